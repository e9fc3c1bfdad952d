"""Columns of plans, of what a plan changes, and of moves."""

from controlplane.resources.tables import Columns

PLANS: Columns = {
    "Plan": "pk",
    "Made (UTC)": "made_at",
    "Valid until (UTC)": "valid_until",
    "Model": "model.name",
    "Strategy": "strategy",
    "Status": "status",
    "Instances before": lambda plan: sum(target["present"] for target in plan.targets),
    "Instances planned": lambda plan: sum(target["target"] for target in plan.targets),
    "Cost before (USD/h)": "cost_usd_per_hour_before",
    "Cost planned (USD/h)": "cost_usd_per_hour_after",
    "Solver": "solver",
    "Gap (ratio)": "gap",
    "Solve time (ms)": "solve_ms",
    "Decided by": "decided_by",
    "Decided (UTC)": "decided_at",
    "Carried out (UTC)": "carried_out_at",
    "Note": "note",
}
MOVES: Columns = {
    "Move": "pk",
    "At (UTC)": "at",
    "Change (instances)": "delta",
    "Model": "model",
    "Region": "region",
    "GPU type": "gpu_type",
    "Instance": "instance",
    "Asked by": "source",
    "Strategy": "strategy",
    "Plan": "plan_id",
    "Reason": "reason",
}
TARGETS: Columns = {
    "Region": "region",
    "GPU type": "gpu_type",
    "Present (instances)": "present",
    "Planned (instances)": "target",
    "Change (instances)": "delta",
    "Demand (tok/s)": "demand_tokens_per_s",
    "Reason": "why",
}
