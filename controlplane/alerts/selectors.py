"""Unresolved alerts, as Overview lists them and the navigation counts them."""

from collections.abc import Iterable
from typing import Any

from django.db.models import F

from controlplane.alerts.models import Alert
from controlplane.events.models import Severity

WORST_FIRST = list(Severity)[::-1]
SHOWN = ("subject", "title", "detail", "severity", "rank", "causes", "model", "page")
Unresolved = dict[str, Any]


def unresolved() -> tuple[Unresolved, ...]:
    """Return all unresolved alerts, worst first; `open` are those that nobody knows of yet."""
    still_open = set(Alert.objects.open().values_list("pk", flat=True))
    rows = Alert.objects.unresolved().values("pk", *SHOWN, condition=F("rule__condition"))
    alerts = [row | {"open": row.pop("pk") in still_open} for row in rows]
    return tuple(sorted(alerts, key=lambda each: (WORST_FIRST.index(each["severity"]), each["rank"], each["title"])))


def open_of(alerts: Iterable[Unresolved], model: str = "") -> list[Unresolved]:
    """Return the open ones of *model* and the fleet's own; all if it is empty."""
    return [each for each in alerts if each["open"] and (not model or each["model"] in ("", model))]
