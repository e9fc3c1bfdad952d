"""Who used what of the fleet, and what it cost: rows by the quarter of an hour, which pages and the API add up."""

from django.db import models

from controlplane.accounts.models import ApiKey, Tenant

SUMS = ("requests", "prompt_tokens", "output_tokens", "kv_token_s", "gpu_s", "cost_usd", "charged_usd")
"""Columns that an hour sums."""


class Work(models.TextChoices):
    """The use of an instance's time, most useful first (SageServe section 3.4: IW, NIW, spot, idle)."""

    INTERACTIVE = "interactive", "Interactive"
    NON_INTERACTIVE = "non_interactive", "Non-interactive"
    BATCH = "batch", "Batch lines"
    OPPORTUNISTIC = "opportunistic", "Opportunistic"
    IDLE = "idle", "Idle"


class Sums(models.Model):
    """What is summed of a quarter of an hour, for one kind of work of one model in one SLO class on one GPU type."""

    hour = models.DateTimeField("begin", db_index=True)
    model = models.CharField(max_length=160)
    gpu_type = models.CharField("GPU type", max_length=40, blank=True, help_text="Empty: nothing ran.")
    slo_class = models.CharField("SLO class", max_length=40, blank=True)
    work = models.CharField(max_length=16, choices=Work.choices, default=Work.INTERACTIVE)
    requests = models.PositiveBigIntegerField(default=0)
    prompt_tokens = models.PositiveBigIntegerField(default=0)
    output_tokens = models.PositiveBigIntegerField(default=0)
    kv_token_s = models.FloatField("KV-token-seconds", default=0.0)
    gpu_s = models.FloatField("GPU-seconds", default=0.0)
    cost_usd = models.FloatField("cost (USD)", default=0.0)
    charged_usd = models.FloatField(
        "charged (USD)",
        default=0.0,
        help_text="By price factor, batch discount or spot price.",
    )

    class Meta:
        abstract = True


class UsageHour(Sums):
    """Use of one model by one API key within a quarter of an hour, and its share of the instances' cost.

    Days of every time zone begin with one. Rows of older versions are of a whole hour (UTC). Requests and their tokens
    count in the quarter of arrival, KV-token-seconds, GPU-seconds and dollars in those in which they ran. What no request
    used has no tenant: it is idle, and all rows of an hour cost what the fleet did. `counting.py` rewrites an hour whenever
    the ledger has more of it.
    """

    tenant = models.ForeignKey(
        Tenant,
        on_delete=models.PROTECT,
        null=True,
        related_name="+",
        db_index=False,  # in usage_tenant
        help_text="Empty: idle, no tenant's.",
    )
    api_key = models.ForeignKey(ApiKey, verbose_name="API key", on_delete=models.PROTECT, null=True, related_name="+")
    application = models.CharField(max_length=80, blank=True)
    batch = models.CharField(max_length=64, blank=True, help_text="Id of the batch whose lines they were.")

    class Meta:
        ordering = ["-hour", "-cost_usd"]
        verbose_name = "hour of usage"
        verbose_name_plural = "hours of usage"
        indexes = [models.Index(fields=["tenant", "hour"], name="usage_tenant")]

    def __str__(self) -> str:
        return f"{self.hour:%F %H:%M} {self.tenant or 'idle'} {self.model} {self.slo_class}".rstrip()


class InstanceHour(Sums):
    """The same sums by instance; with what is known of it on its row of idle time, for when the quarter is counted again."""

    instance = models.CharField(max_length=80, blank=True, help_text="Empty: never placed.")
    gpus = models.PositiveSmallIntegerField(default=0)
    paid = models.JSONField(null=True, help_text="Periods in which it had its GPUs, in seconds after `hour`.")

    class Meta:
        ordering = ["-hour", "instance"]
        verbose_name = "hour of an instance"
        verbose_name_plural = "hours of instances"

    def __str__(self) -> str:
        return f"{self.hour:%F %H:%M} {self.instance} {self.work}"


class UsageMark(models.Model):
    """Time up to which usage is counted; one row.

    Ledger rows up to *ledger_pk* are counted for good. Those up to *seen_pk* are counted too and looked for once more:
    transactions of several gateways may end in another order than their keys were given.
    """

    counted_until = models.DateTimeField()
    ledger_pk = models.PositiveBigIntegerField(default=0)
    seen_pk = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"until {self.counted_until:%F %T}"
