"""`/api/deploy`: hardware, model, deployment, profile and instances in one call."""

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
