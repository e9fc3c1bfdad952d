"""Warm backends of units that are no LLM: started before runs will probably need them, and handed to their units.

`scheduling.applications.warm_pool` says what starts and what leaves, as in simulations; this has actuators do it. They are
kept by the process that owns the queues, as it follows the runs. A start takes a thread each; the event loop decides, and
reports of tenants take what is warm from other threads. A DNN server is shared. A container is one execution's, and is
stopped after it unless its row says that it is reused: it may hold what its tenant left there.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import inf
from typing import Final, NamedTuple

from controlplane.applications.models import BackendKind, UnitBackend
from controlplane.dispatch.prewarming_log import CalledBy, Prewarm, PrewarmLog
from controlplane.dispatch.runs import MOST_UNIT_S
from scheduling.applications.warm_pool import WarmBackend, WarmPool
from workers.backends.actuators import Actuator, ActuatorError, BackendSpec, Started, has_docker, owner_of
from workers.backends.docker import Docker
from workers.backends.processes import Processes

FIRST_START_S: Final = 2.0
"""Taken for a start before one was measured."""
STARTS_KEPT: Final = 16
MOST_TRIES: Final = 3
"""Starts in a row that fail before a backend rests."""
RETRY_S: Final = 5.0
REST_S: Final = 300.0
JOIN_S: Final = 5.0
UNPLACED: Final = "start "
"""Begins the place of a backend that is being started, which is not known before."""
DIED: Final = "It ended before it was used."


class LikelyUnit(NamedTuple):
    """Units of a run that will probably begin, on a backend that is no LLM."""

    backend: str
    why: str
    called_by: CalledBy
    executions: int = 1
    """At once."""


class Failure(NamedTuple):
    """A start that failed, to be written as an event."""

    backend: str
    why: str
    tries: int
    rests_s: float


@dataclass(slots=True, eq=False)
class Running:
    """A backend that was started, and its record until it is used."""

    started: Started
    actuator: Actuator
    record: Prewarm | None


@dataclass(slots=True)
class Kept:
    """All of one backend. *row* is as it was read last."""

    row: UnitBackend
    pool: WarmPool
    running: dict[WarmBackend, Running] = field(default_factory=dict)
    used_by: dict[int, tuple[WarmBackend, float]] = field(default_factory=dict)
    """By row of the unit that has it, with the time since when."""
    tries: int = 0
    """Starts in a row that failed."""
    not_before_s: float = 0.0
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=STARTS_KEPT))

    @property
    def start_s(self) -> float:
        """Return the usual time of a start."""
        return statistics.median(self.took_s) if self.took_s else FIRST_START_S

    @property
    def reused(self) -> bool:
        return self.row.kind == BackendKind.DNN or self.row.reused


class Handed(NamedTuple):
    """What a unit was handed: *address* is empty if it is cold, or has no port."""

    warm: bool
    address: str = ""


class Backends:
    """Keeps backends, and records what becomes of them in *log*. *docker_socket*: path of Docker's socket, "" for none."""

    def __init__(
        self, log: PrewarmLog, installation: str, docker_socket: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        owner = owner_of(blake2b(installation.encode(), digest_size=6).hexdigest())
        self.log, self.clock = log, clock
        self.processes: Actuator = Processes(owner)
        self.docker: Actuator | None = Docker(docker_socket, owner) if has_docker(docker_socket) else None
        self.failures: deque[Failure] = deque(maxlen=100)
        self.kept: dict[str, Kept] = {}
        self._lock = threading.RLock()
        self._threads: set[threading.Thread] = set()
        self._swept = self._stopped = False

    def apply(self, rows: Sequence[UnitBackend]) -> None:
        """Keep the backends of *rows* from now on; others, and those that are started in another way now, leave."""
        if rows and not self._swept:
            self._swept = True
            self._in_thread(self._sweep)
        with self._lock:
            now = {row.name: row for row in rows if row.active}
            for name, kept in list(self.kept.items()):
                if name not in now or (kept.row.spec, kept.row.kind) != (now[name].spec, now[name].kind):
                    del self.kept[name]
                    for each in list(kept.running):
                        self._stop(kept, each)
            for name, row in now.items():
                if name not in self.kept:
                    pool = WarmPool(row.capacity, row.keep_alive_s, shared=row.kind == BackendKind.DNN)
                    self.kept[name] = Kept(row, pool)
                    pool.leave = partial(self._stop, self.kept[name])
                one = self.kept[name]
                one.row, one.pool.capacity, one.pool.keep_alive_s = row, row.capacity, row.keep_alive_s

    def starts_s(self) -> dict[str, float]:
        """Return the usual time to start each backend."""
        return {name: kept.start_s for name, kept in list(self.kept.items())}

    def look(self, likely: Iterable[LikelyUnit]) -> None:
        """Start what *likely* units lack, and stop what was idle or used for too long. Call every second."""
        wanted: dict[str, list[LikelyUnit]] = {}
        for unit in likely:
            wanted.setdefault(unit.backend, []).append(unit)
        with self._lock:
            now_s = self.clock()
            for name, kept in self.kept.items():
                kept.pool.look(now_s)
                for one in [each for each in kept.running if not self._lives(kept, each)]:
                    self._gone(kept, one)
                self.give_back([unit for unit, (_, since_s) in kept.used_by.items() if now_s - since_s > MOST_UNIT_S])
                units = wanted.get(name)
                if units and now_s >= kept.not_before_s:
                    count = sum(unit.executions for unit in units)
                    for at, one in enumerate(kept.pool.warm(name, inf, now_s, count)):
                        self._start(kept, one, units[min(at, len(units) - 1)])

    def take(self, backend: str, unit: int, came_at: float, called_by: CalledBy) -> Handed | None:
        """Hand a warm *backend* to *unit*, the row of an execution; None if that backend is not kept."""
        with self._lock:
            kept = self.kept.get(backend)
            if kept is None:
                return None
            now_s = self.clock()
            ready = [one for one in kept.running if one.ready_s <= now_s and (kept.pool.shared or not one.users)]
            for one in [each for each in ready if not self._lives(kept, each)]:
                self._gone(kept, one)
                ready.remove(one)
            if not ready:
                late = len(kept.pool.backends) > len(kept.running)
                kept.pool.counts["miss"] += 1
                why = "One was still being started." if late else "None was warm."
                self.log.miss(str(kept.row.kind), backend, "", why, called_by)
                return Handed(False)
            one = kept.pool.take(backend, inf, now_s)
            running = kept.running[one]
            kept.used_by[unit] = one, now_s
            if running.record is not None:
                self.log.use(running.record.kind, backend, running.record.place, came_at)
                running.record = None
            return Handed(True, running.started.address)

    def give_back(self, units: Iterable[int]) -> None:
        """Take back what the executions of *units* had: it serves the next one, or is stopped."""
        with self._lock:
            now_s = self.clock()
            for kept in self.kept.values():
                for unit in [each for each in units if each in kept.used_by]:
                    one, _ = kept.used_by.pop(unit)
                    kept.pool.give_back(one, now_s)
                    if not kept.reused:
                        kept.pool.fail(one)
                        self._stop(kept, one)

    def stop(self) -> None:
        """Stop all, and wait a few seconds for their ends."""
        with self._lock:
            self._stopped = True
            for kept in self.kept.values():
                for one in list(kept.running):
                    self._stop(kept, one)
        until_s = time.monotonic() + JOIN_S
        for thread in list(self._threads):
            thread.join(max(0.0, until_s - time.monotonic()))

    def _start(self, kept: Kept, one: WarmBackend, unit: LikelyUnit) -> None:
        spec = kept.row.spec
        record = self.log.begin(str(kept.row.kind), spec.name, f"{UNPLACED}{id(one):x}", unit.why, unit.called_by)
        self._in_thread(lambda: self._run(kept, one, spec, record))

    def _run(self, kept: Kept, one: WarmBackend, spec: BackendSpec, record: Prewarm) -> None:
        """Start a backend, in a thread: warm from then on, or a failure."""
        began_s = self.clock()
        try:
            actuator = self.docker if self.docker is not None and spec.image else self.processes
            if actuator is self.processes and not spec.command:
                raise ActuatorError(f"{spec.name} has an image alone, and there is no Docker here")
            started = actuator.start(spec)
        except ActuatorError as error:
            with self._lock:
                kept.pool.fail(one)
                kept.tries += 1
                rests_s = REST_S if kept.tries % MOST_TRIES == 0 else RETRY_S
                kept.not_before_s = self.clock() + rests_s
                self.failures.append(Failure(spec.name, str(error), kept.tries, rests_s))
            self.log.settle(record, "failed", f"{str(error)[:200]}.")
            return
        with self._lock:
            now_s = self.clock()
            kept.tries, one.ready_s, one.asked_s, one.idle_from_s = 0, now_s, now_s, now_s
            kept.took_s.append(now_s - began_s)
            kept.running[one] = Running(started, actuator, record)
            self.log.warm(record, started.address or started.handle[:12])
            if self._stopped or one not in kept.pool.backends or self.kept.get(spec.name) is not kept:
                self._stop(kept, one)  # it has left meanwhile

    def _lives(self, kept: Kept, one: WarmBackend) -> bool:
        running = kept.running[one]
        return running.actuator.runs(running.started.handle)

    def _gone(self, kept: Kept, one: WarmBackend) -> None:
        """Forget a backend that has ended by itself."""
        running = kept.running.pop(one)
        kept.pool.fail(one)
        if running.record is not None:
            self.log.settle(running.record, "failed", DIED)
            self.failures.append(Failure(kept.row.name, DIED, 1, 0.0))

    def _stop(self, kept: Kept, one: WarmBackend) -> None:
        """Stop a backend. Takes no time: a thread waits for its end. One that is being started stops once it has."""
        running = kept.running.pop(one, None)
        if running is None:
            return
        if running.record is not None:
            self.log.settle(running.record, "waste")
        self._in_thread(lambda: running.actuator.stop(running.started.handle))

    def _sweep(self) -> None:
        for actuator in filter(None, (self.processes, self.docker)):
            try:
                actuator.sweep()
            except ActuatorError as error:
                self.failures.append(Failure("", str(error), 1, 0.0))

    def _in_thread(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="backends", daemon=True)
        self._threads.add(thread)
        thread.start()


class OfProcess:
    """*backends*: those of this process, once its gateway has started."""

    backends: Backends | None = None


OF_PROCESS: Final = OfProcess()
