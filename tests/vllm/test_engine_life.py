"""Real vLLM whose parts are killed: the minimum comes back, with a strategy and without, and nothing is left behind.

Three servers of one deployment, each an API server, an engine and a worker. All load side by side, so the test takes as long
as two starts.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.models import Deployment, Instance
from tests.gateway.conftest import ServedGateway, until
from tests.vllm.conftest import FLAGS, MODEL, START_LIMIT_S
from tests.vllm.gateway import make_stopped_fleet, serving_gateway, workers_launcher
from tests.vllm.test_scaling import becomes, row_of, values_of, working
from workers.vllm.launcher import ProcessLauncher

pytestmark = pytest.mark.vllm
NAMES = ("a", "b", "c")
PARTS = ("api_server", "VLLM::EngineCore", "VLLM::Worker")
END_LIMIT_S = 60.0  # of all processes of a server of which one was killed, on a machine where others start


@pytest.fixture
def launcher(vllm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessLauncher]:
    """The launcher that the worker will use."""
    with workers_launcher(vllm_python, tmp_path, monkeypatch, NAMES, OMP_NUM_THREADS="1") as launcher:
        yield launcher


@pytest.fixture
async def served(
    transactional_db: None, launcher: ProcessLauncher, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ServedGateway]:
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.3)
    monkeypatch.setattr(settings, "HEARTBEAT_FAILURES", 10)  # while others load, one may be slow to answer
    deployment = {"min_instances": 3, "vllm_args": " ".join(FLAGS)}
    await database_sync_to_async(make_stopped_fleet)(tiny_model, NAMES, 4, len(NAMES), **deployment)
    async with serving_gateway() as served, working():
        yield served


def parts_of(leader: int) -> dict[int, str]:
    """Return the live processes of the session that *leader* began, with their titles."""
    parts = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if os.getsid(int(folder.name)) == leader and state not in "ZX":
                parts[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
    return parts


def part(leader: int, title: str) -> int:
    (process_id,) = [each for each, words in parts_of(leader).items() if title in words]
    return process_id


def shared_memory_of(leader: int) -> set[Path]:
    """Return what the processes of the session that *leader* began have mapped of `/dev/shm`."""
    segments = set()
    for process_id in parts_of(leader):
        with suppress(OSError):
            lines = (Path("/proc") / str(process_id) / "maps").read_text().splitlines()
            words = [line.split()[5:] for line in lines]
            segments |= {Path(word[0]) for word in words if len(word) == 1 and word[0].startswith("/dev/shm/")}
    return segments


async def test_killed_parts_come_back_and_leave_nothing(
    served: ServedGateway, launcher: ProcessLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings: dict[str, float] = {}
    began_s = time.monotonic()

    def lap(name: str) -> None:
        nonlocal began_s
        timings[name], began_s = round(time.monotonic() - began_s, 1), time.monotonic()

    accepting = served.gateway.dispatching.topology.fleet.accepting
    shared: set[Path] = set()

    # The minimum starts them.
    first = {name: await becomes(launcher, name, "ready", START_LIMIT_S) for name in NAMES}
    await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 3)
    lap("ready_s")

    # Without a policy: each server loses another part, and all that is left of it goes before it is started again.
    for row in first.values():
        shared |= shared_memory_of(row.process_id or 0)
    assert len(shared) >= 3  # each server has its own
    for (name, row), title in zip(first.items(), PARTS, strict=True):
        assert row.process_id is not None, name
        os.kill(part(row.process_id, title), signal.SIGKILL)
    old = [row.process_id for row in first.values()]
    await until(lambda: not any(parts_of(leader) for leader in old), END_LIMIT_S)
    lap("ended_s")

    async def restarted(name: str) -> Instance:
        deadline = time.monotonic() + START_LIMIT_S
        while (row := await row_of(name)).process_id in {None, *old} or row.state not in {"loading", "ready"}:
            assert time.monotonic() < deadline, f"{name} is {row.state}: {row.state_reason}"
            await asyncio.sleep(0.1)
        return row

    for name in NAMES:
        await restarted(name)
    for name in NAMES:
        await becomes(launcher, name, "ready", START_LIMIT_S)
    await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 3)
    lap("minimum_restored_s")
    answers = await asyncio.gather(*(served.chat(model=MODEL, max_tokens=4) for _ in range(6)))
    assert {answer.status for answer in answers} == {200}
    reasons = dict(await values_of(Event.objects.filter(after={"state": "failed"}), "subject", "reason"))
    assert set(reasons) == set(NAMES)

    # A stop leaves nothing: no process, no shared memory.
    def stop_all() -> None:
        Deployment.objects.update(min_instances=0)
        for instance in Instance.objects.all():
            services.stop(instance, "a test", "the end")

    leaders = [(await row_of(name)).process_id for name in NAMES]
    await database_sync_to_async(stop_all)()
    for name in NAMES:
        await becomes(launcher, name, "stopped", END_LIMIT_S)
    assert [parts_of(leader or 0) for leader in leaders] == [{}, {}, {}]
    assert {path.name for path in shared if path.exists()} == set()
    lap("stopped_s")
    assert accepting.sum() == 0
    print(json.dumps(timings))
