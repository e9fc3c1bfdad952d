"""From a scenario to a simulation: the fleet and its policies as a cluster, the demand as requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import gcd, inf
from pathlib import Path
from typing import Any, Final

from scheduling.control.swaps import EVERY_S
from scheduling.scaling import Assigned, ByEndpoint, Floor, Unified, look_s, make_strategy
from scheduling.scaling.schedule import Schedules, schedules_of
from scheduling.simulation.cluster.description import Cluster, EndpointKey, cluster_of
from scheduling.simulation.result import Result
from scheduling.simulation.scenario import Scenario, wrong_at
from scheduling.simulation.scenario.file import text_of
from scheduling.simulation.scenario.toml_lines import Key, ScenarioProblem
from scheduling.simulation.simulator import Simulation, TimedEvent
from scheduling.simulation.staging.applications import joined, runs_of
from scheduling.simulation.staging.demand import demand_of, past_of
from scheduling.simulation.staging.demand_minutes import DemandMinutes
from scheduling.simulation.staging.recorded_runs import Graphs, no_graphs, recorded_runs
from scheduling.simulation.staging.requests import requests_of
from scheduling.simulation.staging.timed_events import timed_events_of
from scheduling.simulation.state.placing import Fork
from scheduling.simulation.strategies import Advisor, Bounds, Control
from scheduling.simulation.swapping import Swapping
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.requests import Requests
from scheduling.simulation.workload.runs import RunsToCome

PROGRESS_S: Final = 3600.0
PROGRESS_STEPS: Final = 100
"""Progress calls per run, at least."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """How the fleet scales."""

    settings: dict[EndpointKey, Any]
    """`Scenario.at` each endpoint."""
    strategies: dict[EndpointKey, ByEndpoint]
    bounds: dict[EndpointKey, Bounds]
    floor: dict[EndpointKey, Floor] | None
    per_arrival: bool = False
    schedules: Schedules = field(default_factory=dict)
    begins_s: float = 0.0
    """Of the simulation, in seconds since 1970."""

    @property
    def one(self) -> ByEndpoint | Assigned:
        """Return all as one strategy. Reactive alone, with equal bounds, decides on every arrival, as in the paper."""
        first, *others = {id(each): each for each in self.strategies.values()}.values()
        if others or (isinstance(first, Unified) and len(set(self.bounds.values())) > 1):
            return Assigned(self.strategies)
        return first

    @property
    def widest(self) -> tuple[int, int]:
        """Return one pair of bounds for all endpoints: the trigger on arrivals has no others."""
        each = self.bounds.values()
        return min(one.min_instances for one in each), max(one.max_instances for one in each)


@dataclass(frozen=True, slots=True)
class Stage:
    """A scenario ready to simulate."""

    scenario: Scenario
    path: Path
    """Where it was read: files that it names are relative to its folder."""
    cluster: Cluster
    requests: Requests
    tenants: list[str]
    """By their number in requests."""
    left_out: int
    """Requests of the trace that are not simulated: without a prompt or an output, or too long and dropped."""
    clipped: int
    """Requests shortened to their model's context."""
    scaled: Scaled | None
    """None where nothing scales."""
    timed_events: Sequence[TimedEvent]
    seed: int
    until_s: float
    runs: RunsToCome | None = None
    """Application runs that requests belong to; None without any."""
    knows_prefixes: bool = False
    """Whether it is known which prompts share prefixes."""
    state: Fork | None = None
    """Running and waiting requests at the start; None: an idle fleet."""
    recent: Requests | None = None
    """Requests before the start, from whose lengths and bursts planners measure capability; None: those to come."""
    past: tuple[DemandMinutes, DemandMinutes] | None = None
    """Demand before the start, from which planners forecast: interactive, and other; None: none."""
    advisor: Advisor | None = None
    """Makes the plans that strategies follow; None: the planner of the scenario."""
    control: type[Control] = Control
    """Decides what a strategy sees of the fleet."""
    swapping: Callable[[Simulation], Callable[[Simulation], None]] = Swapping
    """Makes the swaps of a fleet that nothing scales, where models share GPUs."""

    def run(
        self,
        *,
        advisor: Advisor | None = None,
        decisions: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Result:
        """Simulate it. *advisor* makes the plans that strategies follow; ValueError if one does and there is none."""
        scaled, cluster, act, trigger = self.scaled, self.cluster, None, None
        strategy = scaled.one if scaled else None
        last_s = min(self.until_s, float(self.requests.arrival_s[-1])) if self.requests.count else PROGRESS_S
        if scaled and strategy:
            if strategy.uses_advice and advisor is None:
                raise ValueError(f"{strategy.name} follows plans: an advisor is needed")
            if isinstance(strategy, Unified):
                cluster = replace(cluster, share_spot=cluster.share_spot and strategy.shares_spot)
                if scaled.per_arrival:
                    trigger = strategy.per_arrival(*scaled.widest)
            cluster = replace(cluster, reactive=trigger)
        simulation = Simulation(
            cluster, self.requests, seed=self.seed, sample_s=self.scenario.sample_s, decisions=decisions,
            state=self.state, runs=self.runs,
        )  # fmt: skip
        if strategy is None:
            act = self.swapping(simulation) if cluster.swap_groups() else None
            tick_s = EVERY_S if act else max(1.0, float(self.requests.arrival_s[-1]) / 200)
        elif scaled is None or trigger:
            tick_s, progress = PROGRESS_S, progress or (lambda done, total: None)
        else:
            act = self.control(simulation, strategy, scaled.bounds, scaled.floor, advisor, self.state)
            act.follow(scaled.schedules, scaled.begins_s)
            act(simulation)
            tick_s = _common_s(strategy.tick_s, look_s(scaled.floor)) if scaled.floor else strategy.tick_s
            tick_s = _common_s(tick_s, EVERY_S) if cluster.swap_groups() else tick_s
            progress = progress and _seldom(progress, min(PROGRESS_S, last_s / PROGRESS_STEPS) / tick_s)
        result = simulation.run(act, tick_s, self.until_s, progress, self.timed_events)
        return replace(
            result, strategy=strategy.name if strategy else "", moves=act.moves if isinstance(act, Control) else []
        )


SOURCE = Path("scenario")
"""Name in errors of a scenario without a file."""


def stage(
    scenario: Scenario,
    path: Path = SOURCE,
    seed: int | None = None,
    workload: Workload | None = None,
    graphs: Graphs = no_graphs,
) -> Stage:
    """Make *scenario*, read from *path*, ready to run with *seed* (its own if None).

    *workload* replaces the requests of its clients or trace; *graphs* is what is known of the applications of recorded
    runs. Raises ScenarioError, and TraceError when a
    trace cannot be read.
    """
    try:
        return _staged(scenario, path, scenario.seed if seed is None else seed, workload, graphs)
    except ScenarioProblem as problem:
        raise wrong_at(path, text_of(path), problem.key, str(problem)) from problem


def _staged(scenario: Scenario, path: Path, seed: int, given: Workload | None, graphs: Graphs) -> Stage:
    cluster = cluster_of(scenario)
    workload, clipped = demand_of(scenario, cluster, path.parent, seed, given)
    run, runs = recorded_runs(scenario, cluster, workload, graphs)
    if scenario.applications:
        drawn = runs_of(scenario, cluster, path.parent, seed)
        clipped += drawn.clipped
        workload, run, runs = joined(workload, run, runs, drawn)
    until_s = inf if scenario.until_h is None else 3600 * scenario.until_h
    last_s = min(until_s, float(workload.arrival_s[-1]))
    return Stage(
        scenario=scenario,
        path=path,
        cluster=cluster,
        requests=requests_of(scenario, cluster, workload, seed, None if runs is None else run),
        tenants=list(workload.tenant.names),
        left_out=workload.left_out,
        clipped=clipped,
        scaled=_scaled(scenario, cluster),
        timed_events=timed_events_of(scenario, cluster, seed, last_s),
        seed=seed,
        until_s=until_s,
        runs=runs,
        knows_prefixes=workload.prefix_block_tokens > 0,
    )


def past_requests(staged: Stage) -> Requests:
    """Return the demand in whole weeks before the start of *staged*, for a forecaster to learn from."""
    scenario, cluster, seed = staged.scenario, staged.cluster, staged.seed
    return requests_of(scenario, cluster, past_of(scenario, cluster, staged.path.parent, seed), seed)


def _scaled(scenario: Scenario, cluster: Cluster) -> Scaled | None:
    """Return strategies and bounds; None without scaling. Raise ScenarioProblem if a model's regions follow two."""
    scaling = scenario.scaled
    if scaling is None:
        return None
    made: dict[Key, ByEndpoint] = {}
    settings = {key: scenario.at(*key) for key in cluster.endpoints}
    bounds = {key: Bounds(own.min_instances, own.max_instances) for key, own in settings.items()}
    floors = {key: Floor(own.floor_above, own.floor_cooldown_s) for key, own in settings.items()}
    strategies: dict[EndpointKey, ByEndpoint] = {}
    followed: dict[str, str] = {}
    for key in cluster.endpoints:
        where, follows = scenario.strategy_of(*key)
        strategy = strategies[key] = made.setdefault(where, make_strategy(follows.strategy or "", follows.parameters))
        if strategy.uses_advice and followed.setdefault(key[0], strategy.name) != strategy.name:
            what = f"{key[0]} follows plans for {followed[key[0]]} in another region: its regions are planned together"
            raise ScenarioProblem(where, what)
    rules = [(one.model, one.region or "", one.rule) for one in scenario.schedules]
    schedules = schedules_of(rules, list(scenario.regions))
    floor = floors if scaling.floor else None
    return Scaled(settings, strategies, bounds, floor, scaling.per_arrival, schedules, scenario.begins_s)


def _common_s(tick_s: float, period_s: float) -> float:
    """Return the greatest common divisor of both times, in whole milliseconds."""
    return max(1, gcd(round(1000 * tick_s), round(1000 * period_s))) / 1000


def _seldom(progress: Callable[[int, int], None], every: float) -> Callable[[int, int], None]:
    """Return *progress* limited to one call in *every*."""
    calls = count()

    def seldom(done: int, total: int) -> None:
        if next(calls) % max(1, round(every)) == 0:
            progress(done, total)

    return seldom
