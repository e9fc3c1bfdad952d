"""What an operator does about a changed deployment; its progress is on the page of the instances."""

from urllib.parse import urlencode

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.views.decorators.http import require_POST

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import act_with_reason
from controlplane.fleet.models import Deployment
from controlplane.fleet.rollouts import services as rollouts

ACTIONS = {"start": rollouts.start, "cancel": rollouts.cancel}


@require_POST
@fleet_role(Role.OPERATOR)
def act(request: HttpRequest, pk: int, action: str) -> HttpResponse:
    """Start or cancel the rollout of a deployment, with a reason that is kept with the event."""
    deployment = get_object_or_404(Deployment.objects.select_related("model", "region", "gpu_type"), pk=pk)
    if action not in ACTIONS:
        raise Http404(f"There is no action {action}.")

    def start_or_cancel(reason: str) -> str:
        rollout = ACTIONS[action](deployment, user_of(request), reason)
        return (
            f"The rollout of {rollout.deployment} {'begins within seconds' if action == 'start' else 'is cancelled'}."
        )

    act_with_reason(request, start_or_cancel, f"{deployment} was left as it is")
    query = urlencode({"model": deployment.model.name, "region": deployment.region.name})
    return redirect(f"{reverse('console:instances')}?{query}")
