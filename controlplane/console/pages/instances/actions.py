"""Actions on more than one instance: cordons, undeploying, rollouts and swaps; and the page of places."""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from django.http import Http404, HttpRequest, HttpResponseBase
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import ActionForm, action
from controlplane.console.lists import list_page
from controlplane.fleet import selectors, services
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Deployment, Instance, Model, Node, Region
from controlplane.fleet.places import bounds
from controlplane.fleet.rollouts import services as rollouts
from controlplane.fleet.swaps import services as swaps
from controlplane.resources.inventory import NODES, REGIONS

PLACE_ACTIONS: dict[tuple[str, str], tuple[type[Any], Callable[..., str], Role]] = {
    ("region", "cordon"): (Region, services.cordon, Role.OPERATOR),
    ("region", "uncordon"): (Region, services.uncordon, Role.OPERATOR),
    ("node", "cordon"): (Node, services.cordon, Role.OPERATOR),
    ("node", "uncordon"): (Node, services.uncordon, Role.OPERATOR),
    ("deployment", "undeploy"): (Deployment, services.undeploy, Role.ADMIN),
    ("deployment", "activate"): (Deployment, services.activate, Role.ADMIN),
    ("model", "retire"): (Model, services.retire, Role.ADMIN),
    ("model", "activate"): (Model, services.activate, Role.ADMIN),
}


@action(Role.OPERATOR, page="console:places", unchanged="The {kind} was left as it is")
def act_on_place(form: ActionForm, kind: str, pk: int, action: str) -> str:
    """Carry out *action* on the row *pk* of *kind*; the service records the event."""
    if (kind, action) not in PLACE_ACTIONS:
        raise Http404(f"There is no action {action} of a {kind}.")
    model, carry_out, role = PLACE_ACTIONS[kind, action]
    if not form.user.has_fleet_role(role):
        raise Http404(f"There is no action {action} for you.")
    return carry_out(get_object_or_404(model, pk=pk), form.user, form.reason)


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
    )


DEPLOYMENTS = Deployment.objects.select_related("model", "region", "gpu_type")
LONGEST_BAKE_S = 86_400
ROLLOUT_ACTIONS = {"start": "begins within seconds", "cancel": "is cancelled", "back": "goes back within seconds"}


def instances_of(deployment: Deployment) -> str:
    """Return the address of the list of the instances of *deployment*."""
    query = urlencode({"model": deployment.model.name, "region": deployment.region.name})
    return f"{reverse('console:instances')}?{query}"


@action(Role.OPERATOR, DEPLOYMENTS, among=ROLLOUT_ACTIONS, page=instances_of)
def act_on_rollout(form: ActionForm, deployment: Deployment, action: str) -> str:
    """Start or cancel the rollout of a deployment, or send it back."""
    if action == "start":
        bake_s = form.fields.get("bake_s") or "60"
        if not bake_s.isdecimal() or int(bake_s) > LONGEST_BAKE_S:
            raise ActionError(f"The time to prove itself is from 0 to {LONGEST_BAKE_S} seconds")
        back = "bake_s" not in form.fields or "auto_back" in form.fields
        rollouts.start(deployment, form.user, form.reason, bake_s=int(bake_s), auto_back=back)
    else:
        {"cancel": rollouts.cancel, "back": rollouts.go_back}[action](deployment, form.user, form.reason)
    return f"The rollout of {deployment} {ROLLOUT_ACTIONS[action]}."


@action(
    Role.OPERATOR,
    Instance,
    key="name",
    page="console:instances",
    unchanged="{row.name} was left as it is",
)
def swap(form: ActionForm, row: Instance) -> str:
    """Swap the shared GPUs to the instance."""
    made = swaps.request(row, form.user, form.reason)
    return f"{made.group} swaps to {row.name}{f', when {made.gave_way} is idle' if made.gave_way else ''}."
