"""The reactive floor: an endpoint that is full gets an instance more, whatever else is dead.

It runs in the gateway, which has the live load in memory, and looks once a second. Under a model whose strategy is alive
it acts only where the strategy has failed: full with all that is on the way (`scheduling.scaling.floor_move`), and it
never takes away. Where there is none (no automatic policy, or Celery, Redis or the strategy is dead) it is the
strategy: SageServe's reactive heuristic, out above 70 %, in below 30 % for a while.

Decisions are made on the event loop from memory (`observation`, `decision`); rows are written in threads of its own, by the
`Rows` that it is given, so neither a slow database nor a dead broker holds up a request. What it sees of each endpoint it
publishes for the strategies in the workers, and reads in the same exchange which of them are alive (`publication`).
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from django.conf import settings

from controlplane.dispatch.floor.decision import Decision
from controlplane.dispatch.floor.observation import Observation
from controlplane.dispatch.floor.publication import Publication
from controlplane.dispatch.floor.swapping import Swapping
from controlplane.dispatch.live_fleet.lookahead import Outlook
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.dispatch.port import Submit
from controlplane.dispatch.requests.reordering import Evicted
from controlplane.dispatch.requests.waiting_queue import WaitingQueue
from controlplane.dispatch.wire import as_inputs
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.jobs.record import Job
from scheduling.scaling import EndpointView

logger = logging.getLogger(__name__)
REFUSED_HOLD_S = 30.0  # moves that cannot be made for so long: what waits for an instance is refused
RETRY_S = 2.0  # after a move that could not be made, where nothing serves or the minimum is not there
OWN_COMMANDS_S = 2.0  # how often it looks whether a worker took its commands
WATCH_S = 900.0  # and for how long after its last move
WORKERS_FIRST_S = 15.0  # in which a worker would have stopped what has drained
STOP_WAIT_S = 1.0
PAUSE_S = 5.0  # after the database refused
COMPLAIN_EVERY_S = 30.0


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

    def swap(self, instance_id: int, reason: str) -> object | None:
        """Give that instance the GPUs that it shares; None if it cannot have them."""

    def note_evictions(self, evictions: Sequence[Evicted]) -> None:
        """Write an event for each."""

    def take_up_commands(self, patience_s: float) -> int:
        """Carry out the floor's own commands that waited for a worker for *patience_s*."""

    def finish_drains(self, idle: Iterable[str]) -> int:
        """Stop those of the instances *idle* (names, nothing runs there) that scaling has drained."""


class Floor:
    """*waiting*, *outlook* and *short*: see `Observation`; *queue* and *pump*: see `Swapping`. *evicted* has what is to
    become events. *owns* says whether this process has the regions; *read_inventory* lets the topology agree with the
    rows."""

    def __init__(
        self,
        topology: Topology,
        rows: Rows,
        *,
        waiting: Callable[[Endpoint], int],
        queue: WaitingQueue,
        pump: Callable[[Endpoint], None],
        outlook: Callable[[Endpoint], Outlook],
        short: Callable[[Endpoint], int],
        evicted: deque[Evicted],
        owns: Callable[[], bool],
        read_inventory: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
        job: Job,
    ) -> None:
        self.topology = topology
        self.rows = rows
        self.clock = clock
        self.job = job
        self._evicted = evicted
        self._owns, self._read_inventory = owns, read_inventory
        self._began_s = clock()
        self.observation = Observation(topology, waiting, outlook, clock, short=short)
        self.decision = Decision(topology, self._began_s)
        self.swapping = Swapping(topology, waiting, queue, pump)
        self.publication = Publication(settings.REDIS_URL)
        self._jobs: set[asyncio.Future[None]] = set()
        self._looking = False
        self._seeing: asyncio.Task[None] | None = None  # held, or the loop might drop it
        # One look for what the last run of this process left behind.
        self._next_look_s = self._began_s + topology.tuned.FLOOR_PATIENCE_S
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
        """Let go, after a moment for moves that are being written; a longer one ends with the process."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=STOP_WAIT_S)
        await self.publication.stop()

    def arrived(self, asked: Submit) -> None:
        """Count what was *asked* as demand."""
        self.observation.arrived(asked)

    # Once a second

    def check(self) -> None:
        """Look at every endpoint, publish what there is to see, and ask for the moves that are wanted."""
        topology, now_s = self.topology, self.clock()
        members: dict[int, list[Replica]] = {}
        for replica in topology.replicas.values():
            members.setdefault(replica.endpoint.index, []).append(replica)
        views = {
            endpoint.index: self.observation.view(endpoint, members.get(endpoint.index, []), now_s)
            for endpoint in topology.endpoints
            if topology.serves(endpoint)
        }
        running = {replica.name: int(topology.fleet.running[replica.slot]) for replica in topology.replicas.values()}
        self.publication.publish(views.values(), running, self._left_tokens(), now_s - self._began_s)
        if self._evicted and now_s >= self._paused_until_s:
            self._in_thread(partial(self.rows.note_evictions, [*self._evicted]), lambda: None)
            self._evicted.clear()
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
                if delta:
                    self._move(endpoint, view, replicas, delta, reason)
            for instance_id, reason in self.swapping.wanted(now_s, time.time()):
                self._in_thread(partial(self.rows.swap, instance_id, reason), lambda: None)
        else:
            self.swapping.keep()
        if self._next_look_s <= now_s < self._watch_until_s and not self._looking:
            self._next_look_s = now_s + OWN_COMMANDS_S
            self._look_after_own(members)

    # Doing it

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

    def _left_tokens(self) -> dict[str, int]:
        """Tokens left to do by instance: of those that could go, the one with the fewest goes."""
        left = self.topology.fleet.remaining_tokens
        return {replica.name: int(left[replica.slot]) for replica in self.topology.replicas.values()}

    def _look_after_own(self, members: dict[int, list[Replica]]) -> None:
        """Carry out own commands that no worker took, and stop what has drained empty while no worker does."""
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
