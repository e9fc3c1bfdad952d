"""PreServe's evaluation of scaling (section 5.3): a code-like and a chat-like day on up to eight instances.

In the paper an instance takes every request at once and queues by itself; the reactive baselines look at KV memory. That is
`deep`, with PreServe's router (4.3.3) and no floor. Pilothouse holds the queue and gives work only where there is room:
`shallow`, with the strategies as they run live, over the floor. Figure 8 shows means over five minutes of arrivals, so a
peak is the highest of those.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.shared.measures import percentiles
from controlplane.experiments.shared.scenes import DAY_S, preserve
from controlplane.experiments.shared.setting import Setting, prepare
from controlplane.simulation.running import Simulated
from controlplane.terminal import table
from forecasting.workload import FORECASTERS, unavailable_reason
from scheduling.scaling import Advice, ByEndpoint, EndpointView, Hybrid, make_strategy
from scheduling.scaling.endpoint import Wish
from scheduling.simulation.engine.lookahead import memory_held
from scheduling.simulation.measures.results import latency_s, paid_hours
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.staging.stage import Scaled
from scheduling.simulation.strategies import Bounds, Control
from scheduling.simulation.workload.generator import random_bursts

Floats = NDArray[np.float64]
SERVICES: Final = ("code-like", "chat-like")
DATA: Final = experiment.read_data("preserve-scaling")
NOT_AT: Final[Mapping[str, Sequence[str]]] = DATA["not_at"]
DEPTHS: Final = tuple(NOT_AT)
PEAK_S: Final = 300.0
SLO_S: Final = 0.2
"""Of normalised latency: end-to-end seconds by output token."""
PERCENTILE: Final = 98.0
"""Of requests that keep it where capability is measured: answers of two tokens break it at any load."""
USD_PER_HOUR: Final = 1.0
"""Of an instance, for the planner: they are all alike."""
SURGES: Final = 3
SURGE_S: Final = 900.0
SURGE_FACTOR: Final = 1.7
"""Surges that are in no history, as the paper's code service has them."""

PAPER: Final[Mapping[str, float]] = DATA["reported"]
MEASURES: Final = {"peak_normalised": "peak_normalised_s", "instance_hours": "instance_hours"}


OUT_ABOVE: Final = 0.95
"""Of KV memory: the mark that section 3.2.1 names for "the current instance status (i.e., KV memory usage)". The paper says
neither whose use it is nor when its baselines scale down: the use of the fullest instance and that of all together are
measured, and they scale down below 30 %, PreServe's own mark.
"""
TICK_S: Final = 5.0
"""Period of PreServe's own second tier."""


@dataclass(kw_only=True)
class ReactiveByMemory(ByEndpoint):
    """One out above 95 % of memory, one in below 30 %, at most one in 15 s."""

    name: str = field(default="reactive", init=False)
    uses_advice: bool = field(default=False, init=False)
    tick_s: float = TICK_S
    out_above: float = OUT_ABOVE

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        return self._by_use(view)


@dataclass(kw_only=True)
class HybridByMemory(Hybrid):
    """The plan at the start of each window, and the same marks within it, never below the plan."""

    tick_s: float = TICK_S
    out_above: float = OUT_ABOVE

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        delta, why = super()._advised(now_s, view, advice)
        if delta < 0 and view.instances + delta < advice.target_instances:
            return 0, ""
        return delta, why


class MemoryControl(Control):
    """Show a strategy KV memory as use: that of the fullest instance."""

    fullest = True

    def views(self, simulation: Simulation) -> list[EndpointView]:
        views = super().views(simulation)
        mean, most = np.zeros(len(views)), np.zeros(len(views))
        world = simulation.world
        memory_held(world.fleet, world.endpoints, world.engines, mean, most)
        use = most if self.fullest else mean
        return [view._replace(use=float(use[at])) for at, view in enumerate(views)]


class MeanMemoryControl(MemoryControl):
    """Show a strategy the KV memory of all instances together as use."""

    fullest = False


BY_MEMORY: Final[dict[str, tuple[type[ByEndpoint], type[Control]]]] = {
    "reactive": (ReactiveByMemory, MemoryControl),
    "hybrid": (HybridByMemory, MemoryControl),
    "hybrid_mean": (HybridByMemory, MeanMemoryControl),
}
"""The paper's forms of strategies, at depth `deep`."""


def setting_of(service: str, settings: experiment.Settings, progress: experiment.Progress) -> Setting:
    """Return a weekday of *service* with its surges, forecasts and capability (Algorithm 1)."""
    days, seed = settings["days"], settings["seed"]
    surges = random_bursts(days * DAY_S, max(1, round(SURGES * days)), SURGE_S, factor=SURGE_FACTOR, seed=seed)
    return prepare(
        preserve(service, settings["scale"]), days, seed, settings["forecaster"], progress,
        weeks=1, bursts=surges, normalised_s=SLO_S, percentile=PERCENTILE,
    )  # fmt: skip


def cases(service: str, made: Setting, names: Sequence[str]) -> Iterator[experiment.Case]:
    """Yield *service* under each of *names* at both depths; `static` keeps all instances."""
    scene = made.scene
    requests = scene.requests(made.workload, made.seed)
    for depth, name in [(depth, name) for depth in DEPTHS for name in names if name not in NOT_AT[depth]]:
        deep, hooks = depth == "deep", dict[str, Any](until_s=made.until_s, seed=made.seed)
        if name == "static":
            scenario = replace(scene, ready=scene.instances).scenario(deep=deep)
        else:
            scaling = {
                "strategy": name.removesuffix("_mean"), "min_instances": scene.min_instances,
                "max_instances": scene.max_instances, "floor": not deep,
            }  # fmt: skip
            scenario = scene.scenario(deep=deep, scaling=scaling)
            strategy = make_strategy(name.removesuffix("_mean"))
            if deep and name in BY_MEMORY:
                form, hooks["control"] = BY_MEMORY[name]
                strategy = form()
                bounds = Bounds(scene.min_instances, scene.max_instances)
                hooks["scaled"] = Scaled(
                    {}, dict.fromkeys(scene.streams, strategy), dict.fromkeys(scene.streams, bounds), None
                )
            if strategy.uses_advice:
                hooks["advisor"] = made.planner(strategy.plans_for, USD_PER_HOUR)
        yield experiment.Case.of({"service": service, "depth": depth, "strategy": name}, scenario, requests, **hooks)


def measured(run: Simulated) -> experiment.Row:
    """Return measures of a run; `peak_normalised_s`: highest mean normalised latency of five minutes' arrivals."""
    result = run.result
    normalised_s, arrival_s = latency_s(result, "normalised"), result.requests.arrival_s
    known = np.isfinite(normalised_s)
    return {
        "instance_hours": paid_hours(result),
        "peak_normalised_s": _highest_mean(arrival_s[known], normalised_s[known], PEAK_S),
        "peak_minute_normalised_s": _highest_mean(arrival_s[known], normalised_s[known], 60.0),
        "normalised_mean_s": float(normalised_s[known].mean()) if known.any() else float("nan"),
        "slo_met": float(np.count_nonzero(normalised_s <= SLO_S)) / max(1, normalised_s.size),
        "ttft_p95_s": percentiles(latency_s(result, "ttft"), 95)[0],
        "scale_outs": result.counters["scale_outs"],
        "scale_ins": result.counters["scale_ins"],
        "unserved": int(np.count_nonzero(~known)),
        "wall_s": run.about["took_s"],
    }


def _highest_mean(arrival_s: Floats, values: Floats, window_s: float) -> float:
    """Return the highest mean of *values* over windows of arrival; nan without any."""
    if not values.size:
        return float("nan")
    window = (arrival_s // window_s).astype(np.int64)
    counts = np.bincount(window)
    means = np.bincount(window, values)[counts > 0] / counts[counts > 0]
    return float(means.max())


def changes(rows: Sequence[experiment.Row], ours: str) -> dict[str, dict[str, float]]:
    """Return changes of strategy *ours* to compare with `PAPER`, by depth and service, for the strategies that were run.

    "both" is of the sum over the services: the paper gives means of both.
    """
    by = {(row["depth"], row["service"], row["strategy"]): row for row in rows}
    services = list(dict.fromkeys(row["service"] for row in rows))
    result: dict[str, dict[str, float]] = {}
    for name in PAPER:
        value, base = name.split("_against_")
        result[name] = {}
        for depth in DEPTHS:
            for label, summed in [*((each, [each]) for each in services), ("both", services)]:
                if all((depth, each, strategy) in by for each in summed for strategy in (ours, base)):
                    after, before = (
                        sum(by[depth, each, strategy][MEASURES[value]] for each in summed) for strategy in (ours, base)
                    )
                    result[name][f"{label}, {depth}"] = round(after / before - 1, 4)
    return result


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    rows, services = [], []
    for service in SERVICES:
        made = setting_of(service, settings, progress)
        rows += experiment.run_cases(service, cases(service, made, settings["strategies"]), measured, progress)
        (capability,) = made.capability.values()
        services.append(
            {
                "service": service,
                "requests": len(made.workload),
                "capability_tokens_per_s": {
                    name: round(getattr(capability, f"{name}_tokens_per_s"), 1)
                    for name in ("prompt", "output", "total")
                },
                "forecast_error": {name: round(getattr(made.expected, name).error, 4) for name in ("prompt", "output")},
            }
        )
    return {
        "paper": "preserve-scaling",
        **{name: settings[name] for name in ("days", "scale", "seed", "forecaster")},
        "services": services,
        "rows": experiment.rounded(rows),
        "found": changes(rows, "preserve"),
        "simplest": changes(rows, "reactive"),
        "reported": PAPER,
    }


def show(console: Console, result: experiment.Result) -> None:
    title = f"PreServe, section 5.3: {result['days']:g} day(s), seed {result['seed']}"
    console.print(table(title, experiment.columns(DATA["columns"]["strategies"]), result["rows"]))
    for name, by_service in result["found"].items():
        if by_service:
            values = ", ".join(f"{service} {experiment.percent(value)}" for service, value in by_service.items())
            console.print(f"PreServe, {name.replace('_', ' ')}: {values}")


def compare(result: experiment.Result) -> list[experiment.Comparison]:
    """Return PreServe over both services, by depth, with the reactive strategy as the simplest rule."""
    return [
        experiment.Comparison(
            f"{name.replace('_', ' ')}, {depth}",
            "5.3",
            figure,
            result["found"][name].get(f"both, {depth}"),
            simplest=result["simplest"][name].get(f"both, {depth}"),
        )
        for name, figure in PAPER.items()
        for depth in DEPTHS
        if depth == "deep" or not name.endswith("hybrid_mean")
    ]


PRESERVE_SCALING: Final = experiment.Experiment.read(
    "preserve-scaling",
    among={"forecaster": tuple(FORECASTERS)},
    missing={"forecaster": unavailable_reason},
    run=run,
    show=show,
    compare=compare,
)
