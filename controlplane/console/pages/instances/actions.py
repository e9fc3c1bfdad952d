"""Actions on more than one instance: cordons, undeploying, rollouts and swaps; and the page of places."""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.actions import act_with_reason, back
from controlplane.console.lists import list_page
from controlplane.fleet import selectors, services
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
    ("model", "retire"): (Model, services.retire, Role.ADMIN),
}


@require_POST
@fleet_role(Role.OPERATOR)
def act_on_place(request: HttpRequest, kind: str, pk: int, action: str) -> HttpResponse:
    """Carry out *action* on the row *pk* of *kind*; the service records the event."""
    if (kind, action) not in PLACE_ACTIONS:
        raise Http404(f"There is no action {action} of a {kind}.")
    model, carry_out, role = PLACE_ACTIONS[kind, action]
    if not may(request, role):
        raise Http404(f"There is no action {action} for you.")
    row = get_object_or_404(model, pk=pk)
    act_with_reason(request, lambda reason: carry_out(row, user_of(request), reason), f"{row} was left as it is")
    return back(request, "console:places")


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


ROLLOUT_ACTIONS = {"start": rollouts.start, "cancel": rollouts.cancel}


@require_POST
@fleet_role(Role.OPERATOR)
def act_on_rollout(request: HttpRequest, pk: int, action: str) -> HttpResponse:
    """Start or cancel the rollout of a deployment, with a reason."""
    deployment = get_object_or_404(Deployment.objects.select_related("model", "region", "gpu_type"), pk=pk)
    if action not in ROLLOUT_ACTIONS:
        raise Http404(f"There is no action {action}.")

    def start_or_cancel(reason: str) -> str:
        rollout = ROLLOUT_ACTIONS[action](deployment, user_of(request), reason)
        return (
            f"The rollout of {rollout.deployment} {'begins within seconds' if action == 'start' else 'is cancelled'}."
        )

    act_with_reason(request, start_or_cancel, f"{deployment} was left as it is")
    query = urlencode({"model": deployment.model.name, "region": deployment.region.name})
    return redirect(f"{reverse('console:instances')}?{query}")


@require_POST
@fleet_role(Role.OPERATOR)
def swap(request: HttpRequest, name: str) -> HttpResponse:
    """Swap the shared GPUs to the instance *name*, with a reason."""
    row = get_object_or_404(Instance, name=name)

    def carry_out(reason: str) -> str:
        made = swaps.request(row, user_of(request), reason)
        return f"{made.group} swaps to {row.name}{f', when {made.gave_way} is idle' if made.gave_way else ''}."

    act_with_reason(request, carry_out, f"{row.name} was left as it is")
    return redirect("console:instances")
