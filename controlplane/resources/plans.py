"""Scaling plans, and the instances that scaling moved."""

from typing import Any
from uuid import UUID

from controlplane.accounts.models import Role
from controlplane.planning import selectors, services
from controlplane.planning.models import MoveSource, PlanStatus, ScalingMove, ScalingPlan
from controlplane.resources.resource import (
    Column,
    Filter,
    Operation,
    Resource,
    in_last,
    of_choice,
    of_model,
    of_region,
)

PLANS = Resource(
    name="plans",
    noun="plan",
    model=ScalingPlan,
    operations=(
        Operation("approve", services.approve, "Instances move to the plan's targets.", needs_reason=False),
        Operation("reject", services.reject, "Instances stay as they are.", needs_reason=False),
        Operation("undo", services.undo, "Instances go back to what there was before the plan, by a new one."),
    ),
    rows=lambda viewer: selectors.plans(),
    least=Role.VIEWER,
    columns=(
        Column("id", "Plan"),
        Column("round", type=UUID, about="Models that were planned together have the same."),
        Column("made_at", "Made (UTC)"),
        Column("valid_until", "Valid until (UTC)"),
        Column("model", "Model", "model.name"),
        Column("strategy", "Autoscaler"),
        Column(
            "status",
            "Status",
            type=PlanStatus,
            about=", ".join(f"`{value}`: {label.lower()}" for value, label in PlanStatus.choices),
        ),
        Column("present", "Instances before", lambda plan: sum(row["present"] for row in plan.targets), rest=False),
        Column(
            "planned",
            "Instances planned",
            lambda plan: sum(row["target"] for row in plan.targets),
            rest=False,
        ),
        Column("cost_usd_per_hour_before", "Cost before (USD/h)"),
        Column("cost_usd_per_hour_after", "Cost planned (USD/h)"),
        Column("solver", "Solver"),
        Column("gap", "Gap (ratio)"),
        Column("solve_ms", "Solve time (ms)"),
        Column("decided_by", "Decided by"),
        Column("decided_at", "Decided (UTC)"),
        Column("carried_out_at", "Done (UTC)"),
        Column("note", "Note"),
        Column(
            "targets",
            type=list[dict[str, Any]],
            about="By region and GPU type: present and planned instances, demand, what an instance serves, and why.",
        ),
        Column("binding", type=list[str], about="The limits reached, in words."),
    ),
    filters=(
        of_model("model__name"),
        of_choice("status", PlanStatus, "statuses"),
        Filter("strategy"),
        in_last("made_at", "Made", 1, 6, 24, 168),
    ),
)
MOVES = Resource(
    name="moves",
    noun="move",
    model=ScalingMove,
    rows=lambda viewer: selectors.moves(),
    least=Role.VIEWER,
    columns=(
        Column("id", "Move"),
        Column("at", "At (UTC)"),
        Column("delta", "Change (instances)"),
        Column("model", "Model"),
        Column("region", "Region"),
        Column("gpu_type", "GPU type"),
        Column("instance", "Instance"),
        Column("source", "Asked by", type=MoveSource),
        Column("strategy", "Autoscaler"),
        Column("plan", "Plan", "plan_id", type=int | None),
        Column("reason", "Reason"),
        Column("inputs", type=dict[str, Any]),
    ),
    filters=(
        of_model(),
        of_region(),
        Filter("source", type=MoveSource),
        in_last("at", "Moved", 1, 6, 24, 168),
    ),
)
