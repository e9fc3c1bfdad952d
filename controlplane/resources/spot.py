"""Donated instances."""

from django.db.models import QuerySet

from controlplane.accounts.models import Role
from controlplane.fleet.models import Donation, DonationState
from controlplane.fleet.spot.selectors import donations
from controlplane.resources.resource import Column, Resource, Viewer, in_range, of_choice, of_model, of_region


def visible_donations(viewer: Viewer) -> QuerySet[Donation]:
    return donations() if viewer.sees_fleet else Donation.objects.none()


DONATIONS = Resource(
    name="donations",
    noun="donation",
    title="Donated instances",
    least=Role.VIEWER,
    parent=("console:spot", "Spot pool"),
    model=Donation,
    rows=visible_donations,
    columns=(
        Column("id"),
        Column("instance", "Instance", "instance.name", type=str, draw="console/instances/link_cell.html"),
        Column("model", "Model", "instance.deployment.model.name", type=str),
        Column("region", "Region", "instance.deployment.region.name", type=str),
        Column("state", "State", type=DonationState, source="state", draw="console/batches/donation_state_cell.html"),
        Column(
            "taken_for",
            "Taken for",
            lambda row: row.taken_for.model.name if row.taken_for else None,
            type=str | None,
            about="Model that got the instance, or its GPUs.",
        ),
        Column("actor", "Let go by"),
        Column("reason", "Reason", draw="reason"),
        Column("donated_at", "Donated (UTC)", draw="moment", sorts=True),
        Column("reclaim_at", "Asked for (UTC)", draw="moment"),
        Column("ended_at", "Ended (UTC)", draw="moment"),
        Column(
            "reclaim_s",
            "Reclaim (s)",
            draw="duration",
            type=float | None,
            about="Seconds that its own model waited for it; null for another end, or none yet.",
        ),
        Column("donated_s", "Donated for (s)", lambda row: row.donated_s(), draw="duration", type=float),
        Column(
            "earned_usd",
            "At spot price (USD)",
            lambda row: row.earned_usd(),
            draw="usd",
            type=float | None,
            about="Null where its GPU type had no spot price.",
        ),
        Column(
            "spot_usd_per_hour",
            "Spot price (USD/h)",
            "usd_per_hour",
            draw="usd",
            type=float | None,
            about="Of all its GPUs, when it was donated; null where it was not known.",
        ),
        Column("evicted_requests", "Evicted", draw="count"),
        Column("ended_requests", "Ended with an error", draw="count", label="Ended"),
    ),
    filters=(
        of_model("instance__deployment__model__name"),
        of_region("instance__deployment__region__name"),
        of_choice("state", DonationState, "states"),
        *in_range("donated_at", "Donated", 24, 168),
    ),
    page=(
        *("instance", "model", "region", "state", "taken_for", "donated_at", "donated_s", "reclaim_s"),
        *("earned_usd", "evicted_requests", "ended_requests", "reason"),
    ),
    empty="Scaling donates an instance that it lets go, where the setting SPOT_DONATE is on.",
)
