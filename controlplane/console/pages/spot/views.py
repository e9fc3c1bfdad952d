"""The spot pool: who let what go, what it earns, and taking it back; and weights by region."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_POST, require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.requests import user_of
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import act_with_reason, back
from controlplane.console.live.hub import hub
from controlplane.console.live.sections import sections
from controlplane.console.live.views import live_context
from controlplane.console.pages.spot.selectors import pool
from controlplane.fleet.models import Model, Region
from controlplane.fleet.spot import services as spot_services
from controlplane.fleet.weights import services as weights_services


@require_safe
@fleet_role(Role.VIEWER)
def spot(request: HttpRequest) -> HttpResponse:
    state = hub.state()
    now = timezone.now()
    context = {**live_context(state, "instances,events"), **pool(state, now), "sections": sections(state)}
    return render(request, "console/batches/spot_page.html", context)


@require_POST
@fleet_role(Role.OPERATOR)
def stop(request: HttpRequest) -> HttpResponse:
    """Donate nothing more, and stop what is donated."""
    act_with_reason(
        request, lambda reason: spot_services.stop_donating(user_of(request), reason), "Instances are donated as before"
    )
    return back(request, "console:spot")


@require_POST
@fleet_role(Role.OPERATOR)
def pull(request: HttpRequest, model: int, region: int) -> HttpResponse:
    """Pull the weights of a model into a region."""
    of, to = get_object_or_404(Model, pk=model), get_object_or_404(Region, pk=region)

    def act(reason: str) -> str:
        row = weights_services.pull(of, to, user_of(request), reason)
        return f"The weights of {of} are being pulled to {to}, {row.gigabytes:,.0f} GB"

    act_with_reason(request, act, f"The weights of {of} were not pulled")
    return back(request, "console:spot")
