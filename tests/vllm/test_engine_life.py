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
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import aiohttp
import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.dispatch.floor import Publication
from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.models import Deployment, Instance, Launcher, Model, Node
from controlplane.gateway.process import Gateway
from controlplane.planning.execution import floor as floor_rows
from tests.gateway.conftest import ServedGateway, serving, until
from tests.gateway.rows import make_rows
from tests.vllm.conftest import FLAGS, MAX_MODEL_LEN, MODEL, START_LIMIT_S, STOP_GRACE_S, finish
from tests.vllm.test_scaling import becomes, row_of, values_of, working
from workers.vllm.launcher import ProcessLauncher

pytestmark = pytest.mark.vllm
NAMES = ("a", "b", "c")
PARTS = ("api_server", "VLLM::EngineCore", "VLLM::Worker")
END_LIMIT_S = 60.0  # of all processes of a server of which one was killed, on a machine where others start


@pytest.fixture
def launcher(vllm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessLauncher]:
    """The launcher that the worker will use; whatever it started ends with the test, also when that ends by SIGTERM."""
    monkeypatch.setattr(settings, "VLLM_PYTHON", vllm_python)
    monkeypatch.setattr(settings, "STATE_DIR", tmp_path)
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    launcher = ProcessLauncher(vllm_python, tmp_path / "instances")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield launcher
    for name in NAMES:
        finish(launcher.stop(name, grace_s=STOP_GRACE_S))
    signal.signal(signal.SIGTERM, before)


def make_fleet(source: Path) -> None:
    """A deployment whose minimum is three, on a node of three GPUs, and its stopped instances; no policy."""
    backends = [type("Row", (), {"name": name, "url": f"http://127.0.0.1:{at}"}) for at, name in enumerate(NAMES, 1)]
    make_rows(backends, regions=["here"] * 3, max_num_seqs=4, queue_bound=100, model_name=MODEL)
    deployment = Deployment.objects.get()
    node = Node.objects.create(name="node", region=deployment.region, gpu_type=deployment.gpu_type, gpu_count=3)
    Model.objects.update(source=str(source), context_tokens=MAX_MODEL_LEN)
    Deployment.objects.update(min_instances=3, max_instances=3, vllm_args=" ".join(FLAGS))
    Instance.objects.update(launcher=Launcher.PROCESS, node=node, url="", state="stopped")


@pytest.fixture
async def served(
    transactional_db: None, launcher: ProcessLauncher, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ServedGateway]:
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.3)
    monkeypatch.setattr(settings, "HEARTBEAT_FAILURES", 10)  # while others load, one may be slow to answer
    await database_sync_to_async(make_fleet)(tiny_model)
    async with AsyncExitStack() as stack:
        gateway = Gateway(floor_rows)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        url = await stack.enter_async_context(serving(gateway))
        await stack.enter_async_context(working())
        yield ServedGateway(gateway, url, [], http)


def parts_of(leader: int) -> dict[int, str]:
    """The processes of the session that *leader* began, with their titles; one that is dead counts no more."""
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
    """What the processes of the session that *leader* began have mapped of `/dev/shm`."""
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

    accepting = served.gateway.topology.fleet.accepting
    shared: set[Path] = set()

    # The minimum starts them.
    first = {name: await becomes(launcher, name, "ready", START_LIMIT_S) for name in NAMES}
    await until(lambda: served.gateway.topology.fleet.accepting.sum() == 3)
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

    async def started_anew(name: str) -> Instance:
        deadline = time.monotonic() + START_LIMIT_S
        while (row := await row_of(name)).process_id in {None, *old} or row.state not in {"loading", "ready"}:
            assert time.monotonic() < deadline, f"{name} is {row.state}: {row.state_reason}"
            await asyncio.sleep(0.1)
        return row

    for name in NAMES:
        await started_anew(name)
    second = {name: await becomes(launcher, name, "ready", START_LIMIT_S) for name in NAMES}
    await until(lambda: served.gateway.topology.fleet.accepting.sum() == 3)
    lap("minimum_restored_s")
    answers = await asyncio.gather(*(served.chat(model=MODEL, max_tokens=4) for _ in range(6)))
    assert {answer.status for answer in answers} == {200}
    reasons = dict(await values_of(Event.objects.filter(after={"state": "failed"}), "subject", "reason"))
    assert set(reasons) == set(NAMES)

    # With a strategy that is alive: the same, as far as the start.
    async def exchange(self: Publication, message: bytes) -> None:
        self.strategists = frozenset({MODEL})

    monkeypatch.setattr(Publication, "_exchange", exchange)
    await until(lambda: bool(served.gateway.floor.publication.strategists))
    for row in second.values():
        shared |= shared_memory_of(row.process_id or 0)
    row = second["b"]
    assert row.process_id is not None
    os.kill(part(row.process_id, "VLLM::EngineCore"), signal.SIGKILL)
    old = [one.process_id for one in second.values()]
    await until(lambda: not parts_of(row.process_id or 0), END_LIMIT_S)
    await started_anew("b")
    lap("with_a_strategy_s")

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
