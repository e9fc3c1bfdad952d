"""The live fleet as a whole scenario: inventory, dispatching, scaling and planning, without demand."""

from typing import Any

from django.db.models import QuerySet

from controlplane.fleet.models import Model
from controlplane.gateway.models import LedgerRow
from controlplane.planning.bundles import CUSTOM, presents
from controlplane.planning.execution import strategies
from controlplane.planning.live_scenario import live_scenario
from controlplane.planning.models import PolicyMode, ScalingPolicy
from controlplane.planning.plans import inventory
from controlplane.planning.plans.round import plan_settings
from controlplane.tunable import Tunable
from controlplane.tuning.selectors import tuned
from forecasting.workload import unavailable_reason
from scheduling.scaling import NO_STRATEGY, STRATEGIES, make_strategy


def scenario_of(fleet: inventory.Fleet, rows: QuerySet[LedgerRow]) -> dict[str, Any]:
    """Return all scenario tables except demand, for models with a profile; round trips come from *rows*."""
    tables = live_scenario(fleet, rows)
    values: dict[str, Any] = {"title": "The live fleet", "sample_s": 60.0, **tables, **scaling(fleet, tables)}
    for name in values["models"]:
        if marks := marks_of(name):
            values["models"][name]["marks"] = marks
    for present in presents(Model.objects.filter(name__in=list(tables["models"]))).values():
        if present.name != CUSTOM:
            values["models"][present.model.name]["bundle"] = present.name
    return without_none(values)  # type: ignore[no-any-return]


def scaling(fleet: inventory.Fleet, tables: dict[str, Any]) -> dict[str, Any]:
    """Return live strategies, forecasters, bounds, floor and planner. Without an acting strategy, only the floor."""
    policies = {row.model.name: row for row in ScalingPolicy.objects.select_related("model")}
    endpoints = []
    for endpoint in tables["endpoints"]:
        key = endpoint["model"], endpoint["region"]
        own = [row for place, row in fleet.deployments.items() if place[:2] == key]
        bounds = {name: sum(getattr(row, name) for row in own) for name in ("min_instances", "max_instances")}
        policy = policies.get(endpoint["model"])
        acts = policy is not None and policy.mode in (PolicyMode.AUTO, PolicyMode.ASK)
        followed = strategy_of(policy) if policy is not None and acts else floor_alone(tuned(endpoint["model"]))
        floor_marks = {"floor_cooldown_s": tuned(endpoint["model"]).SCALE_COOLDOWN_S}
        chosen = tuned(endpoint["model"]).FORECASTER
        forecaster = {"forecaster": "" if unavailable_reason(chosen) else chosen}
        other = {"niw_share": tuned(endpoint["model"]).PLAN_NIW_BUFFER}
        endpoints.append({**endpoint, **followed, **bounds, **floor_marks, **forecaster, **other})
    plans = plan_settings()
    return {
        "endpoints": endpoints,
        "scaling": {
            **floor_alone(tuned()),
            "min_instances": 0,
            "max_instances": 1,
            "floor": tuned().FLOOR,
            "floor_cooldown_s": tuned().SCALE_COOLDOWN_S,
        },
        "planner": {
            **({} if plans.period_s is None else {"period_s": float(plans.period_s)}),
            "epsilon": plans.epsilon,
            "time_limit_s": float(plans.time_limit_s),
        },
    }


def marks_of(model: str) -> dict[str, dict[str, float]]:
    """Return the marks set for *model* by strategy, where they differ from the strategy's own."""
    given = {}
    for name in STRATEGIES:
        usual = make_strategy(name)
        marks = strategies.marks(name, tuned(model))
        if differs := {key: value for key, value in marks.items() if getattr(usual, key) != value}:
            given[name] = differs
    return given


def strategy_of(policy: ScalingPolicy) -> dict[str, Any]:
    """Return the strategy of *policy* with its parameters and the marks of its model's settings."""
    marks = strategies.marks(policy.strategy, tuned(policy.model.name))
    return {"strategy": policy.strategy, "parameters": {**marks, **policy.parameters}}


def floor_alone(values: Tunable) -> dict[str, Any]:
    """Return the floor of a model without a strategy, with its marks."""
    return {"strategy": NO_STRATEGY, "parameters": strategies.marks(NO_STRATEGY, values)}


def without_none(value: Any) -> Any:
    """Return *value* as read back from TOML, which has no None."""
    if isinstance(value, dict):
        return {name: without_none(each) for name, each in value.items() if each is not None}
    return [without_none(each) for each in value] if isinstance(value, list) else value
