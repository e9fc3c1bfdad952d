"""`/api/deploy`: create hardware, model, deployment, profile and instances in one call."""

from typing import Any

from ninja import Field, Router, Status

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.schemas import Described
from controlplane.fleet.inventory import deploy as deploying
from controlplane.fleet.inventory.deploy import LOCAL, DeployRequest
from controlplane.fleet.models import Launcher

router = Router(auth=VIEWERS, tags=["Inventory"])


class DeployIn(DeployRequest):
    __doc__ = DeployRequest.__doc__

    reason: str = Field("", max_length=255)


class DeployOut(Described):
    deployment: int
    instances: list[str]
    """Instances that start now, or the one that waits for a swap."""
    profile_estimated: bool | None
    """Null without a performance profile."""
    expected_kv_tokens: int
    """KV cache of one instance, in tokens."""


@router.post("/deploy", response={201: DeployOut})
def deploy(request: ApiRequest, body: DeployIn) -> Status[dict[str, Any]]:
    """Deploy a model: create the missing region, GPU type, node, model, deployment and performance profile, and start the
    minimum number of instances (at least one). All or nothing; recorded as one event.
    """
    user = request.auth.require(Role.OPERATOR)
    if body.address != LOCAL:
        request.auth.require(Role.ADMIN)
    if body.launcher == Launcher.EXTERNAL:
        raise ApiError(
            422, "invalid", "Servers that are started elsewhere are added one by one, with their address.", "launcher"
        )
    made = deploying.deploy(body, user, body.reason)
    return Status(
        201,
        {
            "deployment": made.deployment.pk,
            "instances": [instance.name for instance in made.instances],
            "profile_estimated": made.profile.estimated if made.profile else None,
            "expected_kv_tokens": made.deployment.expected_kv_tokens,
        },
    )
