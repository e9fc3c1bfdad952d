"""The decision side of a process: the fleet as it lives, the dispatcher, and what works on both.

It meets relays, that of this process and others, by records alone (`controlplane.dispatch.relays`).
"""

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

import aiohttp
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.database import ERRORS
from controlplane.dispatch import port
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.lease import Lease
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.heartbeats import Heartbeats
from controlplane.dispatch.live_fleet.kv_caches import KvCaches
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.observation import Observation
from controlplane.dispatch.queues.commands import LOOK_S, Commands
from controlplane.dispatch.queues.operations import QueueOperations
from controlplane.dispatch.relays import Relays
from controlplane.dispatch.snapshot import Snapshot
from controlplane.dispatch.solving import CelerySolver
from controlplane.jobs.record import Jobs
from controlplane.tuning.selectors import Values
from controlplane.tuning.services import report_ignored
from scheduling.queueing import held_work
from scheduling.scaling import FLOOR


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
    ) -> None:
        self.lease, self.clock = lease, clock
        self.topology = topology = Topology()
        self.relays = Relays(
            clock, number=number, local=local, take=self.take, left=self._relay_left, owns=lambda: lease.owns
        )
        self.solver = CelerySolver(settings.REDIS_URL)
        self.dispatcher = Dispatcher(topology, clock, deliver=self.relays.deliver, ask=self.solver.ask)
        self.dispatcher.placement.owns = self.owns
        self.heartbeats = Heartbeats(
            self.dispatcher,
            lease,
            session=session,
            refresh=self.refresh_now,
            job=jobs.add("heartbeats", settings.HEARTBEAT_S, "database"),
        )
        self.kv_caches = KvCaches(topology, self.dispatcher.queue, session=session, owns=self.owns)
        self.inventory_job = jobs.add("read-inventory", settings.FLEET_REFRESH_S, "database")
        self.sweep_job = jobs.add("sweep-queues", held_work.LOOK_S)
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
            QueueOperations(self.dispatcher),
            self.owns,
            jobs.add("queue-commands", LOOK_S, "redis"),
            Snapshot(self.dispatcher, self.observation, last_heard),
        )
        self.tune: Callable[[Values], object] = lambda values: None
        """Gets the settings as they are read."""
        self.ignored_settings: Mapping[tuple[str, str], str] = {}
        self._epoch = 0
        """In which this process has requests of its relays; 0 while it is no owner."""
        self._refresh = asyncio.Event()
        self._sweeps = False

    def owns(self) -> bool:
        """Whether this process has the queues."""
        return self.lease.held

    @property
    def jobs_to_run(self) -> tuple[Coroutine[Any, Any, None], ...]:
        """Return what runs from the start to the end of the process."""
        return (
            self._sweep_on(),
            self._keep_inventory(),
            self.relays.run(),
            self.heartbeats.run(),
            self.commands.run(),
            self.scaling.run(),
        )

    async def stop(self) -> None:
        self.kv_caches.close()
        await self.scaling.stop()
        await self.solver.stop()
        await self.commands.stop()
        self.relays.close()

    # Relays

    def take(self, record: port.FromGateway) -> None:
        """Act on a record of any relay."""
        self.dispatcher.take(record)

    def _relay_left(self, relay: int) -> None:
        """End the requests of a relay that has gone."""
        requests = self.dispatcher.requests
        self.dispatcher.forget([each for number, each in requests.items() if port.relay_of(number) == relay])

    def follow_lease(self) -> None:
        """Begin empty where this process became the owner, and forget everything where another one did.

        Call at each change of owners, before relays hear of it.
        """
        state = self.lease.first
        epoch = state.epoch if state.lease_s else 0
        if epoch == self._epoch:
            return
        self._epoch = self.dispatcher.placement.epoch = epoch
        self.relays.dismiss()
        self.dispatcher.forget(list(self.dispatcher.requests.values()))
        self.refresh_now()

    # Work that is done again and again

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
        if self.topology.changed.is_set():
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
            self._refresh.clear()
            with self.inventory_job:
                await self.read_inventory()

    async def read_inventory(self) -> None:
        """Update the live fleet from the rows. Raises what the database raises; then the live fleet stays as it was."""
        read = await database_sync_to_async(inventory.read)()
        self.dispatcher.apply_inventory(read)
        self.tune(read.values)
        if read.values.ignored != self.ignored_settings:
            with contextlib.suppress(*ERRORS):  # the next look records it
                await database_sync_to_async(report_ignored)(read.values)
                self.ignored_settings = read.values.ignored
