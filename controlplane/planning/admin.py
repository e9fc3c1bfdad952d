"""Admin of forecasts and scaling: plans are approved or rejected, the rest is read; policies are set on the Scaling page."""

from controlplane.planning.models import Forecast, ScalingMove, ScalingPlan, ScalingPolicy
from controlplane.resources.admin import show
from controlplane.resources.plans import PLANS

show(
    Forecast,
    *("made_at", "model", "region", "slo_class", "quantity", "forecaster", "window_s", "start_at", "note"),
    search=("=model", "=region"),
)
show(ScalingPolicy, "model", "strategy", "mode", "changed_at", search=("model__name",))
show(
    ScalingPlan,
    *(
        "made_at",
        "model",
        "strategy",
        "status",
        "cost_usd_per_hour_before",
        "cost_usd_per_hour_after",
        "note",
        "decided_by",
    ),
    search=("=round", "note", "decided_by"),
    operations=PLANS.operations,
)
show(
    ScalingMove,
    *("at", "delta", "model", "region", "gpu_type", "instance", "source", "strategy", "reason"),
    search=("instance", "reason", "=model"),
)
