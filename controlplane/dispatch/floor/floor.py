"""The reactive floor: an endpoint that is full gets an instance more, whoever else is dead.

It runs in the gateway, which has the live load in memory, and looks once a second. Under a model whose strategy is alive
it acts only where the strategy has failed: full with all that is on the way (`scheduling.scaling.floor_move`), and it
never takes away. Where there is none (no automatic policy, or Celery, Redis or the strategy is dead) it is the
strategy: the compiled trigger of SageServe's reactive heuristic, out above 70 %, in below 30 % for a while.

Decisions are made on the event loop from memory; rows are written in threads of its own, by the `Rows` that it is given,
so neither a slow database nor a dead broker holds up a request. What it sees of each endpoint it publishes for the
strategies in the workers, in the same breath in which it reads which of them are alive.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import orjson
import redis.asyncio as aioredis
from django.conf import settings
from redis.exceptions import RedisError

from controlplane.dispatch.live_fleet.lookahead import Outlook
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.port import Submit
from controlplane.dispatch.wire import DEMAND_S, STRATEGIST_KEY, VIEWS_EXPIRE_S, VIEWS_KEY, as_inputs
from controlplane.fleet.lifecycle.states import COMING, InstanceState
from controlplane.jobs.record import Job
from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet
from scheduling.routing.regions import pressure
from scheduling.scaling import FLOOR, EndpointView, Reactive, floor_move, reactive_trigger
from scheduling.scaling.endpoint import GRACE_S, percent

logger = logging.getLogger(__name__)
PERIOD_S = 1.0
ALONE = Reactive(min_instances=0)
"""Marks where no strategy is alive; the bounds are each endpoint's own."""
BENEATH = FLOOR
"""Marks beneath a strategy that is."""
REFUSED_HOLD_S = 30.0  # moves that cannot be made for so long: what waits for an instance is turned away
RETRY_S = 2.0  # after a move that could not be made, where nothing serves or the minimum is not there
EASE_S = 60.0  # use stays below the mark for so long before the floor takes one away
SETTLE_S = 120.0  # after the start, until what little runs means that little is asked for
COMING_LIMIT_S = 1800.0  # what has been loading for so long is not on its way any more
OWN_COMMANDS_S = 2.0  # how often it looks whether a worker took its commands
WATCH_S = 900.0  # and for how long after its last move
WORKERS_FIRST_S = 15.0  # in which a worker would have stopped what has drained
STOP_WAIT_S = 1.0
PAUSE_S = 5.0  # after the database refused
COMPLAIN_EVERY_S = 30.0


@dataclass(slots=True)
class _Memory:
    """What the floor remembers of one endpoint; times on the gateway's clock."""

    changed_s: float
    members: int = 0
    easy_since_s: float | None = None
    busy: bool = False
    restoring: bool = False  # the minimum is being brought back
    refused_since_s: float | None = None  # moves to more could not be made since
    retry_s: float = -math.inf  # when the next is tried
    demand: deque[tuple[int, int]] = field(default_factory=deque)  # (second, tokens asked for)


def warm_up() -> None:
    """Load the floor's kernels from the cache, or compile them: before serving, so that no turn stops for it."""
    fleet, endpoints = allocate_fleet(1), allocate_endpoints(1, 1)
    pressure(fleet, endpoints, 0, 0)
    reactive_trigger(fleet, endpoints, 0, 0, 1, 60.0, ALONE.out_above, ALONE.in_below, ALONE.cooldown_s, 1, 1)


class Rows(Protocol):
    """What the floor has done to rows. Each is called in a thread of its own; they raise what the database raises."""

    def move(
        self,
        delta: int,
        model: str,
        region: str,
        reason: str,
        inputs: Mapping[str, Any],
        load: Mapping[str, float],
        to_minimum: bool = False,
    ) -> object | None:
        """One instance more (delta 1; *to_minimum* only below it) or fewer (-1); None if it cannot be made."""

    def take_up_commands(self, patience_s: float) -> int:
        """Carry out the floor's own commands that waited for a worker for *patience_s*."""

    def finish_drains(self, idle: Iterable[str]) -> int:
        """Stop those of the instances *idle* (names, nothing runs there) that scaling has drained."""


class Floor:
    """*waiting* says how many requests are held for an endpoint, *outlook* what its look-ahead maps foresee, *owns* whether
    this process has the regions; *read_inventory* lets the topology agree with the rows."""

    def __init__(
        self,
        topology: Topology,
        rows: Rows,
        *,
        waiting: Callable[[Endpoint], int],
        outlook: Callable[[Endpoint], Outlook],
        owns: Callable[[], bool],
        read_inventory: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
        job: Job,
    ) -> None:
        self.topology = topology
        self.rows = rows
        self.clock = clock
        self.job = job
        self._waiting, self._outlook = waiting, outlook
        self._owns, self._read_inventory = owns, read_inventory
        self.strategists: frozenset[str] = frozenset()  # models whose strategy is alive
        self._memory: dict[int, _Memory] = {}
        self._jobs: set[asyncio.Future[None]] = set()
        self._looking = False
        self._seeing: asyncio.Task[None] | None = None  # held, or the loop might drop it
        self._publishing: asyncio.Task[None] | None = None
        self._redis = aioredis.from_url(settings.REDIS_URL, socket_timeout=1.0, socket_connect_timeout=1.0)
        self._began_s = clock()
        # One look for what the last run of this process left behind.
        self._next_look_s = self._began_s + settings.FLOOR_PATIENCE_S
        self._watch_until_s = self._next_look_s + OWN_COMMANDS_S
        self._paused_until_s = 0.0
        self._complained_s = -math.inf

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            with self.job:
                if self._owns():
                    self.turn()

    async def stop(self) -> None:
        """Let go, after a moment for moves that are being written; a longer one ends with the process."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=STOP_WAIT_S)
        if self._publishing is not None:
            self._publishing.cancel()
            await asyncio.gather(self._publishing, return_exceptions=True)
        await self._redis.aclose()

    def arrived(self, asked: Submit) -> None:
        """Count a request's tokens as demand of the endpoint that its caller would have first, whoever serves it."""
        candidates = self.topology.candidates(asked.model, asked.region)
        if not candidates.size:
            return
        demand = self._of(int(candidates[0])).demand
        second, tokens = int(self.clock()), asked.prompt_tokens + int(asked.predicted_tokens)
        if demand and demand[-1][0] == second:
            demand[-1] = (second, demand[-1][1] + tokens)
        else:
            demand.append((second, tokens))

    # Once a second

    def turn(self) -> None:
        """Look at every endpoint, publish what there is to see, and ask for the moves that are wanted."""
        topology, now_s = self.topology, self.clock()
        members: dict[int, list[Replica]] = {}
        for replica in topology.replicas.values():
            members.setdefault(replica.endpoint.index, []).append(replica)
        views = {
            endpoint.index: self.view(endpoint, members.get(endpoint.index, []), now_s)
            for endpoint in topology.endpoints
            if topology.serves(endpoint)
        }
        self._publish(views, members)
        if not settings.FLOOR:
            return
        if now_s >= self._paused_until_s:
            for index, view in views.items():
                endpoint = topology.endpoints[index]
                refused_s = self._of(index).refused_since_s
                endpoint.can_start = endpoint.spec.launches and (
                    refused_s is None or now_s - refused_s < REFUSED_HOLD_S
                )
                delta, reason = self.decide(endpoint, view, members.get(index, []), now_s)
                if delta:
                    self._move(endpoint, view, members.get(index, []), delta, reason)
        if self._next_look_s <= now_s < self._watch_until_s and not self._looking:
            self._next_look_s = now_s + OWN_COMMANDS_S
            self._look_after_own(members)

    def view(self, endpoint: Endpoint, members: list[Replica], now_s: float) -> EndpointView:
        """*endpoint* as strategies see it, from memory alone."""
        topology = self.topology
        fleet, memory = topology.fleet, self._of(endpoint.index)
        accepting = [replica.slot for replica in members if fleet.accepting[replica.slot]]
        wall_s = time.time()
        coming = sum(
            replica.spec.state in COMING and wall_s - replica.spec.state_changed_at < COMING_LIMIT_S
            for replica in members
        )
        draining = sum(replica.spec.state == InstanceState.DRAINING for replica in members)
        # Somebody added or drained: that is a change as if it were our own.
        if len(accepting) + coming - draining != memory.members:
            if len(accepting) + coming - draining > memory.members or draining:
                memory.changed_s = max(memory.changed_s, now_s - 1.0)
            memory.members = len(accepting) + coming - draining
        ready_at = max(
            (one.spec.state_changed_at for one in members if one.spec.state == InstanceState.READY), default=-math.inf
        )
        waiting, outlook = self._waiting(endpoint), self._outlook(endpoint)
        kv_capacity = int(fleet.kv_capacity_tokens[accepting].sum())
        return EndpointView(
            model=endpoint.model,
            region=endpoint.region,
            ready=len(accepting),
            coming=coming,
            draining=draining,
            spot=sum(replica.spec.state == InstanceState.SLEEPING for replica in members),
            spot_other=0,
            min_instances=endpoint.spec.min_instances,
            max_instances=endpoint.spec.max_instances,
            use=float(pressure(fleet, topology.arrays, endpoint.index, waiting)),
            waiting=waiting,
            kv_use=int(fleet.kv_tokens[accepting].sum()) / kv_capacity if kv_capacity else 0.0,
            tokens_per_s=self._demand(memory, now_s),
            since_change_s=now_s - memory.changed_s,
            overloaded_instances=outlook.overloaded_instances,
            peak_kv_sum=outlook.peak_kv_sum,
            peak_kv_most=outlook.peak_kv_most,
            since_ready_s=wall_s - ready_at,
        )

    def decide(self, endpoint: Endpoint, view: EndpointView, members: list[Replica], now_s: float) -> tuple[int, str]:
        """The move that the floor wants of *endpoint* now: 1, -1 or 0, and why."""
        memory = self._of(endpoint.index)
        easy = view.use < ALONE.in_below and not view.waiting
        memory.easy_since_s = (memory.easy_since_s or now_s) if easy else None
        if memory.busy:
            return 0, ""
        if self._below_minimum(endpoint, view, members):
            reason = f"Floor: {endpoint.spec.missing_instances} fewer than the {view.min_instances} it must have."
            return (1, reason) if now_s >= memory.retry_s else (0, "")
        if view.ready == 0:
            return self._from_nothing(view) if now_s >= memory.retry_s else (0, "")
        if endpoint.model in self.strategists:
            least = min(view.min_instances, view.instances)  # what is missing is waited for
            wanted = floor_move(0, replace(view, min_instances=least), BENEATH)
            return (1, wanted.reason) if wanted is not None else (0, "")
        topology = self.topology
        delta = reactive_trigger(
            topology.fleet,
            topology.arrays,
            endpoint.index,
            view.waiting,
            view.instances,
            float(view.since_change_s),
            ALONE.out_above,
            ALONE.in_below,
            ALONE.cooldown_s,
            min(view.min_instances, view.instances),
            view.max_instances,
        )
        return self._with_patience(int(delta), view, members, memory, now_s)

    def _below_minimum(self, endpoint: Endpoint, view: EndpointView, members: list[Replica]) -> bool:
        """Whether an instance of the minimum is to be brought back now, under any strategy or none.

        At once where one failed or requests wait. After a stop by hand there is a moment to lower the minimum.
        """
        memory = self._of(endpoint.index)
        if not endpoint.spec.missing_instances or not endpoint.spec.launches:
            memory.restoring = False
            return False
        failed = any(replica.spec.state == InstanceState.FAILED and replica.spec.launched for replica in members)
        if failed or view.waiting > 0 or view.since_change_s >= ALONE.cooldown_s:
            memory.restoring = True
        return memory.restoring

    def _from_nothing(self, view: EndpointView) -> tuple[int, str]:
        """Nothing is ready here. If nobody serves the model and it is asked for, one has to come."""
        if view.coming or not (view.waiting or (view.tokens_per_s > 0 and view.since_change_s >= ALONE.cooldown_s)):
            return 0, ""
        topology = self.topology
        of_model = [endpoint for endpoint in topology.endpoints if endpoint.model == view.model]
        slots = [replica.slot for endpoint in of_model for replica in topology.members(endpoint)]
        if topology.fleet.accepting[slots].any():
            return 0, ""  # another region serves it, and grows when it is full
        return 1, f"Floor: {view.model} is asked for and no instance of it is ready anywhere."

    def _with_patience(
        self, delta: int, view: EndpointView, members: list[Replica], memory: _Memory, now_s: float
    ) -> tuple[int, str]:
        """*delta* of the trigger, unless what is on the way is enough, or it is too early to take one away."""
        if delta > 0:
            soon = view.use * view.ready / view.instances
            if soon <= ALONE.out_above:
                return 0, ""
            coming = f", {percent(soon)} with the {view.coming} on the way" if view.coming else ""
            waiting = f" with {view.waiting} waiting" if view.waiting else ""
            return 1, f"Floor: use is {percent(view.use)}{waiting}{coming}, above {percent(ALONE.out_above)}."
        if delta < 0:
            easy_s = now_s - memory.easy_since_s if memory.easy_since_s is not None else 0.0
            if (
                easy_s < EASE_S
                or view.since_change_s < EASE_S
                or view.since_ready_s < GRACE_S
                or now_s - self._began_s < SETTLE_S
                or view.coming
                or view.draining
                or not any(replica.spec.launched and replica.spec.state == InstanceState.READY for replica in members)
                # the others must have room for what runs on it
                or view.use * view.ready / max(view.ready - 1, 1) > ALONE.out_above
            ):
                return 0, ""
            return -1, f"Floor: use is {percent(view.use)}, below {percent(ALONE.in_below)} for {easy_s:.0f} s."
        return 0, ""

    # Doing it

    def _move(self, endpoint: Endpoint, view: EndpointView, members: list[Replica], delta: int, reason: str) -> None:
        memory = self._of(endpoint.index)
        memory.busy, memory.changed_s, memory.easy_since_s = True, self.clock(), None
        self._watch_until_s = self.clock() + WATCH_S
        fleet = self.topology.fleet
        load = {replica.name: float(fleet.kv_tokens[replica.slot]) for replica in members}
        logger.info("floor: %+d %s in %s: %s", delta, endpoint.model, endpoint.region, reason)
        to_minimum = self._below_minimum(endpoint, view, members)
        made: list[object] = []

        def move() -> None:
            made.append(
                self.rows.move(delta, endpoint.model, endpoint.region, reason, as_inputs(view), load, to_minimum)
            )

        def done() -> None:
            memory.busy = False
            if delta > 0 and made == [None]:
                memory.retry_s = self.clock() + RETRY_S
                memory.refused_since_s = memory.refused_since_s or self.clock()
            elif made:
                memory.refused_since_s = None

        self._in_thread(move, done)

    def _look_after_own(self, members: dict[int, list[Replica]]) -> None:
        """Carry out own commands that no worker took, and stop what has drained empty while no worker does."""
        wall_s = time.time()
        patience_s = settings.FLOOR_PATIENCE_S
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

    def _in_thread(self, work: Callable[[], object], done: Callable[[], None]) -> None:
        """Do *work* in a thread of its own, then *done* on the event loop.

        Not in Django's one thread for rows, where the ledger is written, and not in a pool, whose threads the process
        would wait for at its end: stopping a server may take a minute.
        """
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()
        self._jobs.add(finished)

        async def see() -> None:
            # What was written must be seen before the next decision, or it would be made again.
            with contextlib.suppress(Exception):
                await self._read_inventory()
            done()
            self._jobs.discard(finished)
            finished.set_result(None)

        def end(error: Exception | None) -> None:
            if error is not None:
                self._refused(error)
            self._seeing = loop.create_task(see(), name="floor sees")

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
        """The database did not take it: try again soon, and say so once in a while."""
        now_s = self.clock()
        self._paused_until_s = now_s + PAUSE_S
        if now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            logger.warning("floor: a move could not be written, it will be tried again: %s", error)

    # Redis

    def _publish(self, views: dict[int, EndpointView], members: dict[int, list[Replica]]) -> None:
        if self._publishing is not None and not self._publishing.done():
            return  # Redis is slow: the next turn has newer ones
        running = {
            replica.name: int(self.topology.fleet.running[replica.slot])
            for group in members.values()
            for replica in group
        }
        message = orjson.dumps(
            {
                "ts": time.time(),
                "up_s": self.clock() - self._began_s,
                "endpoints": [as_inputs(view) for view in views.values()],
                "running": running,
            }
        )
        self._publishing = asyncio.create_task(self._exchange(message), name="floor publishes")

    async def _exchange(self, message: bytes) -> None:
        """Publish the views and read who is alive. Without Redis nobody is, for who lives there has no broker either."""
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

    # Memory

    def _of(self, index: int) -> _Memory:
        memory = self._memory.get(index)
        if memory is None:
            memory = self._memory[index] = _Memory(changed_s=self.clock())
        return memory

    @staticmethod
    def _demand(memory: _Memory, now_s: float) -> float:
        while memory.demand and memory.demand[0][0] < now_s - DEMAND_S:
            memory.demand.popleft()
        return sum(tokens for _, tokens in memory.demand) / DEMAND_S
