"""A restart of every process of the gateway under load, for real: nothing is refused, and no stream is cut."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from controlplane.supervisor.keeper import PartError
from controlplane.supervisor.stack import Plan, bound
from tests.supervisor.running import RunningStack
from tests.supervisor.test_up import Address

pytestmark = [pytest.mark.services, pytest.mark.nightly]
STREAMS, WHOLE, NEW = 8, 4, 2
LONG = 3000  # tokens of a stream, which outlast the server's own grace
PAUSE_S = 0.2  # in which a connection is idle
ROWS = "from controlplane.gateway.models import LedgerRow; print(LedgerRow.objects.filter(outcome='done').count())"


@pytest.fixture
def address(tmp_path: Path) -> Address:
    """An address whose port has as many free ones after it as there are processes."""
    address = Address(tmp_path / "var")
    while True:
        try:
            with bound(Plan(tmp_path, port=address.port, relays=2, demo=False)):
                return address
        except PartError:
            address = Address(tmp_path / "var")


@pytest.fixture
def stack(address: Address) -> Iterator[RunningStack]:
    environment = {**address.environment, "DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    stack = RunningStack(f"--port {address.port} --relays 2 --no-traffic", **environment)
    yield stack
    stack.kill()


class Load:
    """Clients that ask all the time, by streams and whole answers, on kept and on new connections."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.headers = f"{url}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
        self.outcomes: Counter[str] = Counter()
        self.over = False

    async def ask(self, http: aiohttp.ClientSession, tokens: int, *, stream: bool, close: bool = False) -> str:
        body = {"model": "llama-3.1-8b", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
        headers = self.headers | ({"Connection": "close"} if close else {})
        try:
            async with http.post(
                self.url, json=body | {"max_tokens": tokens, "ignore_eos": True}, headers=headers
            ) as it:
                text = await it.text()
                if it.status != 200:
                    return f"{it.status} {text[:200]}"
                if stream:
                    return "done" if text.endswith("data: [DONE]\n\n") and text.count('"content"') > 1 else "cut"
                return "done" if json.loads(text)["usage"]["completion_tokens"] == tokens else "short"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return repr(error)

    async def ask_on(self, http: aiohttp.ClientSession, tokens: int, *, stream: bool, close: bool = False) -> None:
        while not self.over:
            self.outcomes[await self.ask(http, tokens, stream=stream, close=close)] += 1
            await asyncio.sleep(PAUSE_S)

    async def run_during(self, work: "asyncio.Future[object]") -> None:
        timeout = aiohttp.ClientTimeout(total=200)
        async with aiohttp.ClientSession(timeout=timeout) as http, asyncio.TaskGroup() as group:
            for tokens, stream, close, count in (
                (LONG, True, False, STREAMS),
                (20, False, False, WHOLE),
                (20, False, True, NEW),
            ):
                for _ in range(count):
                    group.create_task(self.ask_on(http, tokens, stream=stream, close=close))
            await work
            self.over = True


async def test_every_process_is_replaced_under_load(stack: RunningStack, address: Address, tmp_path: Path) -> None:
    await asyncio.to_thread(stack.wait_until_up)
    key = address.manage("create_key", "acme", "--name", "load").stdout.split()[-1]
    load = Load(address.url, key)

    async def restarted() -> None:
        await asyncio.sleep(5)
        said = await asyncio.to_thread(address.manage, "restart")
        assert said.returncode == 0, said.stderr
        await asyncio.sleep(2)

    before = {line.split()[0] for line in stack.processes() if "uvicorn" in line}
    await load.run_during(asyncio.ensure_future(restarted()))
    after = {line.split()[0] for line in stack.processes() if "uvicorn" in line}
    assert len(before) == len(after) == 4
    assert not before & after
    assert set(load.outcomes) == {"done"}, load.outcomes
    assert re.search(r"^Restarted in \d+ s\.$", stack.text, re.MULTILINE)
    rows = address.manage("shell", "--no-imports", "-c", ROWS)
    assert int(rows.stdout.split()[-1]) == load.outcomes["done"]
    stack.interrupt()
    assert stack.processes() == []
