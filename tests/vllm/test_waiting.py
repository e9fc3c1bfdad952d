"""A server behind the gateway: what its queue is expected to take, and streams that are evicted from it.

`pytest -m 'truth or nightly' -s tests/vllm/test_waiting.py` prints how well waits were estimated, of a real server on a
quiet machine, and of an emulated one, whose pace is its own.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp
import numpy as np
import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.fleet.models import Deployment
from controlplane.tuning.services import change
from tests.gateway.conftest import ServedGateway, until
from tests.gateway.test_eviction import events_of, evict_when, request_of, shape, text_of
from tests.vllm.conftest import MODEL, emulated, profile, slow_server
from tests.vllm.gateway import gateway_before

SLOTS, GROUP_BATCHES = 16, 4
GROUPS = 5
BACKLOG, INTERACTIVE = 3 * SLOTS, 20
SLOWED = ("--hidden-size", "512", "--layers", "6")
STOPS = list(range(100, 150))  # of 1,024 tokens: a model with random weights meets one in about twenty
UNKNOWN_LENGTH = {"min_tokens": 20, "max_tokens": 200, "stop_token_ids": STOPS, "temperature": 1.0, "top_p": 1.0}


@pytest.fixture(scope="module")
def server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with steps that are long compared with a request's cost here: otherwise a burst is served as it arrives."""
    folder = tmp_path_factory.mktemp("waiting")
    with slow_server(vllm_python, folder, *SLOWED, max_num_seqs=SLOTS, max_model_len=1024) as url:
        yield url


@pytest.fixture(scope="module")
def emulated_server() -> Iterator[str]:
    options = {"output_median_tokens": 40, "output_sigma": 0.45, "max_num_queued_reqs": None}
    process, url = emulated(max_num_seqs=SLOTS, profile=profile(0.004, 0.001, 0.01, 1e-4), **options)
    with process:
        yield url
        process.terminate()


@pytest.fixture
async def served(transactional_db, request, monkeypatch) -> AsyncIterator[ServedGateway]:
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.3)
    url = request.getfixturevalue(request.param)
    async with gateway_before({"waiting": url}, SLOTS, queue_bound=5000, max_concurrent_requests=5000) as served:
        yield served


async def ask(served: ServedGateway, path: str, **body: object) -> aiohttp.ClientResponse:
    prompt = (
        {"messages": [{"role": "user", "content": "Which way?"}]} if path != "completions" else {"prompt": [5, 6, 7]}
    )
    asked = {"model": MODEL, "stream": True, **prompt, **body}
    return await served.http.post(f"{served.url}/v1/{path}", json=asked, headers=served.headers)


async def burst(served: ServedGateway, requests: int) -> None:
    async def one() -> None:
        async with await ask(served, "completions", **UNKNOWN_LENGTH) as response:
            assert response.status == 200
            await response.read()

    await asyncio.gather(*(one() for _ in range(requests)))


@pytest.mark.parametrize(
    ("served", "least"),
    [
        pytest.param("emulated_server", 0.97, marks=pytest.mark.nightly),
        pytest.param("server", 0.9, marks=pytest.mark.truth),
    ],
    indirect=["served"],
)
async def test_waits_are_estimated_as_they_come(served, least):
    """Outputs of unknown length: two bursts to learn from, one of five groups to judge."""
    burst_size = GROUPS * GROUP_BATCHES * SLOTS + SLOTS
    await burst(served, burst_size)  # what is learned of waits holds for the mean length known then
    await burst(served, burst_size)
    before = len(await served.rows())
    await burst(served, burst_size)
    rows = [row for row in (await served.rows())[before:] if row.queue_position]
    assert len(rows) >= burst_size - 2 * SLOTS
    estimated = np.array([row.estimated_wait_s for row in rows])
    p99 = np.array([row.estimated_wait_p99_s for row in rows])
    actual = np.array([row.queue_ms / 1000 for row in rows])
    r2 = 1 - ((actual - estimated) ** 2).sum() / ((actual - actual.mean()) ** 2).sum()
    result = {
        "groups": GROUPS,
        "requests": len(rows),
        "r2": round(float(r2), 4),
        "below_p99": round(float((actual <= p99).mean()), 4),
        "mean_excess": round(float(estimated.mean() / actual.mean() - 1), 4),
        "longest_wait_s": round(float(actual.max()), 2),
        "output_tokens": [round(float(f([row.output_tokens for row in rows])), 1) for f in (np.mean, np.std)],
    }
    print(json.dumps(result))
    assert r2 > least
    assert result["below_p99"] > 0.9


@pytest.mark.vllm
@pytest.mark.parametrize("served", ["server"], indirect=True)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_an_evicted_answer_is_the_one_that_was_not_evicted(served, path):
    await database_sync_to_async(Deployment.objects.update)(ordering_policy="qlm")
    await served.gateway.dispatching.read_inventory()
    (endpoint,) = served.gateway.dispatching.topology.endpoints
    served.gateway.dispatching.dispatcher.pump_all()
    assert endpoint.spec.policy.ordering == "qlm"
    exactly = {"max_tokens": 700, "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True}}
    whole = await events_of(await ask(served, path, **exactly))
    response = await ask(served, path, **exactly)
    reading = asyncio.create_task(events_of(response))
    await evict_when(served, 50)
    await evict_when(served, 150)
    evicted = await reading
    assert text_of(evicted) == text_of(whole)
    assert shape(evicted[0])[:3] == shape(whole[0])[:3]
    assert shape(evicted[-1]) == shape(whole[-1])
    assert shape(evicted[-2]) == shape(whole[-2])
    assert {event["id"] for event in evicted} == {evicted[0]["id"]}
    rows = await served.rows()
    assert [(row.outcome, row.output_tokens, row.evictions) for row in rows] == [("done", 700, 0), ("done", 700, 2)]
    assert rows[0].prompt_tokens == rows[1].prompt_tokens
    assert not served.gateway.dispatching.dispatcher.requests, request_of(served)


@pytest.mark.vllm
@pytest.mark.parametrize("served", ["server"], indirect=True)
async def test_interactive_requests_behind_a_backlog_are_evicted_for(served):
    await first_tokens_behind_a_backlog(served)


@pytest.mark.nightly
@pytest.mark.parametrize("served", ["emulated_server"], indirect=True)
async def test_the_same_on_an_emulated_server(served):
    await first_tokens_behind_a_backlog(served)


async def first_tokens_behind_a_backlog(served: ServedGateway) -> None:
    """TTFT of interactive requests behind a backlog of three batches, without and with eviction."""
    await database_sync_to_async(Deployment.objects.update)(ordering_policy="qlm")
    await database_sync_to_async(change)("NIW_RELEASE", "at_once", "test")  # the backlog waits in the queue, not held
    limits = (0, 2)
    seen = {}
    for limit in limits:
        await database_sync_to_async(change)("EVICTION_LIMIT", limit, "test")
        await served.gateway.dispatching.read_inventory()
        served.gateway.dispatching.dispatcher.pump_all()
        before = len(await served.rows())
        batch = [900 - 12 * at for at in range(BACKLOG)]
        backlog = [asyncio.create_task(streamed(served, tokens, "flex")) for tokens in batch]
        await until(lambda: served.gateway.dispatching.topology.fleet.running.sum() >= SLOTS, 30)
        asked = []
        for _ in range(INTERACTIVE):
            asked.append(asyncio.create_task(streamed(served, 8, "priority")))
            await asyncio.sleep(0.4)
        ttft_s = np.array([first_s for first_s, _ in await asyncio.gather(*asked)])
        assert [tokens for _, tokens in await asyncio.gather(*asked)] == [8] * INTERACTIVE
        assert [tokens for _, tokens in await asyncio.gather(*backlog)] == batch
        rows = (await served.rows())[before:]
        assert len(rows) == INTERACTIVE + BACKLOG
        assert {row.outcome for row in rows} == {"done"}
        evictions = [row.evictions for row in rows]
        assert max(evictions) <= limit
        p50, p99 = np.percentile(ttft_s, [50, 99])
        seen[limit] = {
            "ttft_p50_s": round(float(p50), 3), "ttft_p99_s": round(float(p99), 3), "evictions": sum(evictions)
        }  # fmt: skip
    print(json.dumps({"without_eviction": seen[0], "with_eviction": seen[2]}))
    assert seen[2]["evictions"]
    assert seen[2]["ttft_p99_s"] < 0.7 * seen[0]["ttft_p99_s"]


async def streamed(served: ServedGateway, tokens: int, tier: str) -> tuple[float, int]:
    """Return seconds to the first event of a stream of *tokens*, and the tokens in its usage."""
    began_s = time.monotonic()
    options = {"max_tokens": tokens, "ignore_eos": True, "service_tier": tier}
    async with await ask(served, "completions", stream_options={"include_usage": True}, **options) as response:
        assert response.status == 200
        first_s, used = 0.0, 0
        async for line in response.content:
            if line.startswith(b"data: {"):
                first_s = first_s or time.monotonic() - began_s
                used = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", used)
    return first_s, used
