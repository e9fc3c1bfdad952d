"""Actions on more than one instance: on those selected, and on all that run spare work."""

from datetime import timedelta

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.views.decorators.http import require_POST

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.actions import ActionForm, action, carried_out
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import Action, ActionError
from controlplane.fleet.models import Instance
from controlplane.fleet.spot import services as spot

BULK = (Action.DRAIN, Action.STOP, Action.START, Action.RESTART)
"""What is done with several instances at once."""
AT_ONCE = 500


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


def local_in(time: timedelta) -> str:
    """Return the moment after *time* as a form's field has it."""
    return f"{timezone.localtime() + time:%Y-%m-%dT%H:%M}"


@action(Role.OPERATOR, page="console:fleet", unchanged="Instances are donated as before")
def stop_donating(form: ActionForm) -> str:
    """Donate nothing more, and stop what is donated."""
    return spot.stop_donating(form.user, form.reason)
