"""Alerts: what is wrong since when, who knows of it, and the rules."""

from datetime import timedelta

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from controlplane.accounts.models import Role
from controlplane.alerts import services
from controlplane.alerts.models import Alert
from controlplane.console.access.roles import fleet_role, may
from controlplane.console.actions import ActionForm, action
from controlplane.console.editing import edit
from controlplane.console.lists import list_page, viewer_of
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.resources.alerts import ALERT_RULES, ALERTS
from controlplane.resources.forms import RuleForm

SILENCES = {1: "1 hour", 4: "4 hours", 24: "1 day", 168: "1 week"}
"""Choices of a silence, in hours."""


@require_http_methods(["GET", "HEAD", "POST"])
@fleet_role(Role.VIEWER)
def alerts(request: HttpRequest) -> HttpResponseBase:
    editing = edit(request, ALERT_RULES, RuleForm)
    if isinstance(editing, HttpResponse):
        return editing
    rules = list(ALERT_RULES.rows(viewer_of(request)))
    return list_page(
        request,
        ALERTS,
        editing=editing,
        rules=rules,
        rule_columns=ALERT_RULES.named(*ALERT_RULES.page),
        rule_actions="console/alerts/rule_actions.html" if may(request, Role.ADMIN) else "",
        silences=SILENCES.items(),
    )


@action(Role.OPERATOR, Alert, page="console:alerts", unchanged="{row} is as it was")
def silence(form: ActionForm, alert: Alert) -> str:
    """Silence an alert for the hours of the field `hours`; without it, end its silence."""
    hours = form.fields.get("hours", "")
    if not hours:
        services.silence(alert, None, form.user, form.reason)
        return f"{alert} is no longer silenced."
    if hours not in {str(each) for each in SILENCES}:
        raise ActionError(f"hours is one of {', '.join(map(str, SILENCES))}, not {hours[:40]!r}")
    silenced = services.silence(alert, timezone.now() + timedelta(hours=int(hours)), form.user, form.reason)
    return f"{alert} is silenced until {timezone.localtime(silenced.silenced_until):%d %b %H:%M}."
