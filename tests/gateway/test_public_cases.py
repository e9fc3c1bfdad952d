"""Faults reported for other gateways, on ours: ids, slots, cut connections, large answers, foreign fields."""

import asyncio
import json
import statistics
from itertools import pairwise

import pytest
from channels.db import database_sync_to_async
from openai._streaming import SSEDecoder

from controlplane.fleet.models import Instance
from tests.gateway.backend import Script
from tests.gateway.conftest import until
from tests.gateway.test_answers import DONE, TOKENS, USAGE, chunk, http, plays, quick_pings, stream  # noqa: F401 (a fixture)

CHOICE = {"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}
ONE_AT_ONCE = pytest.mark.parametrize("gateway_options", [{"max_concurrent_requests": 1}])


@ONE_AT_ONCE
@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_left_has_given_its_slot_back(served, streamed):
    """C29, C47, C54: within a prefill and within the tokens, ten times; the instance knows within a second."""
    backend = served.backends[0]
    for at in range(10):
        within_tokens = at % 2
        backend.script.first_token_s, backend.script.tokens = (0.0, 1000) if within_tokens else (300.0, 3)
        backend.script.token_s = 1.0
        asked = asyncio.create_task(served.chat(stream=streamed))
        await until(lambda: backend.running == 1)
        await asyncio.sleep(0.05)
        if streamed and within_tokens:
            (await asked).close()
        asked.cancel()
        await until(lambda: backend.running == 0, timeout_s=1.0)
        await until(lambda: served.gateway.active == 0)
        backend.script = Script(tokens=1)
        async with await served.chat() as response:
            assert response.status == 200
    outcomes = [(row.outcome, row.error_code, row.attempts) for row in await served.rows()]
    assert outcomes == [("cancelled", "client_disconnected", 1), ("done", "", 1)] * 10
    fleet = served.gateway.dispatching.topology.fleet
    assert (fleet.running.sum(), fleet.kv_tokens.sum(), fleet.remaining_tokens.sum()) == (0, 0, 0)


@pytest.mark.parametrize("gateway_options", [{"max_concurrent_requests": 10, "max_num_seqs": 100}])
async def test_never_more_run_than_the_limit(served):
    """C49: fifty at once."""
    backend = served.backends[0]
    backend.script.hold = asyncio.Event()
    asked = [asyncio.create_task(served.chat()) for _ in range(50)]
    await until(lambda: sum(each.done() for each in asked) == 40)
    await until(lambda: backend.running == 10)
    backend.script.hold.set()
    answers = [await each for each in asked]
    assert sorted(each.status for each in answers) == [200] * 10 + [429] * 40
    assert all(int(each.headers["retry-after"]) >= 1 for each in answers if each.status == 429)


@ONE_AT_ONCE
async def test_a_mistake_costs_no_slot(served):
    """C50."""
    for data in (
        b"{",
        b'{"model":"m","messages":[],"top_p":NaN}',
        b'{"model":"none","messages":[{"role":"user"}]}',
    ):
        url = f"{served.url}/v1/chat/completions"
        async with served.http.post(url, data=data, headers=served.headers) as response:
            assert response.status in (400, 404)
        async with await served.chat() as response:
            assert response.status == 200


async def test_two_requests_may_have_one_id(served):
    """C55: both are answered, and both are in the ledger under it."""
    answers = await asyncio.gather(*(served.chat(headers={"X-Request-Id": "same"}) for _ in range(2)))
    assert [(each.status, each.headers["x-request-id"]) for each in answers] == [(200, "same")] * 2
    assert [row.request_id for row in await served.rows()] == ["same"] * 2


NO_IDS = ["a" * 81, "a" * 1000, "a b", "\u00e9", "a;b", '"']


async def test_an_id_that_is_none_is_replaced(served, subtests):
    """C56: and never said again."""
    for given in NO_IDS:
        with subtests.test(given=given):
            async with await served.chat(headers={"X-Request-Id": given}) as response:
                assert response.status == 200
                assert response.headers["x-request-id"] != given
                assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("streamed", [True, False])
async def test_details_of_usage_are_passed_on(served, streamed):
    """C58."""
    usage = USAGE | {
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 2, "more": {"a": 1.50}},
    }
    closing = {"id": "c", "choices": [], "usage": usage}
    whole = {"id": "c", "object": "chat.completion", "model": "m", "choices": [CHOICE], "usage": usage}
    events = stream(chunk(), chunk("a"), chunk("b", "stop"), closing, DONE)
    plays(served, events if streamed else http(200, json.dumps(whole).encode()))
    options = {"stream": True, "stream_options": {"include_usage": True}} if streamed else {}
    async with await served.chat(**options) as response:
        text = await response.text()
    said = json.loads(text.split("data: ")[-2]) if streamed else json.loads(text)
    assert said["usage"] == usage


async def test_what_only_an_instance_knows_reaches_it_as_it_was_sent(served):
    """C23, C64, C73: message parts, tools and structured outputs of other periods and clients."""
    thought = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "a"}]
    more = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": thought}],
        "guided_choice": ["a", "b"], "guided_json": {"type": "object"}, "prompt_cache_key": "k",
    }  # fmt: skip
    async with await served.chat(**more) as response:
        assert response.status == 200
    sent = served.backends[0].bodies[0]
    assert {name: sent[name] for name in more} == more
    tools = [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}]}, {"type": "web_search"}]
    output = [{"type": "input_image", "image_url": "data:,"}]
    asked = {
        "model": "m", "tools": tools, "include": ["reasoning.encrypted_content"], "store": False,
        "input": [{"type": "function_call_output", "call_id": "x", "output": output}],
    }  # fmt: skip
    async with served.post("/v1/responses", asked) as response:
        await response.read()
    sent = served.backends[0].bodies[1]
    assert {name: sent[name] for name in asked} == asked


async def test_a_long_answer_is_whole(served):
    """C68: 25 MB, which its tenant does not stream."""
    word = "x" * 50_000
    choice = CHOICE | {"message": {"role": "assistant", "content": word * 500}}
    whole = {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": USAGE}
    plays(served, http(200, json.dumps(whole).encode()))
    async with await served.chat() as response:
        answer = json.loads(await response.read())
    assert answer["choices"][0]["message"]["content"] == word * 500
    (row,) = await served.rows()
    assert (row.outcome, row.output_tokens) == ("done", 3)


TWO = pytest.mark.parametrize("gateway_options", [{"regions": ["east", "east"]}])


@TWO
async def test_counts_of_what_runs_end_at_0(served):
    """C46: streams fail, are cut and are cancelled while an instance leaves and returns under its name."""
    fleet = served.gateway.dispatching.topology.fleet
    first, second = served.backends
    first.script.tokens, first.script.token_s, second.script.die = 5, 0.02, "midway"

    async def ask(number: int) -> None:
        asked = asyncio.create_task(served.chat(stream=True))
        if number % 3 == 0:
            await asyncio.sleep(0.03)
            asked.cancel()
        else:
            async with await asked as response:
                await response.read()

    async def leave_and_return() -> None:
        for state in ("draining", "ready") * 3:
            update = Instance.objects.filter(name=second.name).update
            await database_sync_to_async(update)(state=state)
            served.gateway.dispatching.refresh_now()
            await asyncio.sleep(0.1)

    moves = asyncio.create_task(leave_and_return())
    for _ in range(6):
        await asyncio.gather(*(ask(number) for number in range(20)), return_exceptions=True)
        assert fleet.running.min() >= 0
    await moves
    await until(lambda: served.gateway.active == 0)
    assert (fleet.running.sum(), fleet.running.min(), fleet.kv_tokens.sum()) == (0, 0, 0)


@pytest.mark.parametrize("gateway_options", [{"max_concurrent_requests": 10_000, "queue_bound": 200}])
async def test_a_wave_of_long_prompts_is_answered_and_health_with_it(served):
    """C52: each gets an answer or a wait, and `/healthz` answers all the time."""
    served.backends[0].script.token_s = 0.001
    long = [{"role": "user", "content": "word " * 4000}]
    asked = [asyncio.create_task(served.chat(messages=long, stream=bool(number % 2))) for number in range(400)]
    looked_s = []
    loop = asyncio.get_running_loop()
    while not all(each.done() for each in asked):
        began_s = loop.time()
        async with served.http.get(f"{served.url}/healthz") as response:
            assert response.status == 200
        looked_s.append(loop.time() - began_s)
        await asyncio.sleep(0.01)
    answers = [await each for each in asked]
    for answer in answers:
        assert answer.status == 200 or (answer.status == 429 and int(answer.headers["retry-after"]) >= 1)
        await answer.read()
    assert sum(answer.status == 200 for answer in answers) >= 200
    assert statistics.median(looked_s) < 0.1, "client, server and instance share this loop"


async def test_each_delta_is_passed_on_as_it_comes(served):
    """C59: thoughts and arguments of a call, none dropped or held for the next."""
    thoughts = [{"index": 0, "delta": {"reasoning": f"t{number} "}, "finish_reason": None} for number in range(100)]
    parts = [{"index": 0, "function": {"arguments": f'"{number}'}} for number in range(100)]
    calls = [{"index": 0, "delta": {"tool_calls": [part]}, "finish_reason": None} for part in parts]
    events = [{"id": "c", "object": "chat.completion.chunk", "choices": [choice]} for choice in (*thoughts, *calls)]
    end = {"id": "c", "choices": [], "usage": USAGE}
    sent = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in (*events, chunk("", "stop"), end)]
    plays(served, stream(), *sent, DONE + b"\n\n", piece_s=0.01)
    came_s, pieces, loop = [], [], asyncio.get_running_loop()
    async with await served.chat(stream=True, stream_options={"include_usage": True}) as response:
        async for piece in response.content.iter_any():
            came_s.append(loop.time())
            pieces.append(piece)
    assert b"".join(pieces) == b"".join(sent) + DONE + b"\n\n"
    assert len(pieces) > 150, "most come alone"
    assert statistics.median(after - before for before, after in pairwise(came_s)) < 0.03


async def test_more_tokens_than_the_context_has_are_refused_by_a_code_that_clients_know(served):
    """C65."""
    message = (
        "This model's maximum context length is 32768 tokens. However, you requested 32000 output tokens and your prompt "
        "contains at least 769 input tokens."
    )
    for words in (message, "max_tokens=32000 cannot be greater than max_model_len=8192. (parameter=max_tokens)"):
        error = {"message": words, "type": "BadRequestError", "param": "max_tokens", "code": 400}
        plays(served, http(400, json.dumps({"error": error}).encode()))
        async with await served.chat(max_tokens=32_000) as response:
            said = (await response.json())["error"]
        assert (response.status, said["code"], said["message"]) == (400, "context_length_exceeded", words)
        assert response.headers["x-should-retry"] == "false"


async def test_comment_lines_between_events_with_ids_are_no_events(served, quick_pings):  # noqa: F811
    """C72: SDKs up to 2.37 took the empty line behind a comment for an event if one before had an id."""
    pieces = [b"id: 7\ndata: " + json.dumps(event).encode() + b"\n\n" for event in TOKENS]
    plays(served, stream(), *pieces, DONE + b"\n\n", piece_s=0.7)
    async with await served.chat(stream=True) as response:
        text = await response.read()
    assert b": ping" in text
    events = [event.data for event in SSEDecoder().iter_bytes(iter([text]))]
    assert [json.loads(event) for event in events[:-1]] == list(TOKENS)
    assert events[-1] == "[DONE]"
