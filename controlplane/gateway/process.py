"""The gateway process: its parts, and the jobs it runs alongside tenants' requests.

The HTTP side (`gateway.serving`) and the decision side (`controlplane.dispatch`) meet here, and exchange only records.
`start` and `stop` are called by the server's lifespan.
"""

import asyncio
import contextlib
import gc
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from channels.db import database_sync_to_async
from django.conf import settings

from controlplane import background, kernels
from controlplane.database import ERRORS, probe_write
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.lease import RENEW_S, Lease
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.heartbeats import Heartbeats
from controlplane.dispatch.live_fleet.kv_caches import KvCaches
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.observation import Observation
from controlplane.dispatch.port import FromDispatcher, Placed, ServedModels, Warm, WarmPrefix
from controlplane.dispatch.queues.commands import LOOK_S, Commands
from controlplane.dispatch.queues.held import HeldView
from controlplane.dispatch.queues.operations import QueueOperations
from controlplane.dispatch.queues.view import QueuesView
from controlplane.dispatch.snapshot import Snapshot
from controlplane.dispatch.solving import CelerySolver
from controlplane.gateway.admission.admitting import Admitter
from controlplane.gateway.admission.budgets import Budgets
from controlplane.gateway.admission.keys import Keys
from controlplane.gateway.admission.limits import Limits
from controlplane.gateway.ledger.accounting import Records
from controlplane.gateway.ledger.writer import Ledger
from controlplane.gateway.monitoring import tracing
from controlplane.gateway.monitoring.summary import Publisher, Summary
from controlplane.gateway.serving.application import Application
from controlplane.gateway.serving.catalog import Catalog
from controlplane.gateway.serving.completions import Completions
from controlplane.gateway.serving.open_requests import OpenRequests
from controlplane.gateway.upstream.client import Upstream
from controlplane.jobs import monitor
from controlplane.jobs.broker import answering_workers
from controlplane.jobs.parts import Part, PartState, merged, supervised
from controlplane.jobs.record import Job, Jobs, describe
from controlplane.lengths.length_service import LengthService
from controlplane.tuning.services import report_ignored
from forecasting.lengths import LengthPrior
from scheduling import dispatch
from scheduling.queueing import global_scheduler, held_work
from scheduling.queueing.waits import waiting_in_queues, waiting_time
from scheduling.scaling import FLOOR, view

COLLECT_AFTER = (
    50_000,
    20,
    50,
)  # allocations; a thousand streams hold so much that frequent collection stalls the loop
SWITCH_S = 0.0005
"""Longest wait of the event loop for a computing thread, such as the ledger's writer, to release the interpreter.

With Python's default of 5 ms, callbacks alongside such a thread took twice as long (41 us on average instead of 20, at worst
50 ms).
"""
COUNT_S = 0.1  # period of counting the tokens of streams
NOTE_USE_S = 30.0
CANCEL_AGAIN_S = 1.0

logger = logging.getLogger(__name__)


async def end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel *tasks* until they have ended.

    Once is not enough: asgiref loses a cancellation that comes as a thread calls back, and a process that waits for such a
    task never stops.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        for task in pending:
            logger.warning("gateway: still waiting for %s, cancelled again", task)


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


class Gateway:
    """The parts of the process. *scaling* makes its scaling loop."""

    def __init__(self, scaling: Callable[..., Scaling]) -> None:
        loop_clock = time.monotonic  # the clock of asyncio's event loop
        self.clock = loop_clock
        self.jobs = jobs = Jobs()
        self.topology = Topology()
        self.keys = Keys()
        self.limits = Limits()
        self.budgets = Budgets(loop_clock)
        self.ledger = Ledger(settings.LEDGER_FLUSH_S, Path(settings.STATE_DIR))
        self.ledger.job = jobs.add("flush-ledger", settings.LEDGER_FLUSH_S, "database")
        self.catalog = Catalog()
        self.solver = CelerySolver(settings.REDIS_URL)
        self.dispatcher = Dispatcher(self.topology, loop_clock, deliver=self._handle, ask=self.solver.ask)
        self.requests = OpenRequests(loop_clock, self.dispatcher.take)
        self.upstream = Upstream(
            self.requests, connect_s=settings.UPSTREAM_CONNECT_S, silence_s=settings.UPSTREAM_SILENCE_S
        )
        self.lengths = LengthService(LengthPrior(), jobs)
        self.records = Records(self.ledger, self.lengths, loop_clock)
        self.records.tracing = tracing.start()
        self.lease = Lease(jobs.add("renew-lease", RENEW_S, "database"))
        self.dispatcher.placement.owns = self.upstream.owns = self.owns
        self.heartbeats = Heartbeats(
            self.dispatcher,
            self.lease,
            session=lambda: self.upstream.session,
            refresh=self.refresh_now,
            job=jobs.add("heartbeats", settings.HEARTBEAT_S, "database"),
        )
        self.kv_caches = KvCaches(
            self.topology, self.dispatcher.queue, session=lambda: self.upstream.session, owns=self.owns
        )
        self.inventory_job = jobs.add("read-inventory", settings.FLEET_REFRESH_S, "database")
        self.parts = Parts(self)
        self.monitor = monitor.Monitor(jobs, self.parts)
        sections: dict[str, Callable[[], dict[str, Any]]] = {
            "lengths": self.lengths.snapshot,
            "system": self.monitor.report,
            "queues": QueuesView(self.dispatcher),
            "held": HeldView(self.dispatcher.holding),
            "work": self.dispatcher.holding.waiting_work,
            "outcomes": self.topology.outcomes,
            "prewarmed": self.dispatcher.prewarming.figures,
        }
        self.publisher = Publisher(
            Summary(self.dispatcher, self.records, self.lease.owner, sections),
            job=jobs.add("publish-summary", settings.SUMMARY_S, "redis"),
            owns=self.owns,
            refresh=self.refresh_now,
        )
        self.observation = Observation(
            self.topology,
            self.dispatcher.queue.count,
            self.dispatcher.outlook,
            loop_clock,
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
            Snapshot(self.dispatcher, self.observation, self.requests.last_heard),
        )
        admission = Admitter(
            words=lambda: self.keys.words,
            limits=self.limits,
            budgets=self.budgets,
            catalog=self.catalog,
            lengths=self.lengths,
            tokens=self.upstream.tokens,
            prefixes=self.upstream.prefixes,
            next_number=self.requests.next_number,
            clock=loop_clock,
        )
        self.http = Application(
            Completions(
                keys=self.keys,
                admission=admission,
                requests=self.requests,
                upstream=self.upstream,
                records=self.records,
                owns=self.owns,
                max_depth=settings.MAX_JSON_DEPTH,
                most_bytes=settings.MAX_BODY_BYTES,
                most_body_bytes=max(settings.MAX_BODY_BYTES, settings.MAX_MEDIA_BODY_BYTES),
            ),
            origins=frozenset(settings.CORS_ORIGINS),
        )
        self.ready = False
        self.stopping = False
        self._refresh = asyncio.Event()
        self.ignored_settings: Mapping[tuple[str, str], str] = {}
        self._sweeps = False
        self._noted_use_s = loop_clock()
        self._tasks: list[asyncio.Task[None]] = []
        self._giving_up: asyncio.Task[None] | None = None

    def _handle(self, record: FromDispatcher) -> None:
        if isinstance(record, ServedModels):
            self.catalog.update(record)
        elif isinstance(record, WarmPrefix):
            self.upstream.prefixes.warm(record)
        else:
            if isinstance(record, Warm) or (isinstance(record, Placed) and record.adapter):
                self.upstream.adapters.note(record)
            if not isinstance(record, Warm):
                self.requests.on_event(record)

    @property
    def active(self) -> int:
        """Return the number of requests between arrival and answer."""
        return self.http.active

    # Lifecycle

    async def start(self) -> None:
        await asyncio.to_thread(kernels.compile_group, "requests")  # immediate where that was done
        for module in (dispatch, waiting_time, waiting_in_queues, view, global_scheduler):
            await asyncio.to_thread(module.warm_up)
        await self.upstream.start()
        await self.ledger.start()
        await self.lengths.start()
        await self.lease.start()
        await self.read_inventory()
        await self.keys.refresh()
        await self.budgets.refresh()
        for work in (
            self._every(self.jobs.add("count-tokens", COUNT_S), self._count),
            self._every(self.jobs.add("sweep-queues", held_work.LOOK_S), self._sweep),
            self._every(self.jobs.add("refresh-keys", settings.KEY_CACHE_S, "database"), self._refresh_keys),
            self._every(self.monitor.job, self.monitor.read),
            self._every(self.parts.job, self.parts.probe),
            self._keep_inventory(),
            self.heartbeats.run(),
            self.publisher.run(),
            self.commands.run(),
            self.scaling.run(),
        ):
            self._tasks.append(background.spawn(work, str(getattr(work, "__qualname__", work))))
        # Everything loaded by this point stays: without this, each full collection walks half a million objects (100 ms).
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        sys.setswitchinterval(SWITCH_S)
        self.ready = True
        monitor.current = self.monitor

    async def stop(self) -> None:
        """Write what is left and release resources, after the server has let its streams finish (or cut them)."""
        self.step_down()
        if monitor.current is self.monitor:
            monitor.current = None
        await end(self._tasks)
        await self.ledger.stop()
        if self.records.tracing is not None:
            await asyncio.to_thread(self.records.tracing.stop)
        await self.lengths.stop()
        with contextlib.suppress(Exception):
            await self.keys.note_use()
        self.kv_caches.close()
        await self.scaling.stop()
        await self.solver.stop()
        await self.commands.stop()
        await self.publisher.stop()
        await self.lease.stop()
        await self.upstream.stop()
        gc.unfreeze()

    def step_down(self) -> None:
        """Give up the regions before anything else of a planned stop: another process serves while streams end here.

        A relay has none: it answers what still reaches it, and what waits goes on waiting in its dispatcher's queue.
        """
        if not self.stopping:
            self.stopping = True
            if settings.PART == "relay":
                return
            self.http.stopping = True
            self._giving_up = background.spawn(self.lease.give_up(), "give up ownership")
            self.requests.stand_by()

    @staticmethod
    async def _every(job: Job, work: Any) -> None:
        while True:
            await asyncio.sleep(job.period_s)
            with job:
                await work()

    async def _count(self) -> None:
        self.http.completions.load.tick()
        self.requests.report()
        if not self.owns():
            self.requests.stand_by()
        self.dispatcher.prewarming.control.refresh_likely()
        if self.topology.changed.is_set():
            self.topology.changed.clear()
            self.dispatcher.pump_all()

    async def _refresh_keys(self) -> None:
        """Read keys and budgets again, and write when keys were used."""
        await all_of((self._end_keys, self.budgets.refresh, self._note_use))

    async def _end_keys(self) -> None:
        self.requests.end_keys(await self.keys.refresh(self.requests.key_ids()))

    async def _note_use(self) -> None:
        if self.clock() - self._noted_use_s >= NOTE_USE_S:
            self._noted_use_s = self.clock()
            await self.keys.note_use()

    async def _sweep(self) -> None:
        """Release held work; every other time, sweep the queues and look for instances that publish KV events."""
        self._sweeps = not self._sweeps
        steps: list[Callable[[], object]] = [self.dispatcher.holding.release_due]
        await all_of([*steps, *self.dispatcher.sweep_steps, self.kv_caches.look] if self._sweeps else steps)

    def owns(self) -> bool:
        """Whether this process has the regions."""
        return self.lease.held

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
        if read.values.ignored != self.ignored_settings:
            with contextlib.suppress(*ERRORS):  # the next look records it
                await database_sync_to_async(report_ignored)(read.values)
                self.ignored_settings = read.values.ignored
        self.lengths.tune(self.topology.values)


PROBE_S = 10.0
ANSWER_WITHIN_S = 2.0
GONE_AFTER = 2  # missed probes: a worker that starts a child may answer late
BEAT_SILENT_S = 30.0  # the shortest period of its schedule is five seconds
NOT_KNOWN = "not known while "


class Parts:
    """State of every part. `probe` asks database and workers periodically; calling the object returns each part as last
    known."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.job: Job = gateway.jobs.add("probe-parts", PROBE_S, "redis", "database")
        self.no_writes = ""
        """Why the database takes no writes; empty while it does."""
        self._workers: dict[str, list[str]] | None = None  # None: not asked yet, or the broker did not answer
        self._missed = 0
        self._kernels_missing = True

    async def probe(self) -> None:
        """Write a row, and ask which workers are running. Raises what the broker raises."""
        try:
            await database_sync_to_async(probe_write)()
            self.no_writes = ""
        except Exception as error:
            self.no_writes = describe(error)
        try:
            workers = await asyncio.to_thread(answering_workers, settings.REDIS_URL, ANSWER_WITHIN_S)
        except Exception:
            self._workers = None
            raise
        self._missed = 0 if workers else self._missed + 1
        if workers or self._missed >= GONE_AFTER:
            self._workers = workers

    def __call__(self) -> list[Part]:
        redis = self._redis()
        celery = self._celery(redis)
        seen = [self._web(), redis, self._database(), celery, self._beat(celery), self._instances(), self._lengths()]
        seen.append(self._kernels())
        return merged(seen, supervised(Path(settings.STATE_DIR)))

    def _web(self) -> Part:
        gateway = self.gateway
        if not gateway.ready or gateway.stopping:
            return Part("web", PartState.STARTING, "starting or stopping")
        lease = gateway.lease
        if not lease.held:
            return Part("web", PartState.STANDBY, f"standing by for {lease.holder or 'the database'}")
        if deaths := background.summary():
            return Part("web", PartState.WARNING, f"background tasks died, and run again after a restart: {deaths}")
        busy = f"its event loop is busy for {gateway.http.completions.load.share:.0%} of the time"
        owner = f"{lease.owner} owns the regions, epoch {lease.epoch}"
        return Part("web", PartState.OK, f"{owner}; {gateway.active} in flight; {busy}")

    def _redis(self) -> Part:
        job = self.gateway.publisher.job
        if not job.ok:
            return Part("redis", PartState.DOWN, job.last_error)
        took_s = job.last_duration_s
        return Part("redis", PartState.OK, "" if took_s is None else f"answers in {took_s * 1000:.1f} ms")

    def _database(self) -> Part:
        job = self.gateway.inventory_job
        if not job.ok:
            return Part("database", PartState.DOWN, job.last_error)
        ledger = self.gateway.ledger
        if ledger.trouble:
            return Part("database", PartState.WARNING, f"ledger: {ledger.trouble}")
        if self.no_writes:
            text = f"takes no writes: {self.no_writes}; {ledger.held} ledger rows wait"
            return Part("database", PartState.WARNING, text)
        took = "" if job.last_duration_s is None else f"the inventory is read in {job.last_duration_s * 1000:.0f} ms; "
        return Part("database", PartState.OK, f"{took}{ledger.held} ledger rows wait to be written")

    def _celery(self, redis: Part) -> Part:
        if redis.state != PartState.OK:
            return Part("celery", PartState.WARNING, f"{NOT_KNOWN}Redis does not answer")
        if self._workers is None:
            if not self.job.ok:
                return Part(
                    "celery", PartState.WARNING, f"{NOT_KNOWN}the broker does not answer: {self.job.last_error}"
                )
            return Part("celery", PartState.OK, "being asked")
        if not self._workers:
            return Part("celery", PartState.DOWN, "no worker answers")
        named = [f"{worker}: {', '.join(queues)}" for worker, queues in self._workers.items()]
        return Part("celery", PartState.OK, "; ".join(named))

    def _beat(self, celery: Part) -> Part:
        if celery.state != PartState.OK:
            return Part("beat", PartState.WARNING, f"{NOT_KNOWN}no worker answers")
        # Only the tasks that it starts show that it is alive.
        ran_at = max(self.gateway.monitor.last_run_at() or 0.0, self.gateway.monitor.started_at)
        silent_s = time.time() - max(ran_at, self._back_at())
        if silent_s > BEAT_SILENT_S:
            return Part("beat", PartState.DOWN, f"no periodic task has ended for {silent_s:.0f} s")
        return Part("beat", PartState.OK, f"a periodic task ended {time.time() - ran_at:.0f} s ago")

    def _back_at(self) -> float:
        """Return when the last outage of Redis ended: until then nothing of beat's could arrive."""
        return self.gateway.publisher.job.last_error_at or 0.0

    def _instances(self) -> Part:
        topology = self.gateway.topology
        fleet, ready, total, below = topology.fleet, 0, 0, []
        for endpoint in topology.own_endpoints:
            slots = [replica.slot for replica in topology.members(endpoint)]
            here = int(fleet.accepting[slots].sum())
            ready, total = ready + here, total + len(slots)
            if topology.serves(endpoint) and here < endpoint.spec.min_instances:
                below.append(f"{endpoint.model} in {endpoint.region} ({here} of {endpoint.spec.min_instances})")
        text = f"{ready} of {total} ready"
        if below:
            return Part("instances", PartState.WARNING, f"{text}; below the minimum: {', '.join(below[:4])}")
        return Part("instances", PartState.OK, text)

    def _lengths(self) -> Part:
        service = self.gateway.lengths
        if not service.on:
            return Part("lengths", PartState.OFF, "PILOTHOUSE_LENGTHS is off")
        active = service.answering.active
        if active is None:
            return Part("lengths", PartState.WARNING, "no length model is loaded; moving means answer")
        return Part("lengths", PartState.OK, f"{active.version} answers", None, active.predictor.restarts)

    def _kernels(self) -> Part:
        if self._kernels_missing:
            if compiling := kernels.progress():
                return Part("kernels", PartState.STARTING, f"{compiling}; who needs one of them waits")
            if missing := kernels.missing():
                text = f"not compiled yet: {' and '.join(missing)}; done by the first process that needs one"
                return Part("kernels", PartState.STANDBY, text)
            self._kernels_missing = False
        return Part("kernels", PartState.OK, "all are compiled for this machine")
