"""Alerts, and the rules that open them."""

from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet
from django.utils import timezone
from pydantic import BaseModel, Field

from controlplane.accounts.models import Role, User
from controlplane.alerts import services
from controlplane.alerts.models import Alert, AlertRule, Condition, WebhookFormat
from controlplane.events.models import Severity
from controlplane.resources.filters import Select
from controlplane.resources.resource import Column, Filter, Operation, Resource, in_range, of_model
from controlplane.rows import Instant

STATES = ("open", "acknowledged", "silenced", "resolved")


def by_state(rows: QuerySet[Alert], state: str) -> QuerySet[Alert]:
    """Narrow to `unresolved` alerts, or to those of one state."""
    now = timezone.now()
    silenced = Q(silenced_until__gt=now)
    match state:
        case "resolved":
            return rows.exclude(resolved_at=None)
        case "silenced":
            return rows.filter(silenced, resolved_at=None)
        case "acknowledged":
            return rows.filter(resolved_at=None, acknowledged_at__isnull=False).exclude(silenced)
        case "open":
            return rows.filter(pk__in=Alert.objects.open())
        case "unresolved":
            return rows.filter(resolved_at=None)
    return rows


def open_alerts(rule: AlertRule) -> int:
    """Return the number of unresolved alerts of *rule*."""
    return rule.alerts.filter(resolved_at=None).count()


class SilenceIn(BaseModel):
    until: Instant | None = Field(description="Null ends a silence.")


def silence(alert: Alert, user: User, reason: str, until: datetime | None) -> Alert:
    return services.silence(alert, until, user, reason)


ALERTS = Resource(
    name="alerts",
    noun="alert",
    model=Alert,
    operations=(
        Operation("acknowledge", services.acknowledge, "Its message is not repeated.", needs_reason=False),
        Operation(
            "silence",
            silence,
            "No message about its subject until a time, also if it opens again.",
            takes=SilenceIn,
        ),
    ),
    rows=lambda viewer: Alert.objects.select_related("rule"),
    least=Role.VIEWER,
    columns=(
        Column("id", "Alert"),
        Column("subject", "What", draw="console/alerts/subject_cell.html"),
        Column("title", "Title"),
        Column("detail", "Detail", draw="console/alerts/detail_cell.html", kind="wide"),
        Column("causes", type=list[Any], about="Of a missed SLO: words, share of the misses and page of each."),
        Column("value", "Value", draw="console/alerts/value_cell.html", kind="num"),
        Column("threshold", source="rule.limit", type=float | None, about="In force; null for a rule without one."),
        Column("rule", "Rule", "rule.name", type=str),
        Column("condition", "Condition", "rule.condition", type=Condition),
        Column("severity", "Severity"),
        Column("model", "Model"),
        Column("state", "State", type=str, draw="console/alerts/state_cell.html", about=f"One of {', '.join(STATES)}."),
        Column("since", "Since (UTC)", draw="since", label="For"),
        Column("opened_at", "Opened (UTC)", draw="moment"),
        Column("resolved_at", "Resolved (UTC)", draw="moment"),
        Column("acknowledged_at", "Acknowledged (UTC)"),
        Column("acknowledged_by", "Acknowledged by"),
        Column("silenced_until", "Silenced until (UTC)"),
        Column(
            "notified",
            "Notified",
            type=str,
            about="Last message that its receivers took: `firing`, `resolved` or none.",
        ),
        Column("notified_at", "Notified at (UTC)"),
        Column("page", about="Address in the console."),
    ),
    filters=(
        Filter(
            "state",
            by_state,
            control=Select(
                "state",
                "State",
                [
                    *((state, state.capitalize()) for state in STATES),
                    ("unresolved", "Not resolved"),
                    ("", "All states"),
                ],
                "open",
            ),
            about=f"One of {', '.join(STATES)}, or `unresolved`; without it all.",
        ),
        Filter(
            "severity",
            "",
            Severity,
            Select("severity", "Severity", [("", "All severities"), *Severity.choices]),
        ),
        Filter("rule", "rule__name"),
        of_model(),
        *in_range("opened_at", "Opened", 1, 24, 168),
    ),
    page=("subject", "detail", "state", "value", "since"),
    template="console/alerts/alerts.html",
    actions="console/alerts/actions.html",
    live="events",
)
ALERT_RULES = Resource(
    name="alert-rules",
    noun="rule",
    title="Rules",
    model=AlertRule,
    kind=services.ALERT_RULE,
    rows=lambda viewer: AlertRule.objects.all(),
    least=Role.VIEWER,
    columns=(
        Column("id"),
        Column("name", "Rule", draw="console/alerts/rule_cell.html"),
        Column("condition", "Condition", type=Condition, draw="console/alerts/condition_cell.html"),
        Column("model", "Model"),
        Column("slo_class", "SLO class"),
        Column(
            "threshold", "Threshold", "limit", type=float | None, draw="console/alerts/threshold_cell.html", kind="num"
        ),
        Column("window_s", "Window (s)", draw="period"),
        Column("for_s", "For (s)", label="After", draw="period"),
        Column(
            "severity", "Severity", type=str, draw="console/alerts/severity_cell.html", about="Empty: by how bad it is."
        ),
        Column(
            "receivers",
            "Receivers",
            "receivers_shown",
            type=str,
            label="Notifies",
            draw="console/alerts/receivers_cell.html",
            about="Mail addresses, and hosts of webhooks.",
        ),
        Column("webhook_format", "Format", type=WebhookFormat),
        Column("repeat_hours", "Repeats (h)"),
        Column("active", "Active", type=bool),
        Column("failures", type=int, about="Of the receivers, in a row."),
        Column("delivery_error", "Delivery error", type=str),
        Column("open", "Open", open_alerts, type=int, draw="count"),
    ),
    page=("name", "condition", "threshold", "for_s", "severity", "receivers", "open"),
)
