"""Real vLLM that Pilothouse itself starts, drains and stops: the fleet of one deployment grows and shrinks under load.

The gateway serves in the test's event loop, and its floor decides about growth. The commands are carried out by the tasks of
the real workers, in a thread that runs them as Celery and its beat would; neither they nor Redis are there.
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.models import CommandState, Instance, InstanceCommand, Node
from controlplane.planning.execution import executor
from controlplane.planning.execution.rows import in_a_thread
from controlplane.planning.models import MoveSource, ScalingMove
from tests.gateway.conftest import ServedGateway, until
from tests.gateway.rows import SECRET
from tests.vllm.conftest import FLAGS, IN_ONE_PROCESS, MAX_MODEL_LEN, MODEL, START_LIMIT_S
from tests.vllm.gateway import make_stopped_fleet, serving_gateway, workers_launcher
from workers.tasks import fleet as fleet_tasks
from workers.vllm.launcher import VISIBLE_GPUS, ProcessLauncher

pytestmark = pytest.mark.vllm
FIRST, SECOND = "first", f"{MODEL}-here-1"  # the name of the second is made by the executor
SEQUENCES = 8  # that each server runs at a time
BURST = 3 * SEQUENCES // 2
CHOICES, LONG = 4, 3900  # of the stream that outlasts its instance's release: some ten seconds
STOP_LIMIT_S = 30.0
VLLM_ARGS = " ".join((*FLAGS, "--distributed-executor-backend", "uni"))


@pytest.fixture
def launcher(vllm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessLauncher]:
    """The launcher that the worker will use."""
    with workers_launcher(vllm_python, tmp_path, monkeypatch, (FIRST, SECOND), **IN_ONE_PROCESS) as launcher:
        yield launcher


@in_a_thread
def run_tasks() -> None:
    """Run what is due in the workers now."""
    pending = InstanceCommand.objects.filter(state=CommandState.PENDING).order_by("pk")
    for key in list(pending.values_list("pk", flat=True)):
        fleet_tasks.run_command(key)
    fleet_tasks.watch_loading()
    fleet_tasks.end_failed()


@asynccontextmanager
async def working() -> AsyncIterator[asyncio.Task[None]]:
    """Run the workers' tasks repeatedly; raise their errors at the end."""
    leave = asyncio.Event()

    async def work() -> None:
        while not leave.is_set():
            await asyncio.to_thread(run_tasks)
            with suppress(TimeoutError):
                await asyncio.wait_for(leave.wait(), 0.3)

    task = asyncio.create_task(work())
    try:
        yield task
    finally:
        leave.set()
        await task


@pytest.fixture
async def served(
    transactional_db: None, launcher: ProcessLauncher, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ServedGateway]:
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.3)
    monkeypatch.setattr(settings, "HEARTBEAT_FAILURES", 10)  # while one loads, the other may be slow to answer
    deployment = {"min_instances": 1, "vllm_args": VLLM_ARGS}
    await database_sync_to_async(make_stopped_fleet)(tiny_model, [FIRST], SEQUENCES, 2, **deployment)
    async with serving_gateway() as served, working():
        yield served


@pytest.fixture
async def client(served: ServedGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=SECRET, max_retries=0, timeout=120) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, tokens: int) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=[7] * 10, max_tokens=tokens, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tokens


@dataclass(frozen=True)
class Answer:
    """Why each choice of a stream ended, the tokens that were counted, and when all had come (epoch seconds)."""

    reasons: tuple[str, ...]
    tokens: int
    at: float = field(default=0.0, compare=False)


async def rest(stream: openai.AsyncStream[openai.types.Completion]) -> Answer:
    reasons, tokens = [], 0
    async for chunk in stream:
        reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return Answer(tuple(reasons), tokens, time.time())


async def row_of(name: str) -> Instance:
    return await database_sync_to_async(Instance.objects.get)(name=name)


async def becomes(launcher: ProcessLauncher, name: str, state: str, limit_s: float) -> Instance:
    """Return the row of *name* once it is *state*; fail with the end of its log if that
    takes too long or it has failed.
    """
    deadline = time.monotonic() + limit_s
    while (row := await row_of(name)).state != state:
        if row.state == "failed" or time.monotonic() > deadline:
            log = launcher.log_file(name)
            end = log.read_text()[-3000:] if log.exists() else "there is none"
            pytest.fail(f"{name} is {row.state} ({row.state_reason}), not {state}; the end of its log:\n{end}")
        await asyncio.sleep(0.1)
    return row


async def values_of(queryset: Any, *fields: str) -> list[tuple[Any, ...]]:
    return await database_sync_to_async(lambda: list(queryset.order_by("pk").values_list(*fields)))()


def group(leader: int) -> list[int]:
    """Return the processes of the session that *leader* began, without zombies."""
    process_ids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if os.getsid(int(folder.name)) == leader and state not in "ZX":
                process_ids.append(int(folder.name))
    return process_ids


def gpus_of(process_id: int) -> str:
    words = (Path("/proc") / str(process_id) / "environ").read_text().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)[VISIBLE_GPUS]


def listens(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", urlsplit(url).port)) == 0


async def test_a_burst_brings_a_second_server_and_a_release_lets_it_finish(
    served: ServedGateway, client: openai.AsyncOpenAI, launcher: ProcessLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings: dict[str, float] = {}
    began_s = time.monotonic()

    def lap(name: str) -> None:
        nonlocal began_s
        timings[name], began_s = round(time.monotonic() - began_s, 1), time.monotonic()

    def fleet() -> dict[str, Any]:
        return {replica.name: replica for replica in served.gateway.dispatching.topology.replicas.values()}

    # The first is started by hand.
    await database_sync_to_async(lambda: services.start(Instance.objects.get(), "a test", "to serve"))()
    first = await becomes(launcher, FIRST, "ready", START_LIMIT_S)
    await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 1)
    assert first.process_id in group(first.process_id)
    assert first.kv_capacity_tokens > MAX_MODEL_LEN
    await ask(client, 10)
    lap("first_ready_s")

    # More is asked for than it can run, until the floor has asked for another one.
    grown = asyncio.Event()

    async def keep_asking() -> None:
        while not grown.is_set():
            await ask(client, 200)

    async with asyncio.timeout(60), asyncio.TaskGroup() as burst:
        for _ in range(BURST):
            burst.create_task(keep_asking())
        while not await values_of(ScalingMove.objects, "pk"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        grown.set()
    monkeypatch.setattr(settings, "FLOOR", False)  # it would not leave the release to us
    lap("floor_moved_s")
    second = await becomes(launcher, SECOND, "ready", START_LIMIT_S)
    await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 2)
    lap("second_ready_s")
    assert first.process_id != second.process_id
    assert await database_sync_to_async(lambda: Node.objects.get().free_gpus())() == 0
    assert [gpus_of(row.process_id) for row in (first, second)] == ["0", "1"]
    rows_before = len(await served.rows())
    await asyncio.gather(ask(client, 300), ask(client, 300))
    rows = (await served.rows())[rows_before:]
    assert {(row.instance, row.outcome) for row in rows} == {
        (FIRST, "done"),
        (SECOND, "done"),
    }

    # While a long answer is under way on the second, it is let go. The first may have another one.
    answers = []
    while not fleet()[SECOND].requests:
        stream = await client.completions.create(
            model=MODEL,
            prompt=[9, 9],
            n=CHOICES,
            max_tokens=LONG,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        await anext(stream)
        answers.append(asyncio.create_task(rest(stream)))
    assert len(answers) <= 2

    looks: list[int | None] = []  # what the worker has process_ids running on the second, each time that it looked
    finish_drain = executor.finish_drain

    def look(instance: Instance, running: int | None, actor: str) -> bool:
        looks.append(running)
        return finish_drain(instance, running, actor)

    monkeypatch.setattr(executor, "finish_drain", look)

    def release() -> ScalingMove:
        return executor.remove(MODEL, "here", executor.Why(MoveSource.STRATEGY, "reactive", "use is low", {"use": 0.1}))

    assert (await database_sync_to_async(release)()).instance == SECOND
    await until(
        lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 1
    )  # without Redis it reads the rows now and then
    rows_before = len(await served.rows())
    while not answers[-1].done():
        assert (await row_of(SECOND)).state == "draining"
        await ask(client, 20)
    lap("stream_done_s")
    ended_at = (await answers[-1]).at
    assert {await answer for answer in answers} == {Answer(("length",) * CHOICES, CHOICES * LONG)}

    # Then, and only then, it is stopped; the first has served all the while and continues.
    stopped = await becomes(launcher, SECOND, "stopped", STOP_LIMIT_S)
    lap("stopped_s")
    assert (stopped.process_id, group(second.process_id), listens(second.url)) == (None, [], False)
    assert not await launcher.alive(SECOND)
    assert await database_sync_to_async(lambda: Node.objects.get().free_gpus())() == 1
    assert (await row_of(FIRST)).process_id == first.process_id
    await ask(client, 20)
    rows = (await served.rows())[rows_before:]
    assert {row.outcome for row in rows} == {"done"}
    assert [row.output_tokens for row in rows if row.instance == SECOND] == [CHOICES * LONG]
    drained = await database_sync_to_async(Event.objects.get)(subject=SECOND, after={"state": "draining"})
    assert ended_at - drained.at.timestamp() > executor.DRAIN_SETTLE.total_seconds()  # it could have been cut
    assert looks[-1] == 0
    assert any(looks)
    assert 0 not in looks[:-1]

    # All of it is written down, with who and why.
    added, removed = await values_of(ScalingMove.objects, "source", "delta", "instance", "reason")
    assert added[:3] == ("floor", 1, SECOND)
    assert added[3].startswith("Safety autoscaler: use is 1")
    assert removed == ("strategy", -1, SECOND, "use is low")
    of_second = Event.objects.filter(subject=SECOND)
    assert await values_of(of_second, "kind", "actor", "reason") == [
        ("instance.start_requested", "safety autoscaler", added[3]),
        ("scaling.added", "safety autoscaler", added[3]),
        ("instance.moved", "fleet worker", added[3]),
        ("instance.moved", "gateway", "health check passed"),
        ("instance.moved", "autoscaler reactive", "use is low"),
        ("scaling.removed", "autoscaler reactive", "use is low"),
        ("instance.stop_requested", "planner", "drained: nothing runs on it"),
        ("instance.moved", "fleet worker", "drained: nothing runs on it"),
    ]
    states = [after["state"] for (after,) in await values_of(of_second.filter(kind="instance.moved"), "after")]
    assert states == ["loading", "ready", "draining", "stopped"]
    # There is no Redis here, which is said once.
    assert not await values_of(Event.objects.exclude(severity="info").exclude(kind="part.down"), "kind", "reason")
    print(json.dumps(timings))
