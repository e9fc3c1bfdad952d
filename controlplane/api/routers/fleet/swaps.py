"""`/api/swap-groups`: models that share GPUs, the awake instance, and swaps."""

from ninja import Field, Router

from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.schemas import Described, Items, RowSchema
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Swap, SwapState, Tier
from controlplane.fleet.swaps.selectors import GroupStatus, statuses

router = Router(auth=VIEWERS, tags=["Instances"])


class SwapOut(RowSchema):
    class Meta:
        model = Swap
        fields = ("id", "actor", "reason", "message", "drain_s", "sleep_s", "load_s", "started_at", "ended_at")

    to: str = Field(alias="instance.name")
    gave_way: str | None
    """Instance that was awake; null for none."""
    state: SwapState
    tier: Tier
    """Former location of the weights."""

    @staticmethod
    def resolve_gave_way(row: Swap) -> str | None:
        return row.gave_way.name if row.gave_way else None


class SwapMemberOut(Described):
    name: str = Field(alias="instance.name")
    model: str = Field(alias="instance.deployment.model.name")
    state: InstanceState = Field(alias="instance.state")
    tier: Tier
    """Location of its weights."""
    swap_s: float = Field(alias="seconds")
    """Duration of a swap to it once the awake instance is drained."""
    measured: bool = Field(alias="is_measured")
    """True for the median of measured times; false for an estimate from the size of the weights."""


class SwapGroupOut(Described):
    name: str = Field(alias="group.name")
    cpu_memory_bytes: int | None = Field(alias="group.cpu_memory_bytes")
    """Memory for weights of sleeping instances; null: unlimited."""
    awake: str | None
    members: list[SwapMemberOut]
    swaps: list[SwapOut]
    """Newest five swaps."""

    @staticmethod
    def resolve_awake(status: GroupStatus) -> str | None:
        return status.awake.name if status.awake else None


@router.get("/swap-groups", response=Items[SwapGroupOut])
def list_swap_groups(request: ApiRequest, model: str = "", region: str = "") -> dict[str, list[GroupStatus]]:
    """List swap groups: instances of several models that share the same GPUs, at most one of them awake."""
    return {"items": statuses(model, region)}
