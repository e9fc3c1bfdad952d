"""`/api/alerts` and `/api/alert-rules`: what is wrong, and who hears of it."""

from asgiref.sync import async_to_sync
from django.shortcuts import get_object_or_404
from django.utils import timezone
from ninja import Router, Schema

from controlplane.accounts.models import Role
from controlplane.alerts import messages
from controlplane.alerts.models import AlertRule
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.resources import add_changes, add_list, add_operations, schema_of
from controlplane.resources.alerts import ALERT_RULES, ALERTS

router = Router(auth=VIEWERS, tags=["Alerts"])
AlertOut, RuleOut = schema_of(ALERTS, "AlertOut"), schema_of(ALERT_RULES, "AlertRuleOut")


class AlertTestOut(Schema):
    receivers: str
    took: bool
    error: str
    """What went wrong; empty if all receivers took the message."""


add_list(router, ALERTS, AlertOut, "Alerts, newest first.")
add_operations(router, ALERTS, AlertOut)
add_list(router, ALERT_RULES, RuleOut, "Alert rules by name. Of webhooks only the hosts are shown.", paged=False)
add_changes(router, ALERT_RULES, RuleOut)


@router.post("/alert-rules/{int:rule_id}/test", response=AlertTestOut)
def test_alert_rule(request: ApiRequest, rule_id: int) -> AlertTestOut:
    """Send a test message to the receivers of a rule, and wait for them for up to 5 s. Needs the role admin."""
    request.auth.require(Role.ADMIN)
    rule = get_object_or_404(AlertRule, pk=rule_id)
    if not rule.receivers:
        raise ApiError(409, "conflict", f"{rule} has no receiver.")
    error = async_to_sync(messages.notify)(rule, messages.sample(rule, timezone.now()))
    return AlertTestOut(receivers=rule.receivers_shown, took=not error, error=error)
