"""Emulated answers are as long as their prompts ask for: the same prompt always about the same, kinds far from others."""

import statistics

import pytest

from tests.workers.conftest import Emulator
from workers.emulator import requested_length, text


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("Write a story in about 600 words.", 600.0),
        ("Is it true that ice floats? Answer yes or no.", 4.0),
        ("TRANSLATE into French:\n" + "word " * 100, 130.0),
        ("Tell me in one sentence what a bollard is.", 28.0),
        ("<|system|>\nYou are kind.<|end|>\n<|user|>\nList the tools.<|end|>\n<|assistant|>\n", 170.0),
        ("x " * 4_000 + "Summarize this.", 110.0),
    ],
)
def test_what_a_prompt_asks_for(prompt: str, tokens: float) -> None:
    length = requested_length.read(prompt, 130)
    assert length is not None
    assert length.tokens == tokens


@pytest.mark.parametrize("prompt", ["", "x", "Hello engine", "enlist the reporters", "y" * 400 + " list " + "y" * 400])
def test_most_texts_ask_for_nothing(prompt: str) -> None:
    assert requested_length.read(prompt, 10) is None


def test_a_prompt_has_a_length_of_its_own_and_answers_differ_a_little() -> None:
    length = requested_length.read("Explain tides.", 4)
    assert length is not None
    of_prompts = [requested_length.draw(length, text.mixed(1, prompt), text.mixed(2, prompt)) for prompt in range(400)]
    of_one = [requested_length.draw(length, 1 << 60, text.mixed(2, number)) for number in range(400)]
    assert requested_length.draw(length, 1 << 60, 5) == requested_length.draw(length, 1 << 60, 5)
    assert statistics.median(of_prompts) == pytest.approx(length.tokens, rel=0.1)
    assert statistics.stdev(of_one) / statistics.mean(of_one) < 0.8 * statistics.stdev(of_prompts) / length.tokens
    assert requested_length.draw(requested_length.RequestedLength(1.0, 0.3), 0, 0) == 1


async def test_an_emulated_server_answers_so(emulator: Emulator) -> None:
    await emulator.ready(max_model_len=4096)
    lengths = []
    for prompt in ("Answer yes or no: is it late?", "Write an essay on harbours.", "Write an essay on ships."):
        _, answer = await emulator.complete(prompt=prompt, ignore_eos=False, max_tokens=3000, temperature=0)
        lengths.append(answer["usage"]["completion_tokens"])
    short, one, other = lengths
    assert short < 15 < 200 < min(one, other)
    assert one != other
