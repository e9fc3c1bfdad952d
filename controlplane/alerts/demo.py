"""The demo, and its alert rules, without webhooks."""

from collections import Counter
from typing import Literal

from controlplane.alerts.models import AlertRule, Condition
from controlplane.alerts.services import ALERT_RULE
from controlplane.events.models import Severity
from controlplane.fleet.demo import seed as seed_fleet
from controlplane.fleet.inventory.services import create
from controlplane.planning import demo as planning

RULES = (
    AlertRule(name="SLO burns fast", condition=Condition.SLO_BURN, severity=Severity.CRITICAL),
    AlertRule(name="SLO burns", condition=Condition.SLO_BURN, threshold=6.0, window_s=6 * 3600),
    AlertRule(name="Instance down", condition=Condition.INSTANCE, for_s=30, severity=Severity.CRITICAL),
    AlertRule(name="Budget nearly used", condition=Condition.BUDGET),
    AlertRule(name="Plan waits", condition=Condition.PLAN, for_s=300, severity=Severity.INFO),
    AlertRule(name="Job or part in trouble", condition=Condition.JOB, for_s=60, severity=Severity.CRITICAL),
    AlertRule(name="Scaling flaps", condition=Condition.FLAPPING),
)
"""The burn rates and windows are those of the SRE workbook, chapter 5."""


def seed_all(fleet: Literal["none", "emulated"] = "emulated") -> Counter[str]:
    """Create the demo: inventory, policies and alert rules; rows that exist stay as they are.

    Return the rows created, by kind.
    """
    return seed_fleet(fleet) + planning.seed() + seed()


def seed() -> Counter[str]:
    """Create the demo's rules where there is no rule. Return the rows created, by kind."""
    if AlertRule.objects.exists():
        return Counter()
    for rule in RULES:
        fields = ("name", "condition", "threshold", "window_s", "for_s", "severity")
        create(ALERT_RULE, {name: getattr(rule, name) for name in fields}, "demo")
    return Counter({"alert rules": len(RULES)})
