"""Scheduled minimums of instances."""

import re

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone

from controlplane.fleet.models.hardware import Region
from controlplane.fleet.models.serving import Model
from scheduling.scaling.schedule import SUCH_AS, Rule


class ScheduledMinimum(models.Model):
    """At least so many instances of a model, READY on these weekdays between two times."""

    name = models.SlugField(max_length=80, unique=True)
    model = models.ForeignKey(Model, models.CASCADE, related_name="schedules")
    region = models.ForeignKey(
        Region,
        models.CASCADE,
        null=True,
        blank=True,
        related_name="schedules",
        help_text="Empty: in each of its regions.",
    )
    instances = models.PositiveSmallIntegerField(validators=[MinValueValidator(1)], help_text="In each region.")
    weekdays = models.CharField(
        max_length=40,
        blank=True,
        help_text="On which it begins, such as `mon tue wed thu fri`; empty: every day.",
    )
    begins = models.CharField(max_length=5, help_text="By the zone's clock, such as 08:00: they are READY by then.")
    ends = models.CharField(max_length=5, help_text="Such as 18:30; at or before that time: of the next day.")
    time_zone = models.CharField(
        max_length=64, blank=True, help_text="Such as Europe/Berlin; empty: PILOTHOUSE_TIME_ZONE."
    )
    except_on = models.CharField(
        max_length=2000, blank=True, help_text="Days on which it does not begin, such as `2026-12-25 2027-01-01`."
    )
    active = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["model__name", "name"]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        field, _, what = self.unreadable.partition(": ")
        if field:
            raise ValidationError({field: f"{what[:1].upper()}{what[1:]}."})

    @property
    def unreadable(self) -> str:
        """Name the field that cannot be read, and say why; empty if the rule can."""
        try:
            assert self.rule
        except ValueError as error:
            return str(error)
        return ""

    @property
    def rule(self) -> Rule:
        """Raise ValueError for what is no time of the clock, zone or day."""
        for name in ("begins", "ends"):
            if not re.fullmatch("[0-9]{2}:[0-9]{2}", text := getattr(self, name)):
                raise ValueError(f"{name}: {text!r} is not such as {SUCH_AS[name]}")
        zone = self.time_zone or settings.TIME_ZONE
        return Rule.read(
            self.instances, self.begins, self.ends, self.weekdays.split(), zone, self.except_on.split()
        )  # fmt: skip
