"""PreServe's evaluation of scaling (section 5.3): a code-like and a chat-like day on up to eight instances.

In the paper a request is given to an instance at once, and queues there; the reactive baselines look at KV memory. That is
`deep`, with PreServe's router (4.3.3) and no floor. Pilothouse holds the queue and gives work only where there is room:
`shallow`, with the strategies as they run live, over the floor. Figure 8 shows means over five minutes of arrivals, so a
peak is the highest of those.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from rich.console import Console

from controlplane.experiments.experiment import (
    SCALE,
    SEED,
    Comparison,
    Experiment,
    Option,
    Progress,
    Result,
    Settings,
    percent,
    seconds,
    share,
)
from controlplane.experiments.shared.capability import measured_capability
from controlplane.experiments.shared.demand import BURSTS_OVER_S, Floats, Seen, check_days, forecast_demand, minutes
from controlplane.experiments.shared.measures import rounded
from controlplane.experiments.shared.memory_scaling import HybridByMemory, ReactiveByMemory, run_by_memory
from controlplane.experiments.shared.planner import Expected, planner
from controlplane.experiments.shared.scenes import DAY_S, INTERACTIVE, OTHER, Scene, preserve
from controlplane.terminal import Column, table
from forecasting.workload import FORECASTERS, rests
from scheduling.planning.bursts import arrival_cv
from scheduling.planning.capacity import Capability
from scheduling.policy import EndpointPolicy
from scheduling.scaling import FLOOR, ByEndpoint, make_strategy
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import State
from scheduling.simulation.measures.results import latency_s
from scheduling.simulation.result import Result as Simulated
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.strategies import Bounds, run_strategy
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.generator import random_bursts
from scheduling.simulation.workload.requests import Requests

WINDOW_S: Final = 600.0
SERVICES: Final = ("code-like", "chat-like")
STRATEGIES: Final = ("static", "reactive", "proactive", "hybrid", "hybrid_mean", "preserve", "lt_ua", "pilothouse")
"""`hybrid` looks at the fullest instance, `hybrid_mean` at all together."""
NOT_AT: Final = {"deep": ("lt_ua", "pilothouse"), "shallow": ("hybrid_mean",)}
"""By depth: `deep` has only what the paper has, `shallow` only what runs live."""
DEPTHS: Final = tuple(NOT_AT)
PEAK_S: Final = 300.0
SLO_S: Final = 0.2
"""Of normalised latency: end-to-end seconds by output token."""
PERCENTILE: Final = 98.0
"""Of requests that keep it where capability is measured: answers of two tokens break it at any load."""
HISTORY_DAYS: Final = 7
USD_PER_HOUR: Final = 1.0
"""Of an instance, for the planner: they are all alike."""
SURGES: Final = 3
SURGE_S: Final = 900.0
SURGE_FACTOR: Final = 1.7
"""Surges that are in no history, as the paper's code service has them."""

PAPER: Final = {
    "peak_normalised_against_hybrid": -0.786,
    "peak_normalised_against_hybrid_mean": -0.786,
    "instance_hours_against_static": -0.4447,
}
"""The peaks are the mean of both services': 0.92 s and 0.197 s."""
MEASURES: Final = {"peak_normalised": "peak_normalised_s", "instance_hours": "instance_hours"}


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy's line of one service."""

    service: str
    depth: str
    strategy: str
    instance_hours: float
    peak_normalised_s: float
    """The highest mean of normalised latency over five minutes, by arrival."""
    peak_minute_normalised_s: float
    """The same over a minute."""
    normalised_mean_s: float
    slo_met: float
    ttft_p95_s: float
    scale_outs: int
    scale_ins: int
    unserved: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class Setting:
    """What the runs of one service share."""

    service: str
    scene: Scene
    days: float
    seed: int
    workload: Workload
    expected: Expected
    capability: Capability


def prepare(service: str, scale: float, days: float, seed: int, forecaster: str, progress: Progress) -> Setting:
    """Draw a weekday's demand, forecast prompt and output tokens separately, and run Algorithm 1."""
    check_days(days, WINDOW_S)
    scene = preserve(service, scale)
    progress("drawing the demand", 0, 2)
    drawn = scene.demand(HISTORY_DAYS, seed + 1000)
    past, other = (minutes(drawn, scene.streams, [name], HISTORY_DAYS * DAY_S) for name in (INTERACTIVE, OTHER))
    progress("drawing the demand", 1, 2)
    surges = random_bursts(days * DAY_S, max(1, round(SURGES * days)), SURGE_S, factor=SURGE_FACTOR, seed=seed)
    workload = scene.demand(days, seed, surges)
    came, more = (minutes(workload, scene.streams, [name], days * DAY_S) for name in (INTERACTIVE, OTHER))
    seen = Seen(came.after(past.last(BURSTS_OVER_S)), more.after(other.last(BURSTS_OVER_S)), BURSTS_OVER_S)
    progress("measuring what instances serve", 0, 1)
    capability = measured_capability(
        scene.models[0].engine(),
        scene.clients,
        normalised_s=SLO_S,
        percentile=PERCENTILE,
        cv=arrival_cv(past.requests[0]),
        seed=seed,
    )
    history, actual = past.longer(WINDOW_S), came.longer(WINDOW_S)
    prompt, output = (
        forecast_demand(
            forecaster, getattr(history, quantity), getattr(actual, quantity), WINDOW_S,
            partial(progress, f"forecasting {quantity} tokens by {forecaster}"),
        )
        for quantity in ("prompt", "output")
    )  # fmt: skip
    return Setting(service, scene, days, seed, workload, Expected(prompt, output, seen), capability)


def run(setting: Setting, names: Sequence[str], progress: Progress) -> list[Row]:
    """Simulate the service under each of *names* at both depths; `static` keeps all instances."""
    scene, rows = setting.scene, []
    for depth in DEPTHS:
        for name in names:
            if name in NOT_AT[depth]:
                continue
            began_s = time.monotonic()
            cluster = _cluster(replace(scene, ready=scene.instances) if name == "static" else scene, depth)
            requests = scene.requests(cluster, setting.workload, setting.seed)

            def report(done: int, total: int, about: str = f"{name}, {depth}") -> None:
                progress(f"{setting.service}: simulating {about}", done, total)

            result = _simulate(setting, name, depth, cluster, requests, report)
            rows.append(_row(setting, name, depth, result, time.monotonic() - began_s))
    return rows


def _cluster(scene: Scene, depth: str) -> Cluster:
    cluster = scene.cluster()
    if depth == "shallow":
        return cluster
    instances = [replace(spec, dispatch_max_num_seqs=100_000, dispatch_kv_tokens=1 << 40) for spec in cluster.instances]
    return replace(cluster, instances=instances, policies=EndpointPolicy(routing="preserve", ordering="priority"))


def _simulate(
    setting: Setting, name: str, depth: str, cluster: Cluster, requests: Requests, progress: Callable[[int, int], None]
) -> Simulated:
    until_s = setting.days * DAY_S
    if name == "static":
        simulation = Simulation(cluster, requests, seed=setting.seed)
        return simulation.run(tick_s=3600.0, until_s=until_s, progress=progress)
    strategy = _strategy(name, depth)
    bounds = Bounds(setting.scene.min_instances, setting.scene.max_instances)
    advisor = None
    if strategy.uses_advice:
        scene, model = setting.scene, setting.scene.models[0].name
        advisor = planner(
            scene.streams,
            setting.expected,
            strategy.plans_for,
            {model: setting.capability},
            scene.instances,
            USD_PER_HOUR,
        )
    if isinstance(strategy, ReactiveByMemory | HybridByMemory):
        return run_by_memory(
            cluster, requests, strategy, fullest=name != "hybrid_mean", bounds=bounds, advisor=advisor,
            seed=setting.seed, until_s=until_s, progress=progress,
        )  # fmt: skip
    return run_strategy(
        cluster, requests, strategy, bounds=bounds, floor=FLOOR if depth == "shallow" else None, advisor=advisor,
        seed=setting.seed, until_s=until_s, progress=progress,
    ).result  # fmt: skip


def _strategy(name: str, depth: str) -> ByEndpoint:
    if depth == "deep" and name == "reactive":
        return ReactiveByMemory()
    if depth == "deep" and name in ("hybrid", "hybrid_mean"):
        return HybridByMemory()
    return make_strategy(name)


def _row(setting: Setting, name: str, depth: str, result: Simulated, wall_s: float) -> Row:
    normalised_s = latency_s(result, "normalised")
    arrival_s = result.requests.arrival_s
    hours = result.state_s.sum(axis=0) / 3600
    known = np.isfinite(normalised_s)
    ttft_s = latency_s(result, "ttft")
    return Row(
        service=setting.service,
        depth=depth,
        strategy=name,
        instance_hours=float(hours.sum() - hours[State.EMPTY] - hours[State.SPOT]),
        peak_normalised_s=_highest_mean(arrival_s[known], normalised_s[known], PEAK_S),
        peak_minute_normalised_s=_highest_mean(arrival_s[known], normalised_s[known], 60.0),
        normalised_mean_s=float(normalised_s[known].mean()) if known.any() else float("nan"),
        slo_met=float(np.count_nonzero(normalised_s <= SLO_S)) / max(1, normalised_s.size),
        ttft_p95_s=float(np.nanpercentile(ttft_s, 95)) if known.any() else float("nan"),
        scale_outs=result.counters["scale_outs"],
        scale_ins=result.counters["scale_ins"],
        unserved=int(np.count_nonzero(~known)),
        wall_s=wall_s,
    )


def _highest_mean(arrival_s: Floats, values: Floats, window_s: float) -> float:
    """The highest mean of *values* over windows of arrival; nan without any."""
    if not values.size:
        return float("nan")
    window = (arrival_s // window_s).astype(np.int64)
    counts = np.bincount(window)
    means = np.bincount(window, values)[counts > 0] / counts[counts > 0]
    return float(means.max())


def changes(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Changes to hold against `PAPER`, by depth and service, for the strategies that were run.

    "both" is of the sum over the services: the paper gives means of both.
    """
    by = {(row.depth, row.service, row.strategy): row for row in rows}
    services = list(dict.fromkeys(row.service for row in rows))
    result: dict[str, dict[str, float]] = {}
    for name in PAPER:
        value, base = name.split("_against_")
        result[name] = {}
        for depth in DEPTHS:
            for label, summed in [*((each, [each]) for each in services), ("both", services)]:
                if all((depth, each, strategy) in by for each in summed for strategy in ("preserve", base)):
                    ours, theirs = (
                        sum(getattr(by[depth, each, strategy], MEASURES[value]) for each in summed)
                        for strategy in ("preserve", base)
                    )
                    result[name][f"{label}, {depth}"] = round(ours / theirs - 1, 4)
    return result


COLUMNS: Final = (
    Column("Service", "service"),
    Column("Queues", "depth"),
    Column("Strategy", "strategy"),
    Column("instance-hours", "instance_hours", "{:,.1f}"),
    Column("peak 5 min", "peak_normalised_s", seconds),
    Column("peak minute", "peak_minute_normalised_s", seconds),
    Column("mean", "normalised_mean_s", seconds),
    Column(f"within {SLO_S} s", "slo_met", share),
    Column("TTFT p95", "ttft_p95_s", seconds),
    Column("out/in", lambda row: f"{row['scale_outs']:,}/{row['scale_ins']:,}", "{}"),
)


class PreserveScaling(Experiment):
    name = "preserve-scaling"
    paper = "PreServe"
    section = "5.3"
    measures = "peak of normalised latency and instance-hours by scaling strategy"
    results = "scaling.md#preserves-day"
    options = (
        Option("days", "days simulated", 1.0, float, above=0.0, at_most=7.0),
        SCALE,
        SEED,
        Option("strategies", "strategies, separated by commas (default all)", among=STRATEGIES, several=True),
        Option(
            "forecaster",
            "of prompt and output tokens; mlstm is the paper's",
            "mlstm",
            among=tuple(FORECASTERS),
            rests=rests,
        ),
    )

    def run(self, settings: Settings, progress: Progress) -> Result:
        rows, services = [], []
        for service in SERVICES:
            setting = prepare(
                service, settings["scale"], settings["days"], settings["seed"], settings["forecaster"], progress
            )
            rows += run(setting, settings["strategies"], progress)
            capability = setting.capability
            services.append(
                {
                    "service": service,
                    "requests": len(setting.workload),
                    "capability_tokens_per_s": {
                        "prompt": round(capability.prompt_tokens_per_s, 1),
                        "output": round(capability.output_tokens_per_s, 1),
                        "total": round(capability.total_tokens_per_s, 1),
                    },
                    "forecast_error": {
                        "prompt": round(setting.expected.prompt.error, 4),
                        "output": round(setting.expected.output.error, 4),
                    },
                }
            )
        return {
            "paper": self.name,
            **{name: settings[name] for name in ("days", "scale", "seed", "forecaster")},
            "services": services,
            "rows": [rounded(asdict(row)) for row in rows],
            "found": changes(rows),
            "reported": PAPER,
        }

    def show(self, console: Console, result: Result) -> None:
        title = f"PreServe, section 5.3: {result['days']:g} day(s), seed {result['seed']}"
        console.print(table(title, COLUMNS, result["rows"]))
        for name, by_service in result["found"].items():
            if by_service:
                values = ", ".join(f"{service} {percent(value)}" for service, value in by_service.items())
                console.print(f"PreServe, {name.replace('_', ' ')}: {values}")

    def compare(self, result: Result) -> list[Comparison]:
        """PreServe over both services, by depth."""
        changed = result["found"]
        return [
            Comparison(f"{name.replace('_', ' ')}, {depth}", self.section, figure, changed[name].get(f"both, {depth}"))
            for name, figure in PAPER.items()
            for depth in DEPTHS
            if depth == "deep" or not name.endswith("hybrid_mean")
        ]
