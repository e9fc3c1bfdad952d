"""Measures of a strategy's run, as a row of a table."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from controlplane.experiments.experiment import Row
from controlplane.experiments.shared.scenes import SILO
from controlplane.simulation.running import Simulated
from scheduling.queueing.promises import Promise
from scheduling.simulation.cluster.world import UNPAID, Outcome, State
from scheduling.simulation.measures.results import PROVISIONING, kept, latency_s
from scheduling.simulation.result import Result

INTERACTIVE_CLASS = 0


def percentiles(values: Any, *wanted: float) -> list[float]:
    """Return the *wanted* percentiles of *values* without NaN."""
    known = values[np.isfinite(values)]
    return [float(each) for each in np.percentile(known, wanted)] if known.size else [float("nan")] * len(wanted)


def of_run(run: Simulated, promises: list[Promise], usd_per_hour: float) -> Row:
    """Return the measures of a strategy. Latencies and `slo_met` are those of interactive requests, which are of class 0.

    `instance_hours` are paid: in any state but lent out or empty. `waste_hours` are those between the decision to add an
    instance and its first request. `unserved` requests were refused, failed or still waiting at the end; `forwarded` ones
    were served in another region.
    """
    result = run.result
    outcomes, counters = result.outcomes, result.counters
    interactive = result.requests.slo_class == INTERACTIVE_CLASS
    judged, met = kept(result, promises)
    judged &= interactive
    ttft = percentiles(latency_s(result, "ttft")[interactive], 50, 95, 99)
    hours = result.state_s.sum(axis=0) / 3600
    paid = float(hours.sum() - hours[list(UNPAID)].sum())
    done = int(np.count_nonzero(outcomes["state"] == Outcome.DONE))
    return {
        "instance_hours": paid,
        "waste_hours": float(hours[list(PROVISIONING)].sum()),
        "draining_hours": float(hours[State.DRAINING]),
        "usd": paid * usd_per_hour,
        **dict(zip(("ttft_p50_s", "ttft_p95_s", "ttft_p99_s"), ttft, strict=True)),
        "e2e_p95_s": percentiles(latency_s(result, "e2e")[interactive], 95)[0],
        "slo_met": float(np.count_nonzero(met & judged)) / max(1, int(np.count_nonzero(judged))),
        "done": done,
        "unserved": int(outcomes.size - done),
        **{name: counters[name] for name in ("forwarded", "scale_outs", "scale_ins", "redeploys")},
        "hours_by_model": hours_by_model(result),
        "wall_s": run.about["took_s"],
    }


class Spell(NamedTuple):
    """Time that an instance spent in one state."""

    endpoint: int
    state: State
    began_s: float
    ended_s: float


def spells(result: Result) -> Iterator[Spell]:
    """Yield the time in every state of every instance, up to the end."""
    cluster = result.cluster
    now = [(0.0, cluster.endpoints.index((spec.model, spec.region)), spec.state) for spec in cluster.instances]
    for time_s, instance, endpoint, _, after in result.changes.tolist():
        began_s, was, state = now[instance]
        yield Spell(was, state, began_s, time_s)
        now[instance] = (time_s, endpoint, State(after))
    for began_s, endpoint, state in now:
        yield Spell(endpoint, state, began_s, result.end_s)


def hours_by_model(result: Result) -> dict[str, float]:
    """Return paid hours by the model that an instance had; the pools of one model count together."""
    names = [model.removesuffix(SILO) for model, _ in result.cluster.endpoints]
    hours = dict.fromkeys(names, 0.0)
    for spell in spells(result):
        hours[names[spell.endpoint]] += (spell.ended_s - spell.began_s) / 3600 * (spell.state not in UNPAID)
    return hours
