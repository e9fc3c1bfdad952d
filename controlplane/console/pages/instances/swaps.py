"""Giving shared GPUs to another of the models on them; who shares with whom is on the page of the instances."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import act_with_reason
from controlplane.fleet.models import Instance
from controlplane.fleet.swaps import services as swaps


@require_POST
@fleet_role(Role.OPERATOR)
def act(request: HttpRequest, name: str) -> HttpResponse:
    """Have the instance *name* take the GPUs that it shares, with a reason that is kept with the event."""
    row = get_object_or_404(Instance, name=name)

    def swap(reason: str) -> str:
        made = swaps.request(row, user_of(request), reason)
        return f"{made.group} swaps to {row.name}{f', when {made.gave_way} is idle' if made.gave_way else ''}."

    act_with_reason(request, swap, f"{row.name} was left as it is")
    return redirect("console:instances")
