"""A whole gateway in the test's own event loop: uvicorn, database, scripted backends; no Redis."""

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio
import uvicorn
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.fleet.models import Instance
from controlplane.gateway.models import LedgerRow
from controlplane.gateway.process import Gateway
from controlplane.lengths import answering
from controlplane.planning.execution.loop import ScalingLoop
from scheduling.queueing import global_scheduler, held_work
from tests.gateway.backend import Backend
from tests.gateway.rows import SECRET, make_rows
from tests.workers.conftest import FAST


@dataclass
class ServedGateway:
    """A gateway behind HTTP, with scripted backends and its rows in the database."""

    gateway: Gateway
    url: str
    backends: list[Backend]
    http: aiohttp.ClientSession
    secret: str = SECRET
    extra: dict = field(default_factory=dict)
    rows_seen: int = 0

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secret}"}

    def post(self, path: str, body: dict, headers: dict | None = None):
        return self.http.post(f"{self.url}{path}", json=body, headers=self.headers | (headers or {}))

    async def chat(self, headers: dict | None = None, **body) -> aiohttp.ClientResponse:
        body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]} | body
        return await self.post("/v1/chat/completions", body, headers)

    async def rows(self) -> list[LedgerRow]:
        await self.gateway.ledger.flush()
        return await database_sync_to_async(lambda: list(LedgerRow.objects.select_related("tenant").order_by("id")))()

    async def new_row(self) -> LedgerRow:
        """Return the one row that was written since the last call."""
        rows = await self.rows()
        (row,) = rows[self.rows_seen :]
        self.rows_seen = len(rows)
        return row

    async def instance(self, index: int = 0) -> Instance:
        name = self.backends[index].name
        return await database_sync_to_async(lambda: Instance.objects.get(name=name))()

    async def becomes(self, state: str, index: int = 0, within_s: float = 20.0) -> bool:
        """Whether the row of an instance reaches *state*; a busy machine may miss heartbeats on the way."""
        end_s = time.monotonic() + within_s
        while (await self.instance(index)).state != state:
            if time.monotonic() > end_s:
                return False
            await asyncio.sleep(0.05)
        return True


_load, _bundled = answering.load, cache(partial(answering.load, "trees", ""))
_warm_up = cache(global_scheduler.warm_up)


def do_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do the shared setup of every gateway, which takes a tenth of a second, once per process.

    Length models answer in process, independent of the machine's load; their speed is tested in
    tests/lengths/test_subprocess.py.
    """
    if answering.load is _load:
        monkeypatch.setattr(answering, "load", lambda kind, file: _load(kind, file) if file else _bundled())
    monkeypatch.setattr(global_scheduler, "warm_up", _warm_up)
    monkeypatch.setattr(held_work, "COOLDOWN_S", 0.0)  # each test's instance is new


def open_sdk(served: ServedGateway, **options) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=False)  # reading certificates takes a tenth of a second
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=served.secret, http_client=http, **options)


@asynccontextmanager
async def serving(gateway: Gateway):
    """The ASGI application around *gateway* on a free port."""
    from controlplane.asgi import create_application
    from controlplane.listening import HttpProtocol

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        create_application(gateway),
        http=HttpProtocol,
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    with pytest.MonkeyPatch.context() as patch:
        # Half a second per gateway in a process as large as pytest's; keeps what tests/conftest.py froze.
        for name in ("collect", "freeze", "unfreeze", "set_threshold"):
            patch.setattr(gc, name, lambda *_: None)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
            if task.done():
                task.result()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task
            listener.close()


@asynccontextmanager
async def gateway_before(
    backends: Sequence[Any], http: aiohttp.ClientSession | None = None, **extra: Any
) -> AsyncIterator[ServedGateway]:
    """Run a gateway on the existing rows, with all of *backends* ready."""
    gateway = Gateway(ScalingLoop)
    async with http or aiohttp.ClientSession() as http, serving(gateway) as url:
        await until(lambda: gateway.dispatching.topology.fleet.accepting.sum() == len(backends))
        yield ServedGateway(gateway, url, list(backends), http, extra=extra)


@pytest.fixture
def gateway_options() -> dict:
    """Override in a test module or by parametrisation: regions, max_num_seqs, queue_bound."""
    return {}


@pytest_asyncio.fixture
async def served(transactional_db, gateway_options, monkeypatch):
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(settings, "KEY_CACHE_S", 0.2)
    do_once(monkeypatch)
    options = {"regions": ["east"], "max_num_seqs": 8, "queue_bound": 100} | gateway_options
    async with AsyncExitStack() as stack:
        backends = [Backend(f"m-{index}") for index in range(len(options["regions"]))]
        for backend in backends:
            await backend.start()
            stack.push_async_callback(backend.stop)
        await database_sync_to_async(make_rows)(backends, **options)
        yield await stack.enter_async_context(gateway_before(backends))


async def emulate_two(emulator: Any, regions: list[str], max_num_seqs: int, **spec: Any) -> tuple[list, list]:
    """Start emulated instances "a" and "b" of one seed and write their rows; return them and their addresses."""
    options = {"profile": FAST, "seed": 7, "max_num_seqs": max_num_seqs} | spec
    instances = [await emulator.ready(name, **options) for name in ("a", "b")]
    backends = [SimpleNamespace(name=each.name, url=f"{emulator.url}/{each.name}") for each in instances]
    await database_sync_to_async(make_rows)(backends, regions=regions, max_num_seqs=max_num_seqs, queue_bound=100)
    return instances, backends


async def until(condition, timeout_s: float = 30.0) -> None:
    """Wait until *condition()* is true; fails after *timeout_s*."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
