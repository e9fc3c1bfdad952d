"""Alert rules, and the alerts that they open."""

from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, URLValidator, validate_email
from django.db import models
from django.utils import timezone

from controlplane.events.models import Severity

DEFAULT_BURN, DEFAULT_BUDGET_SHARE = 1.0, 0.9
"""Where a rule names no threshold: more misses than the objective allows; 90% of a limit."""
MAIL = "mailto:"


class Condition(models.TextChoices):
    """What a rule watches."""

    SLO_BURN = "slo_burn", "SLO missed"
    ERRORS = "errors", "Requests fail"
    ENDPOINT = "endpoint", "Endpoint short of instances, or queue full"
    INSTANCE = "instance", "Instance, GPU or region down"
    ROLLOUT = "rollout", "Rollout failed"
    PLAN = "plan", "Plan awaits approval"
    FLAPPING = "flapping", "Scaling flaps"
    BATCH = "batch", "Batch late or at risk"
    BUDGET = "budget", "Budget used"
    JOB = "job", "Job or part of the stack in trouble"


DEFAULT_THRESHOLDS = {Condition.SLO_BURN: DEFAULT_BURN, Condition.BUDGET: DEFAULT_BUDGET_SHARE}
"""Of the conditions that have a threshold."""


class WebhookFormat(models.TextChoices):
    """Body that a receiver is sent."""

    ALERTMANAGER = "alertmanager", "JSON, as Alertmanager's webhook"
    SLACK = "slack", "Slack (also Mattermost)"


def check_receivers(text: str) -> None:
    """Raise ValidationError where a part of *text*, between spaces, is neither a web address nor one of mail."""
    for each in text.split():
        try:
            validate_email(each.removeprefix(MAIL)) if "://" not in each else WEBHOOK(each)
        except ValidationError:
            raise ValidationError(f"{each!r} is no https:// address of a webhook and no mail address.") from None


WEBHOOK = URLValidator(schemes=["http", "https"])


class AlertRule(models.Model):
    """Opens one alert for each subject of its condition, and notifies its receivers when it opens and when it resolves."""

    name = models.CharField(max_length=80, unique=True)
    condition = models.CharField(max_length=16, choices=Condition.choices)
    model = models.CharField(max_length=160, blank=True, help_text="Empty: every model.")
    slo_class = models.CharField("SLO class", max_length=40, blank=True, help_text="Of an SLO; empty: every class.")
    threshold = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0.001)],
        help_text="Of an SLO, times the allowed misses (1 if empty); of a budget, the used share (0.9 if empty).",
    )
    window_s = models.PositiveIntegerField(
        "window (s)",
        default=3600,
        validators=[MinValueValidator(720), MaxValueValidator(30 * 86_400)],
        help_text="Of an SLO: the long window. The misses must also be above the threshold over a twelfth of it.",
    )
    for_s = models.PositiveIntegerField(
        "for (s)",
        default=0,
        validators=[MaxValueValidator(86_400)],
        help_text="Time for which the condition must hold before the alert opens.",
    )
    severity = models.CharField(
        max_length=16, choices=Severity.choices, blank=True, help_text="Empty: by how bad it is, warning or critical."
    )
    receivers = models.CharField(
        max_length=500,
        blank=True,
        validators=[check_receivers],
        help_text="Notified when alerts open and resolve: https:// addresses of webhooks and mail addresses, with spaces "
        "between. Of a webhook, which is a secret, only the host is shown.",
    )
    webhook_format = models.CharField(max_length=16, choices=WebhookFormat.choices, default=WebhookFormat.ALERTMANAGER)
    repeat_hours = models.PositiveSmallIntegerField(
        default=4, help_text="The message of an open alert is repeated so often until it is acknowledged; 0: never."
    )
    active = models.BooleanField(default=True, help_text="A rule that is not active resolves its alerts.")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    # Of the receivers, written by the process that owns the regions.
    failures = models.PositiveSmallIntegerField(default=0, editable=False)
    try_at = models.DateTimeField(null=True, editable=False)
    delivery_error = models.CharField(max_length=200, blank=True, editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def limit(self) -> float | None:
        """The threshold in force; None for a condition without one."""
        return self.threshold if self.threshold is not None else DEFAULT_THRESHOLDS.get(Condition(self.condition))

    @property
    def receivers_shown(self) -> str:
        """Its receivers, as they are shown: mail addresses, and hosts of webhooks."""
        parts = [(each, urlsplit(each)) for each in self.receivers.split()]
        return ", ".join(f"{at.scheme}://{at.hostname}/…" if at.hostname else each for each, at in parts)

    def clean(self) -> None:
        if self.condition not in DEFAULT_THRESHOLDS and self.threshold is not None:
            raise ValidationError({"threshold": f"{self.get_condition_display()} has no threshold: leave it empty."})
        if self.condition != Condition.SLO_BURN and self.slo_class:
            raise ValidationError({"slo_class": "Only an SLO is of an SLO class: leave it empty."})
        if self.condition == Condition.JOB and self.model:
            raise ValidationError({"model": "Jobs and parts are of no model: leave it empty."})
        if AlertRule.objects.filter(pk=self.pk).exclude(receivers=self.receivers).exists():
            self.failures, self.try_at, self.delivery_error = 0, None, ""


class AlertQuerySet(models.QuerySet["Alert"]):
    """Alerts by where they stand."""

    def unresolved(self) -> "AlertQuerySet":
        return self.filter(resolved_at=None)

    def open(self) -> "AlertQuerySet":
        """Those that nobody knows of yet: what Overview lists and the navigation counts."""
        unseen = self.unresolved().filter(acknowledged_at=None)
        return unseen.exclude(silenced_until__gt=timezone.now())


class Alert(models.Model):
    """One subject of a rule, from the time it met the condition until it no longer does."""

    rule = models.ForeignKey(AlertRule, on_delete=models.CASCADE, related_name="alerts")
    subject = models.CharField(max_length=200, help_text="What it is about, such as a model with its SLO class.")
    title = models.CharField(max_length=200, blank=True)
    detail = models.CharField(max_length=500, blank=True)
    severity = models.CharField(max_length=16, choices=Severity.choices, default=Severity.WARNING)
    rank = models.FloatField(default=0.0, help_text="Among alerts of one severity, lowest first.")
    causes = models.JSONField(default=list, help_text="Of missed SLOs: words, share and page of each.")
    model = models.CharField(max_length=160, blank=True)
    page = models.CharField(max_length=255, blank=True, help_text="Address in the console.")
    value = models.FloatField(null=True, help_text="Latest value, in the unit of the rule's threshold.")
    since = models.DateTimeField(help_text="When the condition began to hold.")
    opened_at = models.DateTimeField()
    seen_at = models.DateTimeField(help_text="When the condition held last.")
    resolved_at = models.DateTimeField(null=True)
    settled = models.BooleanField(
        default=False, db_default=False, help_text="Whether it stayed resolved, so that its end is sent."
    )
    acknowledged_at = models.DateTimeField(null=True)
    acknowledged_by = models.CharField(max_length=120, blank=True)
    silenced_until = models.DateTimeField(null=True, help_text="No message is sent before, also if it opens again.")
    notified = models.CharField(max_length=8, blank=True, help_text="The last message that the receivers took.")
    notified_at = models.DateTimeField(null=True)

    objects = AlertQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["rule", "subject", "-id"], name="alert_by_subject")]
        constraints = [
            models.UniqueConstraint(
                fields=["rule", "subject"], condition=models.Q(resolved_at=None), name="one_open_alert_per_subject"
            )
        ]

    def __str__(self) -> str:
        return f"{self.rule}: {self.subject}"

    def is_silenced(self, now: datetime | None = None) -> bool:
        return self.silenced_until is not None and self.silenced_until > (now or timezone.now())

    @property
    def sentence(self) -> str:
        """What is wrong, with its details."""
        return ": ".join(part for part in (self.title, self.detail) if part)

    @property
    def state(self) -> str:
        """`open`, `acknowledged`, `silenced` or `resolved`."""
        if self.resolved_at is not None:
            return "resolved"
        if self.is_silenced():
            return "silenced"
        return "acknowledged" if self.acknowledged_at is not None else "open"

    def labels(self) -> dict[str, Any]:
        """Return what identifies the alert, as Alertmanager's labels."""
        given = {"alertname": self.rule.name, "severity": self.severity, "condition": self.rule.condition}
        return given | {"subject": self.subject} | ({"model": self.model} if self.model else {})
