"""Messages about alerts to the webhook of their rule: what is due, its body, and its delivery.

A receiver may be slow, fail or redirect (`controlplane.webhooks`). A rule that failed is tried again with a growing pause,
so no receiver holds up another. A message is repeated until the receiver takes it, so it may come twice: `fingerprint` says
that it is the same alert.
"""

import asyncio
import hashlib
import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from django.conf import settings
from django.db.models import Q

from controlplane.alerts.models import Alert, AlertRule, WebhookFormat
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.webhooks import call, pause_s

logger = logging.getLogger(__name__)

MOST_TRIES: Final = 8
"""Of one message, which take about 20 minutes. What comes later begins again."""
MOST_IN_MESSAGE: Final = 50
MOST_CALLS: Final = 20
"""At one time."""
FIRING, RESOLVED = "firing", "resolved"
SLACK_MARKS: Final = {
    Severity.INFO: ":information_source:",
    Severity.WARNING: ":warning:",
    Severity.CRITICAL: ":red_circle:",
}


def message_due(alert: Alert, now: datetime) -> str:
    """Return the message that the receiver lacks, `firing` or `resolved`; empty if there is none.

    A receiver that never heard of an alert is not sent its end; one that did is sent it, even in a silence.
    """
    if alert.resolved_at is not None:
        return RESOLVED if alert.notified == FIRING else ""
    if alert.is_silenced(now):
        return ""
    if alert.notified != FIRING or alert.notified_at is None:
        return FIRING
    repeat = timedelta(hours=alert.rule.repeat_hours)
    return FIRING if repeat and alert.acknowledged_at is None and now - alert.notified_at >= repeat else ""


def due(now: datetime) -> list[tuple[AlertRule, list[Alert]]]:
    """Return the rules whose webhook is to be called now, with the alerts of the message."""
    rows = Alert.objects.filter(Q(resolved_at=None) | Q(notified=FIRING)).exclude(rule__webhook_url="")
    rows = rows.filter(Q(rule__try_at=None) | Q(rule__try_at__lte=now)).select_related("rule").order_by("pk")
    by_rule: dict[int, tuple[AlertRule, list[Alert]]] = {}
    for alert in rows:
        if message_due(alert, now):
            by_rule.setdefault(alert.rule_id, (alert.rule, []))[1].append(alert)
    longest_first = sorted(by_rule.values(), key=lambda each: each[0].try_at or each[1][0].opened_at)
    return longest_first[:MOST_CALLS]


def body_of(rule: AlertRule, alerts: Sequence[Alert]) -> dict[str, Any]:
    """Return the JSON that the webhook of *rule* is sent about *alerts*."""
    if rule.webhook_format == WebhookFormat.SLACK:
        return {"text": "\n".join(_line(alert) for alert in alerts[:MOST_IN_MESSAGE]) + _more(alerts)}
    shown = [_entry(alert) for alert in alerts[:MOST_IN_MESSAGE]]
    return {
        "version": "4",
        "groupKey": f"rule:{rule.pk}",
        "receiver": rule.name,
        "status": FIRING if any(entry["status"] == FIRING for entry in shown) else RESOLVED,
        "truncatedAlerts": len(alerts) - len(shown),
        "groupLabels": {"alertname": rule.name},
        "commonLabels": {"alertname": rule.name, "severity": rule.severity, "condition": rule.condition},
        "commonAnnotations": {},
        "externalURL": settings.PUBLIC_URL,
        "alerts": shown,
    }


def _entry(alert: Alert) -> dict[str, Any]:
    """Return one alert as in Alertmanager's webhook, version 4."""
    ended = alert.resolved_at
    return {
        "status": RESOLVED if ended else FIRING,
        "labels": alert.labels(),
        "annotations": {"summary": str(alert), "description": alert.detail},
        "value": alert.value,
        "startsAt": alert.since.isoformat(),
        "endsAt": ended.isoformat() if ended else "0001-01-01T00:00:00Z",
        "generatorURL": _address(alert),
        "fingerprint": hashlib.blake2b(f"{alert.rule_id} {alert.subject}".encode(), digest_size=8).hexdigest(),
    }


def _line(alert: Alert) -> str:
    """Return one alert in Slack's markup."""
    mark = ":white_check_mark: Resolved" if alert.resolved_at else SLACK_MARKS[Severity(alert.rule.severity)]
    address = _address(alert)
    subject = f"<{address}|{_slack(alert.subject)}>" if settings.PUBLIC_URL else f"*{_slack(alert.subject)}*"
    return f"{mark} {_slack(alert.rule.name)}: {subject}" + (f"\n{_slack(alert.detail)}" if alert.detail else "")


def _more(alerts: Sequence[Alert]) -> str:
    more = len(alerts) - MOST_IN_MESSAGE
    return f"\nand {more} more" if more > 0 else ""


def _slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _address(alert: Alert) -> str:
    return f"{settings.PUBLIC_URL}{alert.page or '/alerts/'}"


def sample_body(rule: AlertRule, now: datetime) -> dict[str, Any]:
    """Return the message by which an admin tries the webhook of *rule*."""
    detail = "This is a test: nothing is wrong."
    return body_of(rule, [Alert(rule=rule, subject="test", detail=detail, page="/alerts/", since=now, opened_at=now)])


async def call_all(calls: Iterable[tuple[AlertRule, list[Alert]]]) -> list[tuple[AlertRule, list[Alert], str]]:
    """Call the webhooks at once; return what went wrong with each."""
    calls = list(calls)
    errors = await asyncio.gather(*(call(rule.webhook_url, body_of(rule, alerts)) for rule, alerts in calls))
    return [(rule, alerts, error) for (rule, alerts), error in zip(calls, errors, strict=True)]


def note(rule: AlertRule, alerts: Sequence[Alert], error: str, now: datetime) -> None:
    """Write how the call about *alerts* ended. After `MOST_TRIES` failures in a row the message is given up."""
    rows = AlertRule.objects.filter(pk=rule.pk, webhook_url=rule.webhook_url)
    failures = rule.failures + 1 if error else 0
    given_up = failures >= MOST_TRIES
    if error:
        logger.log(
            logging.WARNING if failures in (1, MOST_TRIES) else logging.DEBUG,
            "alerts: the webhook of %s %s (%d times in a row)", rule, error, failures,
        )  # fmt: skip
        try_at = now + timedelta(seconds=pause_s(failures))
        rows.update(failures=0 if given_up else failures, try_at=try_at, delivery_error=error[:200])
    else:
        rows.update(failures=0, try_at=None, delivery_error="")
    if given_up:
        record(
            "alert_rule.not_delivered",
            rule,
            actor="alerts",
            after={"alerts": [alert.subject for alert in alerts[:MOST_IN_MESSAGE]], "tries": failures},
            reason=f"The webhook {rule.webhook} {error}",
            severity=Severity.WARNING,
        )
    if not error or given_up:
        for message in (FIRING, RESOLVED):
            sent = [alert.pk for alert in alerts if (alert.resolved_at is None) == (message == FIRING)]
            Alert.objects.filter(pk__in=sent).update(notified=message, notified_at=now)
