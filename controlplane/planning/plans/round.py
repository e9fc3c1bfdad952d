"""One round of planning: the models that share GPUs, solved as one problem, and what the row of each says of it."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from django.conf import settings

from controlplane.planning.json_values import plain
from controlplane.planning.plans import capability, inventory
from controlplane.planning.plans.expected import Expected, levels

if TYPE_CHECKING:
    from scheduling.planning.capacity import Capability
    from scheduling.planning.plan import Plan
    from scheduling.planning.problem import Problem


def solve(problem: "Problem") -> "Plan":
    from scheduling.planning import planner  # brings the solver

    return planner.solve(problem, time_limit_s=settings.PLAN_TIME_LIMIT_S)


@dataclass(frozen=True, slots=True)
class Round:
    """What was known of the fleet and its demand, the problem that it poses, and the solution."""

    fleet: inventory.Fleet
    expected: Expected
    measured: Mapping[capability.Key, "Capability"]
    planned: inventory.Planned
    plan: "Plan"
    solve_ms: float
    id: uuid.UUID = field(default_factory=uuid.uuid4)

    @classmethod
    def solved(
        cls,
        fleet: inventory.Fleet,
        expected: Expected,
        measured: Mapping[capability.Key, "Capability"],
        horizon: timedelta,
    ) -> "Round":
        """Plan *fleet* for the next *horizon*. Raises what the solver raises."""
        theta = {key: each.at(expected.prompt_share(key[0])) for key, each in measured.items()}
        planned = inventory.problem_of(
            fleet, expected.tokens_per_s, expected.buffer_tokens_per_s, theta, horizon, settings.PLAN_EPSILON
        )
        began = time.perf_counter()
        plan = solve(planned.problem)
        return cls(fleet, expected, measured, planned, plan, (time.perf_counter() - began) * 1000)

    def columns(self, model: str, strategy: str, note: str) -> dict[str, Any]:
        """Columns of the `ScalingPlan` of *model*, which *strategy* follows; *note* stands among the round's own."""
        problem, plan, shortage = self.planned.problem, self.plan, self._shortage(model)
        idle = problem.shortage(problem.instances).total_tokens_per_s[problem.models.index(model)]
        usd = self._usd_per_hour(model)
        return {
            "round": self.id,
            "inputs": {
                **self._inputs(model, strategy),
                "shortage": shortage,
                "short_rows": [text for text in plan.infeasible if self._concerns(text, model)],
                "do_nothing_unmet_tokens_per_s": round(float(idle), 1),
            },
            "targets": self.targets(model),
            "binding": [text for text in plan.binding if self._concerns(text, model)],
            "cost_usd_per_hour_before": usd["present"],
            "cost_usd_per_hour_after": usd["target"],
            "solver": str(plan.solver)[:40],
            "gap": plain(plan.gap),
            "solve_ms": round(self.solve_ms, 3),
            "note": "; ".join(dict.fromkeys(filter(None, [shortage, note, plan.note, *self.expected.notes_of(model)])))[
                :255
            ],
        }

    def targets(self, model: str) -> list[dict[str, Any]]:
        """The rows of `ScalingPlan.targets`, by region and GPU type."""
        problem, plan, rows = self.planned.problem, self.plan, []
        for place in self._places(model):
            i, j, k = self.planned.index(place)
            delta, present = int(plan.delta[i, j, k]), int(problem.instances[i, j, k])
            rows.append(
                {
                    "region": place[1],
                    "gpu_type": place[2],
                    "present": present,
                    "target": present + delta,
                    "demand_tokens_per_s": round(float(problem.peak_tokens_per_s[i, j]), 1),
                    "capability_tokens_per_s": round(float(problem.capability_tokens_per_s[i, k]), 1),
                    "reason": plan.reasons.get((i, j, k), "") if delta else "as it is",
                }
            )
        return rows

    def _places(self, model: str) -> list[inventory.Place]:
        return sorted(place for place in self.fleet.deployments if place[0] == model)

    def _usd_per_hour(self, model: str) -> dict[str, float]:
        """The price of the instances that are present, and of those that the plan asks for."""
        usd = {"present": 0.0, "target": 0.0}
        for place, row in zip(self._places(model), self.targets(model), strict=True):
            deployment = self.fleet.deployments[place]
            each = float(deployment.gpu_type.on_demand_usd_per_hour) * deployment.tensor_parallel
            for name in usd:
                usd[name] += each * row[name]
        return {name: round(value, 4) for name, value in usd.items()}

    def _inputs(self, model: str, strategy: str) -> dict[str, Any]:
        fleet, expected = self.fleet, self.expected
        endpoints = [(model, region) for region in fleet.regions if (model, region) in expected.tokens_per_s]
        deployments = {place: row for place, row in fleet.deployments.items() if place[0] == model}
        band, towards = levels(strategy)
        inputs: dict[str, Any] = plain(
            {
                "start_at": expected.start,
                "window_s": expected.window_s,
                "demand_tokens_per_s": {key[1]: np.round(expected.tokens_per_s[key], 1) for key in endpoints},
                "soon_tokens_per_s": {key[1]: np.round(expected.soon_tokens_per_s[key], 1) for key in endpoints},
                "demand_of": {"band": band, **towards._asdict()},
                "buffer_tokens_per_s": {
                    key[1]: round(expected.buffer_tokens_per_s.get(key, 0.0), 1) for key in endpoints
                },
                "capability_tokens_per_s": {
                    gpu_type: {
                        "prompt": round(each.prompt_tokens_per_s, 1),
                        "output": round(each.output_tokens_per_s, 1),
                        "total": round(each.total_tokens_per_s, 1),
                        "used": round(each.at(expected.prompt_share(model)), 1),
                        "source": each.source,
                        "windows": each.windows,
                        "note": each.note,
                    }
                    for (name, gpu_type), each in self.measured.items()
                    if name == model
                },
                "bounds": {
                    f"{region} {gpu_type}": [row.min_instances, row.max_instances]
                    for (_, region, gpu_type), row in deployments.items()
                },
                "usd_per_gpu_hour": {
                    gpu_type: row.gpu_type.on_demand_usd_per_hour for (_, _, gpu_type), row in deployments.items()
                },
                "gpus": {f"{region} {gpu_type}": count for (region, gpu_type), count in sorted(fleet.units.items())},
                "epsilon": settings.PLAN_EPSILON,
                "planned_with": [name for name in fleet.models if name != model],
            }
        )
        return inputs

    def _shortage(self, model: str) -> str:
        """What no capacity could serve, in words; empty if all is."""
        problem, plan = self.planned.problem, self.plan
        i = problem.models.index(model)
        overall = float(plan.unmet_total_tokens_per_s[i])
        if overall > 0:
            return f"{overall:,.0f} tokens/s cannot be served anywhere"
        return "; ".join(
            f"{region} falls {float(rate):,.0f} tokens/s short of its share"
            for region, rate in zip(problem.regions, plan.unmet_tokens_per_s[i], strict=True)
            if rate > 0
        )

    def _concerns(self, text: str, model: str) -> bool:
        """Whether a row of the problem, in words, concerns *model*: it names it, or no model at all."""
        return model in text or not any(name in text for name in self.planned.problem.models)
