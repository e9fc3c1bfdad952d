"""Locks for compiling: one process compiles a group of kernels, and others that need one of them wait.

`controlplane.kernels` compiles a whole group before services start. It holds the group's lock, a file next to the compiled
kernels, and writes its progress there. A process that calls a kernel of the group which is not on disk yet logs that and
waits, instead of compiling the same kernel.
"""

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

GROUPS: Final = ("requests", "simulation")
"""In compilation order: the gateway's request path, then the simulator."""
COMPILES: Final = "PILOTHOUSE_COMPILES_KERNELS"
"""Set in the environment of processes that compile under a lock that another process holds for them."""
POLL_S: Final = 0.2
WRITE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the process that holds a group's lock."""

    group: str
    process_id: int
    began_s: float
    """Since the epoch."""
    kernels: int
    """On disk so far: of its group, or called by one of its kernels."""

    def __str__(self) -> str:
        took_s = max(0.0, time.time() - self.began_s)
        return f"kernels of {self.group} are being compiled, {self.kernels} so far, for {took_s:.0f} s"


def group_of(module: str) -> str:
    """Return the kernel group of the module."""
    return "simulation" if module.startswith("scheduling.simulation.") else "requests"


def _lock_file(base: Path, group: str) -> Path:
    return base / f"compiling-{group}"


@contextmanager
def compiling(base: Path, group: str) -> Iterator[None]:
    """Hold the lock of *group* in the folder *base*, waiting for any other process that does, and write the progress."""
    base.mkdir(parents=True, exist_ok=True)
    _lock_file(base, group).touch()
    with _lock_file(base, group).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        os.utime(file.fileno())
        began_s, ended = (
            os.fstat(file.fileno()).st_mtime,
            threading.Event(),
        )  # by the file system's clock, which is coarse

        def write() -> None:
            while True:
                made = sum(1 for path in base.glob("kernels-*/*.nbc") if _modified_s(path) >= began_s)
                text = json.dumps(asdict(Progress(group, os.getpid(), began_s, made))).encode()
                os.pwrite(file.fileno(), text.ljust(200), 0)
                if ended.wait(WRITE_S):
                    return

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        try:
            yield
        finally:
            ended.set()
            writer.join()


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has just replaced it
        return 0.0


def progress(base: Path, group: str) -> Progress | None:
    """Return the progress of the process that is compiling *group*; None if there is none."""
    try:
        with _lock_file(base, group).open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Progress(**json.loads(file.read() or "{}"))
    except (OSError, ValueError, TypeError):  # no such file, or one being written
        pass
    return None


def wait_for(kernel: Any, folder: Path | None) -> None:
    """Wait until *kernel*, a function, is in *folder* or no process is compiling its group."""
    if folder is None or os.environ.get(COMPILES):
        return
    group = group_of(kernel.__module__)
    said = False
    while not any(folder.glob(f"*.{kernel.__name__}-*.nbi")):
        now = progress(folder.parent, group)
        if now is None or now.process_id == os.getpid():
            return
        if not said:
            said = True
            logging.getLogger(__name__).warning(
                "%s waits for process %d: %s",
                kernel.__name__,
                now.process_id,
                now,
            )
        time.sleep(POLL_S)
