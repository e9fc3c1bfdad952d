"""What is reported of a strategy's run."""

from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from controlplane.experiments.shared.scenes import SILO
from scheduling.simulation.cluster.world import UNPAID, Outcome, State
from scheduling.simulation.measures.results import PROVISIONING, Promise, kept, latency_s
from scheduling.simulation.result import Result
from scheduling.simulation.strategies import StrategyRun

INTERACTIVE_CLASS = 0


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy's line. Latencies are those of interactive requests."""

    strategy: str
    instance_hours: float
    """Paid: in any state but lent out or empty."""
    waste_hours: float
    """Of those, between the decision to add an instance and its first request."""
    draining_hours: float
    usd: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    e2e_p95_s: float
    slo_met: float
    """Share of interactive requests that kept their class's promises."""
    done: int
    unserved: int
    """Refused or failed, or still waiting at the end."""
    forwarded: int
    """To another region."""
    scale_outs: int
    scale_ins: int
    redeploys: int
    hours_by_model: dict[str, float]
    """`instance_hours` by the model that an instance had at the time."""
    wall_s: float


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    """*values* for JSON: floats to four places, null where there is none."""

    def one(value: Any) -> Any:
        if isinstance(value, dict):
            return rounded(value)
        if isinstance(value, float):
            return round(value, 4) if isfinite(value) else None
        return value

    return {name: one(value) for name, value in values.items()}


def measure_run(run: StrategyRun, promises: list[Promise], usd_per_hour: float, wall_s: float) -> Row:
    """The line of *run*, whose requests of class 0 are the interactive ones."""
    result = run.result
    outcomes = result.outcomes
    interactive = result.requests.slo_class == INTERACTIVE_CLASS
    judged, met = kept(result, promises)
    judged &= interactive
    ttft_s, e2e_s = (latency_s(result, name)[interactive] for name in ("ttft", "e2e"))
    ttft = np.nanpercentile(ttft_s, [50, 95, 99]) if np.isfinite(ttft_s).any() else np.full(3, np.nan)
    hours = result.state_s.sum(axis=0) / 3600
    paid = float(hours.sum() - hours[list(UNPAID)].sum())
    done = int(np.count_nonzero(outcomes["state"] == Outcome.DONE))
    counters = result.counters
    return Row(
        strategy=run.strategy,
        instance_hours=paid,
        waste_hours=float(hours[list(PROVISIONING)].sum()),
        draining_hours=float(hours[State.DRAINING]),
        usd=paid * usd_per_hour,
        ttft_p50_s=float(ttft[0]),
        ttft_p95_s=float(ttft[1]),
        ttft_p99_s=float(ttft[2]),
        e2e_p95_s=float(np.nanpercentile(e2e_s, 95)) if np.isfinite(e2e_s).any() else float("nan"),
        slo_met=float(np.count_nonzero(met & judged)) / max(1, int(np.count_nonzero(judged))),
        done=done,
        unserved=int(outcomes.size - done),
        forwarded=counters["forwarded"],
        scale_outs=counters["scale_outs"],
        scale_ins=counters["scale_ins"],
        redeploys=counters["redeploys"],
        hours_by_model=hours_by_model(result),
        wall_s=wall_s,
    )


def hours_by_model(result: Result) -> dict[str, float]:
    """Hours paid for, by the model that an instance had; the pools of one model count together."""
    cluster = result.cluster
    names = [model.removesuffix(SILO) for model, _ in cluster.endpoints]
    hours = dict.fromkeys(names, 0.0)
    now = [(0.0, names[cluster.endpoints.index((spec.model, spec.region))], spec.state) for spec in cluster.instances]
    for change in result.changes.tolist():
        time_s, instance, endpoint, _, after = change
        since_s, name, state = now[instance]
        hours[name] += (time_s - since_s) / 3600 * (state not in UNPAID)
        now[instance] = (time_s, names[endpoint], State(after))
    for since_s, name, state in now:
        hours[name] += (result.end_s - since_s) / 3600 * (state not in UNPAID)
    return hours
