"""The spot pool, as its panel shows it."""

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from controlplane.console.live.state import LiveState
from controlplane.fleet.models import Donation, Model
from controlplane.fleet.spot import selectors as spot
from controlplane.fleet.spot.selectors import ReclaimTimes
from controlplane.tuning.selectors import tuned
from controlplane.usage.by_use import dollars_by_use, last_hours

BIN_S: Final = 20
"""Width of a bar of the reclaim histogram, in seconds."""
WIDTH, HEIGHT = 240, 48


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
class Bar:
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Measured reclaims as bars of an image of WIDTH by HEIGHT."""

    bars: list[Bar]
    limit_x: float
    limit_s: float
    last_s: float
    width: int = WIDTH
    height: int = HEIGHT


def histogram(times: ReclaimTimes, limit_s: float) -> Histogram:
    """Return the bars of *times* in steps of `BIN_S`, up to *limit_s* and beyond it where a reclaim took longer."""
    last_s = max(limit_s, times.most_s or 0.0)
    count = max(1, math.ceil(last_s / BIN_S))
    counts = [0] * count
    for seconds in times.seconds:
        counts[min(count - 1, int(seconds // BIN_S))] += 1
    step, most = WIDTH / count, max(counts)
    bars = [
        Bar(round(at * step + 1, 1), round(HEIGHT - height, 1), round(step - 2, 1), round(height, 1))
        for at, each in enumerate(counts)
        if (height := HEIGHT * each / max(most, 1))
    ]
    return Histogram(bars, round(WIDTH * limit_s / (count * BIN_S), 1), limit_s, last_s)


def pool(state: LiveState, now: datetime) -> dict[str, Any]:
    """Return the context of `console/batches/spot.html`."""
    times, live = spot.reclaim_times(now), state.instance_rows()
    limit_s = tuned().SPOT_RECLAIM_S
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
        "histogram": histogram(times, limit_s),
        "reclaim_limit_s": limit_s,
        "let_go_at": spot.last_let_go_at(),
        "donating": donating,
        "least": minimum_kept(),
        **works_for(now),
    }


USES: Final = (("interactive", "s1"), ("non_interactive", "s2"), ("spot", "s6"), ("idle", "idle"))
"""Uses of dollars, and the color of each."""


def works_for(now: datetime) -> dict[str, Any]:
    """Return the dollars of the last 24 hours by use, with their places in a bar that is 100 wide, and what was donated."""
    since, until = last_hours(24, now)
    dollars = dollars_by_use(since, until)
    parts, x = [], 0.0
    for name, color in USES:
        usd = getattr(dollars, f"{name}_usd")
        width = 100 * usd / dollars.total_usd if dollars.total_usd else 0.0
        parts.append({"name": name.replace("_", "-"), "usd": usd, "x": x, "width": width, "color": color})
        x += width
    return {"works_for": parts, "works_for_usd": dollars.total_usd, "works_for_pool": spot.totals(since, until)}


def minimum_kept() -> str:
    """Return the least and the greatest minimum of active deployments in words; empty without any."""
    counts = spot.minimums()
    if not counts:
        return ""
    return f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
