"""The spot pool: who let what go, what it is worth, and taking it back."""

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import ActionForm, action
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context
from controlplane.console.pages.spot.selectors import pool
from controlplane.fleet.spot import services as spot_services


@require_safe
@fleet_role(Role.VIEWER)
def spot(request: HttpRequest) -> HttpResponse:
    state = feed.state()
    now = timezone.now()
    context = {**live_context(state, "instances,events"), **pool(state, now)}
    return render(request, "console/batches/spot_page.html", context)


@action(Role.OPERATOR, page="console:spot", unchanged="Instances are donated as before")
def stop(form: ActionForm) -> str:
    """Donate nothing more, and stop what is donated."""
    return spot_services.stop_donating(form.user, form.reason)
