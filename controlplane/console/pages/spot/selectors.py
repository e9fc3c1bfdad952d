"""The spot pool, as its panel shows it."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from controlplane.console.live.state import LiveState
from controlplane.fleet.models import Donation, Model
from controlplane.fleet.spot import selectors as spot
from controlplane.tuning.selectors import tuned
from controlplane.usage.by_use import spot_income_usd


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
        "pool_usd_per_hour": spot.offered_per_hour(row.donation for row in rows),
        "pool_today": spot.totals(spot.start_of_day(now), now),
        "income_usd": spot_income_usd(spot.start_of_day(now), now),
        "reclaims": times,
        "reclaim_limit_s": tuned().SPOT_RECLAIM_S,
        "let_go_at": spot.last_let_go_at(),
        "donating": donating,
        "least": minimum_kept(),
    }


def minimum_kept() -> str:
    """Return the least and the greatest minimum of active deployments in words; empty without any."""
    counts = spot.minimums()
    if not counts:
        return ""
    return f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
