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

    class Meta(Operation.Meta):
        constraints = [
            models.UniqueConstraint(
                fields=["deployment"], condition=models.Q(state="in_progress"), name="one_rollout_per_deployment"
            )
        ]

    def __str__(self) -> str:
        return f"rollout {self.pk} of {self.deployment}"
