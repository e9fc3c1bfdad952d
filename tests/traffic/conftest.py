"""A gateway of a few lines that answers by its script and remembers what it was asked."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
import pytest_asyncio
from aiohttp import web


@dataclass
class FakeGateway:
    """Streams completions of the length asked for, unless *answer* is set."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    reports: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # of runs, with their paths
    hold: asyncio.Event | None = None  # answers wait for it
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None

    async def has_open(self, count: int) -> None:
        """Wait until *count* requests are here at one time."""
        async with asyncio.timeout(20):
            async with self.changed:
                await self.changed.wait_for(lambda: self.open >= count)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(body := orjson.loads(await request.read()))
        self.headers.append(request.headers)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        async with self.changed:
            self.changed.notify_all()
        try:
            if self.hold is not None:
                await self.hold.wait()
            return await (self.answer(request) if self.answer else stream(request, body))
        finally:
            self.open -= 1

    async def report(self, request: web.Request) -> web.Response:
        self.reports.append((request.match_info["path"], orjson.loads(await request.read())))
        return web.json_response({})

    async def models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer good":
            return web.json_response(
                {"error": {"message": "This API key is unknown.", "code": "invalid_api_key"}}, status=401
            )
        cards = [("b-long", 8192), ("a-long", 8192), ("short", 512)]
        return web.json_response({"data": [{"id": name, "max_model_len": tokens} for name, tokens in cards]})


async def stream(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b": ping\n\n")
    for _ in range(body["max_tokens"]):
        await response.write(b'data: {"choices":[{"text":" a"}],"usage":null}\n\n')
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    await response.write(b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\ndata: [DONE]\n\n")
    return response


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[FakeGateway]:
    fake = FakeGateway()
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/v1/completions", fake.complete)
    app.router.add_post("/v1/runs/{path:.*}", fake.report)
    app.router.add_get("/v1/models", fake.models)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield fake
    await runner.cleanup()


@pytest_asyncio.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with serving() as fake:
        yield fake


@pytest.fixture
def gateway_with_rows() -> Iterator[FakeGateway]:
    """The same in its own thread, for commands that run an event loop themselves."""
    ready: queue.SimpleQueue[tuple[FakeGateway, asyncio.AbstractEventLoop, asyncio.Event]] = queue.SimpleQueue()

    async def serve() -> None:
        over = asyncio.Event()
        async with serving() as fake:
            ready.put((fake, asyncio.get_running_loop(), over))
            await over.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    fake, loop, over = ready.get(timeout=20)
    yield fake
    loop.call_soon_threadsafe(over.set)
    thread.join()
