"""What-ifs: a start, up to seven futures, and a run of each future for each seed."""

from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils import timezone

LETTERS = "ABCDEFG"
"""Of futures; A is as things are now."""


class WhatIfState(models.TextChoices):
    QUEUED = "queued", "Queued"
    RUNNING = "running", "Running"
    DONE = "done", "Done"
    CANCELLED = "cancelled", "Cancelled"
    FAILED = "failed", "Failed"


class Phase(models.TextChoices):
    """Phase of one seed's run."""

    WAITING = "waiting", "Waiting"
    STAGING = "staging", "Staging"
    SIMULATING = "simulating", "Simulating"
    MEASURING = "measuring", "Measuring"


class WhatIf(models.Model):
    """One question to the simulator: what comes of a start under several futures, each with the same requests."""

    title = models.CharField(max_length=160)
    start = models.JSONField(default=dict, blank=True, help_text="As `start.Start`.")
    horizon_s = models.FloatField(default=3600.0, validators=[MinValueValidator(60)])
    warmup_s = models.FloatField(
        default=0.0, validators=[MinValueValidator(0)], help_text="Of the horizon, from its begin: not counted."
    )
    seeds = models.PositiveSmallIntegerField(default=5, validators=[MinValueValidator(1), MaxValueValidator(100)])
    edits = models.JSONField(default=list, blank=True, help_text="Changes of demand that all futures share.")
    nightly = models.BooleanField(default=False, help_text="Made every night of the ledger under each bundle.")
    state = models.CharField(max_length=11, choices=WhatIfState.choices, default=WhatIfState.QUEUED, db_index=True)
    requested_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now, db_index=True)
    submitted_at = models.DateTimeField(null=True, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    ended_by = models.CharField(max_length=120, blank=True, help_text="Who cancelled it.")
    twin_error = models.JSONField(
        default=dict, blank=True, help_text="Of the simulation against what was measured, when it was made."
    )
    asked = models.TextField(blank=True, help_text="Address of the form that asked it; empty: it was asked otherwise.")
    plan = models.JSONField(default=dict, blank=True, help_text="What was made of a future; empty: nothing.")

    class Meta:
        ordering = ["-id"]
        verbose_name = "what-if"

    def __str__(self) -> str:
        return self.title


class Future(models.Model):
    """One set of changes against now."""

    what_if = models.ForeignKey(WhatIf, on_delete=models.CASCADE, related_name="futures")
    letter = models.CharField(max_length=1, choices=[(letter, letter) for letter in LETTERS])
    name = models.CharField(max_length=80)
    changes = models.JSONField(default=list, blank=True, help_text="As `changes`; none for A.")

    class Meta:
        ordering = ["what_if", "letter"]
        constraints = [models.UniqueConstraint(fields=["what_if", "letter"], name="one_future_a_letter")]

    def __str__(self) -> str:
        return f"{self.letter} {self.name}"


class FutureSeed(models.Model):
    """The simulation of a future with the requests of a seed, and what came of it."""

    future = models.ForeignKey(Future, on_delete=models.CASCADE, related_name="runs")
    seed = models.PositiveBigIntegerField()
    state = models.CharField(max_length=11, choices=WhatIfState.choices, default=WhatIfState.QUEUED, db_index=True)
    phase = models.CharField(max_length=10, choices=Phase.choices, default=Phase.WAITING)
    progress = models.FloatField(default=0.0, help_text="Share of the whole run that is done.")
    task = models.CharField(max_length=80, blank=True, help_text="Celery task that runs it.")
    attempts = models.PositiveSmallIntegerField(default=0)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    result = models.JSONField(default=dict, blank=True, help_text="Columns of the comparison, by scope.")
    curves = models.BinaryField(null=True, blank=True, help_text="TTFT and what changed over time: JSON, compressed.")
    error = models.TextField(blank=True)

    class Meta:
        ordering = ["future", "seed"]
        verbose_name = "run of a future"
        verbose_name_plural = "runs of futures"
        constraints = [models.UniqueConstraint(fields=["future", "seed"], name="one_run_a_seed")]

    def __str__(self) -> str:
        return f"{self.future}, seed {self.seed}"


class TraceFile(models.Model):
    """An uploaded trace, for what-ifs to start from."""

    name = models.CharField(max_length=160)
    format = models.CharField(max_length=20, help_text="A name in `scheduling.simulation.workload.traces`.")
    unit = models.CharField(max_length=2, blank=True, help_text="Of times that are numbers, as it was read.")
    content = models.BinaryField(help_text="Compressed with zlib.")
    requests = models.PositiveIntegerField()
    span_s = models.FloatField(help_text="From its first request to its last.")
    uploaded_at = models.DateTimeField(default=timezone.now)
    uploaded_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return self.name

    @property
    def about(self) -> str:
        return f"{self.name}: {self.requests:,} requests over {self.span_s / 60:,.3g} min, numbers read as {self.unit}"


class TwinError(models.Model):
    """Measurements of one window's requests of one performance profile, and the simulator's values for them."""

    made_at = models.DateTimeField(default=timezone.now, db_index=True)
    model = models.CharField(max_length=160)
    gpu = models.CharField(max_length=80, help_text="GPUs of an instance.")
    from_at = models.DateTimeField()
    to_at = models.DateTimeField()
    requests = models.PositiveIntegerField()
    measured = models.JSONField(help_text="ttft_p50, ttft_p95, itl_p50, itl_p95 in milliseconds, and slo_met.")
    simulated = models.JSONField(help_text="The same.")

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["model", "gpu", "-id"], name="twin_error_profile")]

    def __str__(self) -> str:
        return f"{self.model} on {self.gpu}, {self.to_at:%F %H:%M}"

    @property
    def errors(self) -> dict[str, float]:
        """Simulated over measured, less one; of `slo_met` the difference in points."""
        errors = {}
        for name, measured in self.measured.items():
            simulated = self.simulated.get(name)
            if simulated is not None and name == "slo_met":
                errors[name] = simulated - measured
            elif simulated is not None and measured > 0:
                errors[name] = simulated / measured - 1
        return errors
