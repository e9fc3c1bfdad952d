"""How the parts of the stack stand, as the gateway sees them: itself, Redis, database, workers, instances, lengths."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

from django.conf import settings

from controlplane import kernels
from controlplane.jobs.broker import answering_workers
from controlplane.jobs.parts import Part, PartState, merged, supervised
from controlplane.jobs.record import Job

if TYPE_CHECKING:
    from controlplane.gateway.process import Gateway

PROBE_S = 10.0
ANSWER_WITHIN_S = 2.0
GONE_AFTER = 2  # probes without an answer: a worker that starts a child may answer late
BEAT_SILENT_S = 30.0  # the shortest period of its schedule is five seconds
NOT_KNOWN = "not known while "


class Parts:
    """`probe` asks the workers, now and then; calling it gives every part as memory knows it now."""

    def __init__(self, gateway: "Gateway") -> None:
        self.gateway = gateway
        self.job: Job = gateway.jobs.add("probe-workers", PROBE_S, "redis")
        self._workers: dict[str, list[str]] | None = None  # None: not asked yet, or the broker did not answer
        self._missed = 0
        self._kernels_missing = True

    async def probe(self) -> None:
        """Ask which workers are there. Raises what the broker raises."""
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
        if not gateway.lease.held:
            return Part("web", PartState.STANDBY, f"standing by for {gateway.lease.holder}")
        return Part("web", PartState.OK, f"{gateway.lease.owner} owns the regions; {gateway.active} in flight")

    def _redis(self) -> Part:
        for job in (self.gateway.publisher.job, self.gateway.lease.job):
            if not job.ok:
                return Part("redis", PartState.DOWN, job.last_error)
        took_s = self.gateway.lease.job.last_duration_s
        return Part("redis", PartState.OK, "" if took_s is None else f"answers in {took_s * 1000:.1f} ms")

    def _database(self) -> Part:
        job = self.gateway.inventory_job
        if not job.ok:
            return Part("database", PartState.DOWN, job.last_error)
        held = self.gateway.ledger.held
        took = "" if job.last_duration_s is None else f"the inventory is read in {job.last_duration_s * 1000:.0f} ms; "
        if refused := self.gateway.ledger.refused:
            text = f"it refused {refused} ledger row{'s' * (refused > 1)}, quarantined: `manage.py ledger_refused`"
            return Part("database", PartState.WARNING, text)
        return Part("database", PartState.OK, f"{took}{held} ledger rows wait to be written")

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
        # Only the tasks that it starts show that it lives.
        ran_at = max(self.gateway.monitor.last_run_at() or 0.0, self.gateway.monitor.started_at)
        silent_s = time.time() - max(ran_at, self._back_at())
        if silent_s > BEAT_SILENT_S:
            return Part("beat", PartState.DOWN, f"no periodic task has ended for {silent_s:.0f} s")
        return Part("beat", PartState.OK, f"a periodic task ended {time.time() - ran_at:.0f} s ago")

    def _back_at(self) -> float:
        """When the last outage of Redis ended: until then nothing of beat's could arrive."""
        return self.gateway.publisher.job.last_error_at or 0.0

    def _instances(self) -> Part:
        topology = self.gateway.topology
        fleet, ready, total, below = topology.fleet, 0, 0, []
        for endpoint in topology.endpoints:
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
        answerers = service.answering.all()
        restarts = sum(answerer.restarts for answerer in answerers)
        if not answerers:
            return Part("lengths", PartState.WARNING, "no length model is loaded; moving means answer", None, restarts)
        names = ", ".join(str(answerer.version) for answerer in answerers)
        return Part("lengths", PartState.OK, f"{names} answer{'' if len(answerers) > 1 else 's'}", None, restarts)

    def _kernels(self) -> Part:
        if self._kernels_missing:
            if compiling := kernels.progress():
                return Part("kernels", PartState.STARTING, f"{compiling}; who needs one of them waits")
            if missing := kernels.missing():
                text = f"not compiled yet: {' and '.join(missing)}; done by the first process that needs one"
                return Part("kernels", PartState.STANDBY, text)
            self._kernels_missing = False
        return Part("kernels", PartState.OK, "all are compiled for this machine")
