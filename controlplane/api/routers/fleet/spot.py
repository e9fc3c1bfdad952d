"""`/api`: the spot pool."""

from typing import Annotated, Any

from django.utils import timezone
from ninja import Field, Query, Router

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.resources import add_list, schema_of
from controlplane.api.schemas import ActionIn, Described
from controlplane.fleet.spot import selectors as spot
from controlplane.fleet.spot import services as spot_services
from controlplane.resources.spot import DONATIONS
from controlplane.usage.by_use import dollars_by_use, last_hours

Hours = Annotated[int, Field(ge=1, le=8784)]
router = Router(auth=VIEWERS, tags=["Spot pool"])
DonationOut = schema_of(DONATIONS, "DonationOut", "The time that an instance spends in the spot pool.")


class PoolOut(Described):
    donated: int
    """Instances donated, or being reclaimed."""
    usd_per_hour: float | None
    """Earned per hour now: the spot price of each donated instance; null where none is known."""
    donated_hours_today: float
    """Instance-hours donated today, in UTC."""
    earned_usd_today: float | None
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


class DollarsOut(Described):
    interactive_usd: float
    non_interactive_usd: float
    spot_usd: float
    """Of opportunistic requests, and of donated instances while nothing ran there."""
    idle_usd: float
    total_usd: float
    donated_hours: float
    """Instance-hours donated to the spot pool."""
    earned_usd: float | None
    """That these earned at the spot price; null where none is known. The dollars above are what instances cost."""
    unpriced_hours: float
    """Of those donated, instance-hours of GPU types without a spot price."""


class StoppedOut(Described):
    message: str
    """Result in one sentence."""


add_list(router, DONATIONS, DonationOut, "List donated instances, newest first: earnings, reclaims, evicted requests.")


@router.get("/spot", response=PoolOut)
def get_spot_pool(request: ApiRequest) -> dict[str, Any]:
    """Return the spot pool in numbers."""
    now = timezone.now()
    today, times = spot.totals(spot.start_of_day(now), now), spot.reclaim_times(now)
    rows = list(spot.open_donations())
    return {
        "donated": len(rows),
        "usd_per_hour": spot.earned_per_hour(rows),
        "donated_hours_today": today.donated_hours,
        "earned_usd_today": today.earned_usd,
        "unpriced_hours_today": today.unpriced_hours,
        "reclaims_today": today.reclaims,
        "redeployments_today": today.redeployments,
        "evicted_requests_today": today.evicted_requests,
        "ended_requests_today": today.ended_requests,
        "reclaims_measured": len(times.seconds),
        "reclaim_median_s": times.median_s,
        "reclaim_max_s": times.most_s,
    }


@router.get("/dollars-by-use", response=DollarsOut)
def get_dollars_by_use(request: ApiRequest, hours: Query[Hours] = 24) -> dict[str, Any]:
    """Return what the instances cost in the last hours, at the on-demand price, by the use that they were put to.

    Hours are those of the clock; the running one counts as far as usage is counted. What donated instances earned in that
    time is given next to it, at the spot price.
    """
    since, until = last_hours(hours, timezone.now())
    dollars, pool = dollars_by_use(since, until), spot.totals(since, until)
    return dollars._asdict() | {
        "total_usd": dollars.total_usd,
        "donated_hours": pool.donated_hours,
        "earned_usd": pool.earned_usd,
        "unpriced_hours": pool.unpriced_hours,
    }


@router.post("/spot/stop", response=StoppedOut)
def stop_donating(request: ApiRequest, body: ActionIn) -> dict[str, str]:
    """Switch `SPOT_DONATE` off for all models and stop what is donated. To reclaim one, use its action `reclaim`."""
    return {"message": spot_services.stop_donating(request.auth.require(Role.OPERATOR), body.reason)}
