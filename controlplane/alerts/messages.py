"""Messages about alerts to the receivers of their rule, webhooks and mail addresses: what is due, and its delivery.

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
from django.core.mail import EmailMessage
from django.db.models import Q

from controlplane.alerts.models import MAIL, Alert, AlertRule, WebhookFormat
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
        return RESOLVED if alert.settled and alert.notified == FIRING else ""
    if alert.is_silenced(now):
        return ""
    if alert.notified != FIRING or alert.notified_at is None:
        return FIRING
    repeat = timedelta(hours=alert.rule.repeat_hours)
    return FIRING if repeat and alert.acknowledged_at is None and now - alert.notified_at >= repeat else ""


def due(now: datetime) -> list[tuple[AlertRule, list[Alert]]]:
    """Return the rules whose receivers are to be notified now, with the alerts of the message."""
    rows = Alert.objects.filter(Q(resolved_at=None) | Q(notified=FIRING)).exclude(rule__receivers="")
    rows = rows.filter(Q(rule__try_at=None) | Q(rule__try_at__lte=now)).select_related("rule").order_by("pk")
    by_rule: dict[int, tuple[AlertRule, list[Alert]]] = {}
    for alert in rows:
        if message_due(alert, now):
            by_rule.setdefault(alert.rule_id, (alert.rule, []))[1].append(alert)
    longest_first = sorted(by_rule.values(), key=lambda each: each[0].try_at or each[1][0].opened_at)
    return longest_first[:MOST_CALLS]


def body_of(rule: AlertRule, alerts: Sequence[Alert]) -> dict[str, Any]:
    """Return the JSON that webhooks of *rule* are sent about *alerts*."""
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
        "commonLabels": {"alertname": rule.name, "condition": rule.condition},
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
        "annotations": {"summary": str(alert), "description": alert.sentence},
        "value": alert.value,
        "startsAt": alert.since.isoformat(),
        "endsAt": ended.isoformat() if ended else "0001-01-01T00:00:00Z",
        "generatorURL": _address(alert),
        "fingerprint": hashlib.blake2b(f"{alert.rule_id} {alert.subject}".encode(), digest_size=8).hexdigest(),
    }


def _line(alert: Alert) -> str:
    """Return one alert in Slack's markup."""
    mark = ":white_check_mark: Resolved" if alert.resolved_at else SLACK_MARKS[Severity(alert.severity)]
    address = _address(alert)
    subject = f"<{address}|{_slack(alert.subject)}>" if settings.PUBLIC_URL else f"*{_slack(alert.subject)}*"
    return f"{mark} {_slack(alert.rule.name)}: {subject}" + (f"\n{_slack(alert.sentence)}" if alert.sentence else "")


def _more(alerts: Sequence[Alert]) -> str:
    more = len(alerts) - MOST_IN_MESSAGE
    return f"\nand {more} more" if more > 0 else ""


def _slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _address(alert: Alert) -> str:
    return f"{settings.PUBLIC_URL}{alert.page or '/alerts/'}"


def _mail(rule: AlertRule, alerts: Sequence[Alert], address: str) -> str:
    """Send *address* a message about *alerts*; return what went wrong."""
    first, more = alerts[0], f" and {len(alerts) - 1} more" if len(alerts) > 1 else ""
    word = "Resolved" if all(alert.resolved_at for alert in alerts) else first.severity.capitalize()
    lines = [
        f"{'Resolved' if alert.resolved_at else alert.severity.capitalize()}: {alert.subject}\n{alert.sentence}\n"
        + (f"{_address(alert)}\n" if settings.PUBLIC_URL else "")
        for alert in alerts[:MOST_IN_MESSAGE]
    ]
    subject = f"[Pilothouse] {word}: {rule.name}: {first.subject}{more}".replace("\n", " ")
    try:
        EmailMessage(subject[:250], "\n".join(lines) + _more(alerts), to=[address.removeprefix(MAIL)]).send()
    except (OSError, ValueError) as error:  # of SMTP too
        return f"could not be sent: {type(error).__name__}"
    return ""


def sample(rule: AlertRule, now: datetime) -> list[Alert]:
    """Return what an admin tries the receivers of *rule* by."""
    detail = "This is a test: nothing is wrong."
    return [Alert(rule=rule, subject="test", title=detail, page="/alerts/", since=now, opened_at=now)]


async def notify(rule: AlertRule, alerts: Sequence[Alert]) -> str:
    """Notify each receiver of *rule* about *alerts*; return what went wrong, by receiver."""
    body, names = body_of(rule, alerts), rule.receivers_shown.split(", ")
    errors = await asyncio.gather(
        *(
            call(each, body) if "://" in each else asyncio.to_thread(_mail, rule, alerts, each)
            for each in rule.receivers.split()
        )
    )
    return "; ".join(f"{name} {error}" for name, error in zip(names, errors, strict=True) if error)


async def notify_all(calls: Iterable[tuple[AlertRule, list[Alert]]]) -> list[tuple[AlertRule, list[Alert], str]]:
    """Notify the receivers of all rules at once; return what went wrong with each."""
    calls = list(calls)
    errors = await asyncio.gather(*(notify(rule, alerts) for rule, alerts in calls))
    return [(rule, alerts, error) for (rule, alerts), error in zip(calls, errors, strict=True)]


def note(rule: AlertRule, alerts: Sequence[Alert], error: str, now: datetime) -> None:
    """Write how the call about *alerts* ended. After `MOST_TRIES` failures in a row the message is given up."""
    rows = AlertRule.objects.filter(pk=rule.pk, receivers=rule.receivers)
    failures = rule.failures + 1 if error else 0
    given_up = failures >= MOST_TRIES
    if error:
        logger.log(
            logging.WARNING if failures in (1, MOST_TRIES) else logging.DEBUG,
            "alerts: of %s, %s (%d times in a row)", rule, error, failures,
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
            reason=error,
            severity=Severity.WARNING,
        )
    if not error or given_up:
        for message in (FIRING, RESOLVED):
            sent = [alert.pk for alert in alerts if (alert.resolved_at is None) == (message == FIRING)]
            Alert.objects.filter(pk__in=sent).update(notified=message, notified_at=now)
