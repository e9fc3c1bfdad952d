"""`/api/alerts` and `/api/alert-rules`: what is wrong, and which webhook hears of it."""

from asgiref.sync import async_to_sync
from django.shortcuts import get_object_or_404
from django.utils import timezone
from ninja import Router, Schema

from controlplane.accounts.models import Role
from controlplane.alerts import webhooks
from controlplane.alerts.models import AlertRule
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.resources import add_changes, add_list, add_operations, schema_of
from controlplane.resources.alerts import ALERT_RULES, ALERTS
from controlplane.webhooks import call

router = Router(auth=VIEWERS, tags=["Alerts"])
AlertOut, RuleOut = schema_of(ALERTS, "AlertOut"), schema_of(ALERT_RULES, "AlertRuleOut")


class WebhookTestOut(Schema):
    host: str
    took: bool
    error: str
    """What went wrong; empty if the receiver took the message."""


add_list(router, ALERTS, AlertOut, "Alerts, newest first.")
add_operations(router, ALERTS, AlertOut)
add_list(router, ALERT_RULES, RuleOut, "Alert rules by name. Of a webhook only the host is shown.", paged=False)
add_changes(router, ALERT_RULES, RuleOut)


@router.post("/alert-rules/{int:rule_id}/test", response=WebhookTestOut)
def test_alert_rule(request: ApiRequest, rule_id: int) -> WebhookTestOut:
    """Send a test message to the webhook of a rule, and wait for its answer for up to 5 s. Needs the role admin."""
    request.auth.require(Role.ADMIN)
    rule = get_object_or_404(AlertRule, pk=rule_id)
    if not rule.webhook_url:
        raise ApiError(409, "conflict", f"{rule} has no webhook.")
    error = async_to_sync(call)(rule.webhook_url, webhooks.sample_body(rule, timezone.now()))
    return WebhookTestOut(host=rule.webhook, took=not error, error=error)
