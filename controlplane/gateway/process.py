"""The gateway process: what it is made of, and what it keeps running beside tenants' requests.

The HTTP side (`gateway.serving`) and the decision side (`controlplane.dispatch`) meet here, and exchange records alone.
`start` and `stop` are called by the server's lifespan.
"""

import asyncio
import contextlib
import gc
import sys
import time
from pathlib import Path
from typing import Any

from channels.db import database_sync_to_async
from django.conf import settings

from controlplane import kernels
from controlplane.dispatch import floor
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.floor import Floor
from controlplane.dispatch.lease import RENEW_S, Lease
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.heartbeats import Heartbeats
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.port import FromDispatcher, ServedModels
from controlplane.dispatch.queues.commands import LOOK_S, Commands
from controlplane.dispatch.queues.operations import QueueOperations
from controlplane.dispatch.queues.view import QueuesView
from controlplane.dispatch.snapshot import Snapshot
from controlplane.dispatch.solving import CelerySolver
from controlplane.gateway.admission.keys import Keys
from controlplane.gateway.admission.limits import Limits
from controlplane.gateway.ledger.accounting import Records
from controlplane.gateway.ledger.writer import Ledger
from controlplane.gateway.monitoring.parts import Parts
from controlplane.gateway.monitoring.summary import Publisher, Sources
from controlplane.gateway.serving.application import Application
from controlplane.gateway.serving.completions import Catalog, Completions
from controlplane.gateway.serving.open_requests import OpenRequests
from controlplane.gateway.upstream.client import Upstream
from controlplane.jobs import monitor
from controlplane.jobs.record import Job, Jobs
from controlplane.lengths.length_service import LengthService
from forecasting.lengths import LengthPrior
from scheduling.dispatch import warm_up
from scheduling.queueing import global_scheduler
from scheduling.queueing.waits import waiting_in_queues, waiting_time
from scheduling.scaling import FLOOR, view

COLLECT_AFTER = (50_000, 20, 50)  # allocations; a thousand streams hold so much that collecting often stalls the loop
SWITCH_S = 0.0005
"""How long the event loop waits for a thread that computes, such as the ledger's writer, to let go of the interpreter. With
Python's own 5 ms, callbacks beside such a thread took twice as long (41 us on average instead of 20, at worst 50 ms)."""
COUNT_S = 0.1  # how often the arrays learn how far streams have come
SWEEP_S = 1.0
NOTE_USE_S = 30.0


class Gateway:
    """*rows* are what the reactive floor changes rows by."""

    def __init__(self, rows: floor.Rows) -> None:
        loop_clock = time.monotonic  # the clock of asyncio's event loop
        self.clock = loop_clock
        self.jobs = jobs = Jobs()
        self.topology = Topology()
        self.keys = Keys(settings.KEY_CACHE_S)
        self.limits = Limits()
        self.ledger = Ledger(settings.LEDGER_FLUSH_S, Path(settings.STATE_DIR))
        self.ledger.job = jobs.add("flush-ledger", settings.LEDGER_FLUSH_S, "database")
        self.catalog = Catalog()
        self.solver = CelerySolver(settings.REDIS_URL)
        self.dispatcher = Dispatcher(self.topology, loop_clock, deliver=self._from_dispatcher, ask=self.solver.ask)
        self.requests = OpenRequests(loop_clock, self.dispatcher.take)
        self.upstream = Upstream(
            self.requests, connect_s=settings.UPSTREAM_CONNECT_S, silence_s=settings.UPSTREAM_SILENCE_S
        )
        self.lengths = LengthService(LengthPrior(), jobs)
        self.records = Records(self.ledger, self.lengths, loop_clock)
        self.lease = Lease(settings.REDIS_URL, jobs.add("renew-lease", RENEW_S, "redis"))
        self.heartbeats = Heartbeats(
            self.dispatcher,
            self.lease,
            session=lambda: self.upstream.session,
            refresh=self.refresh_now,
            job=jobs.add("heartbeats", settings.HEARTBEAT_S, "database"),
        )
        self.inventory_job = jobs.add("read-inventory", settings.FLEET_REFRESH_S, "database")
        self.parts = Parts(self)
        self.monitor = monitor.Monitor(jobs, self.parts, self.owns)
        self.publisher = Publisher(
            Sources(
                self.topology,
                self.dispatcher,
                self.records.windows,
                self.records.service_levels,
                loop_clock,
                owner=self.lease.owner,
                lengths=self.lengths.snapshot,
                system=self.monitor.report,
                queues=QueuesView(self.dispatcher),
            ),
            job=jobs.add("publish-summary", settings.SUMMARY_S, "redis"),
            owns=self.owns,
            refresh=self.refresh_now,
        )
        self.floor = Floor(
            self.dispatcher,
            rows,
            owns=self.owns,
            read_inventory=self.read_inventory,
            job=jobs.add("floor", FLOOR.period_s),
        )
        self.commands = Commands(
            settings.REDIS_URL,
            QueueOperations(self.dispatcher),
            self.owns,
            jobs.add("queue-commands", LOOK_S, "redis"),
            Snapshot(self.dispatcher, self.floor.observation, self.requests.last_heard),
        )
        self.http = Application(
            self.keys,
            self.catalog,
            Completions(
                keys=self.keys,
                limits=self.limits,
                catalog=self.catalog,
                lengths=self.lengths,
                requests=self.requests,
                upstream=self.upstream,
                records=self.records,
                clock=loop_clock,
                max_depth=settings.MAX_JSON_DEPTH,
                most_body_bytes=settings.MAX_BODY_BYTES,
                stream_all=settings.STREAM_ALL,
            ),
            self.records,
            owns=self.owns,
            most_body_bytes=max(settings.MAX_BODY_BYTES, settings.MAX_MEDIA_BODY_BYTES),
            origins=frozenset(settings.CORS_ORIGINS),
        )
        self.ready = False
        self._refresh = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def _from_dispatcher(self, record: FromDispatcher) -> None:
        if isinstance(record, ServedModels):
            self.catalog.take(record)
        else:
            self.requests.take(record)

    @property
    def active(self) -> int:
        """Requests between arrival and answer."""
        return self.http.active

    @property
    def stopping(self) -> bool:
        return self.http.stopping

    # Life

    async def start(self) -> None:
        await asyncio.to_thread(kernels.compile_group, "requests")  # at once where that was done
        await asyncio.to_thread(warm_up)
        await asyncio.to_thread(waiting_time.warm_up)
        await asyncio.to_thread(waiting_in_queues.warm_up)
        await asyncio.to_thread(view.warm_up)
        await asyncio.to_thread(global_scheduler.warm_up)
        await self.upstream.start()
        await self.ledger.start()
        await self.lengths.start()
        await self.lease.start()
        await self.read_inventory()
        await self.keys.refresh()
        for work in (
            self._every(self.jobs.add("count-tokens", COUNT_S), self._count),
            self._every(self.jobs.add("sweep-queues", SWEEP_S), self._sweep),
            self._every(self.jobs.add("refresh-keys", settings.KEY_CACHE_S, "database"), self.keys.refresh),
            self._every(self.jobs.add("note-key-use", NOTE_USE_S, "database"), self.keys.note_use),
            self._every(self.monitor.job, self.monitor.look),
            self._every(self.parts.job, self.parts.probe),
            self._keep_inventory(),
            self.heartbeats.run(),
            self.publisher.run(),
            self.commands.run(),
            self.floor.run(),
        ):
            self._tasks.append(asyncio.create_task(work))
        # What is loaded by now stays: without this, each full collection walks half a million objects (100 ms).
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        sys.setswitchinterval(SWITCH_S)
        self.ready = True
        monitor.current = self.monitor

    async def stop(self) -> None:
        """The server has let its streams finish (or cut them); write what is left and let go."""
        self.http.stopping = True
        if monitor.current is self.monitor:
            monitor.current = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.ledger.stop()
        await self.lengths.stop()
        with contextlib.suppress(Exception):
            await self.keys.note_use()
        await self.floor.stop()
        await self.solver.stop()
        await self.commands.stop()
        await self.publisher.stop()
        await self.lease.stop()
        await self.upstream.stop()
        gc.unfreeze()

    @staticmethod
    async def _every(job: Job, work: Any) -> None:
        while True:
            await asyncio.sleep(job.period_s)
            with job:
                await work()

    async def _count(self) -> None:
        self.requests.report()
        if self.topology.changed.is_set():
            self.topology.changed.clear()
            self.dispatcher.pump_all()

    async def _sweep(self) -> None:
        self.dispatcher.sweep()

    def owns(self) -> bool:
        """Whether this process has the regions."""
        return self.lease.held

    def refresh_now(self) -> None:
        """Read the inventory again without waiting for its period."""
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
        """Make the live fleet agree with the rows. Raises what the database raises; then the live fleet stays as it was."""
        self.dispatcher.apply_inventory(await database_sync_to_async(inventory.read)())
        self.lengths.tune(self.topology.values)
