"""Append-only record of actions and decisions."""

from typing import Any

from django.conf import settings
from django.db import models
from django.utils import timezone


class Severity(models.TextChoices):
    INFO = "info", "Info"
    WARNING = "warning", "Warning"
    CRITICAL = "critical", "Critical"


class EventQuerySet(models.QuerySet["Event"]):
    """Query set that only reads and appends: bulk updates and deletions are refused."""

    def update(self, **values: object) -> int:
        raise TypeError("events are append-only: record a new one")

    def delete(self) -> tuple[int, dict[str, int]]:
        raise TypeError("events are append-only")


class Event(models.Model):
    """One operator action or automatic decision: before, after, reason and inputs. Rows are written once."""

    at = models.DateTimeField(default=timezone.now, db_index=True)
    kind = models.CharField(max_length=64, db_index=True, help_text="instance.moved, api_key.revoked, …")
    severity = models.CharField(max_length=16, choices=Severity.choices, default=Severity.INFO)
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True, related_name="+"
    )
    actor = models.CharField(max_length=120, help_text="The user's name, or the part of Pilothouse that acted.")
    subject_type = models.CharField(max_length=32, blank=True)
    subject_id = models.CharField(max_length=64, blank=True)
    subject = models.CharField(max_length=160, blank=True, help_text="The subject's name at that time.")
    before = models.JSONField(default=dict, blank=True)
    after = models.JSONField(default=dict, blank=True)
    reason = models.TextField(blank=True)
    inputs = models.JSONField(default=dict, blank=True)

    objects = EventQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["subject_type", "subject_id", "-id"], name="event_subject")]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}".strip()

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.pk or not self._state.adding:
            raise TypeError("events are append-only: record a new one")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        raise TypeError("events are append-only")
