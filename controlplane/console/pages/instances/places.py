"""Where nothing may be started, and taking a deployment or a model out of service; both with a reason that is kept."""

from collections.abc import Callable
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_POST, require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.actions import act_with_reason, back
from controlplane.fleet import selectors, services
from controlplane.fleet.models import Deployment, Model, Node, Region
from controlplane.fleet.places import bounds

ACTIONS: dict[tuple[str, str], tuple[type[Any], Callable[..., str], Role]] = {
    ("region", "cordon"): (Region, services.cordon, Role.OPERATOR),
    ("region", "uncordon"): (Region, services.uncordon, Role.OPERATOR),
    ("node", "cordon"): (Node, services.cordon, Role.OPERATOR),
    ("node", "uncordon"): (Node, services.uncordon, Role.OPERATOR),
    ("deployment", "undeploy"): (Deployment, services.undeploy, Role.ADMIN),
    ("model", "retire"): (Model, services.retire, Role.ADMIN),
}


@require_POST
@fleet_role(Role.OPERATOR)
def act(request: HttpRequest, kind: str, pk: int, action: str) -> HttpResponse:
    """Carry out *action* on the row *pk* of *kind*; the service records the event."""
    if (kind, action) not in ACTIONS:
        raise Http404(f"There is no action {action} of a {kind}.")
    model, carry_out, role = ACTIONS[kind, action]
    if not may(request, role):
        raise Http404(f"There is no action {action} for you.")
    row = get_object_or_404(model, pk=pk)
    act_with_reason(request, lambda reason: carry_out(row, user_of(request), reason), f"{row} was left as it is")
    return back(request, "console:places")


@require_safe
@fleet_role(Role.VIEWER)
def places(request: HttpRequest) -> HttpResponse:
    """What is held and cordoned, and which endpoints are below their minimum by that."""
    deployments = list(selectors.deployments().filter(active=True, model__active=True, region__active=True))
    allowed = bounds(deployments)
    context = {
        "held": selectors.instances().exclude(held="").order_by("name"),
        "short": [(row, most) for row in deployments if (most := allowed[row.pk][1]) < row.min_instances],
        "regions": Region.objects.filter(active=True),
        "nodes": selectors.nodes().filter(active=True).order_by("region__name", "name"),
    }
    return render(request, "console/instances/places.html", context)
