"""`/api/queues`: waiting request groups, their order and predicted lateness, and actions on a group."""

from typing import Any

import orjson
from ninja import Field, Router

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ErrorBody
from controlplane.api.routers import system
from controlplane.api.schemas import Described, Strict
from controlplane.dispatch.queues import services
from controlplane.dispatch.queues.operations import GroupAction
from controlplane.dispatch.wire import SUMMARY_KEY, QueueChange, QueuedGroup, QueueInstance, QueueRegion

router = Router(auth=VIEWERS, tags=["Queues"])


class QueuesOut(Described):
    at: float
    regions: list[QueueRegion]
    groups: list[QueuedGroup]
    instances: list[QueueInstance]
    reorders: list[QueueChange]
    """Newest first."""


class ActedOut(Described):
    message: str
    group: QueuedGroup
    """The group before the action."""


class GroupActionIn(Strict):
    reason: str = Field("", max_length=255)


@router.get("/queues", response={200: QueuesOut, 503: ErrorBody})
def list_queues(request: ApiRequest, region: str = "", model: str = "") -> dict[str, Any]:
    """Return request groups in virtual queue order, the instances that pull from the queues, and the last reorders.

    503 while no gateway publishes them.
    """
    read = orjson.loads(system.read_published(SUMMARY_KEY))

    def rows(name: str) -> list[dict[str, Any]]:
        return [
            row
            for row in system.summary_rows(read, "queues", name)
            if region in ("", row.get("region", region)) and model in ("", row.get("model", model))
        ]

    return {
        "at": read["ts"],
        "regions": rows("queues"),
        "groups": rows("groups"),
        "instances": rows("lanes"),
        "reorders": rows("reorders"),
    }


@router.post("/queues/groups/{int:number}/{action}", response={200: ActedOut, 503: ErrorBody})
def act_on_queue_group(request: ApiRequest, number: int, action: GroupAction, body: GroupActionIn) -> dict[str, Any]:
    """Pin, unpin or bump a group. 409 when it has left the queue."""
    group = services.act(number, action, request.auth.require(Role.OPERATOR), body.reason)
    return {"message": services.sentence(group, action), "group": group}
