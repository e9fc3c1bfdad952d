"""Admin of alerts and their rules."""

from controlplane.alerts.models import Alert
from controlplane.resources.admin import register, show
from controlplane.resources.alerts import ALERT_RULES, ALERTS

register(ALERT_RULES, "name", "condition", "model", "severity", "webhook", "active")
show(
    Alert,
    *("subject", "rule", "value", "since", "opened_at", "resolved_at", "acknowledged_by"),
    search=("subject", "detail", "rule__name"),
    operations=ALERTS.operations,
)
