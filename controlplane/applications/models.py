"""Applications of tenants and their runs, as X-Application, X-Run and X-Unit name them (docs/applications.md)."""

from django.db import models
from django.db.models import Q
from django.utils import timezone

from controlplane.accounts.models import Tenant


class Application(models.Model):
    """A workflow of a tenant that runs again and again. Its demand graph is read from its runs."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="applications")
    name = models.CharField(max_length=80)
    units = models.JSONField(default=dict, help_text="Backend of each unit, by name.")
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="one_application_of_a_name")]

    def __str__(self) -> str:
        return self.name


class ApplicationRun(models.Model):
    """One run: what it has used so far, and once it has ended its record for the demand graph."""

    application = models.ForeignKey(Application, on_delete=models.CASCADE, related_name="runs")
    run = models.CharField(max_length=80)
    began_at = models.DateTimeField(db_index=True)
    last_call_at = models.DateTimeField(help_text="End of its last call so far.")
    ended_at = models.DateTimeField(null=True, blank=True, help_text="Empty while it runs.")
    calls = models.PositiveIntegerField(default=0)
    failed_calls = models.PositiveIntegerField(default=0)
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    imported = models.BooleanField(default=False, help_text="It came with a graph that was imported.")
    steps = models.JSONField(default=list, blank=True, help_text="Its record: units, what led to them, demands.")

    class Meta:
        ordering = ["-began_at", "-id"]
        constraints = [models.UniqueConstraint(fields=["application", "run"], name="one_run_of_a_name")]
        indexes = [models.Index(fields=["last_call_at"], condition=Q(ended_at=None), name="runs_that_run")]

    def __str__(self) -> str:
        return self.run

    @property
    def duration_s(self) -> float:
        return ((self.ended_at or self.last_call_at) - self.began_at).total_seconds()


class FollowedLedger(models.Model):
    """The ledger row up to which runs have been followed; one row."""

    ledger_pk = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"until {self.ledger_pk}"
