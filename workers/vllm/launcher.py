"""Launchers of vLLM servers: as processes on this machine, or as emulated instances.

A launcher keeps no state between calls, so that a Celery task may run one call in `asyncio.run` and the next call may
come from another process. The instance's name is its identity: starting a running name returns the running server.
"""

import asyncio
import fcntl
import os
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import orjson

from workers.vllm import processes
from workers.vllm.engine_log import rotate_log
from workers.vllm.processes import Record
from workers.vllm.serve import VISIBLE_GPUS, arguments, environment, problem_with
from workers.vllm.spec import NAME, LaunchSpec, ServerSpec

POLL_S = 0.05
LOCK_WAIT_S = 60.0
EMULATOR_TIMEOUT_S = 5.0
CHECKED = ".checked"
"""Folder of the parser's verdicts on flags."""
PLACES = ".places"
"""Name of the lock under which a port and GPUs are chosen; no instance has such a name."""


class LaunchError(Exception):
    """A server could not be started or stopped; the text says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A running server: its base address without `/v1`, and if it is a process the leader of its group, and its GPUs."""

    url: str
    process_id: int | None
    gpus: Sequence[str] = ()


class Launcher(Protocol):
    """Starts and stops servers. Every call may be repeated safely."""

    async def start(self, spec: LaunchSpec) -> Launched:
        """Start *spec* and return at once; `/health` answers, minutes later, once it has loaded. Raises LaunchError."""

    async def stop(self, name: str, *, grace_s: float = 10.0) -> None:
        """Stop the server, by force after *grace_s*. No error if there is none of that name."""

    async def alive(self, name: str) -> bool:
        """Return whether there is such a process, ready or not."""


class EmulatedLauncher:
    """Launches instances in an emulator (`python -m workers.emulator`) at *base_url*."""

    def __init__(self, base_url: str) -> None:
        self._admin = base_url.rstrip("/") + "/emulator/instances/"
        self._timeout = aiohttp.ClientTimeout(total=EMULATOR_TIMEOUT_S)

    async def start(self, spec: LaunchSpec) -> Launched:
        if spec.profile is None:
            raise LaunchError(f"{spec.name}: an emulated instance needs a performance profile.")
        body = spec.model_dump(mode="json", include=set(ServerSpec.model_fields), exclude_none=True)
        body["enable_auto_tool_choice"] = True
        status, answer = await self._call("PUT", spec.name, body)
        if status != 200:
            raise LaunchError(f"{spec.name}: the emulator answered {status}: {answer.get('error', '')}")
        return Launched(str(answer["url"]), None)

    async def stop(self, name: str, *, grace_s: float = 10.0) -> None:
        status, answer = await self._call("DELETE", name)
        if status not in {204, 404}:
            raise LaunchError(f"{name}: the emulator answered {status}: {answer.get('error', '')}")

    async def alive(self, name: str) -> bool:
        try:
            status, answer = await self._call("GET", name)
        except LaunchError:
            return False
        return status == 200 and answer.get("state") != "crashed"

    async def _call(self, method: str, name: str, body: object = None) -> tuple[int, dict[str, Any]]:
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.request(method, self._admin + _checked(name), json=body) as response,
            ):
                text = await response.read()
                return response.status, orjson.loads(text) if text else {}
        except (aiohttp.ClientError, OSError, orjson.JSONDecodeError) as error:
            raise LaunchError(f"The emulator at {self._admin} cannot be reached: {error}") from error


class ProcessLauncher:
    """Launches vLLM servers as processes of this machine, with *vllm_python*.

    Each has a pid file `<run_dir>/<name>.json` and a log `<run_dir>/<name>.log`, and leads its session: it outlives the
    process that started it, and its engine processes are stopped with it. Ports and GPUs are exclusive. Linux only, as
    vLLM is.
    """

    def __init__(self, vllm_python: str, run_dir: Path) -> None:
        self._python = vllm_python
        self._run_dir = run_dir

    def log_file(self, name: str) -> Path:
        return self._run_dir / f"{_checked(name)}.log"

    async def start(self, spec: LaunchSpec) -> Launched:
        name = _checked(spec.name)
        if not spec.source:
            raise LaunchError(f"{name}: the model {spec.model} names no folder or repository to load.")
        if not os.access(self._python, os.X_OK):
            raise LaunchError(f"{name}: there is no Python at {self._python!r} (VLLM_PYTHON). Run `make vllm` first.")
        self._run_dir.mkdir(parents=True, exist_ok=True)
        if problem := await asyncio.to_thread(problem_with, self._python, spec, self._run_dir / CHECKED):
            raise LaunchError(f"{name}: vLLM does not take its further flags: {problem}.")
        async with self._lock(name):
            record = self._read(name)
            if record is not None and processes.runs(record):
                return Launched(record.url, record.process_id, tuple(record.gpus))
            if record is not None:
                await processes.end(record, 0.0)  # engine processes of a server that died
            async with self._lock(PLACES):
                others = self._others(name)
                shared = [others[other].gpus for other in spec.shares_gpus_with if other in others]
                taken = {gpu for other in others.values() for gpu in other.gpus}
                gpus = shared[0] if shared else _free_gpus(spec, taken)
                port = spec.port or _free_port(spec, {other.url for other in others.values()})
                mark = uuid.uuid4().hex
                process_id = self._spawn(spec, port, gpus, mark)
                started = processes.started_ticks(process_id)
                record = Record(process_id, started, processes.boot_id(), _url(spec.host, port), gpus, mark)
                self._pid_file(name).write_bytes(orjson.dumps(asdict(record)))
        return Launched(record.url, record.process_id, tuple(record.gpus))

    async def stop(self, name: str, *, grace_s: float = 10.0) -> None:
        name = _checked(name)
        if not self._run_dir.is_dir():
            return
        async with self._lock(name):
            record = self._read(name)
            if record is not None:
                await processes.end(record, grace_s)
                self._pid_file(name).unlink(missing_ok=True)

    async def end_failed(self, name: str, seen: Record) -> bool:
        """End the remaining processes of the failed server *name*, unless it was restarted since *seen*; return whether
        any were. Its pid file goes with the last of them.
        """
        async with self._lock(name):
            if self._read(name) != seen or not processes.members(seen):
                return False
            await processes.end(seen, 0.0)
            if not processes.members(seen):
                self._pid_file(name).unlink(missing_ok=True)
        return True

    def how_it_ended(self, name: str) -> str:
        """Return how the last server *name* ended (`processes.how_it_ended`)."""
        record = self.record(name)
        return processes.how_it_ended(record) if record else ""

    def is_gone(self, name: str) -> bool:
        """Return whether no process of the last server *name* is left on this machine."""
        record = self.record(name)
        return record is None or not processes.members(record)

    def record(self, name: str) -> Record | None:
        """Return the record of the last start of *name*, running or not."""
        return self._read(_checked(name))

    async def alive(self, name: str) -> bool:
        record = self._read(_checked(name))
        return record is not None and processes.runs(record)

    def _others(self, name: str) -> dict[str, Record]:
        """Return other servers started here that have a living process, by name: one that loads has no port yet."""
        records = {file.stem: self._read(file.stem) for file in self._run_dir.glob("*.json") if file.stem != name}
        return {other: record for other, record in records.items() if record and processes.members(record)}

    def _spawn(self, spec: LaunchSpec, port: int, gpus: Sequence[str], mark: str) -> int:
        """Start the server in its own session and return its process id."""
        log_file = self.log_file(spec.name)
        rotate_log(log_file)
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            # Not subprocess.Popen: no thread of this process will wait for it, as Popen objects expect.
            command = arguments(self._python, spec, port)
            return os.posix_spawn(
                command[0],
                command,
                {**environment(spec, gpus), **processes.KEEP_ENVIRONMENT, processes.MARK: mark},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log, 1),
                    (os.POSIX_SPAWN_DUP2, log, 2),
                ],
                setsid=True,
            )
        except OSError as error:
            raise LaunchError(f"{spec.name}: {self._python} cannot be started: {error.strerror}") from error
        finally:
            os.close(log)

    def _pid_file(self, name: str) -> Path:
        return self._run_dir / f"{name}.json"

    def _read(self, name: str) -> Record | None:
        try:
            return Record(**orjson.loads(self._pid_file(name).read_bytes()))
        except (FileNotFoundError, orjson.JSONDecodeError, TypeError):
            return None

    @asynccontextmanager
    async def _lock(self, name: str) -> AsyncIterator[None]:
        """Serialise starts and stops of a name over all processes of this machine."""
        with (self._run_dir / f"{name}.lock").open("w") as file:
            deadline = time.monotonic() + LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise LaunchError(f"{name}: another start or stop of it does not end.") from None
                    await asyncio.sleep(POLL_S)
            yield


def _checked(name: str) -> str:
    """Return *name*, which becomes a file name and a part of a URL. Raises LaunchError if it is not a plain word."""
    if not NAME.fullmatch(name):
        raise LaunchError(f"{name!r} is not an instance name: use letters, digits, - and _.")
    return name


def _free_port(spec: LaunchSpec, taken: Set[str]) -> int:
    """Return a port whose address is not among *taken*: vLLM opens its own only after half a minute."""
    while True:
        try:
            with socket.socket() as probe:
                probe.bind((spec.host, 0))
                port = int(probe.getsockname()[1])
        except OSError as error:
            reason = f"no server can be started at {spec.host} from this machine: {error.strerror}"
            raise LaunchError(f"{spec.name}: {reason}.") from error
        if _url(spec.host, port) not in taken:
            return port


def _free_gpus(spec: LaunchSpec, taken: Set[str]) -> tuple[str, ...]:
    """Return the first visible GPUs that are neither *taken* nor cordoned, suspect ones last; none if their number is
    unknown.
    """
    visible = os.environ.get(VISIBLE_GPUS) or ",".join(map(str, range(spec.gpus)))
    free = [gpu for gpu in visible.split(",")[: spec.gpus] if gpu not in taken and gpu not in spec.cordoned_gpus]
    free.sort(key=lambda gpu: gpu in spec.suspect_gpus)
    if spec.gpus and len(free) < spec.tensor_parallel:
        raise LaunchError(
            f"{spec.name}: it needs {spec.tensor_parallel} of {spec.gpus} GPUs, and other servers"
            f"{f' and {len(spec.cordoned_gpus)} cordoned' if spec.cordoned_gpus else ''} leave {len(free)}."
        )
    return tuple(free[: spec.tensor_parallel])


def _url(host: str, port: int) -> str:
    return f"http://{host}:{port}"
