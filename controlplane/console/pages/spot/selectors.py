"""The spot pool and weights by region, as their panels show them."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from controlplane.console.live.state import LiveState
from controlplane.fleet.models import Donation, Model, Region, Weights, WeightsState
from controlplane.fleet.spot import selectors as spot
from controlplane.fleet.weights import selectors as weights
from controlplane.fleet.weights.selectors import Pull
from controlplane.tuning.selectors import tuned


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A donated instance."""

    donation: Donation
    running: int | None
    """Requests there; None while nothing is known live."""
    reclaim_s: float
    """Expected time of a reclaim."""
    reclaiming_s: float | None
    """Seconds since it was asked for; None while it is not."""


@dataclass(frozen=True, slots=True)
class WeightsCell:
    """The weights of a model in a region."""

    model: Model
    region: Region
    row: Weights | None
    left_s: float
    """Seconds until they are there."""

    @property
    def dialog(self) -> str:
        return f"pull-{self.model.pk}-{self.region.pk}"

    @property
    def may_be_pulled(self) -> bool:
        return self.row is None or self.row.state == WeightsState.FAILED


@dataclass(frozen=True, slots=True)
class WeightsRow:
    model: Model
    pull: Pull
    cells: list[WeightsCell]


def pool(state: LiveState, now: datetime) -> dict[str, Any]:
    """Return the context of `console/batches/spot.html`."""
    times, live = spot.reclaim_times(now), state.instance_rows()
    rows = []
    for donation in spot.open_donations():
        reading = live.get(donation.instance_id)
        asked = donation.reclaim_at
        rows.append(
            PoolRow(
                donation,
                reading.get("running") if reading else None,
                times.expected_s,
                (now - asked).total_seconds() if asked else None,
            )
        )
    donating = [model.name for model in Model.objects.filter(active=True) if tuned(model.name).SPOT_DONATE]
    return {
        "pool": rows,
        "pool_usd_per_hour": spot.earned_per_hour(row.donation for row in rows),
        "pool_today": spot.totals(spot.start_of_day(now), now),
        "reclaims": times,
        "reclaim_limit_s": tuned().SPOT_RECLAIM_S,
        "let_go_at": spot.last_let_go_at(),
        "donating": donating,
        "least": minimum_kept(),
        "weights_regions": list(Region.objects.filter(active=True)),
        "weights_rows": weights_rows(now),
    }


def minimum_kept() -> str:
    """Return the least and the greatest minimum of active deployments in words; empty without any."""
    counts = spot.minimums()
    if not counts:
        return ""
    return f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"


def weights_rows(now: datetime) -> list[WeightsRow]:
    """Return where the weights of each active model are, by region."""
    regions = list(Region.objects.filter(active=True))
    of = {(row.model_id, row.region_id): row for row in weights.weights()}
    return [
        WeightsRow(
            model,
            weights.estimate(model),
            [
                WeightsCell(model, region, of.get((model.pk, region.pk)), weights.pull_s(model, region, now))
                for region in regions
            ],
        )
        for model in Model.objects.filter(active=True).prefetch_related("weights")
    ]
