"""Warm backends of units that are no LLM: started before runs will probably need them, and handed to their units.

The process that owns the queues keeps them, as it follows the runs. A start takes a thread each; the event loop decides, and
reports of tenants take what is warm from other threads. A container belongs to one execution and is stopped after it; a DNN
server holds nothing of a tenant, so that it serves the next one.
"""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

from controlplane.applications.models import BackendKind, UnitBackend
from controlplane.dispatch.prewarming_log import CalledBy, Fate, Prewarm, PrewarmLog
from controlplane.dispatch.runs import MOST_UNIT_S
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


class LikelyUnit(NamedTuple):
    """A unit of a run that will probably begin, on a backend that is no LLM."""

    backend: str
    why: str
    called_by: CalledBy


class Failure(NamedTuple):
    """A start that failed, to be written as an event."""

    backend: str
    why: str
    tries: int
    rests_s: float


@dataclass(slots=True, eq=False)
class Running:
    """A backend that runs."""

    started: Started
    actuator: Actuator
    since_s: float
    """Since it is idle, or in use."""
    record: Prewarm | None
    """Of its start, until it is used."""
    unit: int = 0
    """Row of the unit that has it."""


@dataclass(slots=True)
class Pool:
    """All of one backend. *row* is as it was read last."""

    row: UnitBackend
    idle: list[Running] = field(default_factory=list)
    used: list[Running] = field(default_factory=list)
    starting: int = 0
    tries: int = 0
    """Starts in a row that failed."""
    not_before_s: float = 0.0
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=STARTS_KEPT))

    @property
    def start_s(self) -> float:
        """Return the usual time of a start."""
        return statistics.median(self.took_s) if self.took_s else FIRST_START_S

    @property
    def room(self) -> int:
        return self.row.capacity - self.starting - len(self.idle) - len(self.used)


class Handed(NamedTuple):
    """What a unit was handed: *address* is empty if it is cold."""

    warm: bool
    address: str = ""


class Backends:
    """Keeps backends for the units of *log*. *docker_socket* is the path of Docker's socket, "" for none."""

    def __init__(
        self, log: PrewarmLog, installation: str, docker_socket: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        owner = owner_of(blake2b(installation.encode(), digest_size=6).hexdigest())
        self.log, self.clock = log, clock
        self.processes: Actuator = Processes(owner)
        self.docker: Actuator | None = Docker(docker_socket, owner) if has_docker(docker_socket) else None
        self.failures: deque[Failure] = deque(maxlen=100)
        self.pools: dict[str, Pool] = {}
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._swept = self._stopped = False

    def apply(self, rows: Sequence[UnitBackend]) -> None:
        """Keep the backends of *rows* from now on; what others have idle is stopped."""
        if rows and not self._swept:
            self._swept = True
            self._in_thread(self._sweep)
        with self._lock:
            known = {row.name: row for row in rows if row.active}
            for name, row in known.items():
                if name not in self.pools:
                    self.pools[name] = Pool(row)
                elif self.pools[name].row.spec != row.spec:
                    self._stop(self.pools[name], self.pools[name].idle)
                    self.pools[name].tries, self.pools[name].not_before_s = 0, 0.0
                self.pools[name].row = row
            for name in [name for name in self.pools if name not in known]:
                self._stop(self.pools[name], self.pools[name].idle)
                if not self.pools[name].used and not self.pools[name].starting:
                    del self.pools[name]

    def start_s(self, backend: str) -> float | None:
        """Return the usual time to start *backend*, None if it is not kept warm."""
        pool = self.pools.get(backend)
        return None if pool is None else pool.start_s

    def look(self, likely: Iterable[LikelyUnit]) -> None:
        """Start what *likely* units lack, and stop what was idle or used for too long. Call every second."""
        wanted: dict[str, list[LikelyUnit]] = {}
        for unit in likely:
            wanted.setdefault(unit.backend, []).append(unit)
        with self._lock:
            now_s = self.clock()
            for name, pool in self.pools.items():
                self._tidy(pool, now_s)
                units = wanted.get(name, [])
                while len(units) > len(pool.idle) + pool.starting and pool.room > 0 and now_s >= pool.not_before_s:
                    self._start(pool, units[len(pool.idle) + pool.starting])

    def take(self, backend: str, unit: int, came_at: float, called_by: CalledBy) -> Handed | None:
        """Hand a warm *backend* to *unit*, the row of an execution; None if that backend is not kept."""
        with self._lock:
            pool = self.pools.get(backend)
            if pool is None:
                return None
            while pool.idle:
                one = pool.idle.pop()
                if not one.actuator.runs(one.started.handle):
                    self._settle(one, "failed", "It ended before it was used.")
                    continue
                if one.record is not None:
                    self.log.use(one.record.kind, backend, one.record.place, came_at)
                one.record, one.unit, one.since_s = None, unit, self.clock()
                pool.used.append(one)
                return Handed(True, one.started.address)
            why = "It was still being started." if pool.starting else "None was warm."
            self.log.miss(_kind(pool), backend, "", why, called_by)
            return Handed(False)

    def give_back(self, units: Iterable[int]) -> None:
        """Take back what the executions of *units* had: a container is stopped, a DNN server is warm for the next one."""
        ended = set(units)
        with self._lock:
            for pool in self.pools.values():
                back = [one for one in pool.used if one.unit in ended]
                if pool.row.kind == BackendKind.DNN:
                    for one in back:
                        pool.used.remove(one)
                        one.unit, one.since_s = 0, self.clock()
                        pool.idle.insert(0, one)
                else:
                    self._stop(pool, pool.used, back)

    def stop(self) -> None:
        """Stop all. Blocks for a few seconds at most for each."""
        self._stopped = True
        with self._lock:
            for pool in self.pools.values():
                self._stop(pool, pool.idle)
                self._stop(pool, pool.used)
        for thread in list(self._threads):
            thread.join(timeout=5.0)

    def _tidy(self, pool: Pool, now_s: float) -> None:
        dead = [one for one in pool.idle if not one.actuator.runs(one.started.handle)]
        for one in dead:
            pool.idle.remove(one)
            self._settle(one, "failed", "It ended before it was used.")
        kept_s = pool.row.keep_alive_s
        self._stop(pool, pool.idle, [one for one in pool.idle if now_s - one.since_s > kept_s])
        self._stop(pool, pool.used, [one for one in pool.used if now_s - one.since_s > MOST_UNIT_S])

    def _start(self, pool: Pool, unit: LikelyUnit) -> None:
        pool.starting += 1
        self._in_thread(lambda: self._run(pool, pool.row.spec, unit))

    def _run(self, pool: Pool, spec: BackendSpec, unit: LikelyUnit) -> None:
        """Start a backend, in a thread: warm from then on, or a failure."""
        record = self.log.begin(_kind(pool), spec.name, f"start {id(unit):x}", unit.why, unit.called_by)
        began_s = self.clock()
        try:
            actuator = self.docker if self.docker is not None and spec.image else self.processes
            if not spec.command and actuator is self.processes:
                raise ActuatorError("there is no Docker here, and no command to run without it")
            started = actuator.start(spec)
        except ActuatorError as error:
            with self._lock:
                pool.starting -= 1
                pool.tries += 1
                rests_s = REST_S if pool.tries % MOST_TRIES == 0 else RETRY_S
                pool.not_before_s = self.clock() + rests_s
                self.failures.append(Failure(spec.name, str(error), pool.tries, rests_s))
            self.log.settle(record, "failed", f"{str(error)[:200]}.")
            return
        with self._lock:
            pool.starting -= 1
            one = Running(started, actuator, self.clock(), record)
            self.log.warm(record, started.address or started.handle[:12])
            pool.tries = 0
            pool.took_s.append(self.clock() - began_s)
            pool.idle.append(one)
            if self._stopped or pool.row.spec != spec:
                self._stop(pool, pool.idle, [one])

    def _stop(self, pool: Pool, among: list[Running], some: Sequence[Running] | None = None) -> None:
        """Stop *some* of *among*, a list of *pool*; all by default. Takes no time: a thread waits for their ends."""
        for one in list(among if some is None else some):
            among.remove(one)
            self._settle(one, "waste")
            self._in_thread(lambda one=one: one.actuator.stop(one.started.handle))

    def _settle(self, one: Running, fate: Fate, why: str = "") -> None:
        if one.record is not None:
            self.log.settle(one.record, fate, why)

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


def _kind(pool: Pool) -> str:
    return str(pool.row.kind)


current: Backends | None = None
"""Those of this process, once its gateway has started."""
