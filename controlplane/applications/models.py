"""Applications of tenants and their runs, by the marks of requests and by what tenants report (docs/applications.md)."""

from django.db import models
from django.db.models import F, Q
from django.utils import timezone
from django.utils.functional import cached_property

from controlplane.accounts.models import Tenant
from controlplane.applications.completion import DAY, Completions
from scheduling.applications.recording import RECOGNIZED


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
    title = models.CharField(max_length=80, blank=True, default="", help_text="Name given to one that was recognized.")
    units = models.JSONField(default=dict, help_text="Backend of each unit, by name.")
    created_at = models.DateTimeField(default=timezone.now)
    learns_from = models.DateTimeField(
        null=True,
        blank=True,
        help_text="Runs that ended before are not in its demand graph: a version was restored then.",
    )
    frozen_at = models.DateTimeField(
        null=True, blank=True, help_text="Runs that ended later are recorded and not learned; empty while it learns."
    )

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["tenant", "name"], name="one_application_of_a_name")]

    def __str__(self) -> str:
        return self.title or self.name

    @cached_property
    def completions(self) -> Completions:
        """How its runs ended in the last day."""
        ended = self.runs.filter(ended_at__gte=timezone.now() - DAY, imported=False)
        return Completions.of(ended.defer("steps").order_by("ended_at"))

    @property
    def kinds(self) -> str:
        """Return the number of its units and the kinds that are no LLM, in words."""
        others = sorted({str(unit.get("kind")) for unit in self.units.values()} - {"llm"})
        number = len(self.units)
        return ", ".join([f"{number} unit" + "s" * (number != 1), *others])

    @property
    def recognized(self) -> bool:
        """Whether it was found by conversations and system prompts, and not by marks."""
        return self.name.startswith(RECOGNIZED)


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


def learned(run: str = "", application: str = "application__") -> Q:
    """Return which runs the demand graph of their application is made of; *run* and *application* lead to either."""
    ended, since, until = f"{run}ended_at", f"{application}learns_from", f"{application}frozen_at"
    here = (Q(**{since: None}) | Q(**{f"{ended}__gte": F(since)})) & (
        Q(**{until: None}) | Q(**{f"{ended}__lte": F(until)})
    )
    return ~Q(**{f"{run}steps": []}) & (Q(**{f"{run}imported": True}) | here)


class GraphVersion(models.Model):
    """A demand graph as it was, kept to compare and restore."""

    application = models.ForeignKey(Application, on_delete=models.CASCADE, related_name="versions")
    number = models.PositiveIntegerField()
    made_at = models.DateTimeField(default=timezone.now)
    made_by = models.CharField(max_length=150)
    why = models.CharField(max_length=255)
    records = models.PositiveIntegerField(help_text="Runs that it is learned from.")
    error_s = models.FloatField(
        null=True, blank=True, help_text="Mean error of predictions of what its left-out runs still needed (s)."
    )
    needed_s = models.FloatField(null=True, blank=True, help_text="Mean of what these runs needed (s).")
    size_bytes = models.PositiveIntegerField(help_text="Of its JSON form.")
    graph = models.BinaryField(help_text="Its JSON form, compressed by zlib.")

    class Meta:
        ordering = ["-number"]
        constraints = [models.UniqueConstraint(fields=["application", "number"], name="one_version_of_a_number")]

    def __str__(self) -> str:
        return f"v{self.number}"

    @property
    def error(self) -> float | None:
        """Return the error as a share of what was needed; None with too few runs."""
        return None if self.error_s is None or not self.needed_s else self.error_s / self.needed_s


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


class FollowedLedger(models.Model):
    """The ledger row up to which runs have been followed; one row."""

    ledger_pk = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"until {self.ledger_pk}"
