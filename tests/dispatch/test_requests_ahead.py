"""Requests ahead of an instance, through the whole gateway: what is measured, what the trace and the summary say of it."""

import asyncio

import pytest

from controlplane.gateway.explanation import trace_of
from tests.gateway.conftest import until


@pytest.fixture
def gateway_options() -> dict:
    return {"max_num_seqs": 2, "requests_ahead_limit": None}


async def ask(served, count: int, **body) -> list[asyncio.Task]:
    async def one() -> int:
        async with await served.chat(**body) as response:
            await response.read()
            return response.status

    return [asyncio.create_task(one()) for _ in range(count)]


async def test_an_instance_is_given_one_more_than_it_runs_and_the_trace_says_why(served):
    (backend,) = served.backends
    (replica,) = served.gateway.dispatching.topology.replicas.values()
    await until(lambda: served.gateway.dispatching.topology.round_trip_ms(replica) is not None)
    backend.script.hold = asyncio.Event()
    asked = await ask(served, 6, stream=True)
    await until(lambda: len(served.gateway.dispatching.dispatcher.queue) == 3)
    await asyncio.sleep(0.1)
    assert len(served.gateway.dispatching.dispatcher.queue) == 3
    assert served.gateway.dispatching.topology.requests_ahead(replica) == 1
    instances = served.gateway.publisher.summary.snapshot()["instances"]
    assert instances["requests_ahead"] == [1]
    assert instances["round_trip_ms"][0] > 0
    backend.script.hold.set()
    assert await asyncio.gather(*asked) == [200] * 6
    assert served.gateway.dispatching.topology.requests_ahead(replica) == 0
    steps = [trace_of(row)[-1] for row in await served.rows()]
    assert sorted(step["requests_ahead"] for step in steps)[:2] == [0, 0]
    assert max(step["requests_ahead"] for step in steps) >= 1
    for step in steps:
        assert step["round_trip_ms"] > 0
        assert ("sent early to hide a round trip" in step["chosen_because"]) == (step["requests_ahead"] > 0)
        assert all(seen["room"] for seen in step["seen"])


async def test_a_round_trip_is_from_the_decision_to_the_headers(served):
    """A stream's headers arrive before its first token, so computing is not part of the round trip."""
    (backend,) = served.backends
    (replica,) = served.gateway.dispatching.topology.replicas.values()
    backend.script.first_token_s = 0.4
    for task in await ask(served, 12, stream=True):
        assert await task == 200
    assert 0 < served.gateway.dispatching.topology.round_trip_ms(replica) < 300
    assert replica.round_trip.headers_at_s > 0
