"""Regions, latencies between them, and GPU types with prices."""

from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models

from controlplane.fleet.models.prices import PriceOf, keep_price


class Region(models.Model):
    """A place with GPUs, such as US East."""

    name = models.SlugField(max_length=40, unique=True, help_text="Short name, such as us-east.")
    title = models.CharField(max_length=80)
    active = models.BooleanField(default=True)
    cordoned = models.CharField(
        max_length=255,
        blank=True,
        editable=False,
        help_text="Who cordoned it, and why: nothing is started there until an operator uncordons it. Empty: nobody.",
    )

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.title


class RegionLatency(models.Model):
    """One-way network latency from *origin* to *target*; also for the way back unless that has a row.

    A request whose own region is full goes to the nearest: `scheduling.routing.regions.by_preference`.
    """

    origin = models.ForeignKey(Region, verbose_name="from", on_delete=models.PROTECT, related_name="latencies_from")
    target = models.ForeignKey(Region, verbose_name="to", on_delete=models.PROTECT, related_name="latencies_to")
    latency_ms = models.FloatField(
        "latency (ms)",
        validators=[MinValueValidator(0.0), MaxValueValidator(60_000.0)],
        help_text="One way; the same back unless that is given too.",
    )

    class Meta:
        ordering = ["origin__name", "target__name"]
        verbose_name_plural = "region latencies"
        constraints = [models.UniqueConstraint(fields=["origin", "target"], name="one_latency_from_region_to_region")]

    def __str__(self) -> str:
        return f"{self.origin} to {self.target}"

    def clean(self) -> None:
        if self.origin_id is not None and self.origin_id == self.target_id:
            raise ValidationError({"target": "Name another region: within one, nothing is added."})


class Device(models.TextChoices):
    """Kind of processor that vLLM runs on."""

    GPU = "gpu", "GPU"
    CPU = "cpu", "CPU"


class GpuType(models.Model):
    """A kind of accelerator, with its memory and prices; or CPUs, of which an instance takes one share of a node."""

    name = models.SlugField(max_length=40, unique=True, help_text="Short name, such as h100-80gb.")
    title = models.CharField(max_length=80)
    device = models.CharField(max_length=8, choices=Device.choices, default=Device.GPU)
    memory_bytes = models.PositiveBigIntegerField(
        "memory (bytes)",
        validators=[MinValueValidator(1)],
        help_text="Memory of one GPU, in bytes; of CPUs, what one instance may take.",
    )
    on_demand_usd_per_hour = models.DecimalField(
        "on demand", max_digits=8, decimal_places=4, validators=[MinValueValidator(0)]
    )
    spot_usd_per_hour = models.DecimalField(
        "spot", max_digits=8, decimal_places=4, null=True, blank=True, validators=[MinValueValidator(0)]
    )
    price_source = models.CharField(max_length=160, blank=True)

    class Meta:
        ordering = ["name"]
        verbose_name = "GPU type"

    def __str__(self) -> str:
        return self.title

    def save(self, *args: Any, **kwargs: Any) -> None:
        """A changed price counts from now on (`prices`)."""
        super().save(*args, **kwargs)
        spot_usd = self.spot_usd_per_hour
        keep_price(PriceOf.GPU, self.name, float(self.on_demand_usd_per_hour))
        keep_price(PriceOf.SPOT, self.name, None if spot_usd is None else float(spot_usd))

    def clean(self) -> None:
        if (
            self.spot_usd_per_hour is not None
            and self.on_demand_usd_per_hour is not None
            and self.spot_usd_per_hour > self.on_demand_usd_per_hour
        ):
            raise ValidationError({"spot_usd_per_hour": "The spot price is not above the on-demand price."})
