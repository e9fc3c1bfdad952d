"""Death of an engine below its API server: the tenants' view, and the instance's state."""

import json

import pytest

from controlplane.events.models import Event
from tests.gateway.conftest import until
from tests.gateway.test_scaling import of

pytestmark = pytest.mark.parametrize("gateway_options", [{"regions": ["east", "east"], "max_num_seqs": 4}])


async def break_first(served, tokens: int = 3) -> None:
    """Kill the engine of the first instance; its heartbeats continue, as those of vLLM do for seconds."""
    script = served.backends[0].script
    script.die, script.tokens = "engine", tokens


@pytest.mark.parametrize("stream", [True, False])
async def test_before_the_first_byte_another_instance_answers(served, stream):
    await break_first(served, tokens=0)
    for _ in range(4):
        async with await served.chat(stream=stream) as response:
            text = await response.text()
            assert response.status == 200
            assert "EngineCore" not in text
            assert "error" not in text
    rows = await served.rows()
    assert {row.outcome for row in rows} == {"done"}
    tried = [row for row in rows if row.attempts == 2]
    assert len(tried) == 1  # the instance gets no requests after that
    assert "its engine died" in tried[0].trace[0]["lost"]


async def test_the_instance_fails_at_once_though_it_answers_heartbeats(served):
    await break_first(served, tokens=0)
    for _ in range(2):
        assert (await served.chat(stream=True)).status == 200
    await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 1)
    replica = next(one for one in served.gateway.dispatching.topology.replicas.values() if one.name == "m-0")
    await until(lambda: replica.spec.state == "failed")
    assert (await served.instance(0)).state_reason == "its engine died"
    seen = replica.heartbeat_at
    await until(lambda: served.backends[0].script.metrics and replica.heartbeat_at == seen)
    served.backends[0].script.metrics = False  # its server ends
    await until(lambda: not replica.lost)
    served.backends[0].script.metrics, served.backends[0].script.die = True, ""  # and is restarted
    await until(lambda: served.gateway.dispatching.topology.fleet.accepting.sum() == 2)
    states = [
        after["state"] for (after,) in await of(Event.objects.filter(subject="m-0", kind="instance.moved"), "after")
    ]
    assert sorted(states) == ["failed", "loading", "ready"]


async def test_after_it_the_stream_ends_with_our_error(served):
    for backend in served.backends:
        backend.script.die = "engine"
    async with await served.chat(stream=True) as response:
        assert response.status == 200
        events = [line[6:] for line in (await response.text()).split("\n\n") if line]
    assert [json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1]] == ["", "t0 "]
    error = json.loads(events[-1])["error"]
    assert (error["code"], error["type"]) == ("upstream_interrupted", "server_error")
    assert "EngineCore" not in error["message"]
    (row,) = await served.rows()
    assert (row.outcome, row.error_code, row.slo_met) == ("failed", "upstream_interrupted", False)


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_stream_is_the_instances_own_but_for_the_usage(served, choices):
    """C60."""
    for backend in served.backends:
        backend.script.choices = choices
    headers = {"X-Request-Id": "r-1"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "n": choices}
    async with served.http.post(
        f"{served.backends[0].url}/v1/chat/completions", json=body | {"stream_options": {}}, headers=headers
    ) as direct:
        wanted = await direct.read()
    for _ in range(2):
        async with await served.chat(stream=True, n=choices, headers=headers) as response:
            got = await response.read()
    assert got == wanted
