"""`/api/swap-groups`: which models share GPUs, which is awake, and giving the GPUs to another."""

from django.shortcuts import get_object_or_404
from ninja import Field, Router, Status

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.schemas import Described, Items, RowSchema, Strict
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Instance, Swap, SwapState, Tier
from controlplane.fleet.swaps import services as swaps
from controlplane.fleet.swaps.selectors import GroupStatus, statuses

router = Router(auth=VIEWERS, tags=["Instances"])


class SwapOut(RowSchema):
    class Meta:
        model = Swap
        fields = ("id", "actor", "reason", "message", "drain_s", "sleep_s", "load_s", "started_at", "ended_at")

    to: str = Field(alias="instance.name")
    gave_way: str | None
    """The instance that was awake; null for none."""
    state: SwapState
    tier: Tier
    """Where the weights came from."""

    @staticmethod
    def resolve_gave_way(row: Swap) -> str | None:
        return row.gave_way.name if row.gave_way else None


class SwapMemberOut(Described):
    name: str = Field(alias="instance.name")
    model: str = Field(alias="instance.deployment.model.name")
    state: InstanceState = Field(alias="instance.state")
    tier: Tier
    """Where its weights are."""
    swap_s: float = Field(alias="seconds")
    """Time of a swap to it once the awake instance is drained."""
    measured: bool = Field(alias="is_measured")
    """Whether that is the median of measured times; else it is computed from the size of the weights."""


class SwapGroupOut(Described):
    name: str = Field(alias="group.name")
    cpu_memory_bytes: int | None = Field(alias="group.cpu_memory_bytes")
    """For the weights of those that sleep; null: not limited."""
    awake: str | None
    members: list[SwapMemberOut]
    swaps: list[SwapOut]
    """The newest five."""

    @staticmethod
    def resolve_awake(status: GroupStatus) -> str | None:
        return status.awake.name if status.awake else None


class SwapIn(Strict):
    to: str = Field(max_length=80)
    """The instance, by name, that is to be awake."""
    reason: str = Field(min_length=1, max_length=255)


@router.get("/swap-groups", response=Items[SwapGroupOut])
def list_swap_groups(request: ApiRequest, model: str = "", region: str = "") -> dict[str, list[GroupStatus]]:
    """Instances of several models that share the same GPUs, of which one at most is awake."""
    return {"items": statuses(model, region)}


@router.post("/swaps", response={202: SwapOut})
def start_swap(request: ApiRequest, body: SwapIn) -> Status[Swap]:
    """Let who is awake finish what it runs and sleep, then wake or start the other. 409 when it is awake already, shares no
    GPUs, or another swap of its group is in progress."""
    user = request.auth.require(Role.OPERATOR)
    instance = get_object_or_404(Instance, name=body.to)
    return Status(202, swaps.request(instance, user, body.reason))
