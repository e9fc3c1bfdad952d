"""`/api`: the spot pool."""

from typing import Any

from django.utils import timezone
from ninja import Router
from ninja.params.functions import Query as QueryParam

from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.resources import add_list, schema_of
from controlplane.api.schemas import Described
from controlplane.fleet.spot import selectors as spot
from controlplane.resources.spot import DONATIONS
from controlplane.usage.by_use import dollars_by_use, last_hours, spot_income_usd

router = Router(auth=VIEWERS, tags=["Spot pool"])


class DollarsOut(Described):
    interactive_usd: float
    non_interactive_usd: float
    spot_usd: float
    """Of opportunistic requests, and of donated instances while nothing ran there."""
    idle_usd: float
    total_usd: float
    donated_hours: float
    """Instance-hours donated to the spot pool."""
    offered_usd: float | None
    """What these would earn at the spot price if they were leased throughout; null where none is known."""
    income_usd: float
    """What tenants were charged for opportunistic requests. The dollars above are what instances cost."""
    unpriced_hours: float
    """Of those donated, instance-hours of GPU types without a spot price."""


class PoolOut(Described):
    donated: int
    """Instances donated, or being reclaimed."""
    usd_per_hour: float | None
    """The spot price of the instances that are donated now; null where none is known."""
    donated_hours_today: float
    """Instance-hours donated today, in UTC."""
    offered_usd_today: float | None
    """Null where no GPU type of what was donated has a spot price."""
    unpriced_hours_today: float
    """Of those donated, instance-hours of GPU types without a spot price."""
    reclaims_today: int
    redeployments_today: int
    evicted_requests_today: int
    """Requests queued again by reclaims."""
    ended_requests_today: int
    """Requests ended with an error by reclaims."""
    reclaims_measured: int
    """Reclaims of the last seven days."""
    reclaim_median_s: float | None
    reclaim_max_s: float | None
    dollars: DollarsOut
    """What the instances cost in the last hours at the on-demand price, by their use; hours are those of the clock."""


@router.get("/spot", response=PoolOut)
def get_spot_pool(request: ApiRequest, hours: int = QueryParam(24, ge=1, le=8784)) -> dict[str, Any]:
    """Return the spot pool in numbers, and the dollars of the last *hours* by use."""
    now = timezone.now()
    today, times = spot.totals(spot.start_of_day(now), now), spot.reclaim_times(now)
    rows = list(spot.open_donations())
    since, until = last_hours(hours, now)
    dollars, pool = dollars_by_use(since, until), spot.totals(since, until)
    return {
        "donated": len(rows),
        "usd_per_hour": spot.offered_per_hour(rows),
        "donated_hours_today": today.donated_hours,
        "offered_usd_today": today.offered_usd,
        "unpriced_hours_today": today.unpriced_hours,
        "reclaims_today": today.reclaims,
        "redeployments_today": today.redeployments,
        "evicted_requests_today": today.evicted_requests,
        "ended_requests_today": today.ended_requests,
        "reclaims_measured": len(times.seconds),
        "reclaim_median_s": times.median_s,
        "reclaim_max_s": times.most_s,
        "dollars": dollars._asdict()
        | {
            "total_usd": dollars.total_usd,
            "donated_hours": pool.donated_hours,
            "offered_usd": pool.offered_usd,
            "income_usd": spot_income_usd(since, until),
            "unpriced_hours": pool.unpriced_hours,
        },
    }


DonationOut = schema_of(DONATIONS, "DonationOut")
add_list(router, DONATIONS, DonationOut, "Donations, newest first: who let which instance go, and what became of it.")
