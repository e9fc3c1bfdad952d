"""`/api/v1/waiting`: currently waiting requests; `/api/v1/wait-estimates`: accuracy of wait estimates."""

from datetime import datetime, timedelta
from typing import Any

import orjson
from django.utils import timezone
from ninja import Query, Router, Schema
from pydantic import AwareDatetime

from controlplane.accounts.models import Role
from controlplane.api.callers import PEOPLE_AND_KEYS, ApiRequest
from controlplane.api.routers import system
from controlplane.api.schemas import Described
from controlplane.dispatch.wire import WAITING_KEY
from controlplane.gateway import selectors

router = Router(auth=PEOPLE_AND_KEYS, tags=["Records"])

CALIBRATION_RANGE = timedelta(hours=24)


class WaitingOut(Described):
    request_id: str
    tenant: str
    model: str
    region: str
    """Region of the endpoint that it waits for; of one that is held, the one that its caller prefers."""
    slo_class: str
    arrived_at: datetime
    position: int
    """Position in its queue; 1 is dispatched next. Of a held request, among those of its model."""
    estimated_wait_s: float | None
    """Mean from now; null while the pace of the queue is unknown."""
    estimated_wait_p99_s: float | None
    """Of a held request, the time until it has to start for its deadline."""
    reason: str = ""
    """Why the queue manager holds it; empty if it waits in a queue."""


class WaitingAnswer(Described):
    at: datetime
    items: list[WaitingOut]
    total: int
    """Waiting requests of these tenants; only the first of each queue are listed."""


class WaitPoint(Described):
    arrived_at: datetime
    model: str
    position: int
    estimated_wait_s: float
    estimated_wait_p99_s: float
    waited_s: float


class WaitCalibration(Described):
    model: str
    requests: int
    r2: float | None
    """Coefficient of determination of estimated and actual waits; null if all waits were equal."""
    below_p99: float
    """Share that waited at most the estimated 99th percentile."""
    mean_excess_s: float
    """Mean overestimate."""


class WaitEstimates(Described):
    models: list[WaitCalibration]
    points: list[WaitPoint]
    """Latest points, at most `limit`."""


class EstimateQuery(Schema):
    model: str = ""
    since: AwareDatetime | None = None
    limit: int = 1_000


@router.get("/v1/waiting", response=WaitingAnswer)
def list_waiting(request: ApiRequest, model: str = "") -> dict[str, Any]:
    """List waiting requests in queue order, with position and expected wait. A tenant sees its own.

    503 while no gateway publishes them.
    """
    published = orjson.loads(system.read_published(WAITING_KEY))
    tenants = dict(request.auth.tenants().values_list("pk", "name"))
    mine = [
        row | {"tenant": tenants[row["tenant_id"]]}
        for row in published["requests"]
        if row["tenant_id"] in tenants and model in ("", row["model"])
    ]
    counts = published["by_tenant"]
    total = sum(count for tenant, name, count in counts if tenant in tenants and model in ("", name))
    return {"at": published["at"], "items": mine, "total": total}


@router.get("/v1/wait-estimates", response=WaitEstimates)
def list_wait_estimates(request: ApiRequest, query: Query[EstimateQuery]) -> dict[str, Any]:
    """Return estimated and actual waits since `since` (default: a day ago), and their accuracy by model."""
    request.auth.check(Role.VIEWER)
    since = query.since or timezone.now() - CALIBRATION_RANGE
    points = selectors.wait_points(since, model=query.model)
    return {"models": selectors.wait_calibration(points), "points": points[: max(0, query.limit)]}
