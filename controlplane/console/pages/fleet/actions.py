"""Actions on more than one instance: on those selected, on a place, on the spot pool, and rollouts of deployments."""

from datetime import datetime, timedelta
from urllib.parse import urlencode

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.views.decorators.http import require_POST

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import ActionForm, action, carried_out
from controlplane.fleet import maintenance, services
from controlplane.fleet.lifecycle.states import Action, ActionError
from controlplane.fleet.models import Deployment, Instance, Node, Region
from controlplane.fleet.rollouts import services as rollouts
from controlplane.fleet.spot import services as spot

DEPLOYMENTS = Deployment.objects.select_related("model", "region", "gpu_type")
MAX_BAKE_S = 86_400
BULK = (Action.DRAIN, Action.STOP, Action.START, Action.RESTART)
"""What is done with several instances at once."""
AT_ONCE = 500
PLACES: dict[str, type[Node | Region]] = {"nodes": Node, "regions": Region}


def instances_of(deployment: Deployment) -> str:
    """Return the address of the list of the instances of *deployment*."""
    query = urlencode({"model": deployment.model.name, "region": deployment.region.name})
    return f"{reverse('console:fleet')}?{query}"


@action(Role.OPERATOR, DEPLOYMENTS, page=instances_of)
def roll_out(form: ActionForm, deployment: Deployment) -> str:
    """Start the rollout of a deployment."""
    bake_s = form.fields.get("bake_s") or "60"
    if not bake_s.isdecimal() or int(bake_s) > MAX_BAKE_S:
        raise ActionError(f"The time to prove itself is from 0 to {MAX_BAKE_S} seconds")
    back = "bake_s" not in form.fields or "auto_back" in form.fields
    rollouts.start(deployment, form.user, form.reason, bake_s=int(bake_s), auto_back=back)
    return f"The rollout of {deployment} begins within seconds."


@require_POST
@fleet_role(Role.OPERATOR)
def bulk(request: HttpRequest) -> HttpResponse:
    """Do one thing with each selected instance. Say what was done, and what was refused and why."""

    def carry_out(form: ActionForm) -> str:
        keys = [int(key) for key in form.fields.getlist("instance") if key.isdecimal()][:AT_ONCE]
        verb = form.fields.get("verb", "")
        if verb not in BULK or not keys:
            raise ActionError("Select instances, and what to do with them")
        done, refused = [], []
        for row in Instance.objects.filter(pk__in=keys).order_by("name"):
            try:
                services.act(Action(verb), row, form.user, form.reason)
                done.append(row.name)
            except ActionError as refusal:
                refused.append(str(refusal))
        if refused:
            messages.error(request, f"{_some(len(refused))} refused: {'; '.join(refused)}.")
        if not done:
            raise ActionError(f"{Action(verb).label}: nothing is done")
        return f"{Action(verb).label}: {_some(len(done))} in progress or done: {', '.join(done)}."

    return carried_out(request, carry_out, lambda: "console:fleet", "The instances are unchanged")


def _some(count: int) -> str:
    return f"{count} instance{'' if count == 1 else 's'}"


@require_POST
@fleet_role(Role.OPERATOR)
def maintain(request: HttpRequest, kind: str, pk: int) -> HttpResponse:
    """Plan maintenance of a node or a region; times are those of the pages' zone."""
    if kind not in PLACES:
        raise Http404(f"There is no maintenance of {kind}.")
    place = get_object_or_404(PLACES[kind], pk=pk)

    def carry_out(form: ActionForm) -> str:
        until, from_at = (_moment(form, name) for name in ("until", "from_at"))
        if until is None:
            raise ActionError(f"Say when the maintenance of {place} ends")
        return maintenance.planned(maintenance.plan(place, form.user, form.reason, until, from_at))

    return carried_out(request, carry_out, lambda: "console:fleet", f"{place} is unchanged")


def _moment(form: ActionForm, name: str) -> datetime | None:
    """Read a field of a date and a time; None if it is empty."""
    text = form.fields.get(name, "")
    try:
        given = parse_datetime(text)
    except ValueError:
        given = None
    if text and given is None:
        raise ActionError(f"{text} is no date and time, such as 2026-12-24T18:30")
    return timezone.make_aware(given) if given and timezone.is_naive(given) else given


def local_in(time: timedelta) -> str:
    """Return the moment after *time* as a form's field has it."""
    return f"{timezone.localtime() + time:%Y-%m-%dT%H:%M}"


@action(Role.OPERATOR, page="console:fleet", unchanged="Instances are donated as before")
def stop_donating(form: ActionForm) -> str:
    """Donate nothing more, and stop what is donated."""
    return spot.stop_donating(form.user, form.reason)
