"""The gateway with a real Redis: published summaries, notifications, one owner at a time, life without Redis."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.fleet.models import Instance
from controlplane.gateway.process import Gateway
from controlplane.planning.execution.loop import ScalingLoop
from controlplane.planning.plans import waiting
from tests.examples import at_night_but
from tests.gateway.conftest import serving, until
from tests.gateway.rows import make_model
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.services, pytest.mark.gate]


@pytest.fixture
def redis_server(monkeypatch):
    server = RedisServer().start()
    monkeypatch.setattr(settings, "REDIS_URL", server.url)
    monkeypatch.setattr(settings, "SUMMARY_S", 0.1)
    yield server
    server.stop()


@pytest.fixture
async def bus(redis_server):
    from redis.asyncio import Redis

    client = Redis.from_url(redis_server.url)
    yield client
    await client.aclose()


class TestWithRedis:
    @pytest.fixture
    def gateway_options(self, redis_server):
        return {}  # before the gateway is made

    async def test_summary_is_published_and_counts_requests(self, served, bus):
        for _ in range(3):
            assert (await served.chat(stream=True)).status == 200
        async with asyncio.timeout(10):
            while not (text := await bus.get("pilothouse:summary")):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        summary = json.loads(text)
        assert summary["fleet"]["instances_ready"] == 1
        assert summary["instances"]["name"] == ["m-0"]
        assert summary["endpoints"]["region"] == ["east"]
        stored = json.loads(await bus.get("pilothouse:summary"))
        assert stored["seq"] >= summary["seq"]
        assert await bus.llen("pilothouse:history") >= 1
        assert stored["fleet"]["slo_met_ratio"] == 1.0 or stored["fleet"]["slo_met_ratio"] is None

    async def test_outcomes_by_instance_are_known_while_a_summary_is_recent(self, served, bus):
        assert (await served.chat(stream=True)).status == 200
        known = {}
        async with asyncio.timeout(10):
            while known != {"m-0": (1, 0)}:
                known = await asyncio.to_thread(waiting.outcomes) or {}
        assert 0 < await bus.ttl("pilothouse:summary") <= 15

    async def test_a_notification_is_heard_at_once(self, served, bus, monkeypatch):
        monkeypatch.setattr(settings, "FLEET_REFRESH_S", 60)
        await asyncio.sleep(1.2)  # the running wait of the reader ends
        await database_sync_to_async(Instance.objects.update)(state="draining")
        await asyncio.sleep(0.2)
        assert served.gateway.dispatching.topology.fleet.accepting.sum() == 1
        await bus.publish("pilothouse:inventory", "x")
        await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 0)

    async def test_serving_continues_without_redis_and_publishing_resumes(self, served, redis_server):
        await until(lambda: served.gateway.publisher.job.ok)
        redis_server.stop()
        await until(lambda: not served.gateway.publisher.job.ok)
        assert (await served.chat()).status == 200
        assert served.gateway.lease.held
        redis_server.start()
        await until(lambda: served.gateway.publisher.job.ok)

    async def test_a_full_redis_stops_no_request_and_is_said(self, served, bus):
        """C40: `maxmemory` is reached and nothing may be evicted."""
        job = served.gateway.publisher.job
        await until(lambda: job.last_success_at)
        await bus.config_set("maxmemory-policy", "noeviction")
        await bus.config_set("maxmemory", 1)

        def shown():
            return next(each for each in served.gateway.monitor.report()["parts"] if each["name"] == "redis")

        await until(lambda: shown()["state"] != "ok")
        assert (shown()["state"], "used memory > 'maxmemory'" in shown()["detail"]) == ("down", True)
        assert (await served.chat(stream=True)).status == 200
        assert served.gateway.lease.held
        await bus.config_set("maxmemory", 0)
        await until(lambda: job.ok)
        assert await bus.get("pilothouse:summary")

    @pytest.mark.parametrize("takeovers", at_night_but((2,), [2, 10]))
    async def test_the_next_owner_has_all_models_at_once(self, served, monkeypatch, takeovers):
        """C75: asked for its models from its first moment, the next owner names all or says that it does not serve yet."""
        for name in ("LEASE_S", "ALONE_S"):
            monkeypatch.setattr(f"controlplane.dispatch.lease.{name}", 1)
        monkeypatch.setattr("controlplane.dispatch.lease.RENEW_S", 0.1)
        for port, name in enumerate(("n", "o"), 1):  # nothing answers there
            await database_sync_to_async(make_model)(name, f"http://127.0.0.1:{port}")
        await until(lambda: served.gateway.lease.held)
        owner = served.gateway
        async with AsyncExitStack() as stack:
            for _ in range(takeovers):
                heir = Gateway(ScalingLoop)
                url = await stack.enter_async_context(serving(heir))
                await until(lambda heir=heir: not heir.lease.held)
                async with served.http.post(f"{url}/v1/chat/completions", json={}, headers=served.headers) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (503, "standing_by")
                owner.lease._task.cancel()  # its process dies without a word
                answers = []
                async with asyncio.timeout(8):
                    while not answers or answers[-1][0] != 200:
                        await asyncio.sleep(0.02)
                        async with served.http.get(f"{url}/v1/models", headers=served.headers) as response:
                            body = await response.json()
                            answers.append((response.status, response.headers.get("retry-after"), body))
                assert [model["id"] for model in answers[-1][2]["data"]] == ["m", "n", "o"]
                assert {(status, bool(after)) for status, after, _ in answers[:-1]} <= {(503, True)}
                owner = heir
