"""An emulator in the test's own event loop, and the few calls that the tests make on it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.oracles.histograms import Ended, ended
from workers.emulator.instance import EmulatedInstance
from workers.emulator.server import Fleet, make_app, run
from workers.emulator.spec import InstanceSpec, read_spec
from workers.vllm.metrics import VllmMetrics, parse

DATA = Path(__file__).parent / "data"

# A step takes a millisecond or two: tests do not wait for anything longer than they must.
FAST = {
    "prefill_t0_s": 0.001,
    "prefill_a_s": 0.0005,
    "prefill_b_s_per_token": 1e-6,
    "prefill_c_s_per_token2": 0.0,
    "decode_a_s": 0.001,
    "decode_b_s_per_sequence": 1e-5,
    "decode_c_s_per_token": 0.0,
}
SLOW = {**FAST, "decode_a_s": 0.03}  # slow enough to look at what runs
BODY = {"model": "m", "profile": FAST, "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 512}


def body(**changes: object) -> dict[str, object]:
    return {**BODY, **changes}


def spec(**changes: object) -> InstanceSpec:
    return read_spec(body(**changes))


async def eventually(true: Callable[[], Awaitable[bool] | bool], limit_s: float = 30.0) -> None:
    """Wait until *true*; fail after *limit_s*, which is far beyond what it should take."""
    async with asyncio.timeout(limit_s):
        while True:
            result = true()
            if result if isinstance(result, bool) else await result:
                return
            await asyncio.sleep(0.005)


def lives(process_id: int) -> bool:
    """A zombie is dead: in a container it may wait for a reaper for ever."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@dataclass
class Emulator:
    """A running emulator and a session to call it with."""

    url: str
    fleet: Fleet
    session: aiohttp.ClientSession
    runner: web.AppRunner = field(repr=False)

    def add(self, name: str = "one", **changes: object) -> EmulatedInstance:
        self.fleet.put(name, spec(**changes))
        return self.fleet.instances[name]

    async def ready(self, name: str = "one", **changes: object) -> EmulatedInstance:
        instance = self.add(name, **changes)
        await eventually(lambda: instance.listening)
        return instance

    async def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and decoded body (bytes when it is not JSON)."""
        async with self.session.request(method, self.url + path, json=body) as response:
            data = await response.read()
            try:
                return response.status, json.loads(data)
            except ValueError:
                return response.status, data

    async def complete(self, name: str = "one", **fields: object) -> tuple[int, Any]:
        asked = {"model": "m", "prompt": [1] * 8, "max_tokens": 4, "ignore_eos": True, **fields}
        return await self.call("POST", f"/{name}/v1/completions", asked)

    async def stream(self, name: str = "one", **fields: object) -> list[dict[str, Any]]:
        """The events of a streamed completion, without `[DONE]`, which must be there."""
        asked = {"model": "m", "prompt": [1] * 8, "max_tokens": 4, "ignore_eos": True, "stream": True, **fields}
        async with self.session.post(f"{self.url}/{name}/v1/completions", json=asked) as response:
            assert response.status == 200
            events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]

    async def in_work(self, running: int, waiting: int, name: str = "one") -> None:
        """Wait until the server's gauges say so."""

        async def reached() -> bool:
            m = await self.metrics(name)
            return (m.running, m.waiting) == (running, waiting)

        await eventually(reached)

    async def metrics(self, name: str = "one") -> VllmMetrics:
        async with self.session.get(f"{self.url}/{name}/metrics") as response:
            return parse(await response.text())

    async def ended(self, name: str = "one") -> Ended:
        async with self.session.get(f"{self.url}/{name}/metrics") as response:
            return ended(await response.text())


@pytest.fixture
async def emulator() -> AsyncIterator[Emulator]:
    fleet = Fleet()
    runner = await run(make_app(fleet), "127.0.0.1", 0)
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    timeout = aiohttp.ClientTimeout(total=20)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Emulator(url, fleet, session, runner)
    await runner.cleanup()
