"""Admin of alert rules."""

from controlplane.resources.admin import register
from controlplane.resources.alerts import ALERT_RULES

register(ALERT_RULES, "name", "condition", "model", "severity", "receivers_shown", "active")
