"""The processes of a vLLM server on this machine: found under any title, and ended without remains.

A server is an API server with an engine and its workers below it. Each leads a session and has a mark in its
environment; both are inherited. What is left of a server whose leader died is found by either in `/proc`, since vLLM's
processes change their titles, are given to another parent, and may open new sessions.
Linux only, as vLLM is.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "VLLM_SERVER_MARK"
"""Environment variable of all processes of a server; its value is the record's mark."""
KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
"""Keeps setproctitle, by which vLLM renames its processes, from overwriting `/proc/<pid>/environ`."""
POLL_S = 0.05
FOLLOW_S = 5.0
"""Time for the engine, its workers and their resource tracker to end after the API server has ended."""
KILL_WAIT_S = 5.0
TRACKER_S = 2.0
"""Time for the resource tracker to clean up, once the last process that it served is gone."""
TRACKER = b"multiprocessing.resource_tracker"
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 (a file system, not a place for our files)


_exit_codes: dict[tuple[int, int], int] = {}
"""Wait status by process id and start of API servers that were seen to have ended."""


@dataclass(frozen=True, slots=True)
class Record:
    """The pid file. Start time and boot distinguish the process from a later one with the same number."""

    process_id: int
    started_ticks: int
    boot_id: str
    url: str
    gpus: Sequence[str] = ()
    mark: str = ""


def boot_id() -> str:
    with suppress(FileNotFoundError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def started_ticks(process_id: int) -> int:
    stat = status_of(process_id)
    return stat.started_ticks if stat else 0


def started_s(record: Record) -> float:
    """Return when its API server started, in seconds after boot."""
    return record.started_ticks / os.sysconf("SC_CLK_TCK")


def runs(record: Record) -> bool:
    """Return whether its API server lives. Reaps our own dead child, so that no zombie stays."""
    stat = status_of(record.process_id)
    if stat is None or stat.started_ticks != record.started_ticks or record.boot_id != boot_id():
        return False
    if stat.lives:
        return True
    _exit_codes[record.process_id, record.started_ticks] = stat.exit_code
    with suppress(ChildProcessError):  # another process's child
        os.waitpid(record.process_id, os.WNOHANG)
    return False


def how_it_ended(record: Record) -> str:
    """Return how its API server ended, such as `killed (9), perhaps out of memory`; empty if that is unknown or it runs."""
    if runs(record):
        return ""
    code = _exit_codes.get((record.process_id, record.started_ticks))
    if code is None:  # another process has taken its status
        return ""
    number = code & 0x7F
    if number == signal.SIGKILL:
        return "killed (9), perhaps out of memory"
    return f"ended by {signal.Signals(number).name} ({number})" if number else f"ended with status {code >> 8}"


def members(record: Record) -> list[int]:
    """Return the ids of the living processes of this server: of its session, its process group, or with its mark."""
    if record.boot_id != boot_id():
        return []
    leader = status_of(record.process_id)
    # As long as one of them lives, the kernel does not reuse the session's number.
    ours = leader is None or leader.started_ticks == record.started_ticks
    mark = f"{MARK}={record.mark}".encode() if record.mark else b""
    process_ids = []
    for folder in Path("/proc").glob("[0-9]*"):
        process_id = int(folder.name)
        stat = status_of(process_id)
        if stat is None or not stat.lives:
            continue
        if (ours and record.process_id in (stat.group, stat.session)) or (
            mark and mark in read(process_id, "environ").split(b"\0")
        ):
            process_ids.append(process_id)
    return process_ids


async def end(record: Record, grace_s: float) -> list[str]:
    """End the server: gently, then by force, then its shared memory. Return the names of the segments that were
    removed.

    Only the API server is signalled, since it ends the others in order; it has *grace_s*, and they a little longer.
    """
    left = members(record)
    segments = _shared_memory(left)
    if grace_s > 0 and runs(record):
        with suppress(ProcessLookupError):
            os.kill(record.process_id, signal.SIGTERM)
        if await _until(lambda: not runs(record), grace_s):
            await _until(lambda: not members(record), FOLLOW_S)
        left = members(record)
        segments |= _shared_memory(left)
    # What holds memory goes first. The resource tracker then sees that all are gone, cleans up after them and ends.
    trackers = {process_id for process_id in left if TRACKER in read(process_id, "cmdline")}
    _kill(process_id for process_id in left if process_id not in trackers)
    if trackers:
        await _until(lambda: set(members(record)) <= trackers, KILL_WAIT_S)
        await _until(lambda: not members(record), TRACKER_S)
    deadline = time.monotonic() + KILL_WAIT_S
    while (left := members(record)) and time.monotonic() < deadline:  # one may have been born while we looked
        _kill(left)
        await asyncio.sleep(POLL_S)
    runs(record)  # take the exit status of what was our own child
    return _remove(segments)


@dataclass(frozen=True, slots=True)
class Stat:
    state: str
    group: int
    session: int
    started_ticks: int
    exit_code: int = 0
    """Wait status of a process that has ended and whose parent has not asked for it."""

    @property
    def lives(self) -> bool:
        return self.state not in "ZX"


def status_of(process_id: int) -> Stat | None:
    """Return the kernel's facts on a process (proc(5)), its start in clock ticks since boot; None if there is none."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold blanks and brackets
    return Stat(fields[0], int(fields[2]), int(fields[3]), int(fields[19]), int(fields[49]))


def read(process_id: int, file: str) -> bytes:
    """Return a *file* of the process in `/proc`; empty if it has ended or belongs to another user."""
    with suppress(OSError):
        return Path(f"/proc/{process_id}/{file}").read_bytes()
    return b""


def _kill(process_ids: Iterable[int]) -> None:
    for process_id in process_ids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process_id, signal.SIGKILL)


async def _until(true: Callable[[], bool], limit_s: float) -> bool:
    """Poll *true* for up to *limit_s*; return its last value. Not our children: there is no event to wait for."""
    deadline = time.monotonic() + limit_s
    while not (came := true()) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    return came


def _shared_memory(process_ids: Iterable[int]) -> set[str]:
    """Return paths of the shared memory that *process_ids* have mapped."""
    paths = set()
    for process_id in process_ids:
        for line in read(process_id, "maps").decode(errors="replace").splitlines():
            path = line.partition(SHARED_MEMORY)[2]
            if path and not path.endswith(" (deleted)"):
                paths.add(SHARED_MEMORY + path)
    return paths


def _remove(segments: set[str]) -> list[str]:
    """Remove those of *segments* that still exist and that no living process has mapped; return them."""
    left = {path for path in segments if os.path.exists(path)}
    if left:
        left -= _shared_memory(int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    for path in left:
        with suppress(OSError):
            os.unlink(path)
    return sorted(left)
