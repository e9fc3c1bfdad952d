"""Emulated answers: the toy tokenizer, lengths that prompts ask for, stop strings, and values that fit a JSON schema."""

import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.conftest import Emulator
from workers.emulator import requested_length, text
from workers.emulator.content import example
from workers.emulator.text import cut_at_stop


@pytest.mark.parametrize(("value", "tokens"), [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("ä" * 8, 2)])
def test_four_characters_a_token(value: str, tokens: int) -> None:
    assert text.count_tokens(value) == tokens


def test_words_need_no_escaping_in_json() -> None:
    for word in text.WORDS:
        assert word.isascii()
        assert not set(word) & {'"', "\\"}
        assert word.isprintable()


def test_lengths_follow_the_asked_distribution() -> None:
    drawn = [text.output_tokens(text.mixed(1, number), 180.0, 0.9) for number in range(4000)]
    assert statistics.median(drawn) == pytest.approx(180, rel=0.06)
    share_below = sum(length < 73 for length in drawn) / len(drawn)  # one sigma down: 180 / e^0.9
    assert share_below == pytest.approx(0.159, abs=0.02)
    assert min(drawn) >= 1


def test_numbers_depend_on_every_part() -> None:
    numbers = {
        text.mixed(0),
        text.mixed(1),
        text.mixed(0, 1),
        text.mixed(0, 0),
        text.mixed(0, 1, 2),
        text.mixed(0, 2, 1),
    }
    assert len(numbers) == 6


def joined(offset: int, count: int) -> str:
    return " ".join(text.words(offset, count))


def test_no_stop_string_no_cut() -> None:
    assert cut_at_stop(0, 50, ("zebra",), 0, include=False) is None


def test_text_ends_before_the_stop_string_and_nothing_of_it_is_sent() -> None:
    whole = joined(3, 40)
    stop = whole[50:58]
    cut = cut_at_stop(3, 40, (stop,), 0, include=False)
    assert cut is not None
    pieces, which = cut
    assert which == stop
    assert "".join(pieces) == whole[: whole.index(stop)]
    assert len(pieces) < 40


def test_the_stop_string_itself_on_request() -> None:
    whole = joined(0, 40)
    stop = whole[30:35]
    cut = cut_at_stop(0, 40, (stop,), 0, include=True)
    assert cut is not None
    assert "".join(cut[0]) == whole[: whole.index(stop) + len(stop)]


@given(
    offset=st.integers(0, 300),
    count=st.integers(1, 80),
    stops=st.lists(st.sampled_from(["e", "the", " t", "er s", ". ", "zebra"]), min_size=1, max_size=3),
    min_tokens=st.integers(0, 20),
)
def test_first_stop_after_the_minimum_wins(offset: int, count: int, stops: list[str], min_tokens: int) -> None:
    """Against a plain walk that appends token after token, as vLLM's detokenizer does."""
    words = text.words(offset, count)
    expected = None
    written = ""
    for number, word in enumerate(words):
        before = len(written)
        written += word if number == 0 else " " + word
        if number + 1 <= min_tokens:
            continue
        matches = []
        for place, stop in enumerate(stops):
            start = written.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), place, start))
        if matches:
            expected = number, min(matches)[2]
            break
    cut = cut_at_stop(offset, count, tuple(stops), min_tokens, include=False)
    if expected is None:
        assert cut is None
    else:
        assert cut is not None
        assert len(cut[0]) == expected[0] + 1
        assert "".join(cut[0]) == written[: expected[1]]


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


def test_each_prompt_has_a_length_and_its_answers_differ_a_little() -> None:
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


NUMBERS = st.integers(0, 2**64 - 1)
NODE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["name"],
        }
    },
}


@given(NUMBERS)
def test_a_schema_that_refers_to_itself_ends(number: int) -> None:
    drawn = example(NODE, number)
    assert drawn == example(NODE, number)
    depth = 0
    while drawn is not None:
        assert isinstance(drawn["name"], str)
        drawn, depth = drawn.get("next"), depth + 1
    assert 1 < depth < 12


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"const": 4}, int),
        ({"enum": ["a"]}, str),
        ({"type": ["null", "string"]}, str),
        ({"type": "null"}, type(None)),
        ({"anyOf": [{"type": "boolean"}]}, bool),
        ({"type": "integer", "minimum": 3}, int),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2}, list),
        ({"properties": {"a": {"type": "string"}}}, dict),
        (True, type(None)),
    ],
)
def test_the_type_is_the_schema_s(schema: Any, kind: type) -> None:
    assert isinstance(example(schema, 7), kind)
