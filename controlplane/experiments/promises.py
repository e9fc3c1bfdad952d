"""Promises at the door, ours: refuse what is unreachable, against a fixed bound on waiting requests (QLM section 9)."""

from collections.abc import Sequence
from itertools import product
from typing import Any, Final

import numpy as np
from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.shared.scenes import ServedModel, scenario_of
from controlplane.simulation.running import Simulated
from controlplane.terminal import table
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.measures.results import kept

DATA: Final = experiment.read_data("promises")
SERVED: Final = ServedModel.read("m", DATA["served"]["m"])
BOUNDS: Final = (5, 10, 20, 40, 80, 160)
"""Bounds on waiting requests that are tried on the first load."""
TUNED: Final = "tuned"


def case(about: experiment.Row, load: str, rule: str, hours: float, bound: int | None) -> experiment.Case:
    """Return *load* under *rule*, with *bound* on waiting requests, for each seed."""
    tables, changes = DATA["scenario"], dict(DATA["loads"][load])
    group = SERVED.group(instances=changes.pop("instances", 4), regions=["east"])
    more = {
        "policies": tables["policies"] | {"queue_bound": bound},
        "classes": tables["classes"] | {"chat": tables["classes"]["chat"] | DATA["rules"][rule]},
        "clients": [client | changes for client in tables["clients"]],
        "demand": {"duration_h": hours},
    }
    scenario = scenario_of([group], **(tables | more))
    return experiment.Case(about, lambda seed: (scenario.model_copy(update={"seed": seed}), None))


def measured(ran: Simulated) -> dict[str, Any]:
    """Return shares of the requests: refused, degraded, and in time of those admitted on their own terms and of all."""
    result = ran.result
    state = result.outcomes["state"]
    degraded = np.zeros(state.size, bool) if result.asked_class is None else result.asked_class >= 0
    own = (state == Outcome.DONE) & ~degraded
    _, met = kept(result, result.cluster.promises)
    return {
        "requests": int(state.size),
        "refused": float(np.mean(state == Outcome.REFUSED)),
        "degraded": float(np.mean(degraded)),
        "in_time_of_admitted": float(met[own].mean()) if own.any() else 1.0,
        "in_time_of_all": float((met & own).mean()),
    }


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    """Tune the bound and compare the rules by each seed; rows have means, and the range of what is in time of all."""
    hours, best = settings["hours"], list[int]()
    tried, rows = list[list[experiment.Row]](), list[list[experiment.Row]]()
    bounds = [case({"bound": bound}, TUNED, "bound", hours, bound) for bound in BOUNDS]
    seeds = [settings["seed"] + 2 * number for number in range(settings["seeds"])]
    for seed in seeds:
        tried.append(experiment.run_cases("tune the bound", bounds, measured, progress, (seed,)))
        best.append(max(tried[-1], key=lambda row: row["in_time_of_all"])["bound"])
        cases = [
            case({"load": load, "rule": rule}, load, rule, hours, best[-1] if rule == "bound" else None)
            for load, rule in product(DATA["loads"], DATA["rules"])
        ]
        # Another seed than that of the tuning, also for the load that the bound was tuned on.
        rows.append(experiment.run_cases("compare", cases, measured, progress, (seed + 1,)))
    return {
        "hours": hours,
        "seeds": seeds,
        "bounds": best,
        "tried": experiment.rounded([experiment.mean_of(same) for same in zip(*tried, strict=True)]),
        "rows": experiment.rounded([_over_seeds(same) for same in zip(*rows, strict=True)]),
    }


def _over_seeds(same: Sequence[experiment.Row]) -> experiment.Row:
    in_time = [row["in_time_of_all"] for row in same]
    return experiment.mean_of(same) | {"least_in_time_of_all": min(in_time), "most_in_time_of_all": max(in_time)}  # type: ignore[no-any-return]


def show(console: Console, result: experiment.Result) -> None:
    title = (
        f"TTFT within 5 s; the bound that keeps the most in time under the load {TUNED!r}, by seed:"
        f" {', '.join(map(str, result['bounds']))} waiting requests; {result['hours']:g} h, means of"
        f" {len(result['seeds'])} seeds"
    )
    console.print(table(title, experiment.columns(DATA["columns"]["rules"]), result["rows"]))


PROMISES: Final = experiment.Experiment.read("promises", run=run, show=show)
