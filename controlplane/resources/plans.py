"""Scaling plans, and the instances that scaling moved."""

from typing import Any
from uuid import UUID

from controlplane.accounts.models import Role
from controlplane.planning import selectors, services
from controlplane.planning.models import MoveSource, PlanStatus, ScalingMove, ScalingPlan
from controlplane.planning.titles import title_of
from controlplane.resources.filters import Control, Select, every
from controlplane.resources.resource import (
    LEAVES,
    Column,
    Filter,
    Operation,
    Resource,
    Viewer,
    in_last,
    of_choice,
    of_model,
    of_region,
)


def strategy_control(_viewer: Viewer) -> Control:
    strategies = [(name, title_of(name)) for name in selectors.plan_strategies()]
    return Select("strategy", "Strategy", every("strategies", strategies))


PLANS = Resource(
    name="plans",
    noun="plan",
    model=ScalingPlan,
    operations=(
        Operation(
            "approve",
            services.approve,
            "Instances move to the plan's targets; 409 if it is no longer advice.",
            needs_reason=False,
        ),
        Operation("reject", services.reject, "Instances stay as they are.", needs_reason=False),
    ),
    rows=lambda viewer: selectors.plans(),
    least=Role.VIEWER,
    parent=("console:scaling", "Scaling"),
    columns=(
        Column("id", "Plan"),
        Column("round", type=UUID, about="Models that were planned together have the same."),
        Column("made_at", "Made (UTC)"),
        Column("valid_until", "Valid until (UTC)"),
        Column("model", "Model", "model.name"),
        Column("strategy", "Strategy"),
        Column("status", "Status", type=PlanStatus),
        Column("present", "Instances before", lambda plan: sum(row["present"] for row in plan.targets), rest=False),
        Column(
            "planned",
            "Instances planned",
            lambda plan: sum(row["target"] for row in plan.targets),
            label="Change",
            rest=False,
        ),
        Column("cost_usd_per_hour_before", "Cost before (USD/h)", draw="usd"),
        Column("cost_usd_per_hour_after", "Cost planned (USD/h)", label="Planned", draw="usd"),
        Column("solver", "Solver"),
        Column("gap", "Gap (ratio)", draw="percent_fine", leaves=LEAVES),
        Column("solve_ms", "Solve time (ms)", label="Solved in", draw="milliseconds", leaves=LEAVES),
        Column("decided_by", "Decided by"),
        Column("decided_at", "Decided (UTC)"),
        Column("carried_out_at", "Carried out (UTC)"),
        Column("note", "Note"),
        Column(
            "targets",
            type=list[dict[str, Any]],
            about="By region and GPU type: present and planned instances, demand, what an instance serves, and why.",
        ),
        Column("binding", type=list[str], about="The rows that bind, in words."),
    ),
    filters=(
        of_model("model__name"),
        of_choice("status", PlanStatus, "statuses"),
        Filter("strategy", control=strategy_control),
        in_last("made_at", "Made", 1, 6, 24, 168),
    ),
    page=(
        *("id", "made_at", "model", "strategy", "status", "planned"),
        *("cost_usd_per_hour_before", "cost_usd_per_hour_after", "gap", "solve_ms", "decided_by"),
    ),
    template="console/plans/plans.html",
    row_template="console/plans/plan_row.html",
    live="events",
    refresh_s=10,
)
MOVES = Resource(
    name="moves",
    noun="move",
    model=ScalingMove,
    rows=lambda viewer: selectors.moves(),
    least=Role.VIEWER,
    parent=("console:scaling", "Scaling"),
    columns=(
        Column("id", "Move"),
        Column("at", "At (UTC)"),
        Column("delta", "Change (instances)"),
        Column("model", "Model"),
        Column("region", "Region"),
        Column("gpu_type", "GPU type"),
        Column("instance", "Instance"),
        Column("source", "Asked by", type=MoveSource),
        Column("strategy", "Strategy"),
        Column("plan", "Plan", "plan_id", type=int | None),
        Column("reason", "Reason"),
        Column("inputs", type=dict[str, Any]),
    ),
    filters=(
        of_model(),
        of_region(),
        Filter(
            "source",
            type=MoveSource,
            control=Select("source", "Asked by", [("", "Asked by anything"), *MoveSource.choices]),
        ),
        in_last("at", "Moved", 1, 6, 24, 168),
    ),
    page=("at", "delta", "model", "region", "gpu_type", "instance", "source", "reason"),
    caption="Newest first; tokens per second are of prompt and output together",
    empty="Every instance that a plan, a strategy or the reactive floor adds or removes appears here with its reason.",
    row_template="console/plans/move_row.html",
    live="events",
    refresh_s=10,
)
