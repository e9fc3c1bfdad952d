"""Run a scaling strategy inside a simulation: at its ticks it sees the fleet, and its moves are carried out.

The same strategy objects run live. The reactive heuristic, which scales on every arrival, runs as the compiled trigger.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import direct
from scheduling.control.swaps import EVERY_S
from scheduling.control.views import Stages, Views
from scheduling.lookahead.rule import ITERATIONS
from scheduling.scaling import (
    Advice,
    Assigned,
    ByEndpoint,
    EndpointView,
    Floor,
    Floored,
    Strategy,
    floor_moves,
    look_s,
)
from scheduling.scaling.endpoint import Move
from scheduling.scaling.schedule import EARLY_S, Schedule, Schedules
from scheduling.scaling.view import (
    DEMAND_WINDOW_S,
    Stage,
    demand_rate,
    demand_seconds,
)
from scheduling.simulation.cluster.description import Cluster, EndpointKey
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.lookahead import any_below_floor, endpoint_outlook
from scheduling.simulation.result import MadeMove
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.state.placing import Fork
from scheduling.simulation.swapping import Swapping
from scheduling.simulation.workload.requests import CHUNK, Requests

STAGE_OF: Final = np.full(len(State), Stage.AWAY, np.int64)
"""By `State`."""
STAGE_OF[[State.STARTING, State.LOADING, State.RECLAIMING, State.WAKING]] = Stage.COMING
STAGE_OF[[State.READY, State.DRAINING]] = Stage.READY, Stage.DRAINING
STAGE_OF[[State.SPOT, State.ASLEEP]] = Stage.SPARE


class Advisor(Protocol):
    """A slow planner in a simulation. It is called at every tick, and makes a new plan when one is due."""

    def advise(self, now_s: float, views: Sequence[EndpointView]) -> Sequence[Advice | None]:
        """Return advice for each of *views*, in order, without using anything that happens after *now_s*."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """Minimum and maximum instances of every endpoint."""

    min_instances: int = 2
    max_instances: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.min_instances <= self.max_instances:
            raise ValueError(
                f"min_instances ({self.min_instances}) must be from 0 to max_instances ({self.max_instances})"
            )


class Demand:
    """Interactive tokens requested, by endpoint of the caller's own region, per second."""

    def __init__(
        self,
        cluster: Cluster,
        requests: Requests,
        before: NDArray[np.float64] | None = None,
        interactive: Sequence[bool] = (),
    ) -> None:
        """*before*: endpoints x seconds, tokens requested in the last seconds before 0; requests from before 0 are not
        counted again. *interactive*: whether each SLO class is interactive, by number; empty for all.
        """
        count = requests.arrival_s.size
        steps = max(0, int(requests.arrival_s[-1])) + 1 if count else 1
        endpoint_of = np.array(cluster.nearest(), np.int64)
        tokens = np.zeros(len(cluster.endpoints) * steps)
        for begin in range(0, count, CHUNK):
            part = slice(begin, begin + CHUNK)
            place = endpoint_of[requests.model[part], requests.region[part]] * steps
            place += np.maximum(requests.arrival_s[part], 0.0).astype(np.int64)
            asked = requests.prompt_tokens[part].astype(np.float64) + requests.predicted_tokens[part]
            asked[requests.arrival_s[part] < 0] = 0.0
            if interactive:
                asked[~np.array(interactive)[requests.slo_class[part]]] = 0.0
            tokens += np.bincount(place, asked, tokens.size)
        self._until = np.concatenate(
            [np.zeros((len(cluster.endpoints), 1)), tokens.reshape(-1, steps).cumsum(axis=1)], axis=1
        )
        self._before = None if before is None else np.pad(before[:, ::-1].cumsum(axis=1), ((0, 0), (1, 0)))

    def seen(self, now_s: float, more_tokens: NDArray[np.float64] | float = 0.0) -> NDArray[np.float64]:
        """Return tokens per second over the last minute, by endpoint, with *more_tokens* that came in it besides."""
        first, last = (min(at, self._until.shape[1] - 1) for at in demand_seconds(now_s))
        tokens = self._until[:, last] - self._until[:, first] + more_tokens
        if self._before is None:
            return demand_rate(tokens, now_s)
        further = max(0, DEMAND_WINDOW_S - int(now_s))  # seconds of the window before the start
        return demand_rate(tokens + self._before[:, min(further, self._before.shape[1] - 1)], DEMAND_WINDOW_S)


class Control:
    """A strategy in control of a simulation: call it with the simulation at every tick."""

    def __init__(
        self,
        simulation: Simulation,
        strategy: ByEndpoint | Assigned,
        bounds: Mapping[EndpointKey, Bounds],
        floor: Mapping[EndpointKey, Floor] | None = None,
        advisor: Advisor | None = None,
        state: Fork | None = None,
    ) -> None:
        """*strategy* is over *floor*, which runs between its ticks too. *state*: the simulation's first state. Demand is
        that of interactive classes.
        """
        cluster = simulation.cluster
        self.strategy: Strategy = Floored(strategy, floor) if floor else strategy
        self._floor, self._next_tick_s = floor, -np.inf
        self._look_s = look_s(floor) if floor else np.inf
        marks = [floor[key] for key in cluster.endpoints] if floor else []
        self._above = np.array([each.above for each in marks])
        self._cooldown_s = np.array([each.cooldown_s for each in marks])
        self._any_below_floor = direct(any_below_floor)
        self.moves: list[MadeMove] = []
        self._advisor = advisor
        interactive = [one.interactive for one in cluster.classes]
        self.demand = Demand(cluster, simulation.requests, state.asked_tokens if state else None, interactive)
        self._bounds = [bounds[key] for key in cluster.endpoints]
        self._always = self._least = np.array([each.min_instances for each in self._bounds])
        self._schedules: list[tuple[int, Schedule, float]] = []
        self._begins_s = 0.0
        self._most = np.array([each.max_instances for each in self._bounds])
        count = len(cluster.endpoints)
        self.simulation = simulation
        changes = [(one.changed_s, one.changed_delta) for one in state.endpoints] if state else [(-np.inf, 0)] * count
        self._views = Views(self, lambda: simulation.now_s, lambda: (simulation.fleet, simulation.endpoints), changes)
        self._ahead = strategy.looks_ahead
        iterations = int(simulation.fleet.look_ahead[:, ITERATIONS].max())
        self._lines = np.zeros((2, iterations + 1), np.int64)
        self._tokens = np.zeros(iterations, np.int64)
        self._overloaded = np.zeros(count, np.int64)
        self._peaks = np.full((2, count), np.nan)
        self._at_once = [cluster.requests_at_once(key) for key in cluster.endpoints]
        self._region = np.array([cluster.regions.index(region) for _, region in cluster.endpoints])
        gpu_types = [spec.gpu_type for spec in cluster.instances]
        fits = set(cluster.engines())
        self._fits = np.array([[(model, gpu) in fits for gpu in gpu_types] for model, _ in cluster.endpoints])
        self._shares = cluster.share_spot
        self._swaps = Swapping(simulation) if cluster.swap_groups() else None

    def follow(self, schedules: Schedules, begins_s: float) -> None:
        """Keep scheduled minimums, each from the time of a start before it. Time 0 is *begins_s*, in seconds since 1970."""
        cluster, self._begins_s = self.simulation.cluster, begins_s
        usual_s = cluster.delays.start_s + cluster.delays.local_weights_s
        starts_s: dict[EndpointKey, float] = {}
        for spec in cluster.instances:
            key = spec.model, spec.region
            starts_s[key] = max(starts_s.get(key, 0.0), usual_s if spec.start_s is None else spec.start_s)
        self._schedules = [
            (at, schedules[key], starts_s[key] + EARLY_S)
            for at, key in enumerate(cluster.endpoints)
            if key in schedules
        ]

    def __call__(self, simulation: Simulation) -> None:
        """Build the views, ask the strategy, carry out its moves. Between the strategy's ticks only the floor is asked."""
        now_s = simulation.now_s
        if self._schedules:
            self._least = self._always.copy()
            for at, schedule, start_s in self._schedules:
                least = max(self._least[at], schedule.minimum(self._begins_s + now_s, start_s))
                self._least[at] = min(least, self._most[at])
        if self._swaps is not None and now_s % EVERY_S == 0:
            self._swaps(simulation)
        if now_s >= self._next_tick_s:
            self._next_tick_s = (now_s // self.strategy.tick_s + 1) * self.strategy.tick_s
            views = self.views(simulation)
            advice = self._advisor.advise(now_s, views) if self._advisor else [None] * len(views)
            self._carry_out(simulation, self.strategy.decide(now_s, views, advice))
        elif self._floor and now_s % self._look_s == 0 and self._may_be_full(simulation):
            self._carry_out(simulation, floor_moves(self.views(simulation), self._floor))

    def _may_be_full(self, simulation: Simulation) -> bool:
        """Whether the floor could act now: it runs often, and views are costly to build."""
        world = simulation.world
        serving = np.ascontiguousarray(world.policies["serving"][: len(self._bounds)])
        return bool(
            self._any_below_floor(
                world.fleet, world.endpoints, world.waiting.size, serving, self._least, self._most,
                simulation.now_s - self._views.changed_s(), self._above, self._cooldown_s, simulation.now_s,
            )
        )  # fmt: skip

    def _carry_out(self, simulation: Simulation, moves: Sequence[Move]) -> None:
        now_s = simulation.now_s
        for move in moves:
            if move.delta > 0:
                done = simulation.scale_out(move.endpoint, move.delta)
            else:
                done = -simulation.cancel(move.endpoint, -move.delta)
                done -= simulation.scale_in(move.endpoint, min(move.drains, done - move.delta))
            if done:
                simulation.world.policies["scaled_s"][move.endpoint] = now_s
                self._views.moved(move.endpoint, move.delta)
            self.moves.append(MadeMove(now_s, move.endpoint, move.delta, done, move.reason, move.by))

    def views(self, simulation: Simulation) -> list[EndpointView]:
        """Return every endpoint as the strategy sees it."""
        return [*self._views().values()]

    def stages(self) -> Stages:
        lives, states = self.simulation.world.lives.instances, self.simulation.states
        stage, since_s = STAGE_OF[states], lives["since_s"]
        # Instances asleep on shared GPUs are woken by a swap, not by scaling.
        stage[(states == State.ASLEEP) & (lives["swap_group"] >= 0)] = Stage.AWAY
        # An instance that is ready at the start counts as ready since long ago, unless a state says since when.
        return self._own(), stage, np.where(since_s != 0.0, since_s, -np.inf)

    def _own(self) -> NDArray[np.int64]:
        """Return the endpoint of each instance; of a donated one, its own."""
        return np.asarray(self.simulation.fleet.endpoint % len(self._bounds), np.int64)

    def loads(self) -> Iterator[tuple[int, EndpointView]]:
        simulation, now_s, count = self.simulation, self.simulation.now_s, len(self._bounds)
        if self._ahead:
            world = simulation.world
            endpoint_outlook(
                world.fleet, world.endpoints, world.waiting, world.engines, self._lines[0], self._lines[1], self._tokens,
                self._overloaded, self._peaks[0], self._peaks[1],
            )  # fmt: skip
        fallbacks, states = simulation.fallbacks, simulation.states
        asked = self.demand.seen(now_s, 0.0 if fallbacks is None else fallbacks.demand_tokens(now_s, count))
        others, donated = np.zeros(count, np.int64), states == State.SPOT
        if self._shares and donated.any():
            near = donated & self._fits & (simulation.fleet.region == self._region[:, None])
            others = near.sum(axis=1) - np.bincount(self._own()[donated], minlength=count)
        short = simulation.reordering.short_instances if simulation.reordering else {}
        due: dict[str, tuple[tuple[float, float], ...]] = {}
        if simulation.holding is not None and self._advisor is not None:
            due = {model: tuple(simulation.holding.holding.work.due(model)) for model in simulation.cluster.models}
        waiting, (peak_sum, peak_most) = simulation.waiting.size.tolist(), self._peaks.tolist()
        for at, (model, region) in enumerate(simulation.cluster.endpoints):
            yield (
                at,
                EndpointView(
                    model,
                    region,
                    spot_other=int(others[at]),
                    min_instances=int(self._least[at]),
                    max_instances=self._bounds[at].max_instances,
                    waiting=waiting[at],
                    tokens_per_s=float(asked[at]),
                    overloaded_instances=int(self._overloaded[at]),
                    peak_kv_sum=peak_sum[at],
                    peak_kv_most=peak_most[at],
                    short_instances=short.get(at, 0),
                    requests_at_once=self._at_once[at],
                    due=due.get(model, ()),
                ),
            )
