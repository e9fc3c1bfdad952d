"""`/api/queues`: what waits where, in which order, who will be late; and what an operator does to a request group."""

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
    """Its own, never used again."""
    region: str
    instance: str
    model: str
    place: int
    """In its virtual queue, from 1."""
    slo_class: str
    count: int
    tokens: int
    """Prompts and expected output of all its requests."""
    start_s: float | None
    """From now, as the global scheduler estimates; null where nothing serves it."""
    service_s: float | None
    due_s: float | None
    """From now; null without a deadline."""
    slack_s: float | None
    """Until its last request would have its first token late; negative: it will be."""
    pinned: bool
    hold_s: float
    """For how long it is held from now on."""
    risk: str
    """`late`, `risk` with less than 15 s of slack, or nothing."""


class LaneOut(Described):
    instance: str
    region: str
    model: str
    order: str
    """Of its endpoint. Only `qlm` has request groups."""
    state: str
    running: int
    kv_ratio: float | None
    waiting: int | None
    """In its virtual queue; null under another order, where requests wait for the endpoint."""
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
    """Share of requests in groups that is predicted to be in time."""
    fcfs_ratio: float | None
    """The same in order of arrival, over all regions."""
    gap_ratio: float | None
    """By what share of itself the lateness of the last order over all regions may be above that of the best, as the exact
    programme has proved; null where it has proved nothing (many groups, or no worker)."""
    solved_ms: float | None
    solved_at: float | None
    pending_s: float | None
    """For how long a worker's answer has been awaited."""
    fallbacks: int
    """Answers that did not come."""


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
    """The group that an operator changed, while that can be undone."""


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
    """Mean of a request."""
    late: int
    """Groups."""
    start_s: float | None
    """Of the group, from now."""


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
    """Those that lose most."""
    later_groups: int
    evicted: int


class GroupDetail(GroupOut):
    of: int
    """Groups in its virtual queue."""
    prompt_tokens: int
    output_tokens: int
    running: int
    """Its requests that run already and could be evicted."""
    oldest_at: float
    first_wait_s: float | None
    first_wait_p90_s: float | None
    can_undo: bool
    prices: dict[str, PriceOut]
    """Of each action that is possible; of `hold`, for a minute."""


class ActedOut(Described):
    message: str
    group: GroupOut
    """As it was."""
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
    """Request groups in the order of their virtual queues, the instances that pull from those, and the last reorders.

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
    """One group that waits, and what each action on it would cost. 409 when it has left the queue."""
    return answered(lambda: ask("detail", number=number))


@router.post("/queues/groups/{int:number}/{action}", response={200: ActedOut, 503: ErrorBody})
def act_on_queue_group(request: ApiRequest, number: int, action: GroupAction, body: GroupActionIn) -> dict[str, Any]:
    """Pin, unpin, bump, hold, release or evict a group, or undo that within 30 s. 409 when it cannot be done."""
    user = request.auth.require(Role.OPERATOR)
    done = answered(lambda: services.act(number, action, user, body.reason, body.hold_s))
    return done | {"message": services.sentence(done, action)}
