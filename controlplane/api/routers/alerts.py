"""`/api/alerts` and `/api/alert-rules`: what is wrong, and which webhook hears of it."""

from typing import cast

from asgiref.sync import async_to_sync
from django.shortcuts import get_object_or_404
from django.utils import timezone
from ninja import Field, Router, Schema, Status
from pydantic import AwareDatetime

from controlplane.accounts.models import Role
from controlplane.alerts import services, webhooks
from controlplane.alerts.models import Alert, AlertRule, Condition, WebhookFormat
from controlplane.api import conditions
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.conditions import IfMatch
from controlplane.api.errors import ApiError
from controlplane.api.resources import add_list, schema_of
from controlplane.api.schemas import ActionIn, DecisionIn, Strict
from controlplane.events.models import Severity
from controlplane.resources.alerts import ALERT_RULES, ALERTS

router = Router(auth=VIEWERS, tags=["Alerts"])

AlertOut, AlertRuleOut = schema_of(ALERTS, "AlertOut"), schema_of(ALERT_RULES, "AlertRuleOut")


class AlertRuleIn(Strict):
    name: str = Field(max_length=80)
    condition: Condition
    model: str = ""
    """Empty: every model."""
    slo_class: str = ""
    """Of an SLO burn; empty: every class."""
    threshold: float | None = None
    """Times the allowed misses of an SLO burn, or the used share of a budget; null: the default."""
    window_s: int = 3600
    for_s: int = 0
    severity: Severity = Severity.WARNING
    webhook_url: str = ""
    """Never shown again, but for its host."""
    webhook_format: WebhookFormat = WebhookFormat.ALERTMANAGER
    repeat_hours: int = Field(4, ge=0, le=8760)
    active: bool = True
    reason: str = Field("", max_length=255)


class AlertRuleChange(Strict):
    name: str | None = Field(None, max_length=80)
    model: str | None = None
    slo_class: str | None = None
    threshold: float | None = None
    """Null: the default."""
    window_s: int | None = None
    for_s: int | None = None
    severity: Severity | None = None
    webhook_url: str | None = None
    """Empty: no webhook."""
    webhook_format: WebhookFormat | None = None
    repeat_hours: int | None = Field(None, ge=0, le=8760)
    active: bool | None = None
    reason: str = Field("", max_length=255)


class SilenceIn(ActionIn):
    until: AwareDatetime | None
    """Null ends a silence."""


class WebhookTestOut(Schema):
    host: str
    took: bool
    error: str
    """What went wrong; empty if the receiver took the message."""


add_list(router, ALERTS, AlertOut, "Alerts, newest first.")
add_list(router, ALERT_RULES, AlertRuleOut, "Alert rules by name. Of a webhook only the host is shown.", paged=False)


def _alert(alert_id: int) -> Alert:
    return get_object_or_404(Alert.objects.select_related("rule"), pk=alert_id)


@router.post("/alerts/{int:alert_id}/acknowledge", response=AlertOut)
def acknowledge_alert(request: ApiRequest, alert_id: int, body: DecisionIn) -> Alert:
    """Acknowledge an alert: its message is not repeated. 409 if it is resolved or acknowledged. Needs the role operator."""
    return services.acknowledge(_alert(alert_id), request.auth.require(Role.OPERATOR), body.reason)


@router.post("/alerts/{int:alert_id}/silence", response=AlertOut)
def silence_alert(request: ApiRequest, alert_id: int, body: SilenceIn) -> Alert:
    """Send no message about the subject of an alert until a time, also if it opens again. Needs the role operator."""
    return services.silence(_alert(alert_id), body.until, request.auth.require(Role.OPERATOR), body.reason)


@router.post("/alert-rules", response={201: AlertRuleOut})
def create_alert_rule(request: ApiRequest, body: AlertRuleIn) -> Status[AlertRule]:
    """Create an alert rule. Needs the role admin."""
    user = request.auth.require(Role.ADMIN)
    rule = AlertRule(**body.model_dump(exclude={"reason"}))
    return Status(201, services.save_rule(rule, user, body.reason))


@router.get("/alert-rules/{int:rule_id}", response=AlertRuleOut)
def get_alert_rule(request: ApiRequest, rule_id: int) -> AlertRule:
    """One alert rule, with its `ETag`."""
    return cast(AlertRule, conditions.read(request, ALERT_RULES.rows(request.auth), pk=rule_id))


@router.patch("/alert-rules/{int:rule_id}", response=AlertRuleOut)
def change_alert_rule(request: ApiRequest, rule_id: int, body: AlertRuleChange, if_match: str = IfMatch) -> AlertRule:
    """Change an alert rule; its condition stays. Needs the role admin."""
    user = request.auth.require(Role.ADMIN)
    rule = get_object_or_404(AlertRule, pk=rule_id)
    conditions.check(request, if_match, rule)
    for name, value in body.model_dump(exclude_unset=True, exclude={"reason"}).items():
        if value is None and name != "threshold":
            raise ApiError(422, "invalid", f"{name} cannot be null: leave it out to keep it.", name)
        setattr(rule, name, value)
    return services.save_rule(rule, user, body.reason)


@router.delete("/alert-rules/{int:rule_id}", response={204: None})
def delete_alert_rule(request: ApiRequest, rule_id: int, body: ActionIn, if_match: str = IfMatch) -> Status[None]:
    """Delete an alert rule and its alerts; its webhook is not notified. Needs the role admin."""
    user, rule = request.auth.require(Role.ADMIN), get_object_or_404(AlertRule, pk=rule_id)
    conditions.check(request, if_match, rule)
    services.delete_rule(rule, user, body.reason)
    return Status(204, None)


@router.post("/alert-rules/{int:rule_id}/test", response=WebhookTestOut)
def test_alert_rule(request: ApiRequest, rule_id: int) -> WebhookTestOut:
    """Send a test message to the webhook of a rule, and wait for its answer for up to 5 s. Needs the role admin."""
    request.auth.require(Role.ADMIN)
    rule = get_object_or_404(AlertRule, pk=rule_id)
    if not rule.webhook_url:
        raise ApiError(409, "conflict", f"{rule} has no webhook.")
    error = async_to_sync(webhooks.call)(rule.webhook_url, webhooks.sample_body(rule, timezone.now()))
    return WebhookTestOut(host=rule.webhook, took=not error, error=error)
