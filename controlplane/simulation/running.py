"""Simulate a scenario: the one way to run it, and its result with moves, plans and measures as tables."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from controlplane.simulation.planner import planner_of
from scheduling.planning.advisor import FleetPlan, SimulatedPlanner
from scheduling.simulation.cluster import loop
from scheduling.simulation.cluster.world import State
from scheduling.simulation.measures.results import (
    counter_table,
    hour_table,
    move_table,
    request_table,
    run_table,
)
from scheduling.simulation.measures.tables import Table
from scheduling.simulation.result import Result
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.staging import SOURCE, Stage, stage

PLAN_COLUMNS: Final = (
    "made_at_s", "valid_until_s", "model", "region", "target_instances", "soon_instances", "forecast_tokens_per_s", "solver",
)  # fmt: skip


@dataclass(frozen=True)
class Simulated:
    """Result of a simulated scenario, with its stage and planner."""

    staged: Stage
    about: dict[str, Any]
    result: Result
    planner: SimulatedPlanner | None

    @cached_property
    def tables(self) -> dict[str, Table]:
        """Return all tables but the series and the changes, by name."""
        result = self.result
        return {
            "measures": request_table(result, self.staged.tenants),
            "hours": hour_table(result),
            "runs": run_table(result),
            "counters": counter_table(result),
            "moves": move_table(result),
            "plans": _plan_table(self.planner.made if self.planner else []),
        }

    def as_json(self) -> dict[str, Any]:
        """Return `tables` as objects; values that could not be measured are null."""
        return {
            **self.about,
            **{name: [_finite(row) for row in table.as_dicts()] for name, table in self.tables.items()},
        }


def _plan_table(plans: Iterable[FleetPlan]) -> Table:
    """Return the plans that strategies followed. Windows that no strategy looked at are planned to fill it."""
    rows = [
        (
            each.made_at_s,
            each.valid_until_s,
            *endpoint,
            each.target_instances,
            " ".join(str(count) for count in each.soon_instances),
            round(each.forecast_tokens_per_s, 3),
            str(plan.plan.solver),
        )
        for plan in plans
        for endpoint, each in plan.endpoints.items()
    ]
    return Table(PLAN_COLUMNS, rows)


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def simulate(
    scenario: Scenario,
    start: Stage | None = None,
    *,
    path: Path = SOURCE,
    progress: Callable[[int, int], None] | None = None,
) -> Simulated:
    """Simulate *scenario*, read from *path*, from *start* (`stage`); from an idle fleet if that is None.

    Raises ScenarioError, ValueError, and RuntimeError if requests wait for ever.
    """
    staged = start or stage(scenario, path)
    planner = planner_of(staged) if staged.advisor is None else None
    began = time.monotonic()
    result = staged.run(advisor=staged.advisor or planner, progress=progress)
    took_s = time.monotonic() - began
    about = {
        "scenario": scenario.title or path.stem,
        "seed": staged.seed,
        "strategy": result.strategy or "none",
        "requests": staged.requests.count,
        "left_out": staged.left_out,
        "clipped": staged.clipped,
        "simulated_s": float(result.end_s),
        "took_s": round(took_s, 3),
        "failures": int((result.changes["after"] == State.FAILED).sum()),
        **_hours(result),
    }
    return Simulated(staged, about, result, planner)


def _hours(result: Result) -> dict[str, float]:
    """Return instance-hours and dollars of all models."""
    wanted = {"instance_h": "instance_hours", "wasted_h": "wasted_hours", "cost_usd": "cost_usd"}
    sums = dict.fromkeys(wanted.values(), 0.0)
    for by, _, name, value in hour_table(result).rows:
        if by == "model" and name in wanted:
            sums[wanted[name]] += value
    return {name: round(value, 6) for name, value in sums.items()}


def compile_for(staged: Stage) -> None:
    """Load all kernels, so that the time taken is the simulation's own."""
    first = staged.requests._replace(
        **{name: getattr(staged.requests, name)[:1] for name in staged.requests._fields if "prefix" not in name},
        prefix_first=staged.requests.prefix_first[:2],
    )
    Simulation(staged.cluster, first).run()


def warm_up() -> None:
    """Load kernels, planner and solver. Do nothing where kernels must be compiled first.

    Called before a worker's processes are forked, which then share them, so that their first run is as fast as the next.
    """
    if _on_disk(loop.enter):
        run_small()


def run_small() -> None:
    """Simulate a little of everything with its planner."""
    simulate(Scenario.model_validate(SMALL))


def _on_disk(kernel: Any) -> bool:
    """Return whether the code of *kernel*, a `compiled` function, is cached on disk."""
    folder = kernel.stats.cache_path
    return folder is not None and any(Path(folder).glob(f"*.{kernel.__name__}-*.nbi"))


SMALL: Final[dict[str, Any]] = {
    "until_h": 0.5,
    "models": {"m": {"context_tokens": 2048}},
    "gpus": {"g": {"usd_per_hour": 1.0}},
    "regions": {"here": {}, "there": {}},
    "latency_ms": {"here": {"there": 10.0}},
    "profiles": [
        {
            "model": "m",
            "gpu": "g",
            "prefill": {"a_s": 0.02, "b_s_per_token": 1e-4},
            "decode": {"a_s": 0.01, "b_s_per_sequence": 1e-3},
        }
    ],
    "fleet": [{"model": "m", "regions": ["here", "there"], "gpu": "g", "instances": 1, "empty": 3, "kv_tokens": 8192}],
    "classes": {"interactive": {"ttft_ms": 2000.0}, "other": {"kind": "non_interactive", "deadline_s": 3600.0}},
    "policies": {"routing": "preserve", "ordering": "qlm"},
    "scaling": {"strategy": "pilothouse", "min_instances": 1, "max_instances": 4},
    "planner": {"period_s": 600.0, "capability_instances": 1},
    "clients": [
        {
            "tenant": "some",
            "model": "m",
            "slo_class": slo_class,
            "requests_per_s": 1.0,
            "prompt": {"median": 200.0, "p95": 400.0, "maximum": 800},
            "output": {"median": 50.0, "p95": 100.0, "maximum": 200},
        }
        for slo_class in ("interactive", "other")
    ],
    "demand": {"duration_h": 0.4},
}
"""A scenario with a little of everything."""
