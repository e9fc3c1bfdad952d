"""Two web processes on one database: whatever happens to one of them, or to Redis, never do both place requests.

The instance says whose request it was given, since clients ask both all the time.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from itertools import groupby
from urllib.parse import quote

import aiohttp
import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from django.db import connection

from tests.gateway.backend import Backend
from tests.gateway.rows import SECRET, make_rows
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.services, pytest.mark.nightly]
STARTS_WITHIN_S = 120.0
TAKES_OVER_WITHIN_S = 30.0
HEADERS = {"Authorization": f"Bearer {SECRET}"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


class Web:
    """A web process of its own host, as far as its state goes."""

    def __init__(self, name, folder, redis_url):
        self.name = name
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        (folder / name).mkdir()
        database = connection.settings_dict
        url = f"sqlite:///{database['NAME']}"
        if connection.vendor == "postgresql":
            query = f"?host={database['HOST']}" if database["HOST"].startswith("/") else ""
            at = "" if query else f"{database['HOST']}:{database['PORT']}"
            url = f"postgres://{database['USER']}:{database['PASSWORD']}@{at}/{quote(database['NAME'], safe='')}{query}"
        environment = os.environ | {
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "PILOTHOUSE_SECRET_KEY": settings.SECRET_KEY,
            "PILOTHOUSE_STATE_DIR": str(folder / name),
            "PILOTHOUSE_FLOOR": "false",
            "DATABASE_URL": url,
            "REDIS_URL": redis_url,
        }
        command = [sys.executable, "-m", "uvicorn", "controlplane.asgi:application", "--port", str(self.port)]
        command += ["--loop", "controlplane.listening:create_loop", "--http", "controlplane.listening:HttpProtocol"]
        command += ["--lifespan", "on", "--log-level", "warning", "--timeout-graceful-shutdown", "30"]
        self.process = subprocess.Popen(command, env=environment)
        self.url = f"http://127.0.0.1:{self.port}"

    def send(self, number):
        self.process.send_signal(number)


class Two:
    """Both processes, an instance, and clients that ask both of them without pause."""

    def __init__(self, http, backend, webs, redis):
        self.http, self.backend, self.webs, self.redis = http, backend, webs, redis
        self.statuses = Counter()

    async def ask(self, web):
        with suppress(aiohttp.ClientError, asyncio.TimeoutError):
            url, timeout = f"{web.url}/v1/chat/completions", aiohttp.ClientTimeout(total=2)
            headers = HEADERS | {"X-Request-Id": f"{web.name}.{sum(self.statuses.values())}"}
            async with self.http.post(url, json=BODY, headers=headers, timeout=timeout) as response:
                await response.read()
                self.statuses[web.name, response.status] += 1
                return response.status
        self.statuses[web.name, "no answer"] += 1
        return None

    async def ask_on(self, web):
        while True:
            await self.ask(web)
            await asyncio.sleep(0.02)

    def owners(self):
        """Whose requests the instance was given, without repeats."""
        names = [headers["X-Request-Id"][0] for headers in self.backend.headers if "X-Request-Id" in headers]
        return [name for name, _ in groupby(names)]

    async def until(self, condition, within_s=TAKES_OVER_WITHIN_S):
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def serves(self, web, within_s=TAKES_OVER_WITHIN_S):
        async with asyncio.timeout(within_s):
            while await self.ask(web) != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


@pytest.fixture
async def two(transactional_db, tmp_path):
    redis, backend = RedisServer().start(), Backend("m-0")
    await backend.start()
    await database_sync_to_async(make_rows)([backend], regions=["east"], max_num_seqs=64, queue_bound=100)
    async with aiohttp.ClientSession() as http:
        webs = [Web("a", tmp_path, redis.url)]
        two = Two(http, backend, webs, redis)
        asking = []
        try:
            await two.serves(webs[0], STARTS_WITHIN_S)
            webs.append(Web("b", tmp_path, redis.url))
            async with asyncio.timeout(STARTS_WITHIN_S):
                while await two.ask(webs[1]) != 503:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await asyncio.sleep(2.5)  # the owner has heard of it
            two.statuses.clear()
            asking += [asyncio.create_task(two.ask_on(web)) for web in webs]
            yield two
        finally:
            for task in asking:
                task.cancel()
            for web in webs:
                web.send(signal.SIGCONT)
                web.process.kill()
                web.process.wait(10)
            redis.stop()
            await backend.stop()


async def test_the_owner_is_killed(two):
    two.webs[0].process.kill()
    await two.serves(two.webs[1])
    assert two.owners() == ["a", "b"]


async def test_the_owner_is_frozen_for_longer_than_its_lease_and_comes_back(two):
    two.backend.script.token_s = 0.05  # some run, some wait, some are just sent
    await asyncio.sleep(1)
    two.webs[0].send(signal.SIGSTOP)
    await two.serves(two.webs[1])
    assert two.owners() == ["a", "b"]
    before = two.statuses["a", 503]
    two.webs[0].send(signal.SIGCONT)
    await two.until(lambda: two.statuses["a", 503] > before + 20)
    assert two.owners() == ["a", "b"], "it placed nothing"
    assert two.webs[0].process.poll() is None


async def test_redis_is_emptied_stopped_and_comes_back_empty(two):
    two.redis.client.flushall()
    await asyncio.sleep(3)
    two.redis.stop()
    await asyncio.sleep(10)
    two.redis.start()
    await asyncio.sleep(3)
    assert two.owners() == ["a"]
    assert set(two.statuses) == {("a", 200), ("b", 503)}


async def test_a_planned_stop_gives_the_regions_up_before_streams_end(two):
    """The other serves while a stream of the one that stops goes on to its end."""
    two.backend.script.tokens, two.backend.script.token_s = 150, 0.05
    url, headers = f"{two.webs[0].url}/v1/chat/completions", HEADERS | {"X-Request-Id": "a.stream"}
    async with two.http.post(url, json=BODY | {"stream": True, "max_tokens": 500}, headers=headers) as response:
        await response.content.readany()
        two.webs[0].send(signal.SIGTERM)
        await two.until(lambda: two.owners() == ["a", "b"])
        assert two.webs[0].process.poll() is None, "it still streams"
        text = (await response.read()).decode()
    assert text.rstrip().endswith("data: [DONE]")
    assert await asyncio.to_thread(two.webs[0].process.wait, 40) in (0, -signal.SIGTERM)
    assert two.owners() == ["a", "b"]
