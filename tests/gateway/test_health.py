"""Health of instances by their behaviour: failures, circuit breakers, and requests that end engines."""

import asyncio
import math
import time

import openai
import pytest
from channels.db import database_sync_to_async

from controlplane.dispatch.live_fleet import heartbeats
from controlplane.events.models import Event
from controlplane.fleet.models import Instance
from controlplane.tuning.models import Setting
from tests.gateway.conftest import open_sdk, until
from tests.gateway.test_scaling import of

ONE = pytest.mark.parametrize("gateway_options", [{"regions": ["east"]}])
TWO = pytest.mark.parametrize("gateway_options", [{"regions": ["east", "east"]}])
SIX = pytest.mark.parametrize("gateway_options", [{"regions": ["east"] * 6}])


def replica_of(served, index=0):
    name = served.backends[index].name
    return next(one for one in served.gateway.dispatching.topology.replicas.values() if one.name == name)


async def events(kind: str, field: str = "reason") -> list:
    return [row[0] for row in await of(Event.objects.filter(kind=kind).order_by("pk"), field)]


async def tune(served, name: str, value: float) -> None:
    await database_sync_to_async(Setting.objects.create)(name=name, value=value)
    served.gateway.dispatching.refresh_now()
    await until(lambda: getattr(served.gateway.dispatching.topology.tuned, name) == value)


KILLS = pytest.mark.parametrize(("kind", "deaths"), [("engine", 2), ("server", 3)])
"""A server that is gone says nothing: its request may be on a third one before the first is found dead."""


@SIX
@KILLS
async def test_one_call_of_an_sdk_ends_two_or_three_engines(served, kind, deaths):
    """C04: with default retries one call ended all six."""

    def dead() -> int:
        return sum(backend.killed or backend.ended is not None for backend in served.backends)

    async with open_sdk(served) as client:
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "boom"}], extra_body={"kill": kind}
            )
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert refused.value.code == "request_ends_engines"
        assert dead() == deaths
        with pytest.raises(openai.UnprocessableEntityError):  # it is sent again
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "boom"}], extra_body={"kill": kind}
            )
    assert dead() == deaths
    for _ in range(4):
        assert (await served.chat()).status == 200, "others go on"
    await until(lambda: not served.gateway.dispatching.topology.notices)
    (reason,) = await events("model.request_quarantined")
    assert "it is refused until" in reason
    assert 2 <= reason.count("m-") <= deaths


@SIX
@KILLS
async def test_requests_that_ran_with_it_are_served(served, kind, deaths):
    """A dying engine ends all its requests: only one that ends a second engine alone is refused."""
    for backend in served.backends:
        backend.script.first_token_s = 0.8
    bodies = [{"messages": [{"role": "user", "content": f"innocent {number}"}]} for number in range(18)]
    beside = [asyncio.create_task(served.chat(stream=bool(at % 2), **body)) for at, body in enumerate(bodies)]
    await asyncio.sleep(0.1)
    killer = await served.chat(kill=kind)
    assert killer.status == 422
    answers = await asyncio.gather(*beside)
    assert [answer.status for answer in answers] == [200] * 18
    for answer in answers:
        assert "error" not in await answer.text()
    assert sum(backend.killed or backend.ended is not None for backend in served.backends) <= deaths


@TWO
async def test_a_network_outage_quarantines_no_request(served):
    """Connections break, but the servers behind them keep running: nothing ended."""
    for backend in served.backends:
        backend.script.die = "at_once"
    for _ in range(3):
        assert (await served.chat()).status == 502
    for backend in served.backends:
        backend.script.die = ""
    assert (await served.chat()).status == 200
    assert not await events("model.request_quarantined")


@ONE
@pytest.mark.parametrize("health", [True, False])
async def test_slow_metrics_fail_nothing_while_tokens_flow(served, monkeypatch, health):
    """C17, C74: with the only instance slow on /metrics, 18 of 100 requests got 503."""
    monkeypatch.setattr(heartbeats, "ROUND_S", 0.1)
    monkeypatch.setattr(heartbeats, "SLOW_S", 0.3)
    monkeypatch.setattr(heartbeats, "SILENT_S", 1.0)
    script = served.backends[0].script
    script.token_s, script.tokens, script.metrics_s, script.health = 0.02, 20, 5.0, health
    end_s = time.monotonic() + 2.5
    while time.monotonic() < end_s:
        async with await served.chat(stream=True) as response:
            assert response.status == 200
            assert "error" not in await response.text()
    assert (await served.instance()).state == "ready"


@ONE
async def test_one_without_metrics_is_well_while_its_health_says_so(served):
    served.backends[0].script.metrics_status = 404
    await asyncio.sleep(1.0)  # ten heartbeats; three in a row failed it
    assert (await served.chat()).status == 200
    assert (await served.instance()).state == "ready"


@ONE
async def test_silence_on_both_fails_it(served, monkeypatch):
    monkeypatch.setattr(heartbeats, "ROUND_S", 0.1)
    monkeypatch.setattr(heartbeats, "SLOW_S", 0.2)
    monkeypatch.setattr(heartbeats, "SILENT_S", 0.6)
    served.backends[0].script.metrics_s, served.backends[0].script.health = 5.0, False
    assert await served.becomes("failed")
    assert "answers neither /metrics nor /health" in (await served.instance()).state_reason


@TWO
async def test_one_that_stands_still_with_work_takes_nothing_more_and_its_requests_move(served):
    """C16: requests accepted, running reported, counters frozen: never noticed."""
    await tune(served, "WEDGED_S", 0.08)
    wedged = served.backends[0]
    wedged.script.hold = asyncio.Event()
    began = [asyncio.create_task(served.chat(stream=bool(number % 2))) for number in range(4)]
    answers = await asyncio.gather(*began)
    for answer in answers:
        assert answer.status == 200
        assert "error" not in await answer.text()
    assert await served.becomes("failed")
    assert "wedged" in (await served.instance()).state_reason
    asked = len(wedged.bodies)
    for _ in range(4):
        assert (await served.chat()).status == 200
    assert len(wedged.bodies) == asked
    wedged.script.hold.set()
    wedged.generated += 1
    assert await served.becomes("ready"), "it goes on"


@TWO
@pytest.mark.parametrize("script", [{"status": 500}, {"die": "at_once"}])
async def test_the_circuit_of_one_that_fails_requests_opens_and_is_tried_again(served, script):
    sheep = served.backends[0]
    for name, value in script.items():
        setattr(sheep.script, name, value)
    replica, sent = replica_of(served), 0
    while (
        replica.health.breaker.value == "closed" and sent < 60
    ):  # after a broken connection the next heartbeat decides
        sent += 1
        assert (await served.chat()).status == 200
        await until(lambda: replica.reachable)
    asked = len(sheep.bodies)
    assert asked == 3, "then its circuit is open"
    for _ in range(6):
        assert (await served.chat()).status == 200
    assert len(sheep.bodies) == asked
    await until(lambda: not served.gateway.dispatching.topology.notices)
    (reason,) = await events("instance.circuit_open")
    assert "it failed 3 of its last" in reason
    summary = served.gateway.publisher.summary.snapshot()["instances"]
    assert "circuit open" in summary["trouble"][summary["name"].index("m-0")]
    assert (await served.instance()).state == "ready"

    replica.health.until_s = served.gateway.clock()  # its time is over, and it still fails: one request shows it
    served.gateway.dispatching.dispatcher.sweep()
    for _ in range(6):
        assert (await served.chat()).status == 200
    assert len(sheep.bodies) == asked + 1
    await until(lambda: not served.gateway.dispatching.topology.notices)
    first, second = await events("instance.circuit_open", "inputs")
    assert second["open_s"] == 2 * first["open_s"]

    sheep.script.status, sheep.script.die = 200, ""
    replica.health.until_s = served.gateway.clock()
    served.gateway.dispatching.dispatcher.sweep()
    for _ in range(6):
        assert (await served.chat()).status == 200
    assert replica.health.breaker.value == "closed"
    await until(lambda: not served.gateway.dispatching.topology.notices)
    assert len(await events("instance.serves_again")) == 1


@TWO
async def test_refusals_caused_by_a_tenant_open_no_circuit(served, subtests):
    """C51."""
    for status in [400, 404, 422]:
        with subtests.test(status=status):
            for backend in served.backends:
                backend.script.status = status
            for _ in range(10):
                response = await served.chat()
                assert (response.status, response.headers["x-should-retry"]) == (status, "false")
            assert not await events("instance.circuit_open")
            assert served.gateway.dispatching.topology.fleet.accepting.sum() == 2


@TWO
async def test_a_request_that_fails_everywhere_opens_no_circuit(served):
    """A tenant's own request may get 500 from every server: that is no instance's fault."""
    for backend in served.backends:
        backend.script.status = 500
    for _ in range(5):
        assert (await served.chat()).status == 502
    assert not await events("instance.circuit_open")


@TWO
async def test_a_busy_one_is_left_for_another_and_passed_on_when_all_are(served):
    """E4: an instance's 429 went to the tenant at once, without Retry-After."""
    first, second = served.backends
    first.script.status, first.script.retry_after = 429, "7"
    for _ in range(6):
        assert (await served.chat()).status == 200
    assert len(first.bodies) <= 1, "it is left alone as long as it said"
    second.script.status, second.script.retry_after = 503, "3"
    response = await served.chat()
    assert response.status in (429, 503)
    assert response.headers["x-should-retry"] == "true"
    assert response.headers["retry-after"] in ("3", "7")
    assert not await events("instance.circuit_open"), "being busy is no fault"


@ONE
async def test_the_only_one_passes_its_refusal_on_with_retry_after(served):
    served.backends[0].script.status = 429
    response = await served.chat()
    assert (response.status, response.headers["retry-after"]) == (429, "1")
    served.backends[0].script.status = 501
    response = await served.chat()
    assert (response.status, response.headers["x-should-retry"]) == (501, "false")


@TWO
async def test_an_instance_is_checked_against_its_registration(served):
    backend = served.backends[0]
    backend.script.models = ("other", "third")
    await database_sync_to_async(Instance.objects.update)(state="loading")
    assert await served.becomes("failed")
    assert (await served.instance()).state_reason == "it serves other, third, not m"
    backend.script.models = ("m",)
    replica_of(served).identified_s = -math.inf
    assert await served.becomes("ready")
    await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 2)
    backend.script.models = ("other",)  # started again within a heartbeat
    assert {(await served.chat()).status for _ in range(6)} == {200}
    assert await served.becomes("failed")
    assert (await served.instance()).state_reason == "it serves other, not m"


@ONE
async def test_the_page_of_an_instance_says_that_it_is_no_vllm_server(served):
    backend = served.backends[0]
    backend.script.models, backend.script.metrics_status = None, 404  # healthy by its /health, but no vLLM
    replica_of(served).metrics = None
    await database_sync_to_async(Instance.objects.update)(state="loading")
    assert await served.becomes("failed")
    assert "it is no vLLM server: /version answered 404" in (await served.instance()).state_reason
    backend.script.health = False
    await database_sync_to_async(Instance.objects.update)(state="loading", state_reason="")
    await until(lambda: replica_of(served).obstacle)
    row = await served.instance()
    assert (row.state, row.startup) == ("loading", "no answer as of vLLM: /metrics answered 404")
    backend.script.health, backend.script.models, backend.script.metrics_status = True, ("m",), 200
    replica_of(served).identified_s = -math.inf
    assert await served.becomes("ready")
    assert (await served.instance()).startup == ""


@ONE
@pytest.mark.parametrize("stream", [True, False])
async def test_a_broken_idle_connection_is_a_broken_connection(served, stream):
    """C20: the server closed an idle connection just as a request was sent on it, and that counted as an attempt."""
    idle_s, forwarding = 0.3, set()
    backend_port = int(served.backends[0].url.rsplit(":", 1)[1])

    async def forward(reader, writer):
        """Wait until no data has come for a while, then read the next and close."""
        forwarding.add(asyncio.current_task())
        from_backend, to_backend = await asyncio.open_connection("127.0.0.1", backend_port)

        async def answer():
            while data := await from_backend.read(65536):
                writer.write(data)

        answering, last_s = asyncio.create_task(answer()), time.monotonic()
        try:
            while data := await reader.read(65536):
                if time.monotonic() - last_s > idle_s:
                    break
                to_backend.write(data)
                last_s = time.monotonic()
        except ConnectionError:
            pass  # closed by the gateway
        finally:
            answering.cancel()
            to_backend.transport.abort()
            writer.transport.abort()

    proxy = await asyncio.start_server(forward, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    await database_sync_to_async(Instance.objects.update)(url=url)
    served.gateway.dispatching.refresh_now()
    await until(
        lambda: replica_of(served).spec.url == url and served.gateway.dispatching.topology.fleet.accepting.sum() == 1
    )
    for _ in range(4):
        async with await served.chat(stream=stream) as response:
            assert response.status == 200
            assert "error" not in await response.text()
        assert replica_of(served).reachable
        await asyncio.sleep(idle_s + 0.1)
    assert {row.attempts for row in await served.rows()} == {1}
    assert not await events("instance.circuit_open")
    proxy.close()
    for task in forwarding:
        task.cancel()
    await asyncio.gather(*forwarding, return_exceptions=True)
