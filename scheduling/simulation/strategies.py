"""Running a scaling strategy inside a simulation: at its ticks it sees the fleet, and its moves are carried out.

The same strategy objects run live. What scales on every arrival (the reactive heuristic) is run by the compiled trigger.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduling.lookahead.outlook import ITERATIONS
from scheduling.scaling import FLOOR, Advice, Assigned, ByEndpoint, EndpointView, Floor, Floored, Strategy, Unified
from scheduling.simulation.cluster.description import Cluster, EndpointKey
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.lookahead import endpoint_loads, endpoint_outlook
from scheduling.simulation.simulator import Happening, Result, Simulation
from scheduling.simulation.workload.requests import CHUNK, Requests

DEMAND_WINDOW_S: Final = 60.0
"""Over which the demand that a view shows is measured."""
DEMAND_STEP_S: Final = 5.0
STATES: Final = len(State)
COMING_STATES: Final = [State.STARTING, State.LOADING, State.RECLAIMING, State.WAKING, State.SWAPPING]


@dataclass(frozen=True, slots=True)
class Made:
    """A move that was carried out."""

    time_s: float
    endpoint: int
    wanted: int
    done: int
    """As many as there were instances to be had or to be let go; of the sign of *wanted*."""
    reason: str


class Advisor(Protocol):
    """A slow planner in a simulation. It is asked at every tick, and makes a new plan when one is due."""

    def advise(self, now_s: float, views: Sequence[EndpointView]) -> Sequence[Advice | None]:
        """What each of *views* should be, in their order. It must not look at anything that happens after *now_s*."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """Least and most instances of every endpoint."""

    min_instances: int = 2
    max_instances: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.min_instances <= self.max_instances:
            raise ValueError(
                f"min_instances ({self.min_instances}) must be from 0 to max_instances ({self.max_instances})"
            )


class Demand:
    """Tokens that callers asked for, by the endpoint of their own region, step by step."""

    def __init__(self, cluster: Cluster, requests: Requests, step_s: float = DEMAND_STEP_S) -> None:
        self.step_s = step_s
        count = requests.arrival_s.size
        steps = int(requests.arrival_s[-1] // step_s) + 1 if count else 1
        endpoint_of = np.zeros((len(cluster.models), len(cluster.regions)), np.int64)
        for at, model in enumerate(cluster.models):
            for to, region in enumerate(cluster.regions):
                endpoint_of[at, to] = next(iter(cluster.candidates(model, region)), 0)
        tokens = np.zeros(len(cluster.endpoints) * steps)
        for begin in range(0, count, CHUNK):
            part = slice(begin, begin + CHUNK)
            place = endpoint_of[requests.model[part], requests.region[part]] * steps
            place += (requests.arrival_s[part] // step_s).astype(np.int64)
            asked = requests.prompt_tokens[part].astype(np.float64) + requests.predicted_tokens[part]
            tokens += np.bincount(place, asked, tokens.size)
        self._until = np.concatenate(
            [np.zeros((len(cluster.endpoints), 1)), tokens.reshape(-1, steps).cumsum(axis=1)], axis=1
        )

    def seen(self, now_s: float, window_s: float = DEMAND_WINDOW_S) -> NDArray[np.float64]:
        """Tokens a second over the last *window_s*, by endpoint; less at the begin, when less has passed."""
        last = self._until.shape[1] - 1
        until = min(int(now_s // self.step_s), last)
        since = min(max(0, int((now_s - window_s) // self.step_s)), last)
        passed_s = max(min(now_s, window_s), self.step_s)
        return np.asarray((self._until[:, until] - self._until[:, since]) / passed_s)

    def windows(self, window_s: float) -> NDArray[np.float64]:
        """Tokens a second by endpoint and window; a last window that is not over is left out. For forecasts."""
        steps = round(window_s / self.step_s)
        at = self._until[:, ::steps]
        return np.asarray(np.diff(at, axis=1) / window_s)


class Control:
    """A strategy at work: call it with the simulation at every tick."""

    def __init__(
        self,
        simulation: Simulation,
        strategy: Strategy,
        *,
        bounds: Bounds | Mapping[EndpointKey, Bounds] | None = None,
        advisor: Advisor | None = None,
        demand: Demand | None = None,
    ) -> None:
        cluster = simulation.cluster
        self.strategy = strategy
        self.moves: list[Made] = []
        self._advisor = advisor
        self._demand = demand or Demand(cluster, simulation.requests)
        given = bounds or Bounds()
        self._bounds = [given[key] if isinstance(given, Mapping) else given for key in cluster.endpoints]
        count = len(cluster.endpoints)
        self._changed_s, self._ready_s = np.full(count, -np.inf), np.full(count, -np.inf)
        self._ready: NDArray[np.int64] | None = None
        self._use, self._kv_use = np.zeros(count), np.zeros(count)
        self._ahead = strategy.looks_ahead
        self._lines = np.zeros((2, ITERATIONS + 1), np.int64)
        self._tokens = np.zeros(ITERATIONS, np.int64)
        self._overloaded = np.zeros(count, np.int64)
        self._peaks = np.full((2, count), np.nan)
        self._region = np.array([cluster.regions.index(region) for _, region in cluster.endpoints])
        gpu_types = [spec.gpu_type for spec in cluster.instances]
        fits = set(cluster.engines())
        self._fits = np.array([[(model, gpu) in fits for gpu in gpu_types] for model, _ in cluster.endpoints])
        self._shares = cluster.share_spot

    def __call__(self, simulation: Simulation) -> None:
        """See, ask, act."""
        now_s = simulation.now_s
        views = self.views(simulation)
        advice = self._advisor.advise(now_s, views) if self._advisor else [None] * len(views)
        for move in self.strategy.decide(now_s, views, advice):
            act = simulation.scale_out if move.delta > 0 else simulation.scale_in
            done = act(move.endpoint, abs(move.delta)) * (1 if move.delta > 0 else -1)
            if done:
                self._changed_s[move.endpoint] = now_s
            self.moves.append(Made(now_s, move.endpoint, move.delta, done, move.reason))

    def views(self, simulation: Simulation) -> list[EndpointView]:
        """Every endpoint as the strategy sees it now."""
        fleet, world, now_s = simulation.fleet, simulation.world, simulation.now_s
        keys, count = simulation.cluster.endpoints, self._use.size
        states = simulation.states
        by_state = np.bincount(fleet.endpoint * STATES + states, minlength=count * STATES).reshape(count, STATES)
        coming = by_state[:, COMING_STATES].sum(axis=1)
        ready = by_state[:, State.READY]
        if self._ready is not None:
            self._ready_s[ready > self._ready] = now_s
        self._ready = ready
        waiting = world.waiting.size
        endpoint_loads(fleet, world.endpoints, waiting, self._use, self._kv_use)
        if self._ahead:
            self._look_ahead(simulation)
        seen = self._demand.seen(now_s)
        others = np.zeros(count, np.int64)
        if self._shares and by_state[:, State.SPOT].any():
            lent = (states == State.SPOT) & self._fits & (fleet.region == self._region[:, None])
            others = lent.sum(axis=1) - by_state[:, State.SPOT]
        return [
            EndpointView(
                model=model,
                region=region,
                ready=int(by_state[at, State.READY]),
                coming=int(coming[at]),
                draining=int(by_state[at, State.DRAINING]),
                spot=int(by_state[at, State.SPOT]),
                spot_other=int(others[at]),
                min_instances=self._bounds[at].min_instances,
                max_instances=self._bounds[at].max_instances,
                use=float(self._use[at]),
                waiting=int(waiting[at]),
                kv_use=float(self._kv_use[at]),
                tokens_per_s=float(seen[at]),
                since_change_s=now_s - float(self._changed_s[at]),
                overloaded_instances=int(self._overloaded[at]),
                peak_kv_sum=float(self._peaks[0, at]),
                peak_kv_most=float(self._peaks[1, at]),
                since_ready_s=now_s - float(self._ready_s[at]),
            )
            for at, (model, region) in enumerate(keys)
        ]

    def _look_ahead(self, simulation: Simulation) -> None:
        world = simulation.world
        endpoint_outlook(
            world.fleet,
            world.endpoints,
            world.waiting,
            world.engines,
            self._lines[0],
            self._lines[1],
            self._tokens,
            self._overloaded,
            self._peaks[0],
            self._peaks[1],
        )


@dataclass(frozen=True, slots=True)
class StrategyRun:
    """What came of a simulation under a strategy."""

    strategy: str
    result: Result
    moves: list[Made]
    """Of strategies that decide at ticks. What scales on every arrival leaves only the result's changes."""


def run_strategy(
    cluster: Cluster,
    requests: Requests,
    strategy: ByEndpoint | Assigned,
    *,
    bounds: Bounds | Mapping[EndpointKey, Bounds] | None = None,
    floor: Floor | None = FLOOR,
    advisor: Advisor | None = None,
    demand: Demand | None = None,
    seed: int = 0,
    sample_s: float = 0.0,
    decisions: bool = False,
    until_s: float = np.inf,
    progress: Callable[[int, int], None] | None = None,
    happenings: Sequence[Happening] = (),
) -> StrategyRun:
    """Simulate *requests* on *cluster* scaled by *strategy*, over *floor* unless that is None.

    *sample_s* and *decisions* are those of `Simulation`, *happenings* those of its `run`.

    ValueError if the strategy follows advice and *advisor* is None. Other errors are those of `Simulation`.
    """
    if strategy.uses_advice and advisor is None:
        raise ValueError(f"{strategy.name} follows plans: an advisor is needed")
    if isinstance(strategy, Unified):
        widest = _widest(bounds or Bounds())
        trigger = strategy.per_arrival(widest.min_instances, widest.max_instances)
        cluster = replace(cluster, reactive=trigger, share_spot=strategy.shares_spot)
        simulation = Simulation(cluster, requests, seed=seed, sample_s=sample_s, decisions=decisions)
        result = simulation.run(tick_s=PROGRESS_S, until_s=until_s, progress=progress or _silent, happenings=happenings)
        return StrategyRun(strategy.name, result, [])
    cluster = replace(cluster, reactive=None)
    simulation = Simulation(cluster, requests, seed=seed, sample_s=sample_s, decisions=decisions)
    floored = Floored(strategy, floor) if floor else strategy
    control = Control(simulation, floored, bounds=bounds, advisor=advisor, demand=demand)
    control(simulation)
    result = simulation.run(control, strategy.tick_s, until_s, progress, happenings)
    return StrategyRun(strategy.name, result, control.moves)


PROGRESS_S: Final = 3600.0


def _widest(bounds: Bounds | Mapping[EndpointKey, Bounds]) -> Bounds:
    """The trigger on arrivals knows one pair for all endpoints."""
    if isinstance(bounds, Bounds):
        return bounds
    each = list(bounds.values())
    return Bounds(min(one.min_instances for one in each), max(one.max_instances for one in each))


def _silent(done: int, total: int) -> None:
    pass
