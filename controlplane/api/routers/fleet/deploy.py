"""`/api/deploy`: hardware, model, deployment, profile and instances in one call."""

from decimal import Decimal
from typing import Any

from ninja import Field, Router, Status

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.schemas import Described, Strict
from controlplane.fleet.inventory import deploy as deploying
from controlplane.fleet.inventory.deploy import LOCAL, Wanted
from controlplane.fleet.models import Launcher

router = Router(auth=VIEWERS, tags=["Inventory"])


class DeployIn(Strict):
    """Rows that are there are taken by their names; sizes of a new model that are not given are read from its source."""

    region: str = Field(max_length=40)
    gpu_type: str = Field(max_length=40)
    gpus: int = Field(0, ge=0, le=32_767)
    """Of a new node for it; 0: the nodes that there are."""
    address: str = Field(LOCAL, max_length=255)
    """Of the new node. Needs the role admin."""
    usd_per_gpu_hour: Decimal | None = Field(None, ge=0)
    """For a GPU type that is new."""
    model: str = Field(max_length=160)
    source: str = Field("", max_length=255)
    weights_gb: float | None = Field(None, gt=0)
    parameters_billion: float | None = Field(None, gt=0)
    bits: int = Field(16, ge=1, le=32)
    """Of a parameter."""
    active_parameters_billion: float | None = Field(None, gt=0)
    """Mixture of experts: those used per token."""
    experts: int | None = Field(None, ge=1)
    """Per layer."""
    experts_per_token: int | None = Field(None, ge=1)
    kv_kib_per_token: float | None = Field(None, gt=0)
    layers: int | None = Field(None, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=1)
    context_tokens: int | None = Field(None, ge=1)
    tensor_parallel: int = Field(1, ge=1, le=32_767)
    gpu_memory_utilization: float = Field(0.9, ge=0.1, le=1.0)
    max_num_seqs: int = Field(64, ge=1, le=32_767)
    min_instances: int = Field(1, ge=0, le=32_767)
    max_instances: int = Field(4, ge=0, le=32_767)
    launcher: Launcher | None = None
    """Null: that of most instances that Pilothouse starts."""
    share_gpus_with: str = Field("", max_length=80)
    """An instance whose GPUs it is to share, one awake at a time: it is stopped until a swap."""
    reason: str = Field("", max_length=255)


class DeployOut(Described):
    deployment: int
    instances: list[str]
    """Those that start now, or one that waits for a swap."""
    profile_estimated: bool | None
    """Null where there is no performance profile."""
    expected_kv_tokens: int
    """KV cache of one instance."""


@router.post("/deploy", response={201: DeployOut})
def deploy(request: ApiRequest, body: DeployIn) -> Status[dict[str, Any]]:
    """Deploy a model: create what is missing of region, GPU type, node, model, deployment and performance profile, and start
    as many instances as the minimum, one at least. All of it or nothing; one event says what was done.
    """
    user = request.auth.require(Role.OPERATOR)
    if body.address != LOCAL:
        request.auth.require(Role.ADMIN)
    if body.launcher == Launcher.EXTERNAL:
        raise ApiError(
            422, "invalid", "Servers that are started elsewhere are added one by one, with their address.", "launcher"
        )
    wanted = Wanted(**body.model_dump(exclude={"reason", "launcher"}), launcher=body.launcher or "")
    made = deploying.deploy(wanted, user, body.reason)
    return Status(
        201,
        {
            "deployment": made.deployment.pk,
            "instances": [instance.name for instance in made.instances],
            "profile_estimated": made.profile.estimated if made.profile else None,
            "expected_kv_tokens": made.deployment.expected_kv_tokens,
        },
    )
