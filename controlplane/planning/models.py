"""Tables of the slow planners: forecasts, scaling policies, plans and moves."""

import uuid

from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.validators import MinValueValidator
from django.db import models
from django.utils import timezone

from controlplane.fleet.models import Model


class Quantity(models.TextChoices):
    """Token kind of a series."""

    PROMPT = "prompt", "Prompt tokens"
    OUTPUT = "output", "Output tokens"


class Forecast(models.Model):
    """Forecast of one series by one forecaster. Lists have one element per window, in tokens per second."""

    made_at = models.DateTimeField(default=timezone.now, db_index=True)
    model = models.CharField(max_length=160)
    region = models.CharField(max_length=40)
    slo_class = models.CharField(max_length=40, blank=True, help_text="Empty: all interactive classes together.")
    quantity = models.CharField(max_length=8, choices=Quantity.choices)
    forecaster = models.CharField(max_length=40)
    window_s = models.PositiveIntegerField(validators=[MinValueValidator(1)])
    start_at = models.DateTimeField(help_text="Begin of the first window.")
    mean = models.JSONField(default=list)
    lower_80 = models.JSONField(default=list)
    upper_80 = models.JSONField(default=list)
    lower_95 = models.JSONField(default=list)
    upper_95 = models.JSONField(default=list)
    note = models.CharField(max_length=255, blank=True, help_text="Why a simpler forecaster stood in, if one did.")

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["model", "region", "quantity", "slo_class", "-made_at"], name="forecast_series")
        ]

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.slo_class, self.quantity)))
        return f"{self.forecaster}: {what} tokens of {self.model} in {self.region}, {self.made_at:%F %H:%M}"


class PolicyMode(models.TextChoices):
    """Treatment of the advice of a model's strategy."""

    OFF = "off", "Off: only the safety autoscaler"
    SHADOW = "shadow", "Simulated only: plans are made and compared, never carried out"
    ASK = "ask", "Ask: an operator approves each plan"
    AUTO = "auto", "Auto: the autoscaler follows plans by itself"


class ScalingPolicy(models.Model):
    """Scaling policy of one model. A model without one has only the safety autoscaler."""

    model = models.OneToOneField(Model, on_delete=models.CASCADE, related_name="scaling_policy")
    strategy = models.CharField(max_length=40, default="reactive", help_text="A name in `scheduling.scaling`.")
    mode = models.CharField(max_length=8, choices=PolicyMode.choices, default=PolicyMode.SHADOW)
    parameters = models.JSONField(default=dict, blank=True)
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["model__name"]
        verbose_name_plural = "scaling policies"

    def __str__(self) -> str:
        return f"{self.model}: {self.strategy}, {self.mode}"

    def clean(self) -> None:
        from controlplane.planning.execution import strategies
        from controlplane.tuning.selectors import tuned

        if not isinstance(self.parameters, dict):
            raise ValidationError({"parameters": "Parameters are a JSON object: name and value."})
        try:
            strategies.make(self.strategy, self.parameters, tuned(self.model.name if self.model_id else ""))
        except ValueError as error:
            known = self.strategy in strategies.names()
            raise ValidationError({"parameters" if known else "strategy": str(error)}) from error


def mode_of(policy: ScalingPolicy | None) -> PolicyMode:
    """Return the mode in which a model is scaled that has *policy*, or none."""
    return PolicyMode.OFF if policy is None else PolicyMode(policy.mode)


PLANNER = "planner"
"""Who decided about plans that no operator decided about."""
WHAT_IF = "what_if"
"""Strategy of plans proposed from a what-if's chosen future.

Only an operator decides about them: planning rounds neither replace nor count them.
"""


class PlanStatus(models.TextChoices):
    """State of a plan.

    Advice waits for an operator; once approved, it is in progress while some of its instances cannot be moved yet. A plan
    followed by an automatic strategy is in force: the strategy moves instances when load requires it. Both end as carried
    out once targets are reached, else as superseded by a newer plan or expired; the note says what was not moved, and
    why. A shadow plan is only compared.
    """

    ADVICE = "advice", "Awaiting approval"
    SHADOW = "shadow", "Simulated only"
    APPROVED = "approved", "Approved"
    IN_PROGRESS = "in_progress", "In progress"
    IN_FORCE = "in_force", "Active"
    CARRIED_OUT = "carried_out", "Done"
    REJECTED = "rejected", "Rejected"
    SUPERSEDED = "superseded", "Replaced"
    EXPIRED = "expired", "Expired"


class ScalingPlan(models.Model):
    """Target instances of one model until *valid_until*, with all inputs.

    Models that share GPUs are planned together: their plans have the same *round*.
    """

    round = models.UUIDField(default=uuid.uuid4, db_index=True)
    made_at = models.DateTimeField(default=timezone.now, db_index=True)
    valid_until = models.DateTimeField()
    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="scaling_plans")
    strategy = models.CharField(max_length=40)
    status = models.CharField(max_length=12, choices=PlanStatus.choices, default=PlanStatus.ADVICE, db_index=True)
    inputs = models.JSONField(default=dict, help_text="Demand, capability, prices, bounds and present instances.")
    targets = models.JSONField(
        default=list,
        help_text="By region and GPU type: region, gpu_type, present, target, demand_tokens_per_s, reason; once approved,"
        " left (instances still to be added, or below 0 taken away) and obstacle.",
    )
    binding = models.JSONField(default=list, help_text="The limits reached, in words.")
    cost_usd_per_hour_before = models.FloatField(default=0.0)
    cost_usd_per_hour_after = models.FloatField(default=0.0)
    solver = models.CharField(max_length=40, blank=True)
    gap = models.FloatField(null=True, blank=True, help_text="Relative gap to the solver's bound.")
    solve_ms = models.FloatField(null=True, blank=True)
    note = models.CharField(max_length=255, blank=True, help_text="Such as: demand that no capacity could meet.")
    decided_by = models.CharField(max_length=120, blank=True)
    decided_at = models.DateTimeField(null=True, blank=True)
    carried_out_at = models.DateTimeField(
        null=True, blank=True, help_text="When its targets were reached; empty while they are not."
    )

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["model", "status", "-made_at"], name="plan_by_model")]

    def __str__(self) -> str:
        return f"{self.strategy} for {self.model}, {self.made_at:%F %H:%M}"


class MoveSource(models.TextChoices):
    """Origin of a move."""

    FLOOR = "floor", "Safety autoscaler"
    PLAN = "plan", "Planner"
    STRATEGY = "strategy", "Autoscaler"
    OPERATOR = "operator", "Operator"


class ScalingMove(models.Model):
    """One instance added or removed by scaling, with the reason."""

    at = models.DateTimeField(default=timezone.now, db_index=True)
    plan = models.ForeignKey(ScalingPlan, on_delete=models.SET_NULL, null=True, blank=True, related_name="moves")
    source = models.CharField(max_length=10, choices=MoveSource.choices)
    strategy = models.CharField(max_length=40)
    model = models.CharField(max_length=160)
    region = models.CharField(max_length=40)
    gpu_type = models.CharField(max_length=40)
    instance = models.CharField(max_length=80, blank=True)
    delta = models.SmallIntegerField(help_text="1: one more; -1: one less.")
    reason = models.CharField(max_length=255)
    inputs = models.JSONField(default=dict)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["model", "region", "-at"], name="move_by_endpoint")]

    def __str__(self) -> str:
        return f"{self.delta:+d} {self.model} in {self.region}: {self.reason}"


class CapacityState(models.TextChoices):
    QUEUED = "queued", "Queued"
    RUNNING = "running", "Running"
    DONE = "done", "Done"
    FAILED = "failed", "Failed"


class CapacityPlan(models.Model):
    """A question for the least fleet, and its answer once a worker has found and simulated it."""

    asked_at = models.DateTimeField(default=timezone.now, db_index=True)
    requested_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.SET_NULL, null=True, blank=True)
    question = models.JSONField(default=dict, help_text="As `sizing.question.Question`.")
    state = models.CharField(max_length=8, choices=CapacityState.choices, default=CapacityState.QUEUED)
    phase = models.CharField(max_length=80, blank=True)
    progress = models.FloatField(default=0.0, help_text="Share of the check that is done.")
    answer = models.JSONField(default=dict, help_text="The fleet, its price, and what the simulator found.")
    error = models.TextField(blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"Capacity plan {self.pk}"


class RegionLoss(models.Model):
    """Whether the fleet survives the loss of each region, by simulation."""

    made_at = models.DateTimeField(default=timezone.now, db_index=True)
    regions = models.JSONField(
        default=list,
        help_text="By region: region, title, survives, slo_class, slo_met_ratio, below_target_s.",
    )

    class Meta:
        ordering = ["-id"]
        verbose_name_plural = "region losses"

    def __str__(self) -> str:
        return f"Loss of a region, {self.made_at:%F %H:%M}"


class ProjectedFleet(models.Model):
    """Instances over the week ahead, as if each hour were planned for its forecast; the newest row alone is kept."""

    made_at = models.DateTimeField(default=timezone.now)
    moments = models.JSONField(default=list, help_text="Seconds since 1970 from which on instances hold.")
    places = models.JSONField(default=list, help_text="Rows of model, region, GPU type and its instances by moment.")

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"Projected fleet, {self.made_at:%F %H:%M}"
