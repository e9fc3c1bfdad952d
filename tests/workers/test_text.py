"""The toy tokenizer, drawn lengths, and where stop strings cut."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.emulator import text
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
