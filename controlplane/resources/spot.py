"""Donated instances."""

from django.db.models import QuerySet

from controlplane.fleet.models import Donation, DonationState
from controlplane.fleet.spot.selectors import donations
from controlplane.resources.resource import Column, Resource, Viewer, in_range, of_choice, of_model, of_region


def visible_donations(viewer: Viewer) -> QuerySet[Donation]:
    return donations() if viewer.sees_fleet else Donation.objects.none()


DONATIONS = Resource(
    name="donations",
    noun="donation",
    model=Donation,
    rows=visible_donations,
    columns=(
        Column("id"),
        Column("instance", source="instance.name", type=str),
        Column("model", source="instance.deployment.model.name", type=str),
        Column("region", source="instance.deployment.region.name", type=str),
        Column("state", type=DonationState),
        Column(
            "taken_for",
            source=lambda row: row.taken_for.model.name if row.taken_for else None,
            type=str | None,
            about="Model that got the instance, or its GPUs.",
        ),
        Column("actor"),
        Column("reason"),
        Column("donated_at"),
        Column("reclaim_at"),
        Column("ended_at"),
        Column(
            "reclaim_s",
            type=float | None,
            about="Seconds that its own model waited for it; null for another end, or none yet.",
        ),
        Column("donated_s", source=lambda row: row.donated_s(), type=float),
        Column(
            "offered_usd",
            source=lambda row: row.offered_usd(),
            type=float | None,
            about="Null where its GPU type had no spot price.",
        ),
        Column(
            "spot_usd_per_hour",
            source="usd_per_hour",
            type=float | None,
            about="Of all its GPUs, when it was donated; null where it was not known.",
        ),
        Column("evicted_requests"),
        Column("ended_requests"),
    ),
    filters=(
        of_model("instance__deployment__model__name"),
        of_region("instance__deployment__region__name"),
        of_choice("state", DonationState, "states"),
        *in_range("donated_at", "Donated", 24, 168),
    ),
)
