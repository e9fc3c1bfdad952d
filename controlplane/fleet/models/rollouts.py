"""Rollouts: bringing a changed deployment to its instances."""

from django.db import models

from controlplane.fleet.models.instances import Instance
from controlplane.fleet.models.serving import Deployment
from controlplane.fleet.models.swaps import Operation


class RolloutState(models.TextChoices):
    IN_PROGRESS = "in_progress", "In progress"
    SUCCEEDED = "succeeded", "Succeeded"
    FAILED = "failed", "Failed"
    CANCELLED = "cancelled", "Cancelled"
    ROLLED_BACK = "rolled_back", "Rolled back"


class Rollout(Operation):
    """Restart of a deployment's instances with its current settings, one by one (`fleet.rollouts`)."""

    deployment = models.ForeignKey(Deployment, on_delete=models.CASCADE, related_name="rollouts")
    state = models.CharField(max_length=16, choices=RolloutState.choices, default=RolloutState.IN_PROGRESS)
    total = models.PositiveIntegerField(default=0, help_text="Instances that are kept while it lasts.")
    up_to_date = models.PositiveIntegerField(default=0, help_text="Instances that are ready with the present settings.")
    starting = models.ForeignKey(
        Instance,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        help_text="Started with the present settings, to become ready next.",
    )
    draining = models.ForeignKey(
        Instance,
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        help_text="Has other settings, and is drained and stopped.",
    )

    bake_s = models.PositiveIntegerField(
        default=60, help_text="Seconds that a new instance serves before the next one is replaced."
    )
    failure_budget = models.FloatField(
        default=0.05, help_text="Share of failed requests by which the new instances may exceed the others."
    )
    min_requests = models.PositiveIntegerField(
        default=20, help_text="Requests by which they are judged; three failures are judged before."
    )
    auto_back = models.BooleanField(default=True, help_text="It goes back by itself when the new instances are bad.")
    baking_since = models.DateTimeField(null=True, editable=False)
    baseline = models.JSONField(default=dict, editable=False)
    """(answered, failed) requests by instance when the newest one began to serve."""
    others_ratio = models.FloatField(default=0.0, editable=False)
    """Share of requests that the others failed, as last seen."""
    probe = models.CharField(max_length=255, blank=True, editable=False)
    """Of the newest instance, which had no requests: `wanted`, `ok`, or what failed."""
    before = models.JSONField(default=dict, editable=False)
    """What an instance was started with before (`Instance.launched_with`)."""
    going_back = models.BooleanField(default=False, editable=False)
    cause = models.TextField(blank=True, help_text="Why it went back or failed.")

    class Meta(Operation.Meta):
        constraints = [
            models.UniqueConstraint(
                fields=["deployment"], condition=models.Q(state="in_progress"), name="one_rollout_per_deployment"
            )
        ]

    def __str__(self) -> str:
        return f"rollout {self.pk} of {self.deployment}"
