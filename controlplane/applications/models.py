"""Applications of tenants and their runs, by the marks of requests and by what tenants report (docs/applications.md)."""

from datetime import datetime, timedelta

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Avg, Case, F, OuterRef, Q, Subquery, Sum, When
from django.utils import timezone
from django.utils.functional import cached_property

from controlplane.accounts.models import Tenant
from controlplane.applications.completion import DAY_H, Completions
from scheduling.applications.recording import RECOGNIZED
from workers.backends.actuators import PORT, ActuatorError, BackendSpec


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

    asked_hours: int = DAY_H
    """Hours that its figures cover, and the region of their runs, empty for all: annotated by filters of the list."""
    asked_region: str = ""

    @property
    def asked_since(self) -> datetime:
        return timezone.now() - timedelta(hours=self.asked_hours)

    @property
    def asked_runs(self) -> "models.QuerySet[ApplicationRun]":
        """Return its runs of the region asked for, running and ended, without imported ones."""
        runs = self.runs.filter(imported=False)
        return runs.filter(region=self.asked_region) if self.asked_region else runs

    @cached_property
    def completions(self) -> Completions:
        """How its runs ended lately."""
        ended = with_costs(self.asked_runs.filter(ended_at__gte=self.asked_since))
        return Completions.of(ended.defer("steps").order_by("ended_at"))

    @property
    def running(self) -> int:
        return self.asked_runs.filter(ended_at=None).count()

    @property
    def prewarm_hits(self) -> float | None:
        """Return the share of calls that found their backend warm lately, of those that needed one; None without any."""
        rows = PrewarmRow.objects.filter(tenant=self.tenant_id, application=self.name, began_at__gte=self.asked_since)
        if self.asked_region:
            rows = rows.filter(run__in=self.asked_runs.values("run"))
        fates = rows.order_by().filter(fate__in=("hit", "late", "miss"))
        share: float | None = fates.aggregate(hits=Avg(Case(When(fate="hit", then=1.0), default=0.0)))["hits"]
        return share

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
    region = models.CharField(max_length=40, blank=True, default="", help_text="Of the caller of its first call.")
    service_s = models.FloatField(
        null=True, blank=True, help_text="Service of all calls and units, by the profiles of their models."
    )
    expected_calls = models.PositiveIntegerField(
        default=0, help_text="Calls that were placed by rank: what the run still needed was predicted then."
    )
    needed_s = models.FloatField(default=0.0, help_text="Service that came after these predictions, their sum.")
    error_s = models.FloatField(default=0.0, help_text="By how much the predictions were wrong, their sum.")
    plain_error_s = models.FloatField(
        default=0.0, help_text="The same of the simplest rule: the mean of earlier runs less what this one had had."
    )
    deadline_s = models.FloatField(null=True, blank=True, help_text="After it began; empty for none.")
    opened = models.BooleanField(default=False, help_text="It was opened by its tenant, who is to close it.")
    closed_at = models.DateTimeField(null=True, blank=True, help_text="When its tenant closed it.")
    outcome = models.CharField(max_length=16, blank=True, default="", choices=RunOutcome.choices)

    cost_usd: float | None = None
    """Share of the cost of the instances that its calls ran on, and what is charged for them; None where usage has not
    counted them, or without `with_costs`."""
    charged_usd: float | None = None

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


class RunCost(models.Model):
    """Dollars of a run in an hour: the shares of its calls, as usage counts that hour and counts it again (`usage`)."""

    hour = models.DateTimeField(db_index=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="+", db_index=False)
    application = models.CharField(max_length=80)
    run = models.CharField(max_length=80)
    cost_usd = models.FloatField("cost (USD)", default=0.0)
    charged_usd = models.FloatField("charged (USD)", default=0.0)

    class Meta:
        ordering = ["-hour"]
        indexes = [models.Index(fields=["tenant", "application", "run"], name="cost_of_run")]

    def __str__(self) -> str:
        return f"{self.hour:%F %H:%M} {self.application} {self.run}"


def with_costs(runs: "models.QuerySet[ApplicationRun]") -> "models.QuerySet[ApplicationRun]":
    """Return *runs* with `cost_usd` and `charged_usd`; None where usage has not counted them."""
    hours = RunCost.objects.filter(
        tenant=OuterRef("application__tenant"), application=OuterRef("application__name"), run=OuterRef("run")
    )
    of_run = hours.order_by().values("run")
    sums = {name: Subquery(of_run.values(sum=Sum(name))) for name in ("cost_usd", "charged_usd")}
    return runs.annotate(**sums)


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
    warm = models.BooleanField(null=True, help_text="Whether it was handed a warm backend; empty where none is kept.")
    address = models.CharField(max_length=80, blank=True, default="", help_text="Of the backend that it was handed.")

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
    """A backend of units that are no LLM. It is started before a run will probably need it, and handed to its unit."""

    name = models.CharField(
        max_length=80,
        unique=True,
        validators=[RegexValidator(r"^[A-Za-z0-9._:/-]+$", "Letters, digits or . _ : / -")],
        help_text="As units name it in `backend`, such as python:3.11.",
    )
    kind = models.CharField(max_length=16, choices=BackendKind.choices, default=BackendKind.CONTAINER)
    image = models.CharField(
        max_length=255, blank=True, default="", help_text="Container image on the host; used where Docker is there."
    )
    command = models.CharField(
        max_length=1000,
        blank=True,
        default="",
        help_text="Of the container, or of a process where there is no Docker: it listens on {port}, on the loopback.",
    )
    container_port = models.PositiveIntegerField(
        default=0, validators=[MaxValueValidator(65_535)], help_text="Port of the container that is published; 0: none."
    )
    capacity = models.PositiveSmallIntegerField(
        default=2,
        validators=[MinValueValidator(1), MaxValueValidator(64)],
        help_text="Most of them at once, warm or in use.",
    )
    keep_alive_s = models.FloatField(
        default=300.0,
        validators=[MinValueValidator(1.0), MaxValueValidator(86_400.0)],
        help_text="One that is not used for so long is stopped.",
    )
    start_limit_s = models.FloatField(
        default=60.0, validators=[MinValueValidator(1.0), MaxValueValidator(600.0)], help_text="Longest start."
    )
    reused = models.BooleanField(
        default=False, help_text="A container serves the next execution, of any tenant; a DNN model always does."
    )
    active = models.BooleanField(default=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        if not (self.image or self.command):
            raise ValidationError({"command": "It needs an image, a command, or both."})
        try:
            says_port = any(PORT in each for each in self.spec.arguments)
        except ActuatorError as error:
            raise ValidationError({"command": str(error)}) from error
        if not self.image and not says_port:
            raise ValidationError({"command": f"A process is told its port: the command has to contain {PORT}."})

    @property
    def spec(self) -> BackendSpec:
        return BackendSpec(self.name, self.image, self.command, self.container_port, self.start_limit_s)


class PrewarmRow(models.Model):
    """A backend that was prewarmed for a run, or that a call of it found cold."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="+")
    application = models.CharField(
        max_length=80, blank=True, default="", help_text="Empty: of a request without marks."
    )
    run = models.CharField(max_length=80, blank=True, default="")
    kind = models.CharField(max_length=16, help_text="adapter, prefix, model, container or dnn.")
    backend = models.CharField(max_length=160)
    place = models.CharField(max_length=160, blank=True, default="", help_text="Instance, or address.")
    why = models.CharField(max_length=400, blank=True, default="")
    began_at = models.DateTimeField(db_index=True)
    warm_at = models.DateTimeField(null=True, blank=True)
    settled_at = models.DateTimeField(null=True, blank=True, help_text="When it was used, or given up.")
    fate = models.CharField(
        max_length=8, blank=True, default="", help_text="hit, late, miss, waste or failed; empty: not used yet."
    )

    class Meta:
        ordering = ["-began_at", "-id"]
        indexes = [models.Index(fields=["tenant", "application", "run"], name="prewarm_of_run")]

    def __str__(self) -> str:
        return f"{self.kind} {self.backend}"


class FollowedLedger(models.Model):
    """The ledger row up to which runs have been followed; one row."""

    ledger_pk = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"until {self.ledger_pk}"
