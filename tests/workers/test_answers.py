"""What an emulated server answers: text, lengths, several choices, stop strings, streams."""

import asyncio
import json
from typing import Any

from tests.workers.conftest import Emulator
from workers.emulator.text import PROSE


def texts(events: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] for event in events for c in event["choices"] if c["index"] == index)


async def test_streamed_answer_is_the_plain_answer(emulator: Emulator) -> None:
    await emulator.ready()
    plain = (await emulator.complete(max_tokens=40, seed=5))[1]
    events = await emulator.stream(max_tokens=40, seed=5, stream_options={"include_usage": True})
    assert texts(events) == plain["choices"][0]["text"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 40
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * 39 + ["length"]
    assert len(events) == 41  # a token an event


async def test_without_ignore_eos_lengths_vary_and_the_last_token_is_silent(emulator: Emulator) -> None:
    await emulator.ready(output_median_tokens=10, output_sigma=0.5, max_num_seqs=64)
    answers = await asyncio.gather(*(emulator.complete(ignore_eos=False, max_tokens=500) for _ in range(40)))
    lengths = {answer["usage"]["completion_tokens"] for _, answer in answers}
    assert len(lengths) > 5
    for _, answer in answers:
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] is None
        assert len(choice["text"].split()) == answer["usage"]["completion_tokens"] - 1


async def test_min_tokens_is_a_floor(emulator: Emulator) -> None:
    await emulator.ready(output_median_tokens=2, output_sigma=0.1)
    _, answer = await emulator.complete(ignore_eos=False, min_tokens=30, max_tokens=60)
    assert answer["usage"]["completion_tokens"] == 30
    _, answer = await emulator.complete(ignore_eos=False, min_tokens=60, max_tokens=60)
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (60, "length")


async def test_same_seed_same_answer(emulator: Emulator) -> None:
    await emulator.ready()
    ask = {"ignore_eos": False, "max_tokens": 300}
    first, second, other = [(await emulator.complete(seed=s, **ask))[1] for s in (1, 1, 2)]
    assert first["choices"] == second["choices"]
    assert first["choices"] != other["choices"]
    greedy = [(await emulator.complete(temperature=0, **ask))[1]["choices"] for _ in range(2)]
    assert greedy[0] == greedy[1]
    free = [(await emulator.complete(**ask))[1]["choices"][0]["text"] for _ in range(4)]
    assert len(set(free)) > 1


async def test_two_servers_of_one_seed_and_name_answer_alike(emulator: Emulator) -> None:
    async def series() -> list[str]:
        await emulator.ready(seed=3)
        said = [(await emulator.complete(ignore_eos=False, max_tokens=100))[1]["choices"][0]["text"] for _ in range(3)]
        await emulator.call("DELETE", "/emulator/instances/one")
        return said

    assert await series() == await series()


async def test_several_prompts_and_choices(emulator: Emulator) -> None:
    await emulator.ready()
    _, answer = await emulator.complete(prompt=[[1, 2], [3, 4, 5]], n=2, max_tokens=6)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] | {"prompt_tokens": 5, "completion_tokens": 24} == answer["usage"]
    events = await emulator.stream(prompt=[[1, 2], [3, 4, 5]], n=2, max_tokens=6, seed=1)
    for index in range(4):
        assert len(texts(events, index).split()) == 6
    assert (await emulator.ended()).success_total["length"] == 8


async def test_echo(emulator: Emulator) -> None:
    await emulator.ready()
    _, plain = await emulator.complete(prompt="Hello engine", echo=True, max_tokens=2)
    assert plain["choices"][0]["text"].startswith("Hello engine")
    events = await emulator.stream(prompt="Hello engine", echo=True, max_tokens=2)
    assert texts(events).startswith("Hello engine")
    assert texts(events).count("Hello") == 1


async def test_odd_names_and_ids_do_not_break_a_stream(emulator: Emulator) -> None:
    model = 'a "model" \\u0000 of ümläuts'
    await emulator.ready(model=model)
    asked = {"model": model, "prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": True}
    headers = {"X-Request-Id": 'id"\\u0000'}
    async with emulator.session.post(f"{emulator.url}/one/v1/completions", json=asked, headers=headers) as response:
        events = [line for line in (await response.text()).splitlines() if line.startswith("data: {")]
    assert len(events) == 5
    for event in events:
        chunk = json.loads(event[6:])
        assert (chunk["id"], chunk["model"]) == ('cmpl-id"\\u0000', model)
        assert chunk["choices"][0]["text"].strip() in PROSE
