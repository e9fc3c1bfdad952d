"""Maintenance of nodes and regions."""

from datetime import datetime

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Coalesce
from django.utils import timezone

from controlplane.fleet.models.hardware import Region
from controlplane.fleet.models.instances import Node


class MaintenanceState(models.TextChoices):
    UPCOMING = "upcoming", "Upcoming"
    UNDER_WAY = "under_way", "Under way"
    ENDED = "ended", "Ended"


class MaintenanceQuerySet(models.QuerySet["Maintenance"]):
    def open(self) -> "MaintenanceQuerySet":
        """Windows that are under way or to come."""
        return self.filter(ended_at=None)

    def ending_after(self, at: datetime) -> "MaintenanceQuerySet":
        """Windows that ended, or will, after *at*."""
        return self.alias(over_at=Coalesce("ended_at", "until")).filter(over_at__gt=at)

    def under_way(self) -> "MaintenanceQuerySet":
        return self.open().exclude(begun_at=None)


class Maintenance(models.Model):
    """A window in which a node or a region is cordoned, and its instances are drained and stopped."""

    node = models.ForeignKey(Node, models.CASCADE, null=True, blank=True, related_name="maintenance")
    region = models.ForeignKey(Region, models.CASCADE, null=True, blank=True, related_name="maintenance")
    from_at = models.DateTimeField("from", default=timezone.now)
    until = models.DateTimeField(help_text="When it ends by itself.")
    reason = models.CharField(max_length=255)
    created_by = models.CharField(max_length=150)
    begun_at = models.DateTimeField(null=True, help_text="When its place was cordoned; null: it is to come.")
    ended_at = models.DateTimeField(null=True, help_text="When it ended, or was cancelled.")
    cordon = models.CharField(
        max_length=255, blank=True, help_text="The cordon that its end lifts; empty: its place was cordoned before."
    )

    objects = MaintenanceQuerySet.as_manager()

    class Meta:
        ordering = ["from_at", "pk"]
        verbose_name_plural = "maintenance"
        constraints = [
            models.CheckConstraint(condition=Q(until__gt=F("from_at")), name="maintenance_ends_after_it_begins"),
            models.CheckConstraint(
                condition=Q(node__isnull=True) ^ Q(region__isnull=True), name="maintenance_of_one_place"
            ),
        ]

    def __str__(self) -> str:
        return f"Maintenance of {self.place}"

    @property
    def place(self) -> Node | Region:
        place = self.node or self.region
        assert place is not None, "by its constraint"
        return place

    @property
    def state(self) -> MaintenanceState:
        if self.ended_at is not None:
            return MaintenanceState.ENDED
        return MaintenanceState.UPCOMING if self.begun_at is None else MaintenanceState.UNDER_WAY

    @property
    def ends_at(self) -> datetime:
        """When it ended, else when it will."""
        return self.ended_at or self.until
