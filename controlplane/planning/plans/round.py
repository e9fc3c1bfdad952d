"""One planning round: models that share GPUs, solved as one problem, and each model's row."""

import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from controlplane.planning.json_values import plain
from controlplane.planning.plans.expected import levels
from controlplane.tuning.selectors import tuned

if TYPE_CHECKING:
    from scheduling.planning.advisor import EndpointPlan, FleetPlan, PlanInputs, PlanSettings
    from scheduling.planning.places import Place


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
