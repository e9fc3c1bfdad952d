"""The reactive floor: a full endpoint gets one more instance, whatever else is dead.

It runs once a second in the gateway, which has the live load in memory. Under a model whose strategy is alive it acts only
where the strategy has failed: full despite all instances on the way (`scheduling.scaling.floor_move`), and it never removes
one. Without a live strategy (no automatic policy, or Celery, Redis or the strategy is dead) it acts as the strategy:
SageServe's reactive heuristic, out above 70 %, in below 30 % for a while.

Decisions are made on the event loop from memory; rows are written in separate threads, by `Rows`, so neither a slow
database nor a dead broker holds up a request. The view of each endpoint is published for the strategies in the workers, and
the same exchange reads which of them are alive.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import orjson
import redis.asyncio as aioredis
from django.conf import settings
from redis.exceptions import RedisError

from controlplane.background import spawn
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.reordering import Evicted
from controlplane.dispatch.swapping import Swapping
from controlplane.dispatch.token_accounts import Outlook
from controlplane.dispatch.wire import STRATEGIST_KEY, VIEWS_EXPIRE_S, VIEWS_KEY, as_inputs, as_published
from controlplane.fleet.lifecycle.stages import stage_of
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.jobs.record import Job
from controlplane.tuning.rules import alone, beneath
from scheduling.scaling import EndpointView, alone_move, floor_move, without_timers
from scheduling.scaling.owner import UNCHANGED, Change, Mover
from scheduling.scaling.view import (
    Load,
    Stage,
    count_of_one,
    demand_rate,
    demand_seconds,
    endpoint_view,
    use_now,
)

logger = logging.getLogger(__name__)
REFUSED_HOLD_S = 30.0  # time without a possible move after which requests that wait for an instance are refused
RETRY_S = 2.0  # after a failed move, where nothing serves or the minimum is not met
OWN_COMMANDS_S = 2.0  # period of checks whether a worker took its commands
WATCH_S = 900.0  # duration of those checks after its last move
WORKERS_FIRST_S = 15.0  # time in which a worker would have stopped drained instances
STOP_WAIT_S = 1.0
PAUSE_S = 5.0  # after a database error
COMPLAIN_EVERY_S = 30.0


@dataclass(slots=True)
class EndpointMemory:
    """State of one endpoint between two checks; times on the gateway's clock."""

    changed_s: float
    last: Change = UNCHANGED  # the last change
    serving: int = 0  # ready or coming, at the last check
    draining: int = 0
    alone: dict[str, float] = field(default_factory=dict)  # memory of the floor without a strategy
    busy: bool = False
    restoring: bool = False  # the minimum is being brought back
    refused_since_s: float | None = None  # start of a series of failed moves to more instances
    retry_s: float = -math.inf  # time of the next retry

    def moved(self, delta: int, now_s: float) -> None:
        """Record that the floor itself changes the endpoint by *delta*, so that it is not taken for a change by others."""
        self.changed_s, self.last = now_s, Change(Mover.FLOOR, delta)
        if delta > 0:
            self.serving += delta
        else:
            self.draining -= delta


class Observation:
    """Views of endpoints, from memory.

    *waiting* counts held requests, *outlook* returns the look-ahead, *short* the instances that the global scheduler lacks.
    """

    def __init__(
        self,
        topology: Topology,
        waiting: Callable[[Endpoint], int],
        outlook: Callable[[Endpoint], Outlook],
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        *,
        short: Callable[[Endpoint], int] = lambda endpoint: 0,
    ) -> None:
        self.topology = topology
        self.clock, self.wall_clock = clock, wall_clock
        self._began_s = clock()
        self._waiting, self._outlook, self._short = waiting, outlook, short
        self._memory: dict[int, EndpointMemory] = {}  # by index of the endpoint

    def memory(self, endpoint: int) -> EndpointMemory:
        """Return the memory of the endpoint with that index."""
        memory = self._memory.get(endpoint)
        if memory is None:
            memory = self._memory[endpoint] = EndpointMemory(changed_s=self.clock())
        return memory

    def view(self, endpoint: Endpoint, members: list[Replica], now_s: float) -> EndpointView:
        """Return *endpoint* as strategies see it, from memory alone."""
        topology = self.topology
        fleet, memory = topology.fleet, self.memory(endpoint.index)
        wall_s = self.wall_clock()
        # Instances asleep on shared GPUs are woken by a swap, not by scaling.
        members = [one for one in members if not (one.spec.swap_group and one.spec.state == InstanceState.SLEEPING)]
        stages = [
            stage_of(one.spec.state, wall_s - one.spec.state_changed_at, bool(fleet.accepting[one.slot]))
            for one in members
        ]
        since_s = [now_s - (wall_s - one.spec.state_changed_at) for one in members]
        instances = count_of_one(stages, since_s)
        # A change by another process counts like our own.
        serving, draining = instances.ready + instances.coming, instances.draining
        if serving > memory.serving or draining > memory.draining:
            moving = [at for at, stage in zip(since_s, stages, strict=True) if stage in (Stage.COMING, Stage.DRAINING)]
            memory.changed_s = max(memory.changed_s, min(now_s, max(moving or since_s)))
            memory.last = Change(Mover.ANOTHER, 1 if serving > memory.serving else -1)
        memory.serving, memory.draining = serving, draining
        waiting = self._waiting(endpoint)
        use, kv_use = use_now(fleet, topology.arrays, endpoint.index, waiting, now_s)
        tokens_per_s = demand_tokens_per_s(endpoint, now_s, now_s - self._began_s)
        return endpoint_view(
            endpoint.model,
            endpoint.region,
            instances,
            (endpoint.spec.min_instances, endpoint.spec.max_instances),
            Load(use, kv_use, waiting, tokens_per_s, *self._outlook(endpoint), endpoint.spec.max_num_seqs),
            now_s,
            memory.changed_s,
            short_instances=self._short(endpoint),
            last=memory.last,
        )


def demand_tokens_per_s(endpoint: Endpoint, now_s: float, passed_s: float) -> float:
    """Return tokens a second requested over the last minute, or since the start, *passed_s* ago."""
    first, last = demand_seconds(now_s)
    return float(demand_rate(sum(tokens for second, tokens in endpoint.demand if first <= second < last), passed_s))


class Decision:
    """The floor's decisions; *began_s* is the start of the gateway."""

    def __init__(self, topology: Topology, began_s: float) -> None:
        self.topology = topology
        self._began_s = began_s

    def decide(
        self,
        endpoint: Endpoint,
        view: EndpointView,
        members: list[Replica],
        memory: EndpointMemory,
        now_s: float,
        *,
        strategy_alive: bool,
    ) -> tuple[int, str]:
        """Return the change that the floor wants of *endpoint*, in instances, and why."""
        tuned = endpoint.spec.tuned
        rule = alone(tuned)
        if memory.busy:
            return 0, ""
        if self.below_minimum(endpoint, view, members, memory):
            reason = f"Floor: {endpoint.spec.missing_instances} below its minimum of {view.min_instances}."
            return (1, reason) if now_s >= memory.retry_s else (0, "")
        if endpoint.spec.shares_gpus and view.ready == 0:
            return 0, ""  # a swap brings one up (`swapping`)
        view = view._replace(min_instances=min(view.min_instances, view.instances))  # missing instances are waited for
        settled = now_s - self._began_s >= tuned.FLOOR_SETTLE_S
        if view.ready == 0 or strategy_alive or not settled:
            if view.ready == 0 and now_s < memory.retry_s:
                return 0, ""
            wanted = floor_move(0, view, beneath(tuned), served_elsewhere=self._served(view.model))
            if wanted is not None or strategy_alive or not settled:
                memory.alone = without_timers(memory.alone)
                return (wanted.delta, wanted.reason) if wanted is not None else (0, "")
        made = alone_move(0, view, rule, now_s, memory.alone)
        # An instance that could not be started again stays.
        startable = any(one.spec.launched and one.spec.state == InstanceState.READY for one in members)
        if made is None or (made.drains and not startable):
            return 0, ""
        return made.delta, made.reason

    def below_minimum(
        self, endpoint: Endpoint, view: EndpointView, members: list[Replica], memory: EndpointMemory
    ) -> bool:
        """Whether to bring an instance of the minimum back, under any strategy or none.

        At once where one failed or requests wait. Instances that an operator holds or has cordoned are not missing.
        """
        if not endpoint.spec.missing_instances or not endpoint.spec.launches:
            memory.restoring = False
            return False
        failed = any(replica.spec.state == InstanceState.FAILED and replica.spec.launched for replica in members)
        if failed or view.waiting > 0 or view.since_change_s >= endpoint.spec.tuned.SCALE_COOLDOWN_S:
            memory.restoring = True
        return memory.restoring

    def _served(self, model: str) -> bool:
        """Whether an instance of *model* is ready anywhere."""
        topology = self.topology
        of_model = [endpoint for endpoint in topology.endpoints if endpoint.model == model]
        slots = [replica.slot for endpoint in of_model for replica in topology.members(endpoint)]
        return bool(topology.fleet.accepting[slots].any())


class Publication:
    """Publishes views, and reads which strategies are alive: one exchange with Redis at a time, never awaited."""

    def __init__(self, redis_url: str) -> None:
        self.strategists: frozenset[str] = frozenset()  # models whose strategy is alive
        self._redis = aioredis.from_url(redis_url, socket_timeout=1.0, socket_connect_timeout=1.0)
        self._publishing: asyncio.Task[None] | None = None

    def publish(
        self,
        views: Iterable[EndpointView],
        running: Mapping[str, int],
        left_tokens: Mapping[str, int],
        waiting: Mapping[str, Sequence[float]],
        outcomes: Mapping[str, tuple[int, int]],
        up_s: float,
    ) -> None:
        """Publish *views*, requests *running*, *left_tokens* and *outcomes* by instance, what is *waiting* by model, and the
        gateway's uptime.
        """
        if self._publishing is not None and not self._publishing.done():
            return  # Redis is slow: there will be newer ones
        message = orjson.dumps(
            {
                "ts": time.time(),
                "up_s": up_s,
                "endpoints": [as_published(view) for view in views],
                "running": running,
                "left_tokens": left_tokens,
                "waiting": waiting,
                "outcomes": outcomes,
            }
        )
        self._publishing = spawn(self._exchange(message), "floor publishes")

    async def stop(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
        await self._redis.aclose()

    async def _exchange(self, message: bytes) -> None:
        """Publish the views and read which strategies are alive. Without Redis none is: workers have no broker then."""
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.set(VIEWS_KEY, message, ex=VIEWS_EXPIRE_S)
                pipe.get(STRATEGIST_KEY)
                _, alive = await pipe.execute()
            self.strategists = frozenset(orjson.loads(alive or b"[]"))
        except (RedisError, OSError, ValueError) as error:
            if self.strategists:
                logger.warning("floor: Redis does not answer, so the floor scales alone: %s", error)
            self.strategists = frozenset()


class Rows(Protocol):
    """The rows that the floor changes. Each call runs in a separate thread and raises what the database raises."""

    def move(
        self,
        delta: int,
        model: str,
        region: str,
        reason: str,
        inputs: Mapping[str, Any],
        load: Mapping[str, float],
        to_minimum: bool = False,
        drains: bool = True,
    ) -> object | None:
        """Add an instance (delta 1; *to_minimum* only below it) or remove one (-1); return None if that is impossible.

        Without *drains* a removal only cancels a start.
        """

    def swap(self, instance_id: int, reason: str) -> object | None:
        """Give that instance the GPUs that it shares; return None if it cannot have them."""

    def note_evictions(self, evictions: Sequence[Evicted]) -> None:
        """Write an event for each."""

    def take_up_commands(self, patience_s: float) -> int:
        """Carry out the floor's own commands that waited for a worker for *patience_s*."""

    def finish_drains(self, idle: Iterable[str]) -> int:
        """Stop those of the *idle* instances (by name; nothing runs there) that scaling has drained."""


class Floor:
    """The floor's loop. *owns*: whether this process has the regions; *read_inventory* updates the topology from rows."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        rows: Rows,
        *,
        owns: Callable[[], bool],
        read_inventory: Callable[[], Awaitable[None]],
        job: Job,
    ) -> None:
        self.dispatcher, self.topology, self.clock = dispatcher, dispatcher.topology, dispatcher.clock
        self.rows = rows
        self.job = job
        self._owns, self._read_inventory = owns, read_inventory
        self._began_s = self.clock()
        self.observation = Observation(
            self.topology,
            dispatcher.queue.count,
            dispatcher.outlook,
            self.clock,
            short=dispatcher.reordering.short_instances,
        )
        self.decision = Decision(self.topology, self._began_s)
        self.swapping = Swapping(self.topology, dispatcher.queue, dispatcher.placement.pump, dispatcher.prewarming)
        self.publication = Publication(settings.REDIS_URL)
        self._jobs: set[asyncio.Future[None]] = set()
        self._looking = False
        self._seeing: asyncio.Task[None] | None = None  # keeps a reference, or the loop might drop it
        # One check for what the last run of this process left behind.
        self._next_look_s = self._began_s + self.topology.tuned.FLOOR_PATIENCE_S
        self._watch_until_s = self._next_look_s + OWN_COMMANDS_S
        self._paused_until_s = 0.0
        self._complained_s = -math.inf

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.job.period_s)
            with self.job:
                if self._owns():
                    self.check()

    async def stop(self) -> None:
        """Stop after a moment for moves that are being written; a longer one ends with the process."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=STOP_WAIT_S)
        await self.publication.stop()

    # Once a second

    def check(self) -> None:
        """Check every endpoint, publish the views, and request the moves that are wanted."""
        topology, now_s = self.topology, self.clock()
        members: dict[int, list[Replica]] = {}
        for replica in topology.replicas.values():
            members.setdefault((replica.endpoint.base or replica.endpoint).index, []).append(replica)
        views = {
            endpoint.index: self.observation.view(endpoint, members.get(endpoint.index, []), now_s)
            for endpoint in topology.endpoints
            if topology.serves(endpoint)
        }
        for index, view in views.items():
            if self.observation.memory(index).last != UNCHANGED:
                self.dispatcher.holding.work.scaled(view.model, view.region, self.observation.memory(index).changed_s)
        running = {replica.name: int(topology.fleet.running[replica.slot]) for replica in topology.replicas.values()}
        waiting = self.dispatcher.holding.waiting_work()
        health = {replica.name: replica.health for replica in topology.replicas.values()}
        outcomes = {name: (one.answered, one.failures) for name, one in health.items()}
        self.publication.publish(views.values(), running, self._left_tokens(), waiting, outcomes, now_s - self._began_s)
        evicted = self.dispatcher.reordering.evicted
        if evicted and now_s >= self._paused_until_s:
            self._in_thread(partial(self.rows.note_evictions, [*evicted]))
            evicted.clear()
        if not topology.tuned.FLOOR:
            return
        if now_s >= self._paused_until_s:
            for index, view in views.items():
                endpoint, memory = topology.endpoints[index], self.observation.memory(index)
                refused_s = memory.refused_since_s
                endpoint.can_start = endpoint.spec.launches and (
                    refused_s is None or now_s - refused_s < REFUSED_HOLD_S
                )
                alive = endpoint.model in self.publication.strategists
                replicas = members.get(index, [])
                delta, reason = self.decision.decide(endpoint, view, replicas, memory, now_s, strategy_alive=alive)
                if not delta and not memory.busy:
                    delta, reason = self._wake(endpoint, view, replicas)
                if delta:
                    self._move(endpoint, view, replicas, delta, reason)
            for instance_id, reason in self.swapping.wanted(now_s, time.time()):
                self._in_thread(partial(self.rows.swap, instance_id, reason))
        else:
            self.swapping.keep()
        if self._next_look_s <= now_s < self._watch_until_s and not self._looking:
            self._next_look_s = now_s + OWN_COMMANDS_S
            self._run_own_commands(members)

    def _wake(self, endpoint: Endpoint, view: EndpointView, members: list[Replica]) -> tuple[int, str]:
        """Return the move that wakes an instance before a likely call; those on shared GPUs are woken by a swap."""
        sleeps = any(one.spec.state == InstanceState.SLEEPING and not one.spec.swap_group for one in members)
        if view.ready or view.coming or not sleeps or endpoint.spec.shares_gpus:
            return 0, ""
        call = self.dispatcher.prewarming.wakes(endpoint)
        return (1, self.dispatcher.prewarming.woken(endpoint, call)) if call is not None else (0, "")

    # Carrying out

    def _move(self, endpoint: Endpoint, view: EndpointView, members: list[Replica], delta: int, reason: str) -> None:
        memory = self.observation.memory(endpoint.index)
        memory.busy = True
        memory.moved(delta, self.clock())
        self._watch_until_s = self.clock() + WATCH_S
        load = self._left_tokens()
        logger.info("floor: %+d %s in %s: %s", delta, endpoint.model, endpoint.region, reason)
        to_minimum = self.decision.below_minimum(endpoint, view, members, memory)
        made: list[object] = []

        def move() -> None:
            one, inputs = int(math.copysign(1, delta)), as_inputs(view)
            drains = not view.coming  # while instances start, they are what it removes
            asked = one, endpoint.model, endpoint.region, reason, inputs, load, to_minimum, drains
            while len(made) < abs(delta) and None not in made:
                made.append(self.rows.move(*asked))

        def done() -> None:
            memory.busy = False
            if delta > 0 and made == [None]:
                memory.retry_s = self.clock() + RETRY_S
                memory.refused_since_s = memory.refused_since_s or self.clock()
            elif made:
                memory.refused_since_s = None

        self._in_thread(move, done)

    def _left_tokens(self) -> dict[str, int]:
        """Return remaining tokens by instance: the removable one with the fewest is removed."""
        left = self.topology.fleet.remaining_tokens
        return {replica.name: int(left[replica.slot]) for replica in self.topology.replicas.values()}

    def _run_own_commands(self, members: dict[int, list[Replica]]) -> None:
        """Carry out own commands that no worker took, and stop drained instances while no worker does."""
        wall_s = time.time()
        patience_s = self.topology.tuned.FLOOR_PATIENCE_S
        idle = [
            replica.name
            for group in members.values()
            for replica in group
            if replica.spec.state == InstanceState.DRAINING
            and not replica.requests
            and wall_s - replica.spec.state_changed_at > WORKERS_FIRST_S + patience_s
        ]

        def look() -> None:
            self.rows.take_up_commands(patience_s)
            if idle:
                self.rows.finish_drains(idle)

        def done() -> None:
            self._looking = False

        self._looking = True
        self._in_thread(look, done)

    def _in_thread(self, work: Callable[[], object], done: Callable[[], None] = lambda: None) -> None:
        """Do *work* in a separate thread, then *done* on the event loop.

        Not in Django's one thread for rows, where the ledger is written, and not in a pool, whose threads the process
        would wait for at its end: stopping a server may take a minute.
        """
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()
        self._jobs.add(finished)

        async def see() -> None:
            # The rows must be read before the next decision, or it would be repeated.
            with contextlib.suppress(Exception):
                await self._read_inventory()
            done()
            self._jobs.discard(finished)
            finished.set_result(None)

        def end(error: Exception | None) -> None:
            if error is not None:
                self._refused(error)
            self._seeing = spawn(see(), "floor sees")

        def run() -> None:
            error = None
            try:
                work()
            except Exception as caught:
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(end, error)

        threading.Thread(target=run, name="floor", daemon=True).start()

    def _refused(self, error: Exception) -> None:
        """Handle a database error: retry soon, and log it occasionally."""
        now_s = self.clock()
        self._paused_until_s = now_s + PAUSE_S
        if now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            logger.warning("floor: a move could not be written, it will be tried again: %s", error)
