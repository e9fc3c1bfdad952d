"""`/api/v1/waiting`: currently waiting requests."""

from datetime import datetime
from typing import Any

import orjson
from ninja import Router

from controlplane.api.callers import PEOPLE_AND_KEYS, ApiRequest
from controlplane.api.routers import system
from controlplane.api.schemas import Described
from controlplane.dispatch.wire import WAITING_KEY

router = Router(auth=PEOPLE_AND_KEYS, tags=["Records"])


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
