"""Actions on more than one instance: cordons, undeploying, rollouts and swaps; and the page of places."""

from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponseBase
from django.urls import reverse
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import ActionForm, action
from controlplane.console.lists import list_page
from controlplane.fleet import selectors
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Deployment, Region
from controlplane.fleet.places import bounds
from controlplane.fleet.rollouts import services as rollouts
from controlplane.resources.inventory import GPUS, NODES, REGIONS, STOCK


@require_safe
@fleet_role(Role.VIEWER)
def places(request: HttpRequest) -> HttpResponseBase:
    """Regions and nodes; what is held and cordoned there, and which endpoints are below their minimum for that reason."""
    deployments = list(selectors.deployments().filter(active=True, model__active=True, region__active=True))
    allowed = bounds(deployments)
    return list_page(
        request,
        NODES,
        held=selectors.instances().exclude(held="").order_by("name"),
        short=[(row, most) for row in deployments if (most := allowed[row.pk][1]) < row.min_instances],
        regions=Region.objects.filter(active=True),
        region_columns=REGIONS.named(*REGIONS.page),
        gpus=selectors.failed_gpus(),
        gpu_columns=GPUS.named(*GPUS.page),
    )


@require_safe
@fleet_role(Role.VIEWER)
def stock(request: HttpRequest) -> HttpResponseBase:
    """Weights on the disks of nodes."""
    return list_page(request, STOCK)


DEPLOYMENTS = Deployment.objects.select_related("model", "region", "gpu_type")
MAX_BAKE_S = 86_400


def instances_of(deployment: Deployment) -> str:
    """Return the address of the list of the instances of *deployment*."""
    query = urlencode({"model": deployment.model.name, "region": deployment.region.name})
    return f"{reverse('console:instances')}?{query}"


@action(Role.OPERATOR, DEPLOYMENTS, page=instances_of)
def roll_out(form: ActionForm, deployment: Deployment) -> str:
    """Start the rollout of a deployment."""
    bake_s = form.fields.get("bake_s") or "60"
    if not bake_s.isdecimal() or int(bake_s) > MAX_BAKE_S:
        raise ActionError(f"The time to prove itself is from 0 to {MAX_BAKE_S} seconds")
    back = "bake_s" not in form.fields or "auto_back" in form.fields
    rollouts.start(deployment, form.user, form.reason, bake_s=int(bake_s), auto_back=back)
    return f"The rollout of {deployment} begins within seconds."
