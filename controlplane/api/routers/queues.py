"""`/api/queues`: waiting request groups, their order and predicted lateness, and actions on a group."""

from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from ninja import Field, Router

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError, ErrorBody
from controlplane.api.routers import system
from controlplane.api.schemas import Described, Strict
from controlplane.dispatch.queues import services
from controlplane.dispatch.queues.commands import GatewaySilent, ask
from controlplane.dispatch.queues.operations import GroupAction

router = Router(auth=VIEWERS, tags=["Queues"])
Answer = TypeVar("Answer")


class GroupOut(Described):
    number: int
    """Unique number, never reused."""
    region: str
    instance: str
    model: str
    place: int
    """Position in its virtual queue, from 1."""
    slo_class: str
    count: int
    tokens: int
    """Prompt and expected output tokens of all its requests."""
    start_s: float | None
    """Seconds from now, as estimated by the global scheduler; null if nothing serves it."""
    service_s: float | None
    due_s: float | None
    """Seconds from now; null without a deadline."""
    slack_s: float | None
    """Time until its last request's first token would be late; negative: it will be late."""
    pinned: bool
    hold_s: float
    """Remaining hold time."""
    risk: str
    """`late`, `risk` below 15 s of slack, or empty."""


class LaneOut(Described):
    instance: str
    region: str
    model: str
    order: str
    """Order of the endpoint. Only `qlm` has request groups."""
    state: str
    running: int
    kv_ratio: float | None
    waiting: int | None
    """Requests in its virtual queue; null under another order, where requests wait for the endpoint."""
    service_s: float | None


class RegionOut(Described):
    region: str
    waiting: int
    groups: int
    queues: int
    at_risk: int
    late: int
    late_requests: int
    oldest_wait_s: float
    attainment_ratio: float | None
    """Share of grouped requests predicted to be in time."""
    fcfs_ratio: float | None
    """The same in order of arrival, over all regions."""
    gap_ratio: float | None
    """Proven bound of the last order's relative lateness gap to the optimum over all regions; null where the exact programme
    proved nothing (many groups, or no worker).
    """
    solved_ms: float | None
    solved_at: float | None
    pending_s: float | None
    """Time since a worker's answer was requested."""
    fallbacks: int
    """Answers that did not arrive."""


class ReorderOut(Described):
    at: float
    """Epoch seconds."""
    by: str
    why: str
    what: str
    before_ratio: float | None
    after_ratio: float | None
    before_late_s: float | None
    after_late_s: float | None
    took_ms: float | None
    undo: int | None
    """Group that an operator changed, while that can be undone."""


class QueuesOut(Described):
    at: float
    regions: list[RegionOut]
    groups: list[GroupOut]
    instances: list[LaneOut]
    reorders: list[ReorderOut]
    """Newest first."""


class WorthOut(Described):
    attainment_ratio: float
    lateness_s: float
    """Mean per request."""
    late: int
    """Late groups."""
    start_s: float | None
    """Start of the group, from now."""


class LaterOut(Described):
    number: int
    count: int
    slo_class: str
    model: str
    later_s: float


class PriceOut(Described):
    before: WorthOut
    after: WorthOut
    later: list[LaterOut]
    """Groups that lose the most."""
    later_groups: int
    evicted: int


class GroupDetail(GroupOut):
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
    prices: dict[str, PriceOut]
    """Price of each possible action; for `hold`, of one minute."""


class ActedOut(Described):
    message: str
    group: GroupOut
    """The group before the action."""
    price: PriceOut


class GroupActionIn(Strict):
    reason: str = Field("", max_length=255)
    """Required for `evict`."""
    hold_s: float = Field(60.0, gt=0, le=3600)
    """For `hold`."""


def answered(act: Callable[[], Answer]) -> Answer:
    try:
        return act()
    except GatewaySilent as error:
        raise ApiError(503, "no_gateway", f"{error}.") from error


@router.get("/queues", response={200: QueuesOut, 503: ErrorBody})
def list_queues(request: ApiRequest, region: str = "", model: str = "") -> dict[str, Any]:
    """Return request groups in virtual queue order, the instances that pull from the queues, and the last reorders.

    503 while no gateway publishes them.
    """
    summary = system.read_summary()
    if summary is None:
        raise ApiError(503, "no_summary", "No gateway has published a summary in the last seconds.")
    read = orjson.loads(summary)
    tables = read.get("queues") or {}

    def rows(name: str) -> list[dict[str, Any]]:
        columns = tables.get(name) or {}
        lines = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [
            row for row in lines if region in ("", row.get("region", region)) and model in ("", row.get("model", model))
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
    return answered(lambda: ask("detail", number=number))


@router.post("/queues/groups/{int:number}/{action}", response={200: ActedOut, 503: ErrorBody})
def act_on_queue_group(request: ApiRequest, number: int, action: GroupAction, body: GroupActionIn) -> dict[str, Any]:
    """Pin, unpin, bump, hold, release or evict a group, or undo that within 30 s. 409 when not possible."""
    user = request.auth.require(Role.OPERATOR)
    done = answered(lambda: services.act(number, action, user, body.reason, body.hold_s))
    return done | {"message": services.sentence(done, action)}
