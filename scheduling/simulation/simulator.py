"""Run a simulation from Python: set up, advance time, decide at control ticks, read the result."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import direct
from scheduling.control.reordering import EVERY_S as REORDER_S
from scheduling.control.reordering import Reordering
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.queueing.eviction import MOST_EVICTIONS
from scheduling.queueing.fair_shares import OUTPUT_WEIGHT
from scheduling.queueing.held import HELD
from scheduling.queueing.ordering import QLM, VTC
from scheduling.queueing.waiting_set import FREE_COUNT, WaitingArrays, grow_waiting, settle
from scheduling.routing.prefix_affinity import Affinity, grow_affinity
from scheduling.routing.routers import LEAST_DELAY
from scheduling.simulation.admission import CHANGED as CHANGED_BY_ADMISSION
from scheduling.simulation.admission import JudgedArrivals
from scheduling.simulation.application_runs import ReleasedCalls
from scheduling.simulation.cluster import loop
from scheduling.simulation.cluster.build import build_world
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.lifecycle import Lives, take_out
from scheduling.simulation.cluster.state_changes import ARRIVE, EVICT, NOTHING
from scheduling.simulation.cluster.world import MAX_ATTEMPTS, Outcome, State, World
from scheduling.simulation.engine.state import (
    ADAPTERS,
    ITERATIONS,
    LEAVING,
    NONE,
    PREEMPTIONS,
    PREFIX_HIT_TOKENS,
    PREFIX_QUERIED_TOKENS,
    RESTORED_TOKENS,
    sequences_in_use,
)
from scheduling.simulation.fallbacks import CHANGED as CHANGED_BY_FALLBACKS
from scheduling.simulation.fallbacks import SimulatedFallbacks
from scheduling.simulation.holding import HeldArrivals
from scheduling.simulation.measures.samples import Samples
from scheduling.simulation.prewarming import SimulatedPrewarming
from scheduling.simulation.result import Result
from scheduling.simulation.simulated_fleet import SimulatedFleet
from scheduling.simulation.state.placing import Fork, place
from scheduling.simulation.waits import SimulatedWaits
from scheduling.simulation.workload.requests import Requests, follow
from scheduling.simulation.workload.runs import RunsToCome


class TimedEvent(NamedTuple):
    """Scheduled intervention in a simulation, in addition to its strategy's moves."""

    at_s: float
    happen: "Callable[[Simulation], None]"


BUSY = (State.READY, State.DRAINING)
OUT_OF_ORDER = (State.FAILED, State.LOST)


class Simulation:
    """One simulation run. The same cluster, requests and seed give a bit-identical result.

    Raises ValueError for requests that are invalid for the cluster. *sample_s*: step of the series, 0 for none. *decisions*:
    keep a log of dispatches. *state*: start with its fleet instead of an idle one; the requests that it holds then precede
    *requests* in `requests` and the result. *runs*: the application runs that `Requests.run` names.
    """

    def __init__(
        self,
        cluster: Cluster,
        requests: Requests,
        *,
        seed: int = 0,
        sample_s: float = 0.0,
        decisions: bool = False,
        state: Fork | None = None,
        runs: RunsToCome | None = None,
    ) -> None:
        self.cluster = cluster
        requests = requests if state is None else follow(state.requests, requests)
        if runs is not None:  # requests of runs come when they can, with the number that their run has then
            requests = requests._replace(arrival_s=np.array(requests.arrival_s), run=np.array(requests.run))
        judges = bool(requests.judged.any())
        changed = (*CHANGED_BY_ADMISSION * judges, *CHANGED_BY_FALLBACKS * bool(cluster.fallbacks))
        # Separate copies of the columns that change.
        self.requests = requests = requests._replace(**{name: np.array(getattr(requests, name)) for name in changed})
        world = build_world(cluster, requests, decisions=decisions, held=0 if state is None else state.requests.count)
        self.lives = Lives(cluster, world, seed)
        self._run_state: Any = world.run_state[0]
        # Values read every second come from arrays of one number: reading a record takes ten times as long.
        self._now_s, self._arrived, self._ended = (world.run_state[name] for name in ("now_s", "arrived", "ended"))
        self._enter = direct(loop.enter)
        self._decisions = decisions
        self._samples = Samples(sample_s)
        self.bound = SimulatedFleet(self)
        """This, as the concerns of `scheduling.control` see it."""
        self.reordering = (
            Reordering(self.bound, cluster.reordering) if (world.policies["ordering"] == QLM).any() else None
        )
        """Global scheduler, if any endpoint has request groups."""
        self.waits = SimulatedWaits(self.bound) if judges or cluster.fallbacks else None
        """Estimates of waits, where anything is decided by them."""
        self.admission = JudgedArrivals(self.waits) if judges and self.waits else None
        """Judge of promises, where any class has them judged."""
        self.fallbacks = SimulatedFallbacks(self.waits) if cluster.fallbacks and self.waits else None
        """Fallbacks of models, where any has one."""
        waits_s = [each.wait_s for each in cluster.fallbacks.values()]
        self._run_state.estimates = judges or any(each is not None for each in waits_s)
        self.reordered_s = 0.0  # when the global scheduler acted last
        may_hold = judges and not all(terms.interactive for terms in cluster.classes)
        self.holding = HeldArrivals(self.bound, state) if may_hold or (requests.held & HELD).any() else None
        """Queue manager for non-interactive work, if any request is held or may be degraded to such a class."""
        self.runs = None if runs is None else ReleasedCalls(self.bound, runs)
        """Application runs, if there are any."""
        prewarming = SimulatedPrewarming(self.bound, self.runs)
        self.prewarming = prewarming if prewarming.needed else None
        """Prewarming, if there is anything that can be cold."""
        if state is not None:
            self._begin(state)
        self.control()  # compiles everything before time is measured

    def _begin(self, state: Fork) -> None:
        self.make_room(state.slots)
        self.bound.share_queues()
        place(self.world, state)
        if state.groups is not None and self.reordering is not None:
            self.reordered_s = state.state.swept_s
            state.resume(self.reordering, self.waiting.groups.groups.size)
        if self.waits is not None:
            self.waits.resume(state)

    @property
    def world(self) -> World:
        """All arrays. After time has passed this is another tuple, of the same arrays except those that had to grow."""
        return self.lives.world

    @property
    def now_s(self) -> float:
        return self._now_s.item()  # type: ignore[no-any-return]

    @property
    def fleet(self) -> FleetArrays:
        return self.world.fleet

    @property
    def endpoints(self) -> EndpointArrays:
        return self.world.endpoints

    @property
    def waiting(self) -> WaitingArrays:
        return self.world.waiting

    @property
    def states(self) -> NDArray[np.int8]:
        """`State` by instance."""
        return self.lives.state

    def endpoint_of(self, instance: int) -> int:
        """Return the endpoint of *instance* in the cluster, whether it is donated or not."""
        return int(self.fleet.endpoint[instance]) % len(self.cluster.endpoints)

    @property
    def arrived(self) -> int:
        """Requests that have arrived."""
        return self._arrived.item()  # type: ignore[no-any-return]

    @property
    def ended(self) -> int:
        """Requests that are done, failed or refused."""
        return self._ended.item()  # type: ignore[no-any-return]

    def advance(self, until_s: float) -> bool:
        """Process all events before *until_s*, excluding those at it. Return whether all requests have ended."""
        if not until_s >= self.now_s:
            raise ValueError(f"until_s ({until_s}) is before now ({self.now_s})")
        count = self.requests.count
        while True:
            comes_s = max(self.runs.next_s(), self.now_s) if self.runs is not None else np.inf
            # Without further arrivals or events, waiting requests wait for ever, in any order.
            moves = self._arrived.item() < count or comes_s < np.inf or self.world.events.time_s.item(1) < np.inf
            sample_s = self._samples.next_s
            reorder_s = self.reordered_s + REORDER_S if self.reordering is not None and moves else np.inf
            rank_s = self.runs.refresh_s(self.now_s) if self.runs is not None and moves else np.inf
            held_s = self.holding.next_s(self.world, self.now_s) if self.holding is not None else np.inf
            warm_s = max(self.prewarming.next_s, self.now_s) if self.prewarming is not None and moves else np.inf
            stop_s = min(until_s, sample_s, reorder_s, held_s, rank_s, comes_s, warm_s)
            reason = self._enter(self.world, float(stop_s), NONE, NONE, loop.TIME, NOTHING, NONE, NONE)
            if reason == loop.FULL:
                self._grow()
            elif reason == loop.DRAINED:
                self.lives.settle(int(self._run_state.called_instance))
            elif reason == loop.DOOR:
                self._estimate()
            elif reason == loop.FALL_BACK:
                self._ask_fallbacks()
            elif reason == loop.SCALE:
                self._reach_out(int(self._run_state.called_endpoint))
            elif reason == loop.STEP and self.runs is not None:
                self._run_state.ended += self.runs.record_completions(self.world, self.now_s)
            elif reason == loop.UNTIL and self.runs is not None and comes_s < np.inf and stop_s == comes_s:
                self.control()
                self.runs.release_next(self.world, self.now_s, self._arrive)
            elif reason == loop.UNTIL and self.runs is not None and rank_s < np.inf and stop_s == rank_s:
                self.control()
                for endpoint in self.runs.refresh_ranks():
                    self.control(endpoint)
            elif reason == loop.UNTIL and self.prewarming is not None and warm_s < np.inf and stop_s == warm_s:
                self.control()
                self.prewarming.act(self.world, self.now_s)
            elif reason == loop.UNTIL and self.holding is not None and held_s < np.inf and stop_s == held_s:
                self.holding.act(self.world)
            elif reason == loop.UNTIL and self.reordering is not None and reorder_s < np.inf and stop_s == reorder_s:
                self.reordered_s = reorder_s
                self.reordering.act()
            elif reason == loop.UNTIL and sample_s < np.inf and stop_s == sample_s:
                self.control()
                self._samples.take(world=self.world, states=self.states)
            else:
                if reason != loop.ALL_DONE and self.now_s < np.inf:
                    self.control()
                return bool(reason == loop.ALL_DONE)

    def _estimate(self) -> None:
        """Estimate the wait of the request at the door, if any, and decide whether it stays and on which terms."""
        request, self._run_state.at_door = int(self._run_state.at_door), NONE
        if request == NONE or self.waits is None:
            return
        self.waits.refresh()
        if self.fallbacks is not None and self.fallbacks.queued(request):
            return
        if self.world.outcomes["attempts"][request] > 0:
            return
        if self.admission is not None and self.requests.judged[request]:
            self.admission.judge(request)
        else:
            self.waits.control.estimated(request)

    def _arrive(self, request: int) -> None:
        """Let *request* arrive: one of an application run, or one for which fallbacks were asked."""
        reason = self._enter(self.world, np.inf, NONE, NONE, loop.CONTROL, ARRIVE, request, NONE)
        if reason == loop.SCALE:
            self._reach_out(int(self._run_state.called_endpoint))
        elif reason == loop.FALL_BACK:
            self._ask_fallbacks()

    def _ask_fallbacks(self) -> None:
        """Decide whether fallbacks of models serve the request that comes, or those that wait where the sweep is."""
        request, self._run_state.may_fall_back = int(self._run_state.may_fall_back), NONE
        if self.fallbacks is None:
            return
        if request == NONE:
            self.fallbacks.sweep(int(self._run_state.sweeping))
            return
        self.control()
        self.fallbacks.decide(request)
        self._run_state.asked_fallback = request
        self._arrive(request)

    def _reach_out(self, endpoint: int) -> None:
        """Borrow a lent instance of another model: the reactive trigger wants one more than *endpoint* has itself."""
        self.lives.reach_out(endpoint)
        self._run_state.scale_outs += 1
        self.world.policies[endpoint].scaled_s = self.now_s

    def run(
        self,
        on_tick: Callable[["Simulation"], None] | None = None,
        tick_s: float = 60.0,
        until_s: float = np.inf,
        progress: Callable[[int, int], None] | None = None,
        timed_events: "Sequence[TimedEvent]" = (),
    ) -> Result:
        """Run to the end of the last request, or *until_s*, calling *on_tick* at every multiple of *tick_s*.

        *progress* is called at each tick with the requests ended and the total; each of *timed_events*, in order of time, at
        its own time, before the ticks of that time. Raises RuntimeError if requests wait for ever.
        """
        if not 0 < tick_s < np.inf:
            raise ValueError(f"tick_s must be a number above 0, not {tick_s}")
        ticks, to_come = int(self.now_s // tick_s) + 1, deque(timed_events)
        while True:
            tick_at_s = ticks * tick_s if on_tick or progress else np.inf
            stop_s = min(tick_at_s, to_come[0].at_s if to_come else np.inf, until_s)
            if self.advance(stop_s):
                if self.runs is not None:
                    self.runs.end_other_units(until_s)
                break
            if stop_s == np.inf:
                raise RuntimeError(
                    f"{len(self.requests.arrival_s) - self.ended} requests wait for ever:"
                    " no instance that could take them is ready or will be"
                )
            if stop_s == until_s:
                break
            while to_come and to_come[0].at_s <= stop_s:
                to_come.popleft().happen(self)
            if stop_s < tick_at_s:
                continue
            if on_tick:
                on_tick(self)
            if progress:
                progress(self.ended, int(self.requests.arrival_s.size))
            ticks += 1
        return self.result()

    def _grow(self) -> None:
        world = self.world
        waiting, held = world.waiting, world.held
        if waiting.counters[FREE_COUNT] <= world.engines.counters[LEAVING]:
            capacity = 2 * held.size
            waiting, held = grow_waiting(waiting, capacity), np.concatenate([held, np.zeros_like(held)])
        decisions, run_state = world.decisions, self._run_state
        if decisions.size and decisions.size - run_state.decisions <= waiting.key.size:
            decisions = np.concatenate([decisions, np.zeros(decisions.size + waiting.key.size, decisions.dtype)])
        self._replace(waiting=waiting, held=held, decisions=decisions, affinity=self._grown_affinity(held.size))
        self.lives.make_room()

    def _grown_affinity(self, slots: int) -> Affinity:
        """Return the world's affinity table, grown for the waiting requests in *slots* and a spare if it is in use."""
        affinity, noted = self.world.affinity, (self.world.policies["routing"] == LEAST_DELAY).any()
        return grow_affinity(affinity, affinity.matched.size, slots + 1) if noted else affinity

    def _replace(self, **arrays: Any) -> None:
        self.lives.world = self.world._replace(**arrays)

    def scale_out(self, endpoint: int, count: int = 1) -> int:
        """Start adding *count* instances to *endpoint*, nearest source first; return how many were started."""
        begun = self._repeat(self.lives.scale_out, endpoint, count)
        self._run_state.scale_outs += begun
        self.control(endpoint)
        return begun

    def scale_in(self, endpoint: int, count: int = 1) -> int:
        """Drain the *count* least loaded instances of *endpoint* into spot; return how many there were."""
        begun = self._repeat(self.lives.scale_in, endpoint, count)
        self._run_state.scale_ins += begun
        return begun

    def cancel(self, endpoint: int, count: int = 1) -> int:
        """Cancel *count* starts of *endpoint*, those farthest from ready; return how many there were."""
        begun = self._repeat(self.lives.cancel, endpoint, count)
        self._run_state.scale_ins += begun
        return begun

    def _repeat(self, change: Callable[[int], bool], endpoint: int, count: int) -> int:
        """Make *change* at *endpoint* up to *count* times; return how often it was possible."""
        if not 0 <= endpoint < len(self.cluster.endpoints):
            raise ValueError(f"there is no endpoint {endpoint}; there are {len(self.cluster.endpoints)}")
        begun = 0
        while begun < count and change(endpoint):
            begun += 1
        return begun

    def fail(self, instance: int, repair_s: float | None = None) -> int:
        """Fail *instance* and return how many of its requests were queued again.

        Those are the requests without output so far, or all requests of a donated instance and where request groups make
        streams evictable. The instance is repaired after *repair_s* (infinity: never; None: by the cluster's delays), and
        loads its weights again. One that drains for another model is not: that is loaded at once, as in the live fleet.
        """
        self._check_instance(instance, *(state for state in State if state not in (*OUT_OF_ORDER, State.EMPTY)))
        lasts_s = self._repair_s(repair_s)
        if self.waits is not None:
            self.waits.refresh()
        again, lent = 0, self.fleet.endpoint[instance] != self.endpoint_of(instance)
        grouped = lent or self.waiting.groups.limit[self.fleet.endpoint[instance]] > 0
        self.make_room(int(self.fleet.running[instance]))
        given = self.lives.fail(instance, float(lasts_s))
        for request, emitted_tokens, expected_tokens in take_out(self.world, instance):
            outcome = self.world.outcomes[request]
            self._settle(request, emitted_tokens - expected_tokens)
            if self.fallbacks is not None and not emitted_tokens and self.fallbacks.failed(request):
                again += 1
                continue
            attempts = outcome["attempts"] - outcome["evictions"]
            attempts = attempts if self.fallbacks is None else self.fallbacks.attempts(request)
            may = (grouped or not emitted_tokens) and attempts < MAX_ATTEMPTS
            if may and emitted_tokens:
                self._room_to_keep()
                self.world.kept_tokens[request] += emitted_tokens
            if may and self.control(request=request) >= 0:
                again += 1
                self._estimate()
            else:
                self.world.outcomes[request]["state"] = Outcome.FAILED
                if self.requests.run[request if self.requests.run.size > 1 else 0] >= 0:
                    self.world.ended_in_runs[self._run_state.ended_in_runs] = request
                    self._run_state.ended_in_runs += 1
                self._run_state.failed += 1
                self._run_state.ended += 1
        self._run_state.requeued += again
        if given:
            self.lives.settle(instance)
        return again

    def _settle(self, request: int, more_tokens: int) -> None:
        """Charge the tenant of *request*, whose instance failed, for *more_tokens* of output than were expected of it."""
        shares, endpoint = self.waiting.shares, int(self.world.outcomes[request]["endpoint"])
        if shares.ordering[endpoint] == VTC:
            tenant = int(self.requests.tenant[request])
            settle(self.waiting, endpoint, tenant, OUTPUT_WEIGHT * more_tokens / float(shares.weight[tenant]), -np.inf)

    def lose(self, instance: int, repair_s: float | None = None) -> None:
        """Lose the machine of *instance*, running or not; nothing serves there until it is back, after *repair_s*.

        A place that is already out of order stays so until the later of the two times.
        """
        lasts_s, state = self._repair_s(repair_s), State(self.states[instance])
        if state in OUT_OF_ORDER:
            times = self.world.events.time_s
            lasts_s = max(lasts_s, float(times[times.size // 2 + self.states.size + instance]) - self.now_s)
        if state in (State.EMPTY, State.LOST):
            self.lives.lose(instance, lasts_s)
        elif state == State.FAILED:
            self.lives.fail(instance, lasts_s)
        else:
            self.world.lives.instances["goal_endpoint"][instance] = -1  # nothing is loaded there until it is back
            self.fail(instance, lasts_s)

    def _repair_s(self, repair_s: float | None) -> float:
        lasts_s = self.cluster.delays.repair_s if repair_s is None else repair_s
        if not lasts_s >= 0:
            raise ValueError(f"repair_s must be at least 0, not {repair_s}")
        return float(lasts_s)

    def redeploy(self, instance: int, endpoint: int, remote: bool = False) -> None:
        """Drain *instance*, then load the model of *endpoint*; *remote*: the weights come from remote storage."""
        self._check_instance(instance, *BUSY, State.SPOT)
        if self.cluster.instances[instance].sharing is not None:
            raise ValueError(f"instance {instance} shares its GPUs: swap to another of its group")
        model, region = self.cluster.endpoints[endpoint]
        if self.cluster.regions[self.fleet.region[instance]] != region:
            raise ValueError(f"instance {instance} is not in {region}")
        gpu_type = self.cluster.instances[instance].gpu_type
        if (model, gpu_type) not in self.cluster.engines():
            raise ValueError(f"instance {instance}: nothing says how {model} runs on its GPU type, {gpu_type!r}")
        self.lives.redeploy(instance, endpoint, remote=remote)

    def evict(self, request: int) -> None:
        """Evict *request* from its instance at the end of the current iteration; it waits again and keeps its output.

        Raises ValueError if no instance has it, it is already leaving, or it was evicted too often.
        """
        engines, outcome = self.world.engines, self.world.outcomes[request]
        mine = sequences_in_use(engines)
        mine = mine[engines.sequences["request"][mine] == request]
        if not mine.size or engines.sequences["evicted"][mine[0]] or outcome["evictions"] >= MOST_EVICTIONS:
            raise ValueError(f"request {request} cannot be evicted: no instance has it, it leaves, or it was too often")
        self._room_to_keep()
        loop.change(self.world, EVICT, int(mine[0]))

    def _room_to_keep(self) -> None:
        if self.world.kept_tokens.size < self.requests.arrival_s.size:
            self._replace(kept_tokens=np.zeros(self.requests.arrival_s.size, np.int32))

    def control(self, endpoint: int = -1, request: int = -1, source: int = loop.CONTROL) -> int:
        """Update the fleet arrays as *source* sees the present, then pump *endpoint*, or queue *request* there or again.

        Returns the endpoint, -1 for none.
        """
        return self._enter(self.world, np.inf, int(endpoint), int(request), int(source), NOTHING, NONE, NONE)

    def make_room(self, count: int) -> None:
        while self.world.waiting.counters[FREE_COUNT] < count:
            held = np.concatenate([self.world.held, np.zeros_like(self.world.held)])
            affinity = self._grown_affinity(held.size)
            self._replace(waiting=grow_waiting(self.world.waiting, held.size), held=held, affinity=affinity)

    def _check_instance(self, instance: int, *allowed: State) -> None:
        if not 0 <= instance < self.states.size:
            raise ValueError(f"there is no instance {instance}; there are {self.states.size}")
        state = State(self.states[instance])
        if state not in allowed:
            raise ValueError(f"instance {instance} is {state.name}, not {' or '.join(each.name for each in allowed)}")

    def result(self) -> Result:
        """Return the result so far."""
        world, run_state = self.world, self._run_state
        sums = ("events", "arrived", "ended", "forwarded", "requeued", "refused", "expired", "rehomed", "failed")
        counted = (*sums, "evictions", "scale_outs", "scale_ins", "spot_served", "spot_evicted", "spot_ended")
        outcomes, decisions = world.outcomes, world.decisions[: run_state.decisions].copy()
        if world.policies.size > len(self.cluster.endpoints):  # donated instances count where they are from
            outcomes = outcomes.copy()
            for records in (outcomes, decisions):
                of = records["endpoint"]
                records["endpoint"] = np.where(of < 0, of, of % len(self.cluster.endpoints))
        return Result(
            cluster=self.cluster,
            requests=self.requests,
            outcomes=outcomes,
            state_s=self.lives.state_s(self.now_s),
            counters={name: int(run_state[name]) for name in counted}
            | {
                "iterations": int(world.engines.counters[ITERATIONS]),
                "preemptions": int(world.engines.counters[PREEMPTIONS]),
                "prefix_queried_tokens": int(world.engines.counters[PREFIX_QUERIED_TOKENS]),
                "prefix_hit_tokens": int(world.engines.counters[PREFIX_HIT_TOKENS]),
                "restored_tokens": int(world.engines.counters[RESTORED_TOKENS]),
                **{
                    f"adapter_{name}": int(world.engines.counters[ADAPTERS + tier])
                    for tier, name in enumerate(("not_loaded", "in_memory", "on_gpu"))
                },
                "redeploys": self.lives.redeploys,
                "swaps": int(world.lives.groups["swaps"].sum()),
                "reorderings": self.reordering.reordered if self.reordering else 0,
                "released": self.holding.holding.release_count if self.holding else 0,
            }
            | (self.prewarming.counters() if self.prewarming else {})
            | (self.runs.counters(self.now_s) if self.runs else {})
            | (self.admission.counters() if self.admission else {})
            | (self.fallbacks.counters() if self.fallbacks else {}),
            runs=self.runs.outcomes() if self.runs else None,
            asked_class=self.admission.asked_class if self.admission else None,
            refused_at_door=self.admission.refused if self.admission else None,
            admitted_late=self.admission.late if self.admission else None,
            series=self._samples.series(),
            decisions=decisions if self._decisions else None,
            changes=self.lives.changes(),
            end_s=self.now_s,
        )
