"""Scaling plans: target instances of each model until the end of the horizon, with all inputs.

Models whose plans are due (each at its strategy's period) are planned together, since they share GPUs; each gets its own
row, and rows of one round have the same `round`. GPUs held by other models are not available. The policy's mode decides
what happens to a plan: kept for comparison (shadow), shown to an operator (ask), or in force at once (auto).
"""

import logging
import time
import uuid
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from django.db import transaction
from django.db.models import Max

from controlplane.events.models import Event, Severity
from controlplane.events.services import record
from controlplane.planning.execution import plan_rollout, strategies
from controlplane.planning.json_values import plain
from controlplane.planning.models import WHAT_IF, PlanStatus, PolicyMode, ScalingPlan, ScalingPolicy
from controlplane.planning.plans import capability, inventory, load_now
from controlplane.planning.plans.expected import expect, levels
from controlplane.planning.plans.load_now import LoadNow
from controlplane.tuning.selectors import tuned

if TYPE_CHECKING:
    from scheduling.planning.advisor import EndpointPlan, FleetPlan, PlanInputs, PlanSettings
    from scheduling.planning.places import Place

logger = logging.getLogger(__name__)
ACTOR = "planner"
SAID_AGAIN = timedelta(days=1)
OPEN = (PlanStatus.ADVICE, PlanStatus.SHADOW)


def plan_settings() -> "PlanSettings":
    """Return the planner's settings."""
    from scheduling.planning.advisor import PlanSettings
    from scheduling.planning.planner import GAP

    return PlanSettings(period_s=tuned().PLAN_EVERY_S or None, epsilon=tuned().PLAN_EPSILON, gap=GAP)


@dataclass(frozen=True, slots=True)
class Round:
    """A plan that was made."""

    made: "FleetPlan"
    took_ms: float
    id: uuid.UUID = field(default_factory=uuid.uuid4)

    @classmethod
    def solved(cls, inputs: "PlanInputs", now: datetime) -> "Round":
        """Plan from *now*. Raises what the solver raises."""
        from scheduling.planning.advisor import make_plan  # load the solver

        began = time.perf_counter()
        made = make_plan(now.timestamp(), inputs)
        return cls(made, (time.perf_counter() - began) * 1000)

    def valid_until(self, model: str) -> datetime:
        return datetime.fromtimestamp(self._of(model).valid_until_s, UTC)

    def _of(self, model: str) -> "EndpointPlan":
        return next(plan for key, plan in self.made.endpoints.items() if key[0] == model)

    def columns(self, model: str, strategy: str, targets: list[dict[str, Any]], note: str) -> dict[str, Any]:
        """Return the `ScalingPlan` columns of *model*, which follows *strategy*, with its *targets*; *note* is added to the
        round's notes.
        """
        problem, plan, shortage = self.made.planned.problem, self.made.plan, self._shortage(model)
        idle = problem.shortage(problem.instances).total_tokens_per_s[problem.models.index(model)]
        deployed = [self.made.inputs.fleet.deployments[place] for place in self._places(model)]
        usd = {
            name: sum(row[name] * of.usd_per_hour * of.gpus for row, of in zip(targets, deployed, strict=True))
            for name in ("present", "target")
        }
        notes = [shortage, self.out_of_reach(model), note, plan.note]
        notes += [text for (name, _), text in self.made.inputs.notes.items() if name == model]
        return {
            "round": self.id,
            "inputs": {
                **self._inputs(model, strategy),
                "shortage": shortage,
                "short_rows": [text for text in plan.infeasible if self._concerns(text, model)],
                "do_nothing_unmet_tokens_per_s": round(float(idle), 1),
            },
            "targets": targets,
            "binding": [text for text in plan.binding if self._concerns(text, model)],
            "cost_usd_per_hour_before": round(usd["present"], 4),
            "cost_usd_per_hour_after": round(usd["target"], 4),
            "solver": str(plan.solver)[:40],
            "gap": plain(plan.gap),
            "solve_ms": round(self.took_ms, 3),
            "note": "; ".join(dict.fromkeys(filter(None, notes)))[:255],
        }

    def out_of_reach(self, model: str) -> str:
        """Return that no number of instances keeps the promise to *model*'s requests; empty if one does."""
        share = max(
            (each.out_of_reach for (name, _), each in self.made.inputs.capability.items() if name == model), default=0.0
        )
        if not share:
            return ""
        return f"out of reach at any number of instances: {share:.0%} of requests miss their goal on an idle one"

    def targets(self, model: str) -> list[dict[str, Any]]:
        """Return the rows of `ScalingPlan.targets`, by region and GPU type."""
        problem, plan, rows = self.made.planned.problem, self.made.plan, []
        for place in self._places(model):
            i, j, k = self.made.planned.index(place)
            delta, present = int(plan.delta[i, j, k]), int(problem.instances[i, j, k])
            endpoint = self.made.endpoints[place[:2]]
            demand = endpoint.forecast_tokens_per_s + self.made.inputs.demand.of[place[:2]].beta_tokens_per_s
            reason = plan.reasons.get((i, j, k), "")
            if self.made.inputs.follows[model].by_capability:
                reason = f"Algorithm 2: {demand:,.0f} tok/s need {endpoint.target_instances}"
            rows.append(
                {
                    "region": place[1],
                    "gpu_type": place[2],
                    "present": present,
                    "target": present + delta,
                    "demand_tokens_per_s": round(demand, 1),
                    "capability_tokens_per_s": round(float(problem.capability_tokens_per_s[i, k]), 1),
                    "reason": reason if delta else "as it is",
                }
            )
        return rows

    def _places(self, model: str) -> "list[Place]":
        return sorted(place for place in self.made.inputs.fleet.deployments if place[0] == model)

    def _inputs(self, model: str, strategy: str) -> dict[str, Any]:
        fleet, expected = self.made.inputs.fleet, self.made.inputs.demand
        endpoints = {key[1]: plan for key, plan in self.made.endpoints.items() if key[0] == model}
        demand = {region: expected.of[model, region] for region in endpoints}
        deployments = {place: row for place, row in fleet.deployments.items() if place[0] == model}
        band, towards = levels(model, strategy)
        inputs: dict[str, Any] = plain(
            {
                "start_at": datetime.fromtimestamp(expected.start_s, UTC),
                "window_s": round(expected.window_s),
                "period_s": self._of(model).period_s,
                "demand_tokens_per_s": {region: np.round(each.kept, 1) for region, each in demand.items()},
                "soon_tokens_per_s": {region: np.round(each.soon, 1) for region, each in demand.items()},
                "soon_instances": {region: list(each.soon_instances) for region, each in endpoints.items()},
                "forecast_tokens_per_s": {
                    region: round(each.forecast_tokens_per_s, 1) for region, each in endpoints.items()
                },
                "arrival_cv": {region: round(each.cv, 2) for region, each in demand.items()},
                "model_cv": round(self._of(model).cv, 4),
                "reserve_tokens_per_s": {
                    region: round(self.made.reserve_tokens_per_s[model, region], 1) for region in endpoints
                },
                "demand_of": {"band": band, **towards._asdict()},
                "deferred_tokens_per_s": {region: round(each.beta_tokens_per_s, 1) for region, each in demand.items()},
                "capability_tokens_per_s": {
                    gpu_type: {
                        "prompt": round(each.prompt_tokens_per_s, 1),
                        "output": round(each.output_tokens_per_s, 1),
                        "total": round(each.total_tokens_per_s, 1),
                        "used": round(each.at(expected.prompt_share(model)), 1),
                        "source": each.source,
                        "windows": each.windows,
                        "percentile": each.percentile,
                        "cv": round(each.cv, 2),
                        "instances": round(each.instances, 1),
                        "reserve": round(each.reserve, 3),
                        "note": each.note,
                    }
                    for (name, gpu_type), each in self.made.inputs.capability.items()
                    if name == model
                },
                "start_times": {
                    gpu_type: {"seconds": row.start_s, "starts": row.starts}
                    for (_, _, gpu_type), row in deployments.items()
                },
                "bounds": {
                    f"{region} {gpu_type}": [row.min_instances, row.max_instances]
                    for (_, region, gpu_type), row in deployments.items()
                },
                "usd_per_gpu_hour": {gpu_type: row.usd_per_hour for (_, _, gpu_type), row in deployments.items()},
                "gpus": {f"{region} {gpu_type}": count for (region, gpu_type), count in sorted(fleet.units.items())},
                "epsilon": self.made.inputs.settings.epsilon,
                "planned_with": [name for name in fleet.models if name != model],
            }
        )
        return inputs

    def _shortage(self, model: str) -> str:
        """Describe the demand that no capacity could serve; empty if all is served."""
        problem, plan = self.made.planned.problem, self.made.plan
        i = problem.models.index(model)
        overall = float(plan.unmet_total_tokens_per_s[i])
        if overall > 0:
            return f"{overall:,.0f} tok/s cannot be served anywhere"
        return "; ".join(
            f"{region} falls {float(rate):,.0f} tok/s short of its share"
            for region, rate in zip(problem.regions, plan.unmet_tokens_per_s[i], strict=True)
            if rate > 0
        )

    def _concerns(self, text: str, model: str) -> bool:
        """Return whether the text of a constraint concerns *model*: it names it, or names no model."""
        return model in text or not any(name in text for name in self.made.planned.problem.models)


def due(now: datetime, early_s: float, late_share: float) -> set[str] | None:
    """Return the models whose next plan is due, each at its strategy's period; None if no plan is.

    Empty when no model is planned. A new policy is due at once. *early_s* before its time still counts as due;
    *late_share* of a period is waited beyond it. A model without a plan is retried when others are planned.
    """
    policies, settings = list(policies_in_force().values()), plan_settings()
    planned = ScalingPlan.objects.exclude(strategy=WHAT_IF).order_by()
    newest = dict(planned.values_list("model").annotate(Max("made_at")))
    last = max(newest.values(), default=None)
    models = set()
    for row in policies:
        made_at, period_s = newest.get(row.model_id, last), settings.period_of(strategies.plans_for(row.strategy))
        waited_s = period_s * (1.0 + late_share) - early_s
        if made_at is None or row.changed_at > made_at or (now - made_at).total_seconds() >= waited_s:
            models.add(row.model.name)
    return models if models or not policies else None


def policies_in_force() -> dict[str, ScalingPolicy]:
    """Return the policies that are not off, by model."""
    return {row.model.name: row for row in ScalingPolicy.objects.exclude(mode=PolicyMode.OFF).select_related("model")}


def make_plans(now: datetime, models: Set[str] | None = None) -> list[ScalingPlan]:
    """Plan *models* (None: all) whose policies are not off; return the rows of the round, empty if nothing is planned.

    Raises whatever the solver raises; plans in force then stay until they expire.
    """
    policies = {name: row for name, row in policies_in_force().items() if models is None or name in models}
    inputs, loads = read_inputs(now, {name: row.strategy for name, row in policies.items()}), load_now.read(now)
    if inputs is None:
        return []
    solved = Round.solved(inputs, now)
    with transaction.atomic():
        return [_store(policies[model], solved, loads.get(model, LoadNow()), now) for model in inputs.fleet.models]


def read_inputs(now: datetime, followers: Mapping[str, str]) -> "PlanInputs | None":
    """Return what *followers* (strategy by model) are planned from: fleet, capability and demand; None without any.

    Left out are models with an instance whose capability is unknown, for a plan would remove it, and models with an
    endpoint whose demand is unknown, which is not zero.
    """
    from scheduling.planning.advisor import PlanInputs

    fleet, expected = inventory.read(set(followers)), expect(now, followers)
    if expected is None:
        logger.debug("planning: no plan yet: no demand has been counted")
        return None
    measured = capability.read(fleet, expected.demand, now)
    left_out = {
        "capability from profile or ledger": {
            name for (name, _, gpu), count in fleet.present.items() if count and (name, gpu) not in measured
        },
        "forecast or counted minutes": expected.unknown & set(fleet.models),
    }
    for without, names in left_out.items():
        if names:
            logger.warning("planning: no plan for %s: no %s", names, without)
            fleet = inventory.read(set(fleet.models) - names)
    if not fleet.deployments:
        return None
    return PlanInputs(expected.demand, fleet.to_plan(), measured, expected.follows, plan_settings(), expected.notes)


def _store(policy: ScalingPolicy, solved: Round, load: LoadNow, now: datetime) -> ScalingPlan:
    model = policy.model.name
    _record_out_of_reach(policy, solved, now)
    targets = solved.targets(model)
    status, note = _status(policy, any(row["target"] != row["present"] for row in targets))
    values = {
        "made_at": now,
        "valid_until": solved.valid_until(model),
        **solved.columns(model, policy.strategy, targets, note),
    }
    if warning := load.above(values):
        values["note"] = "; ".join(filter(None, (warning, values["note"])))[:255]
    if old := _repeated(policy, status, targets):
        return _renewed(old, values)
    opened = ScalingPlan.objects.filter(model=policy.model, status__in=OPEN).exclude(strategy=WHAT_IF)
    opened.update(status=PlanStatus.SUPERSEDED)
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
            after={"status": status, "round": str(solved.id), "targets": targets},
            reason=f"{policy.strategy} follows this plan until the next one.",
        )
    return row


def _record_out_of_reach(policy: ScalingPolicy, solved: Round, now: datetime) -> None:
    """Record once a day that no number of instances keeps the promise: an operator can change the goal."""
    kind, reason = "plan.goal_out_of_reach", solved.out_of_reach(policy.model.name)
    said = Event.objects.filter(kind=kind, subject=policy.model.name, at__gt=now - SAID_AGAIN)
    if reason and not said.exists():
        reason = f"The latency goal is {reason}. Plans are for the best that can be reached."
        record(kind, policy.model, actor=ACTOR, reason=reason, severity=Severity.WARNING)


def _repeated(policy: ScalingPolicy, status: PlanStatus, targets: list[dict[str, Any]]) -> ScalingPlan | None:
    """Return the open plan (waiting, being carried out or in force) with the same *targets*."""
    alike = {
        PlanStatus.ADVICE: [PlanStatus.ADVICE, *plan_rollout.TO_CARRY_OUT],
        PlanStatus.IN_FORCE: [PlanStatus.IN_FORCE],
    }
    rows = ScalingPlan.objects.filter(model=policy.model, status__in=alike.get(status, [])).exclude(strategy=WHAT_IF)
    old = rows.order_by("-pk").first()
    same = old is not None and old.strategy == policy.strategy and target_counts(old.targets) == target_counts(targets)
    return old if same else None


def _renewed(old: ScalingPlan, values: dict[str, Any]) -> ScalingPlan:
    """Extend *old* to a later end.

    An operator reading the page must not find it replaced by an identical plan. Approved values stay as approved; a
    followed plan keeps its initial counts.
    """
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
    """Return target instance counts by (region, GPU type)."""
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
