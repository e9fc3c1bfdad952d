"""The gateway with a real Redis: published summaries, notifications, one owner at a time, life without Redis."""

import asyncio
import json

import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.dispatch.lease import Lease
from controlplane.fleet.models import Instance
from controlplane.gateway.process import Gateway
from controlplane.jobs.record import Job
from controlplane.planning.execution import floor as floor_rows
from tests.gateway.conftest import serving, until
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
        async with bus.pubsub() as live:
            await live.subscribe("pilothouse:live")
            async with asyncio.timeout(5):
                async for message in live.listen():
                    if message["type"] == "message":
                        break
        summary = json.loads(message["data"])
        assert summary["fleet"]["instances_ready"] == 1
        assert summary["instances"]["name"] == ["m-0"]
        assert summary["endpoints"]["region"] == ["east"]
        stored = json.loads(await bus.get("pilothouse:summary"))
        assert stored["seq"] >= summary["seq"]
        assert await bus.llen("pilothouse:history") >= 1
        assert stored["fleet"]["slo_met_ratio"] == 1.0 or stored["fleet"]["slo_met_ratio"] is None

    async def test_a_notification_is_heard_at_once(self, served, bus, monkeypatch):
        monkeypatch.setattr(settings, "FLEET_REFRESH_S", 60)
        await asyncio.sleep(1.2)  # the running wait of the reader ends
        await database_sync_to_async(Instance.objects.update)(state="draining")
        await asyncio.sleep(0.2)
        assert served.gateway.topology.fleet.accepting.sum() == 1
        await bus.publish("pilothouse:inventory", "x")
        await until(lambda: served.gateway.topology.fleet.accepting.sum() == 0)

    async def test_a_second_process_stands_by_and_takes_over(self, served, monkeypatch):
        monkeypatch.setattr("controlplane.dispatch.lease.RENEW_S", 0.1)
        second = Gateway(floor_rows)
        async with serving(second) as url:
            await until(lambda: not second.lease.held)
            async with served.http.post(f"{url}/v1/chat/completions", json={}, headers=served.headers) as response:
                assert response.status == 503
                assert (await response.json())["error"]["code"] == "standing_by"
            await served.gateway.lease.stop()
            await until(lambda: second.lease.held)
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            await until(lambda: second.topology.fleet.accepting.sum() == 1)
            async with served.http.post(f"{url}/v1/chat/completions", json=body, headers=served.headers) as response:
                assert response.status == 200

    async def test_serving_continues_without_redis_and_publishing_resumes(self, served, redis_server):
        await until(lambda: served.gateway.publisher.job.ok)
        redis_server.stop()
        await until(lambda: not served.gateway.publisher.job.ok)
        assert (await served.chat()).status == 200
        assert served.gateway.lease.held
        redis_server.start()
        await until(lambda: served.gateway.publisher.job.ok)


async def test_a_lease_that_ran_out_is_taken(redis_server, monkeypatch):
    monkeypatch.setattr("controlplane.dispatch.lease.LEASE_S", 1)
    monkeypatch.setattr("controlplane.dispatch.lease.RENEW_S", 0.1)
    first, second = (Lease(redis_server.url, Job("renew-lease", "gateway", 0.1)) for _ in range(2))
    await first.start()
    await second.start()
    assert (first.held, second.held, second.holder) == (True, False, first.owner)
    first._task.cancel()  # the first process dies without a word
    await until(lambda: second.held)
    await second.stop()
    await first._redis.aclose()
