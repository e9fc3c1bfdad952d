"""Requests evicted from emulated instances resume without losing or repeating tokens."""

import asyncio
import json

import aiohttp
import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.fleet.models import Deployment
from controlplane.gateway.admission.validation import Call, Kind
from controlplane.gateway.upstream.continuation import evictable
from tests.examples import at_night_but
from tests.gateway.conftest import do_once, emulate_two, gateway_before, until
from tests.workers.conftest import FAST, emulator  # noqa: F401 (fixture)
from workers.emulator.instance import Fault

TOKENS = 60
MESSAGES = [{"role": "user", "content": "which way does the wind blow"}]
EXACTLY = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


@pytest.fixture
async def served(transactional_db, emulator, monkeypatch):  # noqa: F811
    """A gateway before two emulated instances with the same seed, in request groups; the second sleeps at first."""
    monkeypatch.setattr(settings, "HEARTBEAT_S", 0.1)
    do_once(monkeypatch)
    step = {**FAST, "decode_a_s": 0.02}
    instances, backends = await emulate_two(emulator, ["east", "east"], 2, profile=step)
    await database_sync_to_async(Deployment.objects.update)(ordering_policy="qlm")
    async with gateway_before(backends, instances=instances) as served:
        yield served


async def events_of(response) -> list[dict]:
    assert response.status == 200, await response.text()
    lines = [line for line in (await response.text()).split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(events: list[dict]) -> str:
    choices = [event["choices"][0] for event in events if event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def shape(event: dict) -> tuple:
    """Return an event without its text, time and id."""
    choice = event["choices"][0] if event["choices"] else {}
    return tuple(event), tuple(choice), tuple(choice.get("delta", ())), choice.get("finish_reason"), event.get("usage")


def request_of(served):
    (request,) = served.gateway.dispatching.dispatcher.requests.values()
    return request


async def evict_when(served, tokens: int) -> int:
    """Evict the only request once it has *tokens*, and wait until it resumes; return the tokens to compute again."""
    dispatcher = served.gateway.dispatching.dispatcher
    await until(lambda: request_of(served).output_tokens + request_of(served).kept_tokens >= tokens)
    request = request_of(served)
    before = request.evictions
    cost = dispatcher.evict(request.asked.number)
    await until(lambda: request.evictions == before + 1 or not dispatcher.requests)
    return cost


async def ask(served, path: str, **body) -> aiohttp.ClientResponse:
    prompt = {"messages": MESSAGES} if path == "chat/completions" else {"prompt": list(range(1, 30))}
    return await served.post(f"/v1/{path}", {"model": "m", **prompt, **EXACTLY, **body})


@pytest.mark.parametrize(
    ("path", "usage"),
    at_night_but(
        [("chat/completions", True), ("completions", False)],
        [(path, usage) for path in ("chat/completions", "completions") for usage in (True, False)],
    ),
)
async def test_an_evicted_stream_is_the_one_that_was_not_evicted(served, path, usage):
    options = {"stream": True, "stream_options": {"include_usage": True}} if usage else {"stream": True}
    whole = await events_of(await ask(served, path, **options))
    response = await ask(served, path, **options)
    reading = asyncio.create_task(events_of(response))
    costs = [await evict_when(served, 10), await evict_when(served, 30)]
    evicted = await reading
    assert text_of(evicted) == text_of(whole)
    assert list(map(shape, evicted)) == list(map(shape, whole))
    assert len({(event["id"], event["created"]) for event in evicted}) == 1
    rows = await served.rows()
    assert [(row.outcome, row.output_tokens, row.evictions, row.attempts) for row in rows] == [
        ("done", TOKENS, 0, 1),
        ("done", TOKENS, 2, 3),
    ]
    assert rows[0].prompt_tokens == rows[1].prompt_tokens
    assert 10 <= costs[0] < costs[1]
    assert sum("evicted" in entry for entry in rows[1].trace) == 2
    fleet = served.gateway.dispatching.topology.fleet
    assert (fleet.running.sum(), fleet.kv_tokens.sum(), fleet.remaining_tokens.sum()) == (0, 0, 0)
    (endpoint,) = served.gateway.dispatching.topology.endpoints
    assert (endpoint.running_sequences, endpoint.running_output_tokens) == (0, 0)


async def test_an_answer_that_is_not_streamed_starts_over(served):
    asking = asyncio.create_task(ask(served, "chat/completions"))
    await until(lambda: served.gateway.dispatching.topology.fleet.running.sum() == 1)
    request = request_of(served)
    assert served.gateway.dispatching.dispatcher.evict(request.asked.number) == request.asked.prompt_tokens
    answer = await (await asking).json()
    assert answer["usage"]["completion_tokens"] == TOKENS
    assert answer["choices"][0]["token_ids"] is None
    (row,) = await served.rows()
    assert (row.outcome, row.evictions, row.output_tokens) == ("done", 1, TOKENS)


async def test_what_cannot_be_continued_stays_once_it_has_emitted_something(served):
    response = await ask(served, "completions", stream=True, stop=["horizon"])
    await until(lambda: request_of(served).output_tokens > 3)
    assert served.gateway.dispatching.dispatcher.evict(request_of(served).asked.number) is None
    await events_of(response)
    (row,) = await served.rows()
    assert (row.outcome, row.evictions) == ("done", 0)


async def test_the_client_leaves_while_its_request_waits_again(served):
    blockers = [asyncio.create_task(ask(served, "completions", max_tokens=1000)) for _ in range(3)]
    await until(lambda: served.gateway.dispatching.topology.fleet.running.sum() == 3)
    response = await ask(served, "completions", stream=True)
    dispatcher = served.gateway.dispatching.dispatcher
    number = max(dispatcher.requests)
    await until(lambda: dispatcher.requests[number].output_tokens > 3)
    blockers.append(asyncio.create_task(ask(served, "completions", max_tokens=1000)))
    await until(lambda: len(dispatcher.queue) == 1)
    assert dispatcher.evict(number)
    response.close()
    await until(lambda: number not in dispatcher.requests)
    assert served.gateway.active == 4
    for task in blockers:
        task.cancel()
    await until(lambda: served.gateway.active == 0)
    (row,) = [row for row in await served.rows() if row.streamed]
    assert row.outcome == "cancelled"
    assert row.output_tokens > 3


async def test_streams_of_an_instance_that_dies_continue_elsewhere(served):
    whole = await events_of(await ask(served, "chat/completions", stream=True))
    response = await ask(served, "chat/completions", stream=True)
    reading = asyncio.create_task(events_of(response))
    await evict_when(served, 10)
    await until(lambda: request_of(served).replica is not None and request_of(served).output_tokens > 5)
    dying = next(each for each in served.extra["instances"] if each.name == request_of(served).replica.name)
    dying.set_fault(Fault(kind="crash"))
    again = await reading
    assert text_of(again) == text_of(whole)
    rows = await served.rows()
    assert (rows[1].outcome, rows[1].evictions, rows[1].output_tokens) == ("done", 1, TOKENS)
    assert any("lost" in entry for entry in rows[1].trace)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, True),
        ({"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0}, True),
        ({"n": 2}, False),
        ({"logprobs": True}, False),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"response_format": {"type": "json_schema"}}, False),
        ({"seed": 0}, False),
        ({"stop": "\n"}, False),
        ({"presence_penalty": 0.5}, False),
        ({"return_token_ids": False}, False),
        ({"stream": False}, False),
        ({"max_tokens": None}, False),
        ({"unheard_of": 1}, False),
    ],
)
def test_which_requests_can_be_continued(body, expected):
    asked = {"model": "m", "messages": MESSAGES, "stream": True, "max_tokens": 9, **body}
    asked = {name: value for name, value in asked.items() if value is not None}
    call = Call.read(json.dumps(asked).encode(), Kind.CHAT, max_depth=20)
    assert evictable(call) is expected
