"""Which model's weights are in which region."""

from django.db import models
from django.utils import timezone

from controlplane.fleet.models.hardware import Region
from controlplane.fleet.models.serving import Model


class WeightsState(models.TextChoices):
    PULLING = "pulling", "Pulling"
    PRESENT = "present", "Present"
    FAILED = "failed", "Failed"


class Weights(models.Model):
    """The weights of a model in a region.

    Of a model without any row nothing is known, and its weights count as near in every region. Else a region without a row
    does not have them: a start there takes the time of a pull (SageServe 7.1: two hours).
    """

    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="weights")
    region = models.ForeignKey(Region, on_delete=models.CASCADE, related_name="weights")
    state = models.CharField(max_length=8, choices=WeightsState.choices, default=WeightsState.PRESENT)
    since = models.DateTimeField(default=timezone.now, help_text="When the state began.")
    ready_at = models.DateTimeField(
        null=True, blank=True, editable=False, help_text="Of a pull: its expected end, by size and bandwidth."
    )
    actor = models.CharField(max_length=120, blank=True, editable=False)
    reason = models.CharField(max_length=255, blank=True, editable=False)

    class Meta:
        ordering = ["model__name", "region__name"]
        verbose_name_plural = "weights"
        constraints = [
            models.UniqueConstraint(fields=["model", "region"], name="one_row_of_weights_per_model_and_region")
        ]

    def __str__(self) -> str:
        return f"{self.model} in {self.region}"

    @property
    def gigabytes(self) -> float:
        return self.model.weights_bytes / 1e9
