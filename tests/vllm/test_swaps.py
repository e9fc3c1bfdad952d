"""Two models on the same GPUs behind the gateway, swapped while requests for both come: nothing lost or answered twice.

Two real vLLM servers on CPUs, whose sleep frees no memory but is a sleep otherwise, and two emulated ones. The swaps are
ours: the floor asks for them, and what a worker does is done by a thread. `pytest -m vllm -s tests/vllm/test_swaps.py`
prints the times.
"""

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from types import SimpleNamespace

import aiohttp
import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from django.db import connections

from controlplane.dispatch.live_fleet.topology import Replica
from controlplane.fleet import services
from controlplane.fleet.models import CommandState, Deployment, Instance, InstanceCommand, Model, Swap, SwapGroup
from controlplane.gateway.models import LedgerRow
from controlplane.gateway.process import Gateway
from controlplane.planning.execution.loop import ScalingLoop
from controlplane.tuning import services as tuning
from tests.gateway.conftest import serving, until
from tests.gateway.rows import SECRET, make_rows
from tests.vllm.conftest import VllmFleet, emulated
from workers.tasks import fleet as tasks
from workers.tasks.tick import advance_swaps
from workers.vllm.client import VllmClient
from workers.vllm.metrics import VllmMetrics

MODELS = ("first", "second")
REQUESTS = {"vllm": 24, "emulator": 10}  # for each model
TOKENS = 24
AT_ONCE = 4


@pytest.fixture(scope="module")
def emulator() -> Iterator[tuple[str, dict]]:
    """The address of a process of emulated servers, and the spec of one of them."""
    process, url = emulated(sleep_s=0.05, wake_s=0.1, reload_s=0.2)
    root = url.rpartition("/")[0]
    with process:
        with urllib.request.urlopen(f"{root}/emulator/instances/contract") as answer:
            spec = json.load(answer)["spec"]
        yield root, spec
        process.terminate()


@pytest.fixture(params=["emulator", pytest.param("vllm", marks=pytest.mark.vllm)])
def servers(request: pytest.FixtureRequest) -> Iterator[list[SimpleNamespace]]:
    """A server of each model, by the model's name."""
    if request.param == "vllm":
        fleet: VllmFleet = request.getfixturevalue("vllm_fleet")
        urls = {name: fleet.start(f"swap-{name}", model=name) for name in MODELS}  # both load at the same time
        for name, url in urls.items():
            fleet.wait(f"swap-{name}", url)
        yield [SimpleNamespace(name=name, url=url, requests=REQUESTS["vllm"]) for name, url in urls.items()]
        return
    root, spec = request.getfixturevalue("emulator")
    made = []
    for name in MODELS:
        body = json.dumps(spec | {"model": name}).encode()
        wanted = urllib.request.Request(f"{root}/emulator/instances/{name}", data=body, method="PUT")
        with urllib.request.urlopen(wanted) as answer:
            url = str(json.load(answer)["url"])
            made.append(SimpleNamespace(name=name, url=url, requests=REQUESTS["emulator"]))
    yield made
    for name in MODELS:
        urllib.request.urlopen(urllib.request.Request(f"{root}/emulator/instances/{name}", method="DELETE")).close()


def rows(servers: list[SimpleNamespace], cpu_memory_bytes: int | None, ordering: str, by_queue: bool) -> None:
    """The first is awake, the second sleeps on its GPUs."""
    first, second = servers
    make_rows([first], regions=["here"], max_num_seqs=AT_ONCE, queue_bound=1000, model_name="first")
    of = Deployment.objects.get()
    model = Model.objects.create(
        name="second", title="second", weights_bytes=2**30, kv_bytes_per_token=2**17, context_tokens=8192
    )
    values = {"region": of.region, "gpu_type": of.gpu_type, "max_num_seqs": AT_ONCE, "queue_bound": 1000}
    other = Deployment.objects.create(model=model, **values)
    group = SwapGroup.objects.create(name="shared", cpu_memory_bytes=cpu_memory_bytes)
    Instance.objects.update(swap_group=group)
    Instance.objects.create(
        name="second", deployment=other, url=second.url, state="sleeping", sleep_level=1, swap_group=group
    )
    Deployment.objects.update(ordering_policy=ordering)
    if not by_queue:
        tuning.change("SWAP_BY_QUEUE", False, "test")


class Worker:
    """What Celery does: commands, and the next moves of swaps, in a separate thread."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self._over.wait(0.02):
            try:
                advance_swaps()
                for command in InstanceCommand.objects.filter(state=CommandState.PENDING).order_by("pk"):
                    tasks.run_command(command.pk)
            finally:
                connections.close_all()

    def __enter__(self) -> "Worker":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize("cpu_memory_bytes", [None, 0], ids=["in memory", "discarded"])
@pytest.mark.parametrize(
    ("ordering", "by_queue"),
    [
        pytest.param("fcfs", True, id="fcfs", marks=pytest.mark.nightly),
        pytest.param("qlm", True, id="by queue"),
        pytest.param("qlm", False, id="on demand", marks=pytest.mark.nightly),
    ],
)
async def test_models_that_share_gpus_serve_all_that_comes(
    transactional_db, servers, monkeypatch, cpu_memory_bytes, ordering, by_queue
):
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.1)
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.2)
    for sends in (services, tasks):
        monkeypatch.setattr(sends, "deliver", lambda command: True)
        monkeypatch.setattr(sends, "advance_swaps", lambda: True)
    monkeypatch.setattr(tasks, "SLEEP_WAIT_S", 60.0)
    await database_sync_to_async(rows)(servers, cpu_memory_bytes, ordering, by_queue)
    async with AsyncExitStack() as stack:
        second = await stack.enter_async_context(VllmClient(servers[1].url))
        await second.sleep(level=1)
        before = [await reading_of(server.url) for server in servers]
        gateway = Gateway(ScalingLoop)
        url = await stack.enter_async_context(serving(gateway))
        http = await stack.enter_async_context(session())
        await until(lambda: gateway.dispatching.topology.fleet.accepting.sum() == 1, 30)
        arrays = gateway.dispatching.dispatcher.queue.arrays.groups
        together = ordering == "qlm" and by_queue  # QLM: one virtual queue for both models
        await until(lambda: len({int(arrays.queue_of[one.slot]) for one in replicas(gateway)}) == 2 - together, 30)
        stack.enter_context(Worker())

        async def ask(number: int) -> dict:
            await asyncio.sleep(number // 4 * 0.25)
            body = {
                "model": MODELS[number % 2], "prompt": "w " * 8, "max_tokens": TOKENS, "ignore_eos": True,
            }  # fmt: skip
            headers = {"Authorization": f"Bearer {SECRET}"}
            async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        requests = servers[0].requests
        answers = await asyncio.gather(*(ask(number) for number in range(2 * requests)))
        answers.append(await ask(2 * requests))  # for the first: if it sleeps by now, that is a swap back
        await until(lambda: not any(group.in_progress for group in gateway.dispatching.topology.swap_groups), 60)
    assert [answer["model"] for answer in answers] == [*list(MODELS) * requests, "first"]
    assert {answer["usage"]["completion_tokens"] for answer in answers} == {TOKENS}
    for server, was, count in zip(servers, before, (requests + 1, requests), strict=True):
        reading = await reading_of(server.url)
        assert reading.generation_tokens_total - was.generation_tokens_total == count * TOKENS
    await database_sync_to_async(check)(cpu_memory_bytes, 2 * requests + 1)


def session() -> aiohttp.ClientSession:
    """Send each request on a new connection: an idle one may be closed at the moment of its next use."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=300), connector=aiohttp.TCPConnector(limit=0, force_close=True)
    )


def replicas(gateway: Gateway) -> list[Replica]:
    return list(gateway.dispatching.topology.replicas.values())


async def reading_of(url: str) -> VllmMetrics:
    async with VllmClient(url) as client:
        return await client.metrics()


def check(cpu_memory_bytes: int | None, requests: int) -> None:
    """Return what its rows say."""
    made = list(Swap.objects.order_by("pk"))
    for swap in made:
        print(swap.instance.name, swap.state, swap.tier, swap.sleep_tier, swap.drain_s, swap.sleep_s, swap.load_s)
    assert len(made) >= 2
    assert {swap.state for swap in made} == {"succeeded"}
    assert {swap.sleep_tier for swap in made} == {"storage" if cpu_memory_bytes == 0 else "cpu"}
    assert all(None not in (swap.drain_s, swap.sleep_s, swap.load_s) for swap in made)
    assert LedgerRow.objects.filter(outcome="done").count() == requests
    assert LedgerRow.objects.count() == requests
