"""What models are asked for now, against which a proposed plan is judged: demand, work that waits, service."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from controlplane.fleet.attainment import Attainment, together, worst
from controlplane.gateway.selectors import attainments
from controlplane.planning.forecasts.demand import DEFERRED, TOKENS
from controlplane.planning.forecasts.selectors import demand_now
from controlplane.planning.models import ScalingPlan
from controlplane.planning.plans import waiting as waiting_work
from controlplane.planning.plans.waiting import Waiting
from controlplane.tuning.selectors import tuned

SLO_OVER = timedelta(minutes=10)
NOTHING = Waiting(0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class LoadNow:
    """Demand of one model over the last ten minutes, in tokens per second, what waits, and its service."""

    interactive: float = 0.0
    deferred: float = 0.0
    waiting: Waiting = NOTHING
    slo: Attainment | None = None
    """Of its worst class over `SLO_OVER`."""
    room: float = 1.0
    """Share of deferred work that its plans have room for."""

    @property
    def waiting_tokens(self) -> float:
        return self.waiting.tokens + self.waiting.queued_tokens

    @property
    def tokens_per_s(self) -> float:
        """Return the rate that serves what is asked for now, and what waits in time, as plans have room for it."""
        from scheduling.planning.capacity import LEAST_LEFT_S

        held = self.room * (self.deferred + self.waiting.tokens_per_s)
        return self.interactive + held + self.waiting.queued_tokens / LEAST_LEFT_S

    def above(self, plan: ScalingPlan | Mapping[str, Any]) -> str:
        """Return the warning that *plan* (or its columns) leaves less capacity than is needed now; empty if it does not.

        A plan that takes no instance away leaves no less than there is.
        """
        targets, inputs = (
            (plan.targets, plan.inputs) if isinstance(plan, ScalingPlan) else (plan["targets"], plan["inputs"])
        )
        if sum(row["target"] - row["present"] for row in targets) >= 0:
            return ""
        able = capacity_of(targets, inputs)
        if able is None or able >= self.tokens_per_s:
            return ""
        of = "" if self.room == 1.0 else f"{self.room:.0%} of "
        parts = [f"{self.interactive:,.0f} interactive", f"{of}{self.deferred:,.0f} deferred"]
        if self.waiting.requests:
            parts.append(f"{self.waiting.requests:,} requests waiting")
        return f"Below the load now: {able:,.0f} tok/s as planned, {self.tokens_per_s:,.0f} needed now ({', '.join(parts)})"


def capacity_of(targets: list[dict[str, Any]], inputs: Mapping[str, Any], when: str = "target") -> float | None:
    """Return tokens per second that the instances of *targets*, or those *present*, serve by the plan's capability; None in
    older plans.
    """
    able = {name: each.get("used") for name, each in (inputs.get("capability_tokens_per_s") or {}).items()}
    if any(able.get(row["gpu_type"]) is None for row in targets if row[when]):
        return None
    return float(sum(row[when] * able[row["gpu_type"]] for row in targets if row[when]))


def read(now: datetime) -> dict[str, LoadNow]:
    """Return the load of every model that is asked for, or has been judged, lately."""
    interactive, deferred = (_by_model(demand_now(TOKENS, now, group)) for group in ("", DEFERRED))
    served: dict[str, list[Attainment]] = {}
    for (model, _), of in attainments(now - SLO_OVER).items():
        served.setdefault(model, []).extend(of.values())
    waiting = waiting_work.read()
    return {
        model: LoadNow(
            interactive.get(model, 0.0),
            deferred.get(model, 0.0),
            waiting.get(model, NOTHING),
            worst(together(served.get(model, [])).values()),
            tuned(model).PLAN_NIW_BUFFER,
        )
        for model in {*interactive, *deferred, *served, *waiting}
    }


def _by_model(rates: Mapping[tuple[str, str], float] | None) -> dict[str, float]:
    sums: dict[str, float] = {}
    for (model, _), rate in (rates or {}).items():
        sums[model] = sums.get(model, 0.0) + rate
    return sums
