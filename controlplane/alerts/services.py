"""Opening, resolving, acknowledging and silencing alerts. Each is an event."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.alerts.models import Alert, AlertRule
from controlplane.alerts.problems import Problem
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.inventory.kinds import Kind
from controlplane.fleet.lifecycle.states import ActionError

ACTOR: Final = "alerts"
RESOLVED_AFTER: Final = timedelta(seconds=60)
"""An alert whose condition holds again within that is the same one, and its end is sent after it: a value near its threshold
sends no message again and again."""
MAX_OPEN: Final = 200
"""Open alerts of one rule; further subjects are opened as others resolve."""
KEPT: Final = timedelta(days=30)
"""Resolved alerts are deleted after that; their events stay."""
MAX_SILENCE: Final = timedelta(days=90)

ALERT_RULE: Final = Kind(
    "alert_rules",
    AlertRule,
    key=(),
    fixed=("condition",),
    only=(
        *("name", "model", "slo_class", "threshold", "window_s", "for_s", "severity"),
        *("receivers", "webhook_format", "repeat_hours", "active"),
    ),
    secret=frozenset({"receivers"}),
)
Seen = dict[tuple[int, str], datetime]
"""When a problem that has no time was first seen, by rule and subject."""


@transaction.atomic
def follow(problems: Mapping[AlertRule, Iterable[Problem]], seen: Seen, now: datetime, began: datetime) -> None:
    """Open and resolve the alerts of every rule by its present *problems*, and update *seen*.

    A rule that is not in *problems* resolves its alerts. *began* is when this process began to judge: what it has not
    noticed yet may still hold.
    """
    known = {
        (alert.rule_id, alert.subject): alert for alert in Alert.objects.filter(settled=False).select_related("rule")
    }
    present = {(rule.pk, each.subject[:200]): (rule, each) for rule, of_rule in problems.items() for each in of_rule}
    for key in seen.keys() - present.keys():
        del seen[key]
    counts = Counter(rule_id for rule_id, _ in known)
    standing: list[Alert] = []
    for key, (rule, problem) in present.items():
        since = problem.since or seen.setdefault(key, now)
        alert = known.get(key)
        if alert is not None:
            _describe(alert, problem, now)
            alert.resolved_at = None
            standing.append(alert)
        elif now - since >= timedelta(seconds=rule.for_s) and counts[rule.pk] < MAX_OPEN:
            counts[rule.pk] += 1
            _open(rule, key[1], problem, since, now)
    Alert.objects.bulk_update(standing, (*DESCRIBED, "resolved_at"), batch_size=100)
    active = {rule.pk for rule in problems}
    for key, alert in known.items():
        if key not in present and (
            now - began > RESOLVED_AFTER or alert.seen_at >= began or alert.rule_id not in active
        ):
            _resolve(alert, now, settled=now - alert.seen_at > RESOLVED_AFTER or alert.rule_id not in active)


def _open(rule: AlertRule, subject: str, problem: Problem, since: datetime, now: datetime) -> None:
    before = Alert.objects.filter(rule=rule, subject=subject).first()
    alert = Alert(
        rule=rule,
        subject=subject,
        model=problem.model,
        since=since,
        opened_at=now,
        silenced_until=before.silenced_until if before is not None and before.is_silenced(now) else None,
    )
    _describe(alert, problem, now)
    alert.save(force_insert=True)
    after = {"value": problem.value, "severity": alert.severity}
    record("alert.opened", alert, actor=ACTOR, after=after, reason=alert.sentence, severity=Severity(alert.severity))


DESCRIBED: Final = ("title", "detail", "severity", "rank", "causes", "value", "page", "seen_at")


def _describe(alert: Alert, problem: Problem, now: datetime) -> None:
    """Write how *problem* stands now into `DESCRIBED`."""
    alert.title, alert.detail = problem.title[:200], problem.words[:500]
    alert.severity, alert.rank = alert.rule.severity or problem.severity, problem.rank
    alert.causes, alert.value, alert.page, alert.seen_at = list(problem.causes), problem.value, problem.href, now


def _resolve(alert: Alert, now: datetime, *, settled: bool) -> None:
    alert.resolved_at, alert.settled = alert.resolved_at or now, settled
    alert.save(update_fields=["resolved_at", "settled"])
    if settled:
        lasted_s = (alert.resolved_at - alert.since).total_seconds()
        record("alert.resolved", alert, actor=ACTOR, before={"value": alert.value}, after={"lasted_s": round(lasted_s)})


def prune(now: datetime) -> int:
    """Delete alerts that were resolved long ago; return how many."""
    return Alert.objects.filter(resolved_at__lt=now - KEPT).delete()[0]


@transaction.atomic
def acknowledge(alert: Alert, actor: User, reason: str = "") -> Alert:
    """Stop the repetitions of an open alert's message. Raises ActionError if it is resolved or acknowledged."""
    alert = Alert.objects.select_for_update().select_related("rule").get(pk=alert.pk)
    if alert.resolved_at is not None:
        raise ActionError(f"{alert} is resolved already")
    if alert.acknowledged_at is not None:
        raise ActionError(f"{alert} was acknowledged by {alert.acknowledged_by}")
    alert.acknowledged_at, alert.acknowledged_by = timezone.now(), actor.get_username()
    alert.save(update_fields=["acknowledged_at", "acknowledged_by"])
    record("alert.acknowledged", alert, actor=actor, reason=reason)
    return alert


@transaction.atomic
def silence(alert: Alert, until: datetime | None, actor: User, reason: str = "") -> Alert:
    """Send no message about the alert's subject before *until*; None ends a silence. Raises ActionError if the alert is
    resolved, and ValidationError for a time that is past or too far away."""
    alert = Alert.objects.select_for_update().select_related("rule").get(pk=alert.pk)
    now = timezone.now()
    if alert.resolved_at is not None:
        raise ActionError(f"{alert} is resolved already")
    if until is not None and not now < until <= now + MAX_SILENCE:
        raise ValidationError({"until": f"A silence ends within {MAX_SILENCE.days} days from now."})
    before, alert.silenced_until = alert.silenced_until, until
    alert.save(update_fields=["silenced_until"])
    kind, after = ("alert.unsilenced", {}) if until is None else ("alert.silenced", {"until": until.isoformat()})
    record(kind, alert, actor=actor, before={"until": before.isoformat()} if before else {}, after=after, reason=reason)
    return alert
