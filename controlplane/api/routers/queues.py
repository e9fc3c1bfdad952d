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
from controlplane.dispatch.queues.commands import ask
from controlplane.dispatch.queues.operations import GroupAction, Price
from controlplane.dispatch.wire import SUMMARY_KEY, QueueChange, QueuedGroup, QueueInstance, QueueRegion

router = Router(auth=VIEWERS, tags=["Queues"])


class QueuesOut(Described):
    at: float
    regions: list[QueueRegion]
    groups: list[QueuedGroup]
    instances: list[QueueInstance]
    reorders: list[QueueChange]
    """Newest first."""


class GroupDetail(QueuedGroup):
    of: int
    """Groups in its virtual queue."""
    prompt_tokens: int
    output_tokens: int
    running: int
    """Its running requests, which could be evicted."""
    oldest_at: float
    first_wait_s: float | None
    first_wait_p90_s: float | None
    can_undo: bool
    prices: dict[str, Price]
    """Price of each possible action; for `hold`, of one minute."""


class ActedOut(Described):
    message: str
    group: QueuedGroup
    """The group before the action."""
    price: Price


class GroupActionIn(Strict):
    reason: str = Field("", max_length=255)
    """Required for `evict`."""
    hold_s: float = Field(60.0, gt=0, le=3600)
    """For `hold`."""


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


@router.get("/queues/groups/{int:number}", response={200: GroupDetail, 503: ErrorBody})
def get_queue_group(request: ApiRequest, number: int) -> dict[str, Any]:
    """Return one waiting group and the cost of each action on it. 409 when it has left the queue."""
    return ask("detail", number=number)


@router.post("/queues/groups/{int:number}/{action}", response={200: ActedOut, 503: ErrorBody})
def act_on_queue_group(request: ApiRequest, number: int, action: GroupAction, body: GroupActionIn) -> dict[str, Any]:
    """Pin, unpin, bump, hold, release or evict a group, or undo that within 30 s. 409 when not possible."""
    user = request.auth.require(Role.OPERATOR)
    done = services.act(number, action, user, body.reason, body.hold_s)
    return done | {"message": services.sentence(done, action)}
