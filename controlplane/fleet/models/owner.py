"""The rows of processes that own a part of the fleet's work (`controlplane.dispatch.lease`)."""

from datetime import timedelta
from typing import Any

from django.db import models
from django.db.models import BooleanField, ExpressionWrapper, Q
from django.db.models.functions import Now

NOW = Now()
"""By the database's clock."""
WANTED_S = 10.0
"""Time after which a process that no longer asks for a row is not waited for."""


class OwnerQuerySet(models.QuerySet["Owner"]):
    def judged(self, now: Any = NOW) -> "OwnerQuerySet":
        """Annotate, at *now*, `owned` and `contested`: whether another process stands by."""
        conditions = {
            "owned": ~Q(token="") & Q(expires_at__gt=now),
            "contested": Q(wanted_at__gt=now - timedelta(seconds=WANTED_S)),
        }
        return self.annotate(**{name: ExpressionWrapper(each, BooleanField()) for name, each in conditions.items()})


class Owner(models.Model):
    """The one owner of a role at a time, its epoch, and when its right runs out unless it is renewed."""

    role = models.CharField(max_length=40, unique=True, help_text="A shard of models (`shard 1`), or `batches`.")
    name = models.CharField(max_length=255, blank=True, help_text="Host and process id.")
    token = models.CharField(max_length=255, blank=True, help_text="Of the process; empty: given up.")
    epoch = models.PositiveBigIntegerField(default=0, help_text="Grows with each owner.")
    address = models.CharField(max_length=255, blank=True, help_text="Where relays reach it; empty: they cannot.")
    zone = models.CharField(max_length=20, blank=True, help_text="Of its owner, which may decide for another one.")
    moves = models.BooleanField(default=False, help_text="Its owner leaves it to another process that stands by.")
    expires_at = models.DateTimeField(null=True, help_text="By the database's clock.")
    wanted_at = models.DateTimeField(null=True, help_text="When a process that stands by last asked for it.")

    owned: bool  # this and the next: by `judged`
    contested: bool

    objects = OwnerQuerySet.as_manager()

    def __str__(self) -> str:
        return f"{self.role}: {self.name or 'none'}, epoch {self.epoch}"
