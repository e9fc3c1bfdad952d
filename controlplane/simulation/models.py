"""Simulations that were asked for by REST, and what came of them."""

from django.conf import settings
from django.db import models
from django.utils import timezone


class SimulationState(models.TextChoices):
    QUEUED = "queued", "Queued"
    RUNNING = "running", "Running"
    DONE = "done", "Done"
    FAILED = "failed", "Failed"
    CANCELLED = "cancelled", "Cancelled"


class SimulationRun(models.Model):
    """One scenario, run by a worker."""

    requested_at = models.DateTimeField(default=timezone.now, db_index=True)
    requested_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True)
    title = models.CharField(max_length=160, blank=True)
    scenario = models.JSONField(help_text="As a scenario file, in JSON.")
    seed = models.PositiveBigIntegerField(default=0)
    state = models.CharField(
        max_length=9, choices=SimulationState.choices, default=SimulationState.QUEUED, db_index=True
    )
    progress = models.FloatField(default=0.0, help_text="Share of the requests that have ended.")
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    result = models.JSONField(null=True, blank=True, help_text="As `manage.py simulate --json`, once it is done.")
    error = models.TextField(blank=True, help_text="Why it failed.")

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return self.title or f"simulation {self.pk}"
