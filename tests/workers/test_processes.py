"""What is left of a server whose parts were killed: found and ended, with its shared memory, also after a clean stop.

The server is built as vLLM is: an API server, its engine, the engine's worker, a resource tracker between them, and shared
memory that only the tracker removes. The worker opens a session, so that it is found by its mark alone.
"""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.workers.conftest import eventually, lives
from workers.vllm import processes
from workers.vllm.launcher import ProcessLauncher
from workers.vllm.spec import LaunchSpec

SERVER = """
import multiprocessing, os, signal, sys, time
from multiprocessing import shared_memory

def worker(name):
    segment = shared_memory.SharedMemory(name=name)
    os.setsid()
    print("worker", os.getpid(), flush=True)
    time.sleep(600)

def engine():
    segment = shared_memory.SharedMemory(create=True, size=64)
    child = multiprocessing.get_context("spawn").Process(target=worker, args=[segment.name])
    child.start()
    def leave(*_):
        child.kill()
        os._exit(0)
    signal.signal(signal.SIGTERM, leave)
    print("engine", os.getpid(), flush=True)
    print("segment", segment.name, flush=True)
    child.join()
    time.sleep(600)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=engine)
    child.start()
    def leave(*_):
        child.terminate()
        child.join()
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "--stubborn" in sys.argv else leave)
    print("api", os.getpid(), flush=True)
    while True:
        time.sleep(600)
"""


@dataclass
class Parts:
    """Process ids of a server's parts, and the path of its shared memory."""

    ids: dict[str, int]
    segment: Path

    def left(self) -> list[str]:
        return [name for name, process_id in self.ids.items() if lives(process_id)]


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[ProcessLauncher]:
    server = tmp_path / "server.py"
    server.write_text(textwrap.dedent(SERVER))
    python = tmp_path / "python"
    # Its parser takes every flag.
    python.write_text(f"""#!/bin/sh
case "$1" in *parse_arguments.py) echo '{{"error": ""}}'; exit;; esac
exec {sys.executable} {server} "$@"
""")
    python.chmod(0o755)
    launcher = ProcessLauncher(str(python), tmp_path / "run")
    yield launcher
    await launcher.stop("a", grace_s=0)


async def started(launcher: ProcessLauncher, *extra_args: str) -> Parts:
    await launcher.start(LaunchSpec(name="a", model="m", source="/models/m", extra_args=extra_args))
    lines: list[list[str]] = []

    def logged() -> bool:
        text = launcher.log_file("a").read_text()
        lines[:] = [line.split() for line in text.splitlines()[-4:]]
        return text.endswith("\n") and {line[0] for line in lines} == {"api", "engine", "worker", "segment"}

    await eventually(logged)
    said = {line[0]: line[1] for line in lines}
    segment = Path("/dev/shm") / said.pop("segment")
    assert segment.exists()
    return Parts({name: int(text) for name, text in said.items()}, segment)


async def test_a_clean_stop_leaves_no_process_and_no_shared_memory(launcher: ProcessLauncher) -> None:
    parts = await started(launcher)
    assert os.getsid(parts.ids["worker"]) == parts.ids["worker"]
    await launcher.stop("a")
    assert parts.left() == []
    assert not parts.segment.exists()


async def test_nor_does_a_forced_one(launcher: ProcessLauncher) -> None:
    parts = await started(launcher, "--stubborn")
    await launcher.stop("a", grace_s=0.2)
    assert parts.left() == []
    assert not parts.segment.exists()


@pytest.mark.parametrize("killed", ["api", "engine", "worker"])
async def test_after_a_part_was_killed_the_others_go_too(launcher: ProcessLauncher, killed: str) -> None:
    parts = await started(launcher)
    os.kill(parts.ids[killed], signal.SIGKILL)
    await eventually(lambda: killed not in parts.left())
    assert set(parts.left()) == {"api", "engine", "worker"} - {killed}  # nothing else ends them
    seen = launcher.record("a")
    assert seen is not None
    assert launcher.how_it_ended("a") == ("killed (9), perhaps out of memory" if killed == "api" else "")
    assert await launcher.end_failed("a", seen)
    assert parts.left() == []
    assert launcher.how_it_ended("a") == "", "its end by us is not taken for another's"
    assert not parts.segment.exists()
    assert not await launcher.end_failed("a", seen)  # nothing is left to end


async def test_an_instance_restarted_since_is_left_alone(launcher: ProcessLauncher) -> None:
    parts = await started(launcher)
    seen = launcher.record("a")
    assert seen is not None
    os.kill(parts.ids["api"], signal.SIGKILL)
    await eventually(lambda: "api" not in parts.left())
    again = await started(launcher)
    assert parts.left() == []
    assert not await launcher.end_failed("a", seen)
    assert again.left() == ["api", "engine", "worker"]


async def test_shared_memory_that_its_tracker_can_no_longer_remove(launcher: ProcessLauncher) -> None:
    parts = await started(launcher)
    record = launcher.record("a")
    assert record is not None
    (tracker,) = set(processes.members(record)) - set(parts.ids.values())
    os.kill(tracker, signal.SIGKILL)
    await launcher.stop("a", grace_s=0)
    assert parts.left() == []
    assert not parts.segment.exists()


async def test_shared_memory_in_use_by_others_stays(launcher: ProcessLauncher) -> None:
    parts = await started(launcher)
    record = launcher.record("a")
    assert record is not None
    (tracker,) = set(processes.members(record)) - set(parts.ids.values())
    os.kill(tracker, signal.SIGKILL)
    uses = (
        "import mmap, sys; file = open(sys.argv[1], 'r+b'); held = mmap.mmap(file.fileno(), 0); "
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", uses, str(parts.segment)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:  # noqa: ASYNC220
        assert other.stdout is not None
        other.stdout.readline()
        await launcher.stop("a", grace_s=0)
        assert parts.segment.exists()
        other.communicate()
    parts.segment.unlink()
