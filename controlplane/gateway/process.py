"""The gateway process: its parts, and the jobs it runs alongside tenants' requests.

The HTTP side (`gateway.serving`) and the decision side (`controlplane.dispatch`) meet here, and exchange only records.
`start` and `stop` are called by the server's lifespan.
"""

import asyncio
import contextlib
import gc
import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from channels.db import database_sync_to_async
from django.conf import settings

from controlplane import background, kernels
from controlplane.database import probe_write
from controlplane.dispatch.lease import BATCHES, RENEW_S, Lease
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.monitoring.summary import Publisher, Summary
from controlplane.dispatch.port import (
    FIRST,
    RELAY_BITS,
    FromDispatcher,
    FromGateway,
    OfAllowances,
    Placed,
    Room,
    ServedModels,
    Warm,
    WarmPrefix,
)
from controlplane.dispatch.process import Dispatching, Scaling
from controlplane.dispatch.queues.held import HeldView
from controlplane.dispatch.queues.view import QueuesView
from controlplane.dispatch.transport import TICK_S, advertised
from controlplane.gateway.admission.admitting import Admitter
from controlplane.gateway.admission.entries import Entries
from controlplane.gateway.admission.keys import Keys
from controlplane.gateway.dispatchers import Dispatchers
from controlplane.gateway.ledger.accounting import Records
from controlplane.gateway.ledger.writer import Ledger
from controlplane.gateway.monitoring import tracing
from controlplane.gateway.monitoring.figures import REPORT_S, relay_figures
from controlplane.gateway.selectors import tokens_since
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
from controlplane.tuning import selectors as tuning
from forecasting.lengths import LengthPrior
from scheduling import dispatch
from scheduling.queueing import global_scheduler
from scheduling.queueing.waits import waiting_in_queues, waiting_time
from scheduling.scaling import view

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
SPARE_S = 5.0
"""Time after which a dispatcher takes work that relays do, as none of them has."""
WANTS: Final[Mapping[str, Mapping[str, float]]] = {
    "whole": {FIRST: 0.0, BATCHES: 0.0},
    "relay": {BATCHES: 0.0},
    "dispatcher": {FIRST: 0.0, BATCHES: SPARE_S},
}
"""Roles that a process takes, by its part (`controlplane.dispatch.lease`)."""

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


class Gateway:
    """The parts of the process: those of a relay and, unless it is a relay only, those of a dispatcher. *scaling* makes its
    scaling loop.
    """

    def __init__(self, scaling: Callable[..., Scaling], part: str | None = None) -> None:
        loop_clock = time.monotonic  # the clock of asyncio's event loop
        self.clock = loop_clock
        self.part = part or settings.PART
        self.jobs = jobs = Jobs()
        self.number = secrets.randbits(63 - RELAY_BITS)
        """Of this process as a relay."""
        self.keys = Keys()
        self.ledger = Ledger(settings.LEDGER_FLUSH_S, Path(settings.STATE_DIR))
        self.ledger.job = jobs.add("flush-ledger", settings.LEDGER_FLUSH_S, "database")
        self.catalog = Catalog()
        self.lease = Lease(
            jobs.add("renew-lease", RENEW_S, "database"),
            wants=WANTS[self.part],
            address=advertised(settings.DISPATCHER_BIND),
            zone=settings.ZONE,
        )
        self.lease.changed = self._owners_changed
        self.requests = OpenRequests(loop_clock, self._send, self.number)
        self.entries = Entries(self._send, self.requests.next_number)
        self.upstream = Upstream(
            self.requests, connect_s=settings.UPSTREAM_CONNECT_S, silence_s=settings.UPSTREAM_SILENCE_S
        )
        self.dispatching = (
            None
            if self.part == "relay"
            else Dispatching(
                self.lease,
                jobs,
                scaling=scaling,
                clock=loop_clock,
                number=self.number,
                local=self._of_local,
                last_heard=self.requests.last_heard,
                session=lambda: self.upstream.session,
                tokens_since=tokens_since,
            )
        )
        self.dispatchers = Dispatchers(
            self.lease,
            self.dispatching.take if self.dispatching else None,
            serving=lambda: self.dispatching.serving if self.dispatching else {},
            number=self.number,
            receive=self._handle,
            opened=self.requests.opened,
            entered=self.entries.opened,
            clock=loop_clock,
            zone=settings.ZONE,
            near=lambda zone, regions: self.keys.words.zones(zone, regions),  # noqa: PLW0108  # words are read again
        )
        self.upstream.owns = self.dispatchers.may_send
        self.lengths = LengthService(LengthPrior(), jobs)
        self.records = Records(self.ledger, self.lengths, loop_clock, self.requests.send)
        self.records.tracing = tracing.start()
        if self.dispatching is None:
            self.values_job = jobs.add("read-settings", settings.FLEET_REFRESH_S, "database")
        else:
            self.values_job, self.dispatching.tune = self.dispatching.inventory_job, self.lengths.tune
            self.dispatching.announced = self.dispatchers.follow
            self.dispatching.dispatcher.elsewhere = self.dispatchers.elsewhere
        self.parts = Parts(self)
        self.monitor = monitor.Monitor(jobs, self.parts)
        self.publisher = self._publisher(self.dispatching) if self.dispatching else None
        admission = Admitter(
            words=lambda: self.keys.words,
            entries=self.entries,
            catalog=self.catalog,
            lengths=self.lengths,
            tokens=self.upstream.tokens,
            prefixes=self.upstream.prefixes,
            next_number=self.requests.next_number,
            zones=self.dispatchers.zones_for,
            clock=loop_clock,
        )
        self.http = Application(
            Completions(
                keys=self.keys,
                admission=admission,
                requests=self.requests,
                upstream=self.upstream,
                records=self.records,
                serves=self.serves,
                max_depth=settings.MAX_JSON_DEPTH,
                most_bytes=settings.MAX_BODY_BYTES,
                most_body_bytes=max(settings.MAX_BODY_BYTES, settings.MAX_MEDIA_BODY_BYTES),
            ),
            origins=frozenset(settings.CORS_ORIGINS),
        )
        self.ready = False
        self.stopping = False
        self._noted_use_s = loop_clock()
        self._tasks: list[asyncio.Task[None]] = []
        self._giving_up: asyncio.Task[None] | None = None

    def _publisher(self, dispatching: Dispatching) -> Publisher:
        dispatcher = dispatching.dispatcher
        sections: dict[str, Callable[[], Any]] = {
            "lengths": self.lengths.snapshot,
            "system": self.monitor.report,
            "queues": QueuesView(dispatcher),
            "held": HeldView(dispatcher.holding),
            "work": dispatcher.holding.waiting_work,
            "outcomes": dispatching.topology.outcomes,
            "prewarmed": dispatcher.prewarming.figures,
            "relays": dispatching.measures.relay_rows,
        }
        return Publisher(
            Summary(dispatcher, dispatching.measures, self.lease.owner, sections),
            job=self.jobs.add("publish-summary", settings.SUMMARY_S, "redis"),
            lease=self.lease,
            refresh=dispatching.refresh_now,
        )

    def _send(self, record: FromGateway) -> None:
        self.dispatchers.send(record)

    def _of_local(self, record: FromDispatcher) -> None:
        if isinstance(record, ServedModels | Room):
            self.dispatchers.received(self.dispatchers.local, record)
        else:
            self._handle(record)

    def _handle(self, record: FromDispatcher) -> None:
        if isinstance(record, ServedModels):
            self.catalog.update(record)
        elif isinstance(record, WarmPrefix):
            self.upstream.prefixes.warm(record)
        elif isinstance(record, OfAllowances):
            self.entries.on_event(record)
        else:
            if isinstance(record, Warm) or (isinstance(record, Placed) and record.adapter):
                self.upstream.adapters.note(record)
            if not isinstance(record, Warm | Room):  # that is for `Dispatchers`
                self.requests.on_event(record)

    def _owners_changed(self) -> None:
        if self.dispatching is not None:
            self.dispatching.follow_lease()
        self.dispatchers.follow()

    @property
    def active(self) -> int:
        """Return the number of requests between arrival and answer."""
        return self.http.active

    @property
    def database_job(self) -> Job:
        """Return the job that shows whether the database answers."""
        return self.values_job

    @property
    def redis_job(self) -> Job:
        """Return the job that shows whether Redis answers."""
        return self.publisher.job if self.publisher is not None else self.parts.job

    # Lifecycle

    async def start(self) -> None:
        dispatching = self.dispatching
        await self.upstream.start()
        await self.ledger.start()
        await self.lengths.start()
        if dispatching is not None:
            await asyncio.to_thread(kernels.compile_group, "requests")  # immediate where that was done
            for module in (dispatch, waiting_time, waiting_in_queues, view, global_scheduler):
                await asyncio.to_thread(module.warm_up)
            if settings.DISPATCHER_BIND:
                self.lease.address = advertised(dispatching.relays.listen(settings.DISPATCHER_BIND))
            await dispatching.read_inventory()
        await self.lease.start()
        if dispatching is not None:
            await dispatching.read_inventory()
        await self.keys.refresh()
        if dispatching is not None:
            await dispatching.allowances.refresh()
        work = [
            self._every(self.jobs.add("count-tokens", COUNT_S), self._count),
            self._every(self.jobs.add("refresh-keys", settings.KEY_CACHE_S, "database"), self._end_keys),
            self._every(self.jobs.add("note-key-use", settings.KEY_CACHE_S, "database"), self._note_use),
            self._every(self.monitor.job, self.monitor.read),
            self._every(self.parts.job, self.parts.probe),
            self._every(self.jobs.add("follow-dispatchers", TICK_S), self._follow),
        ]
        if dispatching is not None and self.publisher is not None:
            work += [*dispatching.jobs_to_run, self.publisher.run()]
        else:
            await self._read_values()
            work.append(self._every(self.values_job, self._read_values))
        if self.part != "dispatcher":
            work.append(self._every(self.jobs.add("report-figures", REPORT_S), self._report))
        for each in work:
            self._tasks.append(background.spawn(each, str(getattr(each, "__qualname__", each))))
        # Everything loaded by this point stays: without this, each full collection walks half a million objects (100 ms).
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        sys.setswitchinterval(SWITCH_S)
        self.ready = True
        self.dispatchers.follow()
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
        await self.keys.stop()
        self.dispatchers.close()
        if self.dispatching is not None:
            await self.dispatching.stop()
        if self.publisher is not None:
            await self.publisher.stop()
        await self.lease.stop()
        await self.upstream.stop()
        gc.unfreeze()

    def step_down(self) -> None:
        """Give up what this process owns before anything else of a planned stop: another decides while streams end here.

        Where other processes decide, this one answers what still reaches it, and what waits goes on waiting in their queues.
        """
        if not self.stopping:
            self.stopping = True
            self._giving_up = background.spawn(self.lease.give_up(), "give up ownership")
            if not self.dispatchers.linked:
                self.http.stopping = True
                self.requests.stand_by()

    @staticmethod
    async def _every(job: Job, work: Any) -> None:
        while True:
            await asyncio.sleep(job.period_s)
            with job:
                await work()

    async def _follow(self) -> None:
        self.dispatchers.follow()

    async def _count(self) -> None:
        self.http.completions.load.tick()
        self.requests.report()
        if not self.serves():
            self.requests.stand_by()
        if self.dispatching is not None:
            self.dispatching.pump()

    async def _report(self) -> None:
        name, started_at = self.lease.owner, self.monitor.started_at
        self._send(relay_figures(name, self.number, started_at, self.http, self.ledger, draining=self.stopping))

    async def _read_values(self) -> None:
        self.lengths.tune(await database_sync_to_async(tuning.read)())

    async def _end_keys(self) -> None:
        ended = await self.keys.refresh(self.requests.key_ids() | self.entries.key_ids())
        self.requests.end_keys(ended)
        self.entries.end_keys(ended)

    async def _note_use(self) -> None:
        if self.clock() - self._noted_use_s >= NOTE_USE_S:
            self._noted_use_s = self.clock()
            await self.keys.note_use()

    def owns(self) -> bool:
        """Whether this process decides for the whole fleet."""
        return self.lease.held

    def serves(self) -> bool:
        """Whether this process takes requests: it owns the queues, or can reach who does."""
        return self.dispatchers.reachable and self.catalog.known


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
        seen = [self._web(), redis, self._database(), celery, self._beat(celery), self._lengths()]
        if (dispatching := self.gateway.dispatching) is not None:
            lease = self.gateway.lease
            of = "" if len(lease.owned) == len(lease.shards) else " of those that this process decides about"
            seen += [self._instances(dispatching.topology, of), self._kernels()]
        return merged(seen, supervised(Path(settings.STATE_DIR)))

    def _web(self) -> Part:
        gateway = self.gateway
        if not gateway.ready or gateway.stopping:
            return Part("web", PartState.STARTING, "starting or stopping")
        lease = gateway.lease
        if gateway.part != "relay" and not lease.held:
            return Part("web", PartState.STANDBY, f"standing by for {lease.first.name or 'the database'}")
        if deaths := background.summary():
            return Part("web", PartState.WARNING, f"background tasks died, and run again after a restart: {deaths}")
        busy = f"its event loop is busy for {gateway.http.completions.load.share:.0%} of the time"
        owner = f"{lease.first.name or 'no process'} owns the queues, epoch {lease.first.epoch}"
        return Part("web", PartState.OK, f"{owner}; {gateway.active} in flight; {busy}")

    def _redis(self) -> Part:
        job = self.gateway.redis_job
        if not job.ok:
            return Part("redis", PartState.DOWN, job.last_error)
        took_s = job.last_duration_s
        return Part("redis", PartState.OK, "" if took_s is None else f"answers in {took_s * 1000:.1f} ms")

    def _database(self) -> Part:
        job = self.gateway.database_job
        if not job.ok:
            return Part("database", PartState.DOWN, job.last_error)
        ledger = self.gateway.ledger
        if ledger.trouble:
            return Part("database", PartState.WARNING, f"ledger: {ledger.trouble}")
        if self.no_writes:
            text = f"takes no writes: {self.no_writes}; {ledger.held} ledger rows wait"
            return Part("database", PartState.WARNING, text)
        took = "" if job.last_duration_s is None else f"the job {job.name} took {job.last_duration_s * 1000:.0f} ms; "
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
        return self.gateway.redis_job.last_error_at or 0.0

    @staticmethod
    def _instances(topology: Topology, of: str) -> Part:
        fleet, ready, total, below = topology.fleet, 0, 0, []
        for endpoint in topology.own_endpoints:
            slots = [replica.slot for replica in topology.members(endpoint)]
            here = int(fleet.accepting[slots].sum())
            ready, total = ready + here, total + len(slots)
            if topology.serves(endpoint) and here < endpoint.spec.min_instances:
                below.append(f"{endpoint.model} in {endpoint.region} ({here} of {endpoint.spec.min_instances})")
        text = f"{ready} of {total} ready{of}"
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
