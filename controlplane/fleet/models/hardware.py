"""Regions, latencies between them, and GPU types with prices."""

from datetime import date
from typing import Any
from zoneinfo import available_timezones

from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models

from controlplane.fleet.models.prices import PriceOf, keep_price

MAX_LATENCY_MS = 60_000


class NumbersField(models.JSONField):
    """Numbers by name."""


def region_title(name: str) -> str:
    """Return `us-east` as "US East"."""
    return " ".join(word.upper() if len(word) <= 2 else word.capitalize() for word in name.replace("_", "-").split("-"))


class Region(models.Model):
    """A place with GPUs, such as US East."""

    name = models.SlugField(max_length=40, unique=True, help_text="Short name, such as us-east.")
    title = models.CharField(max_length=80)
    zone = models.SlugField(
        max_length=20,
        blank=True,
        db_index=False,
        help_text="Regions near each other: dispatchers of their own decide there. Empty: one zone with all that name none.",
    )
    active = models.BooleanField(default=True)
    cordoned = models.CharField(
        max_length=255,
        blank=True,
        editable=False,
        help_text="Who cordoned it, and why: nothing is started there until an operator uncordons it. Empty: nobody.",
    )
    dark_since = models.DateTimeField(
        null=True,
        blank=True,
        editable=False,
        help_text="Since when nearly all of its instances are silent: automation starts and stops none there; empty: it "
        "answers.",
    )
    latency_ms = NumbersField(
        "latency (ms)",
        default=dict,
        blank=True,
        help_text="One-way network latency in ms, by name of another region; the same back unless that gives it too.",
    )
    """A request whose own region is full goes to the nearest: `scheduling.routing.regions.by_preference`."""

    time_zone = models.CharField(
        max_length=64,
        blank=True,
        help_text="Of the people who ask here, such as Asia/Tokyo: forecasts follow its clock and weekdays; empty: "
        "PILOTHOUSE_TIME_ZONE.",
    )
    holidays = models.CharField(
        max_length=2000, blank=True, help_text="Days on which they ask as on Sundays, such as `2026-12-25 2027-01-01`."
    )

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.title

    @property
    def days_off(self) -> frozenset[date]:
        """The days of `holidays`."""
        return frozenset(map(date.fromisoformat, self.holidays.split()))

    def clean(self) -> None:
        if self.time_zone and self.time_zone not in available_timezones():
            raise ValidationError(
                {"time_zone": f"There is no time zone {self.time_zone!r}: name one such as Asia/Tokyo."}
            )
        try:
            assert self.days_off is not None
        except ValueError as error:
            raise ValidationError({"holidays": f"{error}: give days such as 2026-12-25."}) from error
        for target, ms in self.latency_ms.items():
            if target == self.name:
                raise ValidationError({"latency_ms": "Name another region: within one, nothing is added."})
            if not isinstance(ms, int | float) or not 0 <= ms <= MAX_LATENCY_MS:
                raise ValidationError({"latency_ms": f"{target}: from 0 to {MAX_LATENCY_MS:,} ms."})


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
