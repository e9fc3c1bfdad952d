"""Applications of tenants and their runs, by marks of requests and reports of tenants (docs/tenants/applications.md)."""

from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.functional import cached_property

from controlplane.accounts.models import Tenant
from controlplane.applications.completion import Completions


class RunOutcome(models.TextChoices):
    """How a run ended. The first is that of a run without an explicit end."""

    ENDED = "ended", "Ended"
    DONE = "done", "Done"  # as reported, as the next two
    FAILED = "failed", "Failed"
    CANCELLED = "cancelled", "Cancelled"
    ABANDONED = "abandoned", "Abandoned"  # opened and never closed, or its last call did not succeed
    STOPPED = "stopped", "Stopped"  # by an operator: later calls of it are refused


class Application(models.Model):
    """A workflow of a tenant that runs again and again. Its demand graph is read from its runs."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="applications")
    name = models.CharField(max_length=80)
    units = models.JSONField(default=dict, help_text="Backend of each unit, by name.")
    created_at = models.DateTimeField(default=timezone.now)
    run_deadline_s = models.FloatField(
        "deadline of a run (s)",
        null=True,
        blank=True,
        validators=[MinValueValidator(0.1)],
        help_text="From the first call of a run on, calls are refused once it cannot end by then. Empty: none.",
    )
    run_max_tokens = models.PositiveBigIntegerField(
        "tokens of a run",
        null=True,
        blank=True,
        validators=[MinValueValidator(1)],
        help_text="Most prompt and output tokens of all calls of a run. Empty: no limit.",
    )
    run_max_usd = models.FloatField(
        "dollars of a run",
        null=True,
        blank=True,
        validators=[MinValueValidator(0.0001)],
        help_text="Most dollars of all calls of a run, at what a token of their models costs lately. Empty: no limit.",
    )

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="one_application_of_a_name")]

    def __str__(self) -> str:
        return self.name

    lately: "list[ApplicationRun]"
    """Its runs that its figures are of, running and ended: fetched with the list."""
    asked_region: str = ""
    """Region of those, empty for all: annotated by a filter of the list."""

    @property
    def asked_runs(self) -> "list[ApplicationRun]":
        return [run for run in self.lately if self.asked_region in ("", run.region)]

    @cached_property
    def completions(self) -> Completions:
        """How its runs ended lately."""
        return Completions.of(run for run in self.asked_runs if run.ended_at is not None)

    @property
    def running(self) -> int:
        return sum(run.ended_at is None for run in self.asked_runs)

    @property
    def kinds(self) -> str:
        """Return the number of its units and the kinds that are no LLM, in words."""
        others = sorted({str(unit.get("kind")) for unit in self.units.values()} - {"llm"})
        number = len(self.units)
        return ", ".join([f"{number} unit" + "s" * (number != 1), *others])


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
    region = models.CharField(max_length=40, blank=True, default="", help_text="Of the caller of its first call.")
    service_s = models.FloatField(
        null=True, blank=True, help_text="Service of all calls and units, by the profiles of their models."
    )
    expected_calls = models.PositiveIntegerField(
        default=0, help_text="Calls that were placed by rank: what the run still needed was predicted then."
    )
    needed_s = models.FloatField(default=0.0, help_text="Service that came after these predictions, their sum.")
    error_s = models.FloatField(default=0.0, help_text="By how much the predictions were wrong, their sum.")
    deadline_s = models.FloatField(null=True, blank=True, help_text="After it began; empty for none.")
    opened = models.BooleanField(default=False, help_text="It was opened by its tenant, who is to close it.")
    closed_at = models.DateTimeField(null=True, blank=True, help_text="When its tenant closed it.")
    outcome = models.CharField(max_length=16, blank=True, default="", choices=RunOutcome.choices)

    class Meta:
        ordering = ["-began_at", "-id"]
        constraints = [models.UniqueConstraint(fields=["application", "run"], name="one_run_of_a_name")]
        indexes = [models.Index(fields=["last_call_at"], condition=Q(ended_at=None), name="runs_that_run")]

    def __str__(self) -> str:
        return self.run

    @property
    def duration_s(self) -> float:
        return ((self.ended_at or self.closed_at or self.last_call_at) - self.began_at).total_seconds()

    @property
    def state(self) -> str:
        """Return how it ended, or `running`."""
        return self.outcome or ("ended" if self.ended_at else "running")

    @property
    def late_s(self) -> float | None:
        """Return by how much it ended after its deadline, negative if before; None without a deadline or an end."""
        if self.deadline_s is None or (self.ended_at is None and self.closed_at is None):
            return None
        return self.duration_s - self.deadline_s

    @property
    def in_time(self) -> bool | None:
        """Whether it ended by its deadline; None without one, and while it runs."""
        late_s = self.late_s
        if late_s is None:
            return None
        return late_s <= 0 and self.outcome not in (RunOutcome.FAILED, RunOutcome.ABANDONED, RunOutcome.STOPPED)


LEARNED = ~Q(steps=[])
"""Runs that the demand graph of their application is made of."""


class UnitReport(models.Model):
    """An execution of a unit that is no LLM, as its tenant reported it."""

    run = models.ForeignKey(ApplicationRun, on_delete=models.CASCADE, related_name="reports")
    report = models.CharField(max_length=80, help_text="Its tenant's name for it.")
    unit = models.CharField(max_length=80)
    kind = models.CharField(max_length=16)
    backend = models.CharField(max_length=80)
    began_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True, help_text="Empty while it runs.")
    failed = models.BooleanField(default=False)

    class Meta:
        ordering = ["began_at", "id"]
        constraints = [models.UniqueConstraint(fields=["run", "report"], name="one_report_of_a_name")]

    def __str__(self) -> str:
        return self.report

    @property
    def duration_s(self) -> float:
        return (self.ended_at - self.began_at).total_seconds() if self.ended_at else 0.0


class BackendKind(models.TextChoices):
    CONTAINER = "container", "Container"  # of one execution at a time
    DNN = "dnn", "DNN model"  # of any number at once


class UnitBackend(models.Model):
    """A backend of units that are no LLM, kept by another platform, whose webhook is called to warm it."""

    name = models.CharField(
        max_length=80,
        unique=True,
        validators=[RegexValidator(r"^[A-Za-z0-9._:/-]+$", "Letters, digits or . _ : / -")],
        help_text="As units name it in `backend`, such as python:3.11.",
    )
    kind = models.CharField(max_length=16, choices=BackendKind.choices, default=BackendKind.CONTAINER)
    url = models.CharField(
        "URL",
        max_length=500,
        validators=[RegexValidator(r"^https?://[^\s/]+\S*$", "An address that begins with http:// or https://")],
        help_text="Is sent `warm` before a run will probably need the backend, `cool` once none does.",
    )
    secret = models.CharField(max_length=200, help_text="Signs what is sent (HMAC-SHA256). It is never shown.")
    keep_alive_s = models.FloatField(
        "keep alive (s)",
        default=300.0,
        validators=[MinValueValidator(1.0), MaxValueValidator(86_400.0)],
        help_text="After so long without need it is sent `cool`.",
    )
    active = models.BooleanField(default=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class FollowedLedger(models.Model):
    """The ledger row up to which runs have been followed; one row."""

    ledger_pk = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"until {self.ledger_pk}"
