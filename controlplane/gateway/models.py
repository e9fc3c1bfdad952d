"""The request ledger and its per-minute series. Prompts and completions are never stored here."""

from datetime import datetime, timedelta

from django.db import models

from controlplane.accounts.models import ApiKey, Tenant

LONG_MS = 600_000.0
"""Duration above which requests are in a separate index: an hour of usage looks for them long before it."""


class Outcome(models.TextChoices):
    """Outcome of a request."""

    DONE = "done", "Done"
    FAILED = "failed", "Failed"  # the instance or Pilothouse could not serve it
    CANCELLED = "cancelled", "Cancelled"  # the tenant disconnected
    REJECTED = "rejected", "Refused"  # queue bound, limits, deadline


class LedgerRow(models.Model):
    """One request, from arrival to its end."""

    request_id = models.CharField(max_length=80, db_index=True)
    arrived_at = models.DateTimeField(db_index=True)
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT, related_name="+", db_index=False)  # in ledger_tenant
    api_key = models.ForeignKey(ApiKey, on_delete=models.PROTECT, null=True, related_name="+")
    model = models.CharField(max_length=160)
    slo_class = models.CharField(max_length=40)
    region = models.CharField(max_length=40, blank=True)
    own_region = models.CharField(
        max_length=40,
        blank=True,
        default="",
        help_text="Where its caller is and it counts as demand; empty: as region.",
    )
    instance = models.CharField(max_length=80, blank=True)
    application = models.CharField(max_length=80, blank=True)
    run = models.CharField(max_length=80, blank=True)
    unit = models.CharField(max_length=80, blank=True)
    run_due_s = models.FloatField(
        null=True, help_text="Seconds from the start of its run to the run's deadline, as this call says it."
    )
    streamed = models.BooleanField()
    outcome = models.CharField(max_length=16, choices=Outcome.choices)
    status_code = models.PositiveSmallIntegerField()
    error_code = models.CharField(max_length=64, blank=True)
    error_message = models.CharField(
        max_length=500, blank=True, default="", help_text="What the tenant was told, without quotations of the request."
    )
    prompt_tokens = models.PositiveIntegerField(default=0)
    output_tokens = models.PositiveIntegerField(default=0)
    predicted_prompt_tokens = models.PositiveIntegerField(default=0)
    predicted_output_tokens = models.PositiveIntegerField(default=0)
    queue_ms = models.FloatField(null=True)
    ttft_ms = models.FloatField(null=True)
    itl_ms = models.FloatField(null=True, help_text="Mean time between output tokens.")
    e2e_ms = models.FloatField(null=True)
    slo_met = models.BooleanField(null=True)
    unserved = models.BooleanField(
        default=False,
        help_text="Demand that got no token: refused by the fleet, or expired, cancelled or failed before its first one.",
    )
    queue_position = models.PositiveIntegerField(null=True, help_text="In its queue when it came; 0: it did not wait.")
    estimated_wait_s = models.FloatField(
        null=True, help_text="How long it was expected to wait when it came: the mean."
    )
    estimated_wait_p99_s = models.FloatField(null=True, help_text="The same, the 99th percentile.")
    attempts = models.PositiveSmallIntegerField(default=0)
    evictions = models.PositiveSmallIntegerField(
        default=0, help_text="How often it was taken from an instance and queued again, what it had emitted kept."
    )
    asked_class = models.CharField(
        max_length=40,
        blank=True,
        default="",
        help_text="SLO class that it was degraded from, because that promise was unreachable; empty: it kept its class.",
    )
    asked_model = models.CharField(
        max_length=160,
        blank=True,
        default="",
        help_text="Name that it asked for, where another model served it; empty: that of the model or adapter.",
    )
    model_rule = models.CharField(
        max_length=16,
        blank=True,
        default="",
        help_text="Why another model served it: weights, unavailable, wait or failure.",
    )
    adapter = models.CharField(
        max_length=160,
        blank=True,
        default="",
        help_text="LoRA adapter of the model that served it; empty: none.",
    )
    ran = models.JSONField(
        null=True,
        help_text="[instance, begin, end] of each time that an instance worked for it, in milliseconds after its arrival;"
        " empty: its last instance from its placement to its end.",
    )
    cached_tokens = models.PositiveIntegerField(
        null=True, help_text="Prompt tokens in the prefix cache, as the instance reports; empty: it does not."
    )
    expected_cached_tokens = models.PositiveIntegerField(
        null=True, help_text="Prompt tokens that the router expected there; empty: it weighs no prefixes."
    )
    expected_by = models.CharField(
        max_length=16,
        blank=True,
        default="",
        help_text="How it knew: kv_events or estimate; empty: it weighs no prefixes.",
    )
    surface = models.CharField(
        max_length=24,
        blank=True,
        default="",
        help_text="What was called, by the last part of its path, such as embeddings; empty: not known.",
    )
    lost = models.BooleanField(
        default=False,
        help_text="An execution of a batch line whose answer was not kept: its tenant does not pay for it.",
    )
    prefix_groups = models.TextField(
        null=True,
        help_text="Keyed hashes of the starts of its prompt, by which simulations know what prompts share; null: not known.",
    )
    trace = models.JSONField(default=list, blank=True, help_text="Placements tried, with policy, scores and reason.")

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["tenant", "-arrived_at"], name="ledger_tenant"),
            models.Index(fields=["instance", "-arrived_at"], name="ledger_instance"),
            models.Index(fields=["arrived_at"], condition=models.Q(e2e_ms__gt=LONG_MS), name="ledger_long"),
            models.Index(
                fields=["asked_model", "-arrived_at"], condition=~models.Q(asked_model=""), name="ledger_asked_model"
            ),
            models.Index(
                fields=["tenant", "application", "run"], condition=~models.Q(run=""), name="ledger_application_run"
            ),
        ]

    def __str__(self) -> str:
        return self.request_id

    @property
    def ended_at(self) -> datetime | None:
        return None if self.e2e_ms is None else self.arrived_at + timedelta(milliseconds=self.e2e_ms)

    @property
    def caller_region(self) -> str:
        return self.own_region or self.region

    @property
    def estimated_wait_ms(self) -> float | None:
        return None if self.estimated_wait_s is None else self.estimated_wait_s * 1000

    @property
    def estimated_wait_p99_ms(self) -> float | None:
        return None if self.estimated_wait_p99_s is None else self.estimated_wait_p99_s * 1000


SERIES = ("minute", "model", "region", "own_region", "slo_class")
"""Key columns of a minute row."""
SUMS = (
    "requests",
    "failed",
    "refused",
    "slo_met",
    "slo_judged",
    "prompt_tokens",
    "output_tokens",
    "unserved",
    "unserved_prompt_tokens",
    "unserved_output_tokens",
)
"""Summed columns of a minute row."""


class MinuteRow(models.Model):
    """Demand of one minute of arrival for (model, region, region of the callers, SLO class).

    Written in the same transaction as the ledger. Tokens were served in *region*; the unserved got no service: prompts as
    counted, outputs as predicted.
    """

    minute = models.DateTimeField(db_index=True)
    model = models.CharField(max_length=160)
    region = models.CharField(max_length=40, blank=True)
    own_region = models.CharField(
        max_length=40,
        blank=True,
        default="",
        help_text="Of the callers, whose demand it is; empty: the same as region.",
    )
    slo_class = models.CharField(max_length=40)
    requests = models.PositiveIntegerField(default=0)
    failed = models.PositiveIntegerField(default=0)
    refused = models.PositiveIntegerField(default=0, db_default=0)
    slo_met = models.PositiveIntegerField(default=0)
    slo_judged = models.PositiveIntegerField(default=0)
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    unserved = models.PositiveIntegerField(default=0)
    unserved_prompt_tokens = models.PositiveBigIntegerField(default=0)
    unserved_output_tokens = models.PositiveBigIntegerField(default=0)

    class Meta:
        ordering = ["-minute"]
        constraints = [
            models.UniqueConstraint(fields=SERIES, name="one_row_per_minute_and_series"),
        ]

    def __str__(self) -> str:
        return f"{self.minute:%F %H:%M} {self.model} {self.region} {self.slo_class}"
