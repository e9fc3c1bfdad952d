"""How the contract tests talk to a server that is vLLM, or should behave as it does."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from tests.oracles import histograms
from tests.oracles.histograms import Ended
from tests.vllm.conftest import MODEL, Server
from workers.vllm.client import VllmClient
from workers.vllm.metrics import VllmMetrics

MESSAGES: Any = [{"role": "user", "content": "Hello engine"}]
EXACT = {"ignore_eos": True}  # with max_tokens: exactly that many tokens
COMPLETION = {"model": MODEL, "prompt": "Hello engine", "max_tokens": 12, **EXACT}
CHAT = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, **EXACT}
RESPONSE = {"model": MODEL, "input": "Hello engine", "max_output_tokens": 12, **EXACT}
USAGE = {"stream_options": {"include_usage": True}}
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def eventually(true: Callable[[], Awaitable[bool]], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not await true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def reached(control: VllmClient, condition: Callable[[VllmMetrics], bool]) -> None:
    async def true() -> bool:
        return condition(await control.metrics())

    await eventually(true)


async def ended(http: aiohttp.ClientSession, server: Server) -> Ended:
    async with http.get(server.url + "/metrics") as response:
        return histograms.ended(await response.text())


async def idle(control: VllmClient) -> None:
    await reached(control, lambda m: (m.running, m.waiting) == (0, 0))


async def post(http: aiohttp.ClientSession, server: Server, path: str, body: object) -> tuple[int, Any, Any]:
    async with http.post(server.url + path, json=body) as response:
        return response.status, await response.json(), response.headers


async def generate(http: aiohttp.ClientSession, server: Server, tokens: int, **fields: object) -> Any:
    body = {"model": MODEL, "prompt": [7] * 10, "max_tokens": tokens, **EXACT, **fields}
    status, answer, _ = await post(http, server, "/v1/completions", body)
    assert status == 200, answer
    return answer


async def begun(http: aiohttp.ClientSession, server: Server, tokens: int) -> aiohttp.ClientResponse:
    """Start a streamed answer, up to its first event."""
    body = {**COMPLETION, "max_tokens": tokens, "stream": True, **USAGE}
    response = await http.post(f"{server.url}/v1/completions", json=body)
    assert (await response.content.readline()).startswith(b"data: ")
    return response


async def rest(response: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    """Return the remaining events."""
    lines = [line.removeprefix("data: ") for line in (await response.text()).splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def events(http: aiohttp.ClientSession, server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with http.post(server.url + path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        blocks = (await response.text()).split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
