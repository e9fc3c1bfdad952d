"""Donated instances: the spot pool (SageServe, sections 3.4 and 6.5)."""

from datetime import datetime

from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone

from controlplane.fleet.models.instances import Instance
from controlplane.fleet.models.serving import Deployment


class DonationState(models.TextChoices):
    DONATED = "donated", "Donated"
    RECLAIMING = "reclaiming", "Reclaiming"
    RECLAIMED = "reclaimed", "Reclaimed"  # by its own model
    REDEPLOYED = "redeployed", "Redeployed"  # its GPUs serve another model
    STOPPED = "stopped", "Stopped"
    FAILED = "failed", "Failed"


OPEN = (DonationState.DONATED, DonationState.RECLAIMING)
"""States in which an instance is still in the pool, or just leaves it."""


class Donation(models.Model):
    """The time that an instance spends in the spot pool, from its last interactive request until it is reclaimed."""

    instance = models.ForeignKey(Instance, on_delete=models.CASCADE, related_name="donations")
    state = models.CharField(max_length=16, choices=DonationState.choices, default=DonationState.DONATED)
    actor = models.CharField(max_length=120, help_text="Who let it go.")
    reason = models.CharField(max_length=255, blank=True)
    spot_usd_per_hour = models.DecimalField(
        max_digits=10,
        decimal_places=4,
        null=True,
        blank=True,
        validators=[MinValueValidator(0)],
        help_text="Spot price of all its GPUs when it was donated, which it earns for as long as it is donated; null where "
        "its GPU type had none.",
    )
    donated_at = models.DateTimeField(default=timezone.now, db_index=True)
    reclaim_at = models.DateTimeField(null=True, blank=True, help_text="When it was asked for again.")
    ended_at = models.DateTimeField(
        null=True, blank=True, help_text="When no opportunistic request ran there any more."
    )
    taken_for = models.ForeignKey(
        Deployment,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        help_text="Deployment that got it, its own or another on the same GPUs.",
    )
    evicted_requests = models.PositiveIntegerField(default=0, help_text="Requests that were queued again.")
    ended_requests = models.PositiveIntegerField(default=0, help_text="Requests that were ended with an error.")

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.UniqueConstraint(
                fields=["instance"], condition=models.Q(state__in=OPEN), name="one_open_donation_per_instance"
            )
        ]

    def __str__(self) -> str:
        return f"donation {self.pk} of {self.instance}"

    def donated_s(self, since: datetime | None = None, until: datetime | None = None) -> float:
        """Return the seconds donated within [since, until); until now, where it still is."""
        end = self.reclaim_at or self.ended_at or timezone.now()
        first = max(self.donated_at, since) if since else self.donated_at
        return max(0.0, ((min(end, until) if until else end) - first).total_seconds())

    @property
    def usd_per_hour(self) -> float | None:
        """Its spot price an hour; None where its GPU type had no spot price."""
        return None if self.spot_usd_per_hour is None else float(self.spot_usd_per_hour)

    def offered_usd(self, since: datetime | None = None, until: datetime | None = None) -> float | None:
        """Return its price for each hour donated within [since, until), used or not; None where that is not known."""
        return None if (price := self.usd_per_hour) is None else price * self.donated_s(since, until) / 3600

    @property
    def reclaim_s(self) -> float | None:
        """Seconds that its own model waited for it; None for another end, or none yet."""
        if self.state != DonationState.RECLAIMED or self.reclaim_at is None or self.ended_at is None:
            return None
        return (self.ended_at - self.reclaim_at).total_seconds()
