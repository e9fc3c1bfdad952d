"""KV events of real vLLM: the blocks that they name are those that it reports as cached, until eviction or restart."""

import asyncio
import json
import time
from statistics import median
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import pytest

from scheduling.routing.cached_blocks import chain, leading, space
from tests.dispatch.test_kv_caches import fleet
from tests.vllm.conftest import MODEL, VllmFleet, finish
from workers.vllm.kv_events import Follower, sources

pytestmark = pytest.mark.vllm
BLOCKS = "34"
"""One is never used, and a context of 4,096 tokens has 32 of 128."""
NAME = "kv-events"


class Caller:
    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http, self.url = http, url

    async def post(self, path: str, **body: object) -> dict:
        async with self.http.post(self.url + path, json={"model": MODEL, **body}) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def cached(self, path: str, **body: object) -> int:
        answer = await self.post(path, max_tokens=1, temperature=0, **body)
        return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)

    async def tokens(self, **body: object) -> list[int]:
        return (await self.post("/tokenize", **body))["tokens"]


async def until(condition, limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_the_blocks_of_its_events_are_those_that_it_reports_as_cached(vllm_fleet: VllmFleet) -> None:
    publishes = {"enable_kv_cache_events": True, "enable_prompt_tokens_details": True}
    flags = ("--num-gpu-blocks-override", BLOCKS)
    url = await asyncio.to_thread(vllm_fleet.start, NAME, extra_args=flags, **publishes)
    await asyncio.to_thread(vllm_fleet.wait, NAME, url)
    _, (cache,), _, _ = fleet(count=1)

    def has(ids: list[int], salt: str = "") -> int:
        hashes = np.zeros(len(ids) // cache.block_tokens, np.int64)
        chain(hashes, np.array(ids, np.int64), cache.block_tokens, space("", salt))
        return leading(cache.queue.affinity.blocks, cache.slot, hashes, 0, hashes.size)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        caller = Caller(http, url)
        text = "The watch begins quietly, and the log has a line for each hour. " * 40
        other = "Nobody asked what the tide would do. " * 60
        ids = await caller.tokens(prompt=text)
        assert await caller.cached("/v1/completions", prompt=text) == 0  # before anyone listens
        async with http.get(f"{url}/kv_event_sources") as response:
            (source,) = sources(url, await response.read())
        follower = Follower(source, cache.take)
        following = asyncio.create_task(follower.run())
        try:
            await until(lambda: cache.count > 0)
            size = cache.block_tokens
            assert has(ids) == len(ids) // size > 1
            assert await caller.cached("/v1/completions", prompt=text) == has(ids) * size
            print(f"{len(ids)} tokens, blocks of {size}: {has(ids)} cached")

            # another salt is another cache, and a chat is tokenized as it is computed
            assert await caller.cached("/v1/completions", prompt=text, cache_salt="mine") == 0
            await until(lambda: has(ids, "mine") == len(ids) // size)
            assert has(ids, "yours") == 0
            messages = [{"role": "user", "content": other}]
            chat = await caller.tokens(messages=messages)
            assert await caller.cached("/v1/chat/completions", messages=messages) == 0
            await until(lambda: has(chat) == len(chat) // size)
            assert await caller.cached("/v1/chat/completions", messages=messages) == has(chat) * size

            took_s = []
            for number in range(20):
                began_s = time.perf_counter()
                tokens = await caller.tokens(prompt=f"{number} " + text * 3)
                took_s.append(time.perf_counter() - began_s)
            print(f"/tokenize of {len(tokens)} tokens: {1000 * median(took_s):.1f} ms")

            # evicted: what is left is what it reports
            before = cache.count
            for number in range(3):
                await caller.cached("/v1/completions", prompt=f"{number} " + "and another hour, " * 500)
            await until(lambda: has(ids) < len(ids) // size)
            await asyncio.sleep(0.5)
            left = has(ids)
            assert await caller.cached("/v1/completions", prompt=text) == left * size
            assert (cache.why, follower.stream.garbled) == ("", 0)
            print(f"{before} blocks before, {left} of the prompt's left; {follower.stream.batches} batches")

            # another server at the same addresses
            await asyncio.to_thread(lambda: finish(vllm_fleet.launcher.stop(NAME)))
            ports = [urlsplit(address).port for address in (source.events, source.replay)]
            again = {"enable_kv_cache_events": True, "publisher": "zmq"}
            again |= {
                name: f"tcp://*:{port}" for name, port in zip(("endpoint", "replay_endpoint"), ports, strict=True)
            }
            flags = (*flags, "--kv-events-config", json.dumps(again))
            caller.url = await asyncio.to_thread(vllm_fleet.start, NAME, extra_args=flags, **publishes)
            await asyncio.to_thread(vllm_fleet.wait, NAME, caller.url)
            assert await caller.cached("/v1/chat/completions", messages=messages) == 0
            await until(lambda: (has(ids), has(chat)) == (0, len(chat) // size))
            assert cache.why == ""
            assert await caller.cached("/v1/chat/completions", messages=messages) == has(chat) * size
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
