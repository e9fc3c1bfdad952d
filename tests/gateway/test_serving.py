"""A request through the gateway, against scripted backends."""

import asyncio

import openai
import pytest
from channels.db import database_sync_to_async

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.fleet.models import Deployment, Instance
from controlplane.gateway.models import MinuteRow
from tests.examples import at_night_but
from tests.gateway.conftest import open_sdk, until


async def test_plain_answer_usage_and_ledger_row(served):
    async with open_sdk(served) as client:
        answer = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hello"}], extra_headers={"X-Request-Id": "r-1"}
        )
    assert answer.usage.completion_tokens == 3
    assert answer._request_id == "r-1"
    (row,) = await served.rows()
    assert (row.request_id, row.outcome, row.status_code, row.model) == ("r-1", "done", 200, "m")
    assert (row.prompt_tokens, row.output_tokens, row.instance, row.region) == (7, 3, "m-0", "east")
    assert row.tenant.name == "acme"
    assert row.slo_class == "interactive"
    assert row.e2e_ms > 0
    assert row.trace[0]["instance"] == "m-0"
    assert served.backends[0].headers[0]["X-Request-Id"] == "r-1"
    (minute,) = await database_sync_to_async(lambda: list(MinuteRow.objects.all()))()
    assert (minute.requests, minute.prompt_tokens, minute.output_tokens) == (1, 7, 3)


async def test_priority_follows_the_class_and_only_steps_back(served):
    await served.chat(headers={"X-SLO-Class": "flexible"}, priority=-100)
    await served.chat(service_tier="flex", priority=7)
    await served.chat(service_tier="auto", priority=9_999)
    assert [body["priority"] for body in served.backends[0].bodies] == [5000, 5007, 499]


async def test_a_client_that_leaves_with_the_whole_answer_has_not_disconnected(served):
    """SDKs close at the last event, just before the instance ends the stream."""
    served.backends[0].script.lingers_s = 30.0
    response = await served.chat(stream=True)
    while b"[DONE]" not in await response.content.readany():
        pass
    response.close()
    await until(lambda: served.gateway.active == 0)
    (row,) = await served.rows()
    assert (row.outcome, row.error_code, row.output_tokens, row.prompt_tokens) == ("done", "", 3, 7)


@pytest.mark.parametrize(
    "gateway_options", [{"ordering_policy": "fcfs"}, {"ordering_policy": "qlm"}], ids=["read", "kept"]
)
@pytest.mark.parametrize("include_usage", at_night_but([True], [False, True]))
async def test_a_stream_that_breaks_behind_its_last_event_is_done(served, gateway_options, include_usage):
    """A client that has read `[DONE]` leaves, and may never see the end of the answer."""
    served.backends[0].script.die, served.backends[0].script.lingers_s = "last", 0.05
    options = {"stream_options": {"include_usage": include_usage}, "max_tokens": 3}
    async with await served.chat(stream=True, **options) as response:
        text = await response.text()
    assert ("return_token_ids" in served.backends[0].bodies[0]) == (
        gateway_options["ordering_policy"] == "qlm"
    )  # it could be evicted
    assert text.endswith("data: [DONE]\n\n")
    assert text.count("[DONE]") == 1
    (row,) = await served.rows()
    assert (row.outcome, row.error_code, row.attempts) == ("done", "", 1)


@pytest.mark.parametrize("gateway_options", [{"regions": ["east", "east"], "max_num_seqs": 4}])
class TestTwoInstances:
    async def test_a_request_without_a_byte_goes_to_the_other_instance(self, served):
        for dying in served.backends:
            served.backends[0].script.die = served.backends[1].script.die = ""
            dying.script.die = "at_once"
            await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 2)
            for _ in range(4):
                async with await served.chat(stream=True) as response:
                    assert response.status == 200
                    assert "[DONE]" in await response.text()
        assert {row.outcome for row in await served.rows()} == {"done"}
        assert any(row.attempts == 2 and "lost" in row.trace[0] for row in await served.rows())

    async def test_a_silent_instance_is_failed_and_its_requests_move(self, served):
        doomed, other = served.backends
        doomed.script.hold = asyncio.Event()
        tasks = [asyncio.create_task(served.chat(stream=True)) for _ in range(6)]
        await until(lambda: doomed.running >= 3)
        doomed.script.metrics = False
        answers = [await task for task in tasks]
        assert [answer.status for answer in answers] == [200] * 6
        for answer in answers:
            assert "[DONE]" in await answer.text()
        assert other.script.status == 200
        row = await served.instance(0)
        assert row.state == "failed"
        event = await database_sync_to_async(lambda: Event.objects.filter(kind="instance.moved").latest("id"))()
        assert event.actor == "gateway"
        assert "heartbeats" in event.reason
        doomed.script.metrics = True
        await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 2)
        assert await served.becomes("ready")


@pytest.mark.parametrize("asked", [200, 3_000_000_000, 2**63])
async def test_a_tenant_over_its_limit_is_refused_and_written_down(served, asked):
    """C01: by more than any column holds, too: such a request once stopped the ledger of all tenants."""
    await database_sync_to_async(Tenant.objects.update)(tokens_per_minute=300)
    served.gateway.keys._grants.clear()
    backend = served.backends[0]
    backend.script.hold = asyncio.Event()
    first = asyncio.create_task(served.chat(max_tokens=200, ignore_eos=True))
    await until(lambda: backend.running == 1)  # about 200 of its 300 tokens are reserved
    async with await served.chat(max_tokens=asked, ignore_eos=True) as response:
        assert response.status == 429
        assert response.headers["x-should-retry"] == "true"
        assert 0 < int(response.headers["retry-after-ms"]) < 60_000
        assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
    backend.script.hold.set()
    assert (await first).status == 200
    refused, done = await served.rows()
    assert (done.outcome, refused.outcome, refused.status_code) == ("done", "rejected", 429)
    assert (refused.error_code, refused.slo_met, refused.instance) == ("rate_limit_exceeded", False, "")
    assert refused.predicted_output_tokens < 2**31
    assert served.gateway.ledger.held == served.gateway.ledger.refused == 0
    assert served.gateway.dispatching.allowances.limits.sequences(done.tenant_id) == 0


async def test_requests_are_held_while_the_model_loads(served):
    await database_sync_to_async(Instance.objects.update)(state="stopped")
    served.gateway.dispatching.refresh_now()
    await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 0)
    async with await served.chat() as response:
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "model_unavailable"
    served.backends[0].script.metrics = False
    await database_sync_to_async(Instance.objects.update)(state="loading")
    served.gateway.dispatching.refresh_now()
    await until(lambda: served.gateway.dispatching.topology.replicas)
    held = asyncio.create_task(served.chat())
    await until(lambda: len(served.gateway.dispatching.dispatcher.queue) == 1)
    served.backends[0].script.metrics = True  # it has started
    assert (await held).status == 200
    assert (await served.instance()).state == "ready"


async def test_draining_finishes_running_requests_and_accepts_none(served):
    backend = served.backends[0]
    backend.script.hold = asyncio.Event()
    running = asyncio.create_task(served.chat())
    await until(lambda: backend.running == 1)
    await database_sync_to_async(Instance.objects.update)(state="draining")
    served.gateway.dispatching.refresh_now()
    await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 0)
    async with await served.chat() as response:
        assert response.status == 503
    backend.script.hold.set()
    assert (await running).status == 200


async def test_health_endpoints_answer(served):
    await until(lambda: not served.gateway.publisher.job.ok)
    async with served.http.get(f"{served.url}/healthz") as response:
        assert response.status == 200
    async with served.http.get(f"{served.url}/readyz") as response:
        assert response.status == 200
        assert (await response.json())["checks"]["redis"] != "ok"  # none runs here, and serving continues
    await served.chat()
    async with served.http.get(f"{served.url}/metrics") as response:
        text = await response.text()
    assert 'pilothouse_requests_total{model="m",outcome="done",region="east",slo_class="interactive"} 1.0' in text
    async with served.http.get(f"{served.url}/metrics", headers={"X-Forwarded-For": "10.1.2.3"}) as response:
        assert response.status == 401


async def test_the_instances_own_token_is_sent_and_its_refusal_is_not_the_tenants(served):
    """A server that requires a token gets its deployment's; the tenant's key never reaches it."""
    async with open_sdk(served, max_retries=0) as client:
        await client.completions.create(model="m", prompt="hello")
        assert "Authorization" not in served.backends[0].headers[-1]
        await database_sync_to_async(Deployment.objects.update)(api_key="of-the-server")
        await until(
            lambda: all(replica.spec.api_key for replica in served.gateway.dispatching.topology.replicas.values())
        )
        await client.completions.create(model="m", prompt="hello")
        assert served.backends[0].headers[-1]["Authorization"] == "Bearer of-the-server"
        served.backends[0].script.status = 401
        with pytest.raises(openai.InternalServerError) as failure:
            await client.completions.create(model="m", prompt="hello")
    assert failure.value.status_code == 502
