"""The decision side of a process: the fleet as it lives, the dispatcher, and what works on both.

It meets relays, that of this process and others, by records alone (`controlplane.dispatch.relays`).
"""

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol, get_args

import aiohttp
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.database import ERRORS
from controlplane.dispatch import port
from controlplane.dispatch.allowances.allowances import Allowances
from controlplane.dispatch.allowances.budgets import Budgets, TokensSince
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.lease import Lease
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.heartbeats import Heartbeats
from controlplane.dispatch.live_fleet.kv_caches import KvCaches
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.monitoring.measures import Measures
from controlplane.dispatch.observation import Observation
from controlplane.dispatch.queues.commands import LOOK_S, Commands
from controlplane.dispatch.queues.operations import QueueOperations
from controlplane.dispatch.registrations import Registrations
from controlplane.dispatch.relays import Relays
from controlplane.dispatch.reordering import in_thread
from controlplane.dispatch.snapshot import Snapshot
from controlplane.dispatch.transport import TICK_S
from controlplane.events.services import guard
from controlplane.fleet.services import report_unreadable
from controlplane.jobs.record import Jobs
from controlplane.tuning.selectors import Values
from controlplane.tuning.services import report_ignored
from scheduling.queueing import held_work
from scheduling.scaling import FLOOR

BUDGETS_S = 1.0
UNREADY_S = 0.1
"""Period instead of that while relays wait for an answer."""
REGISTERING_S = 2.0
"""Time after a takeover within which relays find the new owner and register."""


async def all_of(steps: Iterable[Callable[[], object]]) -> None:
    """Do every step, which may be a coroutine function, and raise the first error of any."""
    errors = []
    for step in steps:
        try:
            done = step()
            if inspect.isawaitable(done):
                await done
        except Exception as error:
            errors.append(error)
        await asyncio.sleep(0)
    if errors:
        raise errors[0]


class Scaling(Protocol):
    """The scaling loop."""

    async def run(self) -> None: ...

    async def stop(self) -> None: ...


class Dispatching:
    """*scaling* makes the scaling loop. *number* is that of the relay of this process, *local* takes its records, and
    *last_heard* returns when each of its streams was last heard from. *session* has the connections to instances.
    """

    def __init__(
        self,
        lease: Lease,
        jobs: Jobs,
        *,
        scaling: Callable[..., Scaling],
        clock: Callable[[], float],
        number: int,
        local: port.Deliver,
        last_heard: Callable[[], Mapping[int, float]],
        session: Callable[[], aiohttp.ClientSession],
        tokens_since: TokensSince,
    ) -> None:
        self.lease, self.clock = lease, clock
        self.topology = topology = Topology()
        self.measures = Measures(clock)
        self.relays = Relays(
            clock, number=number, local=local, take=self.take, left=self._relay_left, owns=lambda: self.serving
        )
        self.dispatcher = Dispatcher(topology, clock, deliver=self.relays.deliver, background=in_thread)
        self.registrations = Registrations(clock, REGISTERING_S if settings.DISPATCHER_BIND else 0.0)
        self.dispatcher.placement.places = lambda shard: self.owns() and self.registrations.complete(shard)
        self.heartbeats = Heartbeats(
            self.dispatcher,
            self.owns,
            session=session,
            refresh=self.refresh_now,
            job=jobs.add("heartbeats", settings.HEARTBEAT_S, "database"),
        )
        self.kv_caches = KvCaches(topology, self.dispatcher.queue, session=session, owns=self.owns)
        self.inventory_job = jobs.add("read-inventory", settings.FLEET_REFRESH_S, "database")
        self.sweep_job = jobs.add("sweep-queues", held_work.LOOK_S)
        self.relays_job = jobs.add("hear-relays", TICK_S)
        self.observation = Observation(
            topology,
            self.dispatcher.queue.count,
            self.dispatcher.outlook,
            clock,
            short=self.dispatcher.reordering.short_instances,
        )
        self.scaling = scaling(
            self.dispatcher,
            self.observation,
            owns=self.owns,
            read_inventory=self.read_inventory,
            job=jobs.add("scale", FLOOR.period_s),
        )
        self.commands = Commands(
            settings.REDIS_URL,
            lambda: lease.owner,
            QueueOperations(self.dispatcher),
            self.owns,
            jobs.add("queue-commands", LOOK_S, "redis"),
            Snapshot(self.dispatcher, self.observation, last_heard),
        )
        self.allowances = Allowances(
            Budgets(clock, tokens_since),
            self.relays.deliver,
            lambda: self.serving.get(port.FIRST, 0) if lease.held else 0,
            lambda: self.registrations.complete(port.FIRST),
        )
        self._takers: dict[type, Callable[[Any], None]] = dict.fromkeys(
            get_args(port.ForAllowances), self.allowances.take
        ) | dict.fromkeys(get_args(port.ForFigures), self.measures.take)
        self._takers[port.Registered] = self.registrations.take
        """By kind of record; all others are the dispatcher's."""
        self.budgets_job = jobs.add("refresh-budgets", BUDGETS_S, "database")
        self.tune: Callable[[Values], object] = lambda values: None
        """Gets the settings as they are read."""
        self.ignored_settings: Mapping[tuple[str, str], str] = {}
        self.serving: dict[str, int] = {}
        """Shards that this process owns and knows the models of, with their epochs."""
        self.announced: Callable[[], object] = lambda: None
        """Called when these change: for the relay of this process."""
        self._refresh = asyncio.Event()
        self._sweeps = False

    def owns(self) -> bool:
        """Whether this process decides about requests of any shard."""
        return bool(self.serving) and self.lease.holds_shards

    @property
    def jobs_to_run(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return what runs from the start to the end of the process."""
        return (
            self._sweep_on(),
            self._keep_inventory(),
            self.relays.run(self.relays_job),
            self._as_owner(self._refresh_budgets()),
            self._as_owner(self.heartbeats.run()),
            self.commands.run(),
            self._as_owner(self.scaling.run()),
        )

    async def _as_owner(self, work: Coroutine[Any, Any, None]) -> None:
        """Do *work*, which writes nothing once another process is the owner by the database."""
        guard.set(self.lease.check)
        await work

    async def stop(self) -> None:
        self.kv_caches.close()
        await self.scaling.stop()
        await self.commands.stop()
        self.relays.close()

    # Relays

    def take(self, record: port.FromGateway) -> None:
        """Act on a record of any relay."""
        self._takers.get(type(record), self.dispatcher.take)(record)

    def _relay_left(self, relay: int) -> None:
        """End the requests of a relay that has gone."""
        self.allowances.forget(relay)
        requests = self.dispatcher.requests
        self.dispatcher.forget([each for number, each in requests.items() if port.relay_of(number) == relay])

    def follow_lease(self) -> None:
        """Forget the requests of shards that this process lost, and read what it gained.

        Call at each change of owners, before relays hear of it.
        """
        owned = self.lease.owned
        lost = {role for role, epoch in self.serving.items() if owned.get(role) != epoch}
        if lost:
            self._serve({role: epoch for role, epoch in self.serving.items() if role not in lost})
            requests = self.dispatcher.requests.values()
            self.dispatcher.forget([each for each in requests if each.endpoint.spec.shard in lost])
        if owned != self.serving:
            self.refresh_now()

    def _serve(self, shards: dict[str, int]) -> None:
        """Serve *shards* from now on, and announce it."""
        self.registrations.begin(shards.keys() - self.serving.keys())
        self.serving = self.dispatcher.placement.epochs = shards
        self.relays.announce()
        self.announced()

    # Work that is done again and again

    async def _refresh_budgets(self) -> None:
        while True:
            await asyncio.sleep(self.budgets_job.period_s if self.allowances.ready else UNREADY_S)
            with self.budgets_job:
                await self.allowances.refresh()

    async def _sweep_on(self) -> None:
        while True:
            await asyncio.sleep(self.sweep_job.period_s)
            with self.sweep_job:
                await self.sweep()

    async def sweep(self) -> None:
        """Release held work; every other time, sweep the queues and look for instances that publish KV events."""
        self._sweeps = not self._sweeps
        steps: list[Callable[[], object]] = [self.dispatcher.holding.release_due]
        await all_of([*steps, *self.dispatcher.sweep_steps, self.kv_caches.look] if self._sweeps else steps)

    def pump(self) -> None:
        """Give out what has room since the fleet changed. Call some ten times a second."""
        self.dispatcher.prewarming.control.refresh_likely()
        if self.registrations.look() or self.topology.changed.is_set():
            self.topology.changed.clear()
            self.dispatcher.pump_all()

    def refresh_now(self) -> None:
        """Read the inventory without waiting for its period."""
        self._refresh.set()

    async def _keep_inventory(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.FLEET_REFRESH_S):
                    await self._refresh.wait()
            with self.inventory_job:
                await self.read_inventory()

    async def read_inventory(self) -> None:
        """Update the live fleet from the rows. Raises what the database raises; then the live fleet stays as it was."""
        self._refresh.clear()
        owned = self.lease.owned
        read = await database_sync_to_async(inventory.read)()
        if owned != self.lease.owned:  # another read may have found more of it
            self.refresh_now()
            return
        moved, forward = [], []
        for one in self.dispatcher.requests.values():
            region = one.endpoint.region
            if (zone := read.zones.get(region, "")) != one.asked.zone:
                forward.append(port.Forward(one.asked.number, zone))
            if zone != one.asked.zone or read.role(one.asked.model, region) not in owned:
                moved.append(one)
        self.dispatcher.forget(moved)  # their relays give them to the next owner
        self.dispatcher.apply_inventory(read.of(owned) if owned else read)  # one that stands by knows all
        for record in forward:  # the zone of its region is another one by now
            self.relays.deliver(record)
        self.tune(read.values)
        if owned != self.serving:
            self._serve(owned)
        with contextlib.suppress(*ERRORS):  # the next look records it
            await database_sync_to_async(report_unreadable)()
            if read.values.ignored != self.ignored_settings:
                await database_sync_to_async(report_ignored)(read.values)
                self.ignored_settings = read.values.ignored
