"""Several models on the same GPUs: swap groups, and swaps with their durations.

As with llama-swap and vLLM's sleep mode, a swap is no process that changes its weights: each model has its own server, an
`Instance` of a separate deployment, and at most one of a group is awake. The others sleep, their weights in
CPU memory (vLLM's sleep level 1) or in storage alone (level 2), or are stopped (QLM, section 5: model swapping).
"""

from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone


class SwapGroup(models.Model):
    """Instances that share the same GPUs, of which one at most is awake."""

    name = models.SlugField(max_length=80, unique=True)
    cpu_memory_bytes = models.PositiveBigIntegerField(
        "CPU memory (bytes)",
        null=True,
        blank=True,
        validators=[MinValueValidator(0)],
        help_text="For the weights of those that sleep; what does not fit is discarded and comes back from storage. "
        "Empty: not limited.",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name


class Tier(models.TextChoices):
    """Location of an instance's weights, nearest first (QLM, section 5)."""

    GPU = "gpu", "GPU"
    CPU = "cpu", "CPU memory"
    STORAGE = "storage", "Storage, server asleep"
    STOPPED = "stopped", "Storage, server stopped"


class Operation(models.Model):
    """Operation of several steps on instances: author, progress and result."""

    actor = models.CharField(max_length=120)
    reason = models.CharField(max_length=255, blank=True)
    message = models.TextField(blank=True, help_text="What it does or waits for, or how it ended.")
    started_at = models.DateTimeField(default=timezone.now)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        abstract = True
        ordering = ["-id"]


class SwapState(models.TextChoices):
    IN_PROGRESS = "in_progress", "In progress"
    SUCCEEDED = "succeeded", "Succeeded"
    FAILED = "failed", "Failed"


class Swap(Operation):
    """Change of the awake instance of a group, with its durations (`fleet.swaps`)."""

    group = models.ForeignKey(SwapGroup, on_delete=models.CASCADE, related_name="swaps")
    instance = models.ForeignKey("fleet.Instance", on_delete=models.CASCADE, related_name="swaps")
    gave_way = models.ForeignKey(
        "fleet.Instance", on_delete=models.SET_NULL, null=True, blank=True, related_name="+", help_text="Who was awake."
    )
    state = models.CharField(max_length=16, choices=SwapState.choices, default=SwapState.IN_PROGRESS)
    tier = models.CharField(max_length=16, choices=Tier.choices, help_text="Where the weights came from.")
    sleep_tier = models.CharField(
        max_length=16, choices=Tier.choices, blank=True, help_text="Where the weights went of who gave way."
    )
    drain_s = models.FloatField(
        "drained for (s)", null=True, blank=True, help_text="Until nothing ran on who gave way."
    )
    sleep_s = models.FloatField("fell asleep in (s)", null=True, blank=True)
    load_s = models.FloatField("loaded in (s)", null=True, blank=True, help_text="Until it answered.")
    load_command = models.ForeignKey(
        "fleet.InstanceCommand",
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="+",
        help_text="That wakes or starts the instance.",
    )

    class Meta(Operation.Meta):
        constraints = [
            models.UniqueConstraint(
                fields=["group"], condition=models.Q(state="in_progress"), name="one_swap_in_progress_per_group"
            )
        ]

    def __str__(self) -> str:
        return f"swap {self.pk} to {self.instance}"
