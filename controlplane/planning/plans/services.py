"""Scaling plans: what the planner would have each model's instances be until the end of the horizon, with all its inputs.

All models with a policy that is not off are planned together, since they share GPUs; each gets a row of its own, and the
rows of one round have the same `round`. What becomes of a plan is the policy's mode: kept for comparison (shadow), laid
before an operator (ask), or in force at once (auto).
"""

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from django.conf import settings
from django.db import transaction
from numpy.typing import NDArray

from controlplane.events.services import record
from controlplane.planning.execution import plan_rollout, strategies
from controlplane.planning.forecasts import demand
from controlplane.planning.forecasts import services as forecasts
from controlplane.planning.json_values import plain
from controlplane.planning.models import Forecast, PlanStatus, PolicyMode, Quantity, ScalingPlan, ScalingPolicy
from controlplane.planning.plans import capability, inventory

if TYPE_CHECKING:
    from scheduling.planning.capacity import Capability
    from scheduling.planning.plan import Plan
    from scheduling.planning.problem import Problem
    from scheduling.scaling import PlansFor

logger = logging.getLogger(__name__)
ACTOR = "planner"
RECENT = timedelta(minutes=10)
"""Where there is no forecast yet, the demand of this time stands in for it."""
OPEN = (PlanStatus.ADVICE, PlanStatus.SHADOW)


@dataclass(frozen=True, slots=True)
class Expected:
    """Demand by (model, region) for each window of the horizon, in tokens a second, and where it is from."""

    start: datetime
    window_s: int
    tokens_per_s: dict[demand.Endpoint, NDArray[np.float64]]
    prompt_tokens_per_s: dict[demand.Endpoint, NDArray[np.float64]]
    """The part of it that is prompts."""
    soon_tokens_per_s: dict[demand.Endpoint, NDArray[np.float64]]
    """The same demand as instances are added for; `scheduling.scaling.PlansFor`."""
    buffer_tokens_per_s: dict[demand.Endpoint, float]
    notes: dict[demand.Endpoint, str]

    def prompt_share(self, model: str) -> float:
        """Share of the model's tokens that are prompts; a half where none are expected."""
        total, prompt = (
            float(sum(values.sum() for (name, _), values in tokens.items() if name == model))
            for tokens in (self.tokens_per_s, self.prompt_tokens_per_s)
        )
        return min(1.0, prompt / total) if total > 0 else 0.5

    def notes_of(self, model: str) -> list[str]:
        return [note for (name, _), note in self.notes.items() if name == model]

    @property
    def end(self) -> datetime:
        count = max((len(values) for values in self.tokens_per_s.values()), default=0)
        return self.start + timedelta(seconds=self.window_s * count)


def make_plans(now: datetime) -> list[ScalingPlan]:
    """Plan every model whose policy is not off; the rows of the round, none when there is nothing to plan.

    Whatever the solver raises is raised: plans that are in force stay so until their time is over.
    """
    policies = {
        row.model.name: row for row in ScalingPolicy.objects.exclude(mode=PolicyMode.OFF).select_related("model")
    }
    fleet = inventory.read(set(policies))
    measured = capability.read(fleet, now)
    unknown = {place[0] for place, count in fleet.present.items() if count and (place[0], place[2]) not in measured}
    if unknown:  # a plan would take away what it cannot value
        logger.warning("planning: no plan for %s: neither profile nor ledger tells what an instance serves", unknown)
        fleet = inventory.read(set(policies) - unknown)
    if not fleet.deployments:
        return []
    expected = expect(now, {name: row.strategy for name, row in policies.items()})
    if expected is None:
        logger.debug("planning: no plan yet: no demand has been counted")
        return []
    horizon = expected.end - now
    planned = inventory.problem_of(
        fleet,
        expected.tokens_per_s,
        expected.buffer_tokens_per_s,
        {key: found.at(expected.prompt_share(key[0])) for key, found in measured.items()},
        horizon,
        settings.PLAN_EPSILON,
    )
    began = time.perf_counter()
    plan = solve(planned.problem)
    took_ms = (time.perf_counter() - began) * 1000
    round_id = uuid.uuid4()
    with transaction.atomic():
        return [
            _store(policies[model], round_id, now, planned, plan, took_ms, fleet, expected, measured)
            for model in fleet.models
        ]


def solve(problem: "Problem") -> "Plan":
    from scheduling.planning import planner  # brings the solver

    return planner.solve(problem, time_limit_s=settings.PLAN_TIME_LIMIT_S)


def levels(strategy: str) -> "tuple[str, PlansFor]":
    """What of forecasts plans are made for that *strategy* follows: a band, and how far up to its upper end."""
    from scheduling.scaling import PlansFor

    match settings.PLAN_DEMAND:
        case "strategy":
            return "upper_80", strategies.plans_for(strategy)
        case "mean":
            return "upper_80", PlansFor()
        case band:
            return band, PlansFor(1.0, 1.0)


def expect(now: datetime, followers: Mapping[str, str]) -> Expected | None:
    """Demand of the next windows by the newest forecasts; where one is missing or old, what came in the last minutes.

    *followers* are the strategies that will follow the plans, by model. None when neither is known of any endpoint:
    nothing is not the same as no demand.
    """
    window_s, count = settings.FORECAST_WINDOW_S, settings.FORECAST_WINDOWS
    start = demand.window_start(now, window_s)
    within = timedelta(seconds=2 * max(settings.FORECAST_EVERY_S, window_s))
    newest = forecasts.newest(now, within)
    recent = demand.read(now - RECENT, demand.last_complete(now, demand.MINUTE_S), demand.MINUTE_S)
    if not newest and recent.known < forecasts.LEAST_WINDOWS:  # the first minute was not counted from its begin
        return None
    tokens: dict[demand.Endpoint, NDArray[np.float64]] = {}
    soon: dict[demand.Endpoint, NDArray[np.float64]] = {}
    prompts: dict[demand.Endpoint, NDArray[np.float64]] = {}
    notes: dict[demand.Endpoint, str] = {}
    for endpoint in demand.endpoints():
        total, total_soon = np.zeros(count), np.zeros(count)
        band, towards = levels(followers.get(endpoint[0], ""))
        for quantity in Quantity:
            forecast = newest.get((*endpoint, quantity))
            values = ahead(forecast, start, count, band, towards.kept) if forecast else None
            values_soon = ahead(forecast, start, count, band, towards.soon) if forecast else None
            if values is None or values_soon is None:
                series = recent.of(endpoint, quantity)
                values = values_soon = np.full(count, float(np.nanmax(series)) if np.any(np.isfinite(series)) else 0.0)
                notes[endpoint] = "no forecast yet: the highest minute of the last ten stands in"
            elif forecast is not None and forecast.note:
                notes.setdefault(endpoint, forecast.note)
            total += values
            total_soon += values_soon
            if quantity == Quantity.PROMPT:
                prompts[endpoint] = values
        tokens[endpoint], soon[endpoint] = total, total_soon
    share = settings.PLAN_NIW_BUFFER
    buffer = {}
    if share:
        from scheduling.planning.capacity import niw_buffer

        spare = demand.non_interactive(now)
        buffer = {endpoint: float(niw_buffer(rate, 1.0, share)) for endpoint, rate in spare.items()}
    return Expected(start, window_s, tokens, prompts, soon, buffer, notes)


def ahead(
    forecast: Forecast, start: datetime, count: int, band: str = "upper_80", towards: float = 0.0
) -> NDArray[np.float64] | None:
    """What *forecast* says of the *count* windows from *start*; its last one stands for those beyond it.

    Its mean (*towards* 0), the upper end of *band* (1) or what lies between. None if it says nothing of the time from
    *start* on, or its windows are of another length.
    """
    values: NDArray[np.float64] = np.array(forecast.mean, np.float64)
    if towards:
        values += towards * (np.array(getattr(forecast, band), np.float64) - values)
    skipped = round((start - forecast.start_at).total_seconds() / forecast.window_s)
    if forecast.window_s != settings.FORECAST_WINDOW_S or skipped >= len(values):
        return None
    values = np.concatenate([np.repeat(values[:1], max(0, -skipped)), values[max(0, skipped) :]])[:count]
    values = np.maximum(0.0, np.concatenate([values, np.repeat(values[-1:], count - len(values))]))
    return values


def _store(
    policy: ScalingPolicy,
    round_id: uuid.UUID,
    now: datetime,
    planned: inventory.Planned,
    plan: "Plan",
    took_ms: float,
    fleet: inventory.Fleet,
    expected: Expected,
    measured: Mapping[capability.Key, "Capability"],
) -> ScalingPlan:
    model = policy.model.name
    targets, before, after = _targets(model, planned, plan, fleet)
    shortage = _unmet(model, planned, plan)
    problem = planned.problem
    idle = problem.shortage(problem.instances).total_tokens_per_s[problem.models.index(model)]
    inputs = {
        **_inputs(model, policy.strategy, planned, fleet, expected, measured),
        "shortage": shortage,
        "short_rows": [text for text in plan.infeasible if _about(text, model, planned)],
        "do_nothing_unmet_tokens_per_s": round(float(idle), 1),
    }
    changes = any(row["target"] != row["present"] for row in targets)
    status, note = _status(policy, changes)
    values = {
        "round": round_id,
        "made_at": now,
        "valid_until": valid_until(now, expected.end),
        "inputs": inputs,
        "targets": targets,
        "binding": [text for text in plan.binding if _about(text, model, planned)],
        "cost_usd_per_hour_before": before,
        "cost_usd_per_hour_after": after,
        "solver": str(plan.solver)[:40],
        "gap": plain(plan.gap),
        "solve_ms": round(took_ms, 3),
        "note": "; ".join(dict.fromkeys(filter(None, [shortage, note, plan.note, *expected.notes_of(model)])))[:255],
    }
    if old := _repeated(policy, status, targets):
        return _renewed(old, values)
    ScalingPlan.objects.filter(model=policy.model, status__in=OPEN).update(status=PlanStatus.SUPERSEDED)
    for old in ScalingPlan.objects.filter(model=policy.model, status=PlanStatus.IN_FORCE).select_related("model"):
        plan_rollout.end(old, PlanStatus.SUPERSEDED, now)
    row = ScalingPlan.objects.create(
        **values,
        model=policy.model,
        strategy=policy.strategy,
        status=status,
        decided_by="" if status in OPEN else ACTOR,
        decided_at=None if status in OPEN else now,
        carried_out_at=now if status == PlanStatus.CARRIED_OUT else None,
    )
    if status == PlanStatus.IN_FORCE:
        record(
            "plan.in_force",
            row,
            actor=ACTOR,
            after={"status": status, "round": str(round_id), "targets": targets},
            reason=f"{policy.strategy} follows this plan until the next one.",
        )
    return row


def valid_until(now: datetime, expected_end: datetime) -> datetime:
    """Until when a plan is followed: to the end of its forecast, and never before a successor that comes a period late."""
    return max(expected_end, now + timedelta(seconds=2 * settings.PLAN_EVERY_S))


def _repeated(policy: ScalingPolicy, status: PlanStatus, targets: list[dict[str, Any]]) -> ScalingPlan | None:
    """The plan that waits for approval, is being carried out or is in force, and asks for the same *targets*."""
    alike = {
        PlanStatus.ADVICE: [PlanStatus.ADVICE, *plan_rollout.TO_CARRY_OUT],
        PlanStatus.IN_FORCE: [PlanStatus.IN_FORCE],
    }
    rows = ScalingPlan.objects.filter(model=policy.model, status__in=alike.get(status, []))
    old = rows.order_by("-pk").first()
    same = old is not None and old.strategy == policy.strategy and target_counts(old.targets) == target_counts(targets)
    return old if same else None


def _renewed(old: ScalingPlan, values: dict[str, Any]) -> ScalingPlan:
    """*old* with a later end. An operator who reads the page must not find that it was replaced by its like; what was
    approved stays as it was then, and of what a strategy follows it stays known how many there were at first."""
    if old.status in plan_rollout.TO_CARRY_OUT:
        values = {name: values[name] for name in ("round", "made_at", "valid_until")}
    elif old.status == PlanStatus.IN_FORCE:
        present = {(row["region"], row["gpu_type"]): row["present"] for row in old.targets}
        kept = [row | {"present": present[row["region"], row["gpu_type"]]} for row in values["targets"]]
        values = values | {"targets": kept, "cost_usd_per_hour_before": old.cost_usd_per_hour_before}
    for name, value in values.items():
        setattr(old, name, value)
    old.save(update_fields=list(values))
    return old


def target_counts(targets: list[dict[str, Any]]) -> dict[tuple[str, str], int]:
    """Instances asked for, by region and GPU type."""
    return {(row["region"], row["gpu_type"]): row["target"] for row in targets}


def _status(policy: ScalingPolicy, changes: bool) -> tuple[PlanStatus, str]:
    match policy.mode:
        case PolicyMode.SHADOW:
            return PlanStatus.SHADOW, ""
        case PolicyMode.ASK:
            return (PlanStatus.ADVICE, "") if changes else (PlanStatus.CARRIED_OUT, "nothing to move")
    if strategies.follows_plans(policy.strategy):
        return (PlanStatus.IN_FORCE, "") if changes else (PlanStatus.CARRIED_OUT, "nothing to move")
    return PlanStatus.SHADOW, f"{policy.strategy} does not follow plans"


def _targets(
    model: str, planned: inventory.Planned, plan: "Plan", fleet: inventory.Fleet
) -> tuple[list[dict[str, Any]], float, float]:
    """The rows of `ScalingPlan.targets`, and the price in USD an hour before and after."""
    problem = planned.problem
    i = problem.models.index(model)
    rows, before, after = [], 0.0, 0.0
    for j, region in enumerate(problem.regions):
        for k, (gpu_type, _) in enumerate(planned.pools):
            deployment = fleet.deployments.get((model, region, gpu_type))
            if deployment is None or planned.pools[k] != fleet.pools()[region, gpu_type]:
                continue
            delta = int(plan.delta[i, j, k])
            present = int(problem.instances[i, j, k])
            usd = float(deployment.gpu_type.on_demand_usd_per_hour) * deployment.tensor_parallel
            before += usd * present
            after += usd * (present + delta)
            rows.append(
                {
                    "region": region,
                    "gpu_type": gpu_type,
                    "present": present,
                    "target": present + delta,
                    "demand_tokens_per_s": round(float(problem.peak_tokens_per_s[i, j]), 1),
                    "capability_tokens_per_s": round(float(problem.capability_tokens_per_s[i, k]), 1),
                    "reason": plan.reasons.get((i, j, k), "") if delta else "as it is",
                }
            )
    return rows, round(before, 4), round(after, 4)


def _inputs(
    model: str,
    strategy: str,
    planned: inventory.Planned,
    fleet: inventory.Fleet,
    expected: Expected,
    measured: Mapping[capability.Key, "Capability"],
) -> dict[str, Any]:
    regions = [region for region in fleet.regions if (model, region) in expected.tokens_per_s]
    band, towards = levels(strategy)
    said: dict[str, Any] = plain(
        {
            "start_at": expected.start,
            "window_s": expected.window_s,
            "demand_tokens_per_s": {region: np.round(expected.tokens_per_s[model, region], 1) for region in regions},
            "soon_tokens_per_s": {region: np.round(expected.soon_tokens_per_s[model, region], 1) for region in regions},
            "demand_of": {"band": band, **towards._asdict()},
            "buffer_tokens_per_s": {
                region: round(expected.buffer_tokens_per_s.get((model, region), 0.0), 1) for region in regions
            },
            "capability_tokens_per_s": {
                gpu_type: {
                    "prompt": round(found.prompt_tokens_per_s, 1),
                    "output": round(found.output_tokens_per_s, 1),
                    "total": round(found.total_tokens_per_s, 1),
                    "used": round(found.at(expected.prompt_share(model)), 1),
                    "source": found.source,
                    "windows": found.windows,
                    "note": found.note,
                }
                for (name, gpu_type), found in measured.items()
                if name == model
            },
            "bounds": {
                f"{region} {gpu_type}": [row.min_instances, row.max_instances]
                for (name, region, gpu_type), row in fleet.deployments.items()
                if name == model
            },
            "usd_per_gpu_hour": {
                gpu_type: row.gpu_type.on_demand_usd_per_hour
                for (name, _, gpu_type), row in fleet.deployments.items()
                if name == model
            },
            "gpus": {f"{region} {gpu_type}": count for (region, gpu_type), count in sorted(fleet.units.items())},
            "epsilon": settings.PLAN_EPSILON,
            "planned_with": [name for name in fleet.models if name != model],
        }
    )
    return said


def _unmet(model: str, planned: inventory.Planned, plan: "Plan") -> str:
    """What no capacity could serve, in words; empty if all is."""
    i = planned.problem.models.index(model)
    overall = float(plan.unmet_total_tokens_per_s[i])
    if overall > 0:
        return f"{overall:,.0f} tokens/s cannot be served anywhere"
    here = {
        region: float(plan.unmet_tokens_per_s[i, j])
        for j, region in enumerate(planned.problem.regions)
        if plan.unmet_tokens_per_s[i, j] > 0
    }
    return "; ".join(f"{region} falls {rate:,.0f} tokens/s short of its share" for region, rate in here.items())


def _about(text: str, model: str, planned: inventory.Planned) -> bool:
    """Whether a binding row concerns *model*: it names it, or no model at all."""
    return model in text or not any(name in text for name in planned.problem.models)
