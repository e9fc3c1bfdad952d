"""Promises at the door, ours: refuse what is unreachable, against a fixed bound on waiting requests (QLM section 9)."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.shared.scenes import ServedModel, scenario_of
from controlplane.simulation.running import Simulated
from controlplane.terminal import Column, table
from scheduling.fleet.profile import Profile
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.measures.results import kept
from scheduling.simulation.scenario import Scenario

SERVED: Final = ServedModel(
    "m", Profile(0.02, 0.01, 1e-4, 0.0, 0.02, 8e-4, 1e-7), 80_000, 16, 8192, batched_tokens=8192, queue="fcfs", gpu="g"
)
MAX_HOLD_S: Final = 600.0
TTFT_MS: Final = 5000
BOUNDS: Final = (5, 10, 20, 40, 80, 160)
"""Bounds on waiting requests that are tried on the first load."""
TUNED: Final = "tuned"
RULES: Final = ("admit", "bound", "refuse", "degrade")
LOADS: Final[dict[str, dict[str, Any]]] = {
    TUNED: {},
    "more requests": {"requests_per_s": 24.0},
    "longer outputs": {"output": (360, 1200), "requests_per_s": 6.0},
    "shorter outputs": {"output": (40, 130), "requests_per_s": 40.0},
    "bursts": {"cv": 6.0, "requests_per_s": 12.0},
    "half the fleet": {"instances": 2, "requests_per_s": 8.0},
    "no overload": {"requests_per_s": 6.0},
}
"""What differs from the first load, on which alone the bound is tuned."""


def scenario_at(
    rule: str,
    hours: float,
    *,
    bound: int | None = None,
    requests_per_s: float = 14.0,
    output: tuple[int, int] = (120, 400),
    cv: float = 1.0,
    instances: int = 4,
) -> Scenario:
    """Return a fleet of one model with an interactive class, and a batch class that takes what is degraded."""
    at_door = {"if_unreachable": rule} if rule in ("refuse", "degrade") else {}
    if rule == "degrade":
        at_door["degrades_to"] = "batch"
    client = {
        "tenant": "acme",
        "model": SERVED.name,
        "slo_class": "chat",
        "requests_per_s": requests_per_s,
        "cv": cv,
        "prompt": {"median": 400, "p95": 1500, "maximum": 4000},
        "output": {"median": output[0], "p95": output[1], "maximum": 4000},
    }
    return scenario_of(
        [SERVED.group(instances=instances, regions=["east"])],
        policies={"ordering": "priority", "sweeps": True, "max_hold_s": MAX_HOLD_S, "queue_bound": bound},
        classes={
            "chat": {"ttft_ms": TTFT_MS, **at_door},
            "batch": {"kind": "non_interactive", "deadline_s": 86_400, "priority": 5},
        },
        predictions={"kind": "error", "log_sd": 0.5},
        demand={"duration_h": hours},
        clients=[client],
    )


def measured(ran: Simulated) -> dict[str, Any]:
    """Return shares of the requests: refused, degraded, and in time of those admitted on their own terms and of all."""
    result = ran.result
    state = result.outcomes["state"]
    degraded = np.zeros(state.size, bool) if result.asked_class is None else result.asked_class >= 0
    own = (state == Outcome.DONE) & ~degraded
    _, met = kept(result, ran.staged.promises)
    return {
        "requests": int(state.size),
        "refused": float(np.mean(state == Outcome.REFUSED)),
        "degraded": float(np.mean(degraded)),
        "in_time_of_admitted": float(met[own].mean()) if own.any() else 1.0,
        "in_time_of_all": float((met & own).mean()),
    }


def case_of(about: dict[str, Any], rule: str, hours: float, **changed: Any) -> experiment.Case:
    scenario = scenario_at(rule, hours, **changed)
    return experiment.Case(about, lambda seed: (scenario.model_copy(update={"seed": seed}), None))


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    """Tune the bound and compare the rules by each seed; rows have means, and the range of what is in time of all."""
    hours, best = settings["hours"], list[int]()
    tried, rows = list[list[experiment.Row]](), list[list[experiment.Row]]()
    bounds = [case_of({"bound": bound}, "bound", hours, bound=bound) for bound in BOUNDS]
    seeds = [settings["seed"] + 2 * number for number in range(settings["seeds"])]
    for seed in seeds:
        tried.append(experiment.run_cases("tune the bound", bounds, measured, progress, (seed,)))
        best.append(max(tried[-1], key=lambda row: row["in_time_of_all"])["bound"])
        cases = [
            case_of({"load": load, "rule": rule}, rule, hours, bound=best[-1] if rule == "bound" else None, **changed)
            for load, changed in LOADS.items()
            for rule in RULES
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
    return experiment.mean_of(same) | {"least_in_time_of_all": min(in_time), "most_in_time_of_all": max(in_time)}


def show(console: Console, result: experiment.Result) -> None:
    title = (
        f"TTFT within {TTFT_MS / 1000:g} s; the bound that keeps the most in time under the load {TUNED!r}, by seed:"
        f" {', '.join(map(str, result['bounds']))} waiting requests; {result['hours']:g} h, means of"
        f" {len(result['seeds'])} seeds"
    )
    console.print(table(title, COLUMNS, result["rows"]))


COLUMNS: Final = (
    Column("Load", "load"),
    Column("rule", "rule"),
    Column("requests", "requests", "{:,}"),
    Column("refused", "refused", experiment.share),
    Column("degraded", "degraded", experiment.share),
    Column("in time, of admitted", "in_time_of_admitted", experiment.share),
    Column("in time, of all", "in_time_of_all", experiment.share),
    Column("least", "least_in_time_of_all", experiment.share),
    Column("most", "most_in_time_of_all", experiment.share),
)
PROMISES: Final = experiment.Experiment(
    name="promises",
    paper="ours",
    section="own",
    measures="attainment of the admitted and refused share, under loads that a fixed bound was not tuned on",
    results="waiting-time.md#promises-at-the-door",
    options=(
        experiment.Option("hours", "hours simulated", 0.5, float, above=0.0, at_most=24.0),
        experiment.Option("seeds", "seeds, each with its own bound", 5, int, at_least=1),
        experiment.SEED,
    ),
    run=run,
    show=show,
)
