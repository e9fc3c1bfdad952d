"""What a cheap model sees of a prompt: as its plain twin reads it, and nothing that a text could be read off."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.lengths import kernels
from forecasting.lengths.features import (  # fmt: skip
    CATEGORIES,
    FIRST,
    HASHES,
    KINDS,
    LAST,
    MEASURES,
    UNITS,
    VALUES,
    Vocabulary,
    extract,
    packed,
    read,
    unpacked,
)
from forecasting.lengths.query import LengthQuery
from tests.oracles import text_features as plain

PIECES = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["in 50 words", "```", "- a\n", "1. one\n", "two short paragraphs", "Yes or no?", "{x = 1;}", "123456", "\n"]
    ),
)


SOME_WORDS = st.sampled_from(["write", "read", "list", "a", "story", "about", "rome", "now"])


def measure(text: str, name: str) -> float:
    return float(extract(LengthQuery(text, 10)).measures[MEASURES.index(name)])


@given(st.lists(PIECES, max_size=12).map("".join))
def test_kernel_reads_as_its_plain_twin(text: str) -> None:
    data = text.encode("utf-8", "replace")
    hashes, opening = np.empty(kernels.MOST_HASHES, np.int64), np.empty(kernels.MOST_OPENING_HASHES, np.int64)
    counts, demands, categories = np.zeros(kernels.COUNTS), np.zeros(len(UNITS)), np.zeros(len(CATEGORIES))
    sizes = kernels.read_bytes(
        np.frombuffer(data, np.uint8),
        HASHES,
        KINDS,
        VALUES,
        len(UNITS),
        len(CATEGORIES),
        hashes,
        opening,
        counts,
        demands,
        categories,
    )
    expected = plain.read_bytes(data)
    assert hashes[: sizes[0]].tolist() == expected[0]
    assert opening[: sizes[1]].tolist() == expected[1]
    for got, wanted in zip((counts, demands, categories), expected[2:], strict=True):
        assert got.tolist() == wanted.tolist()


def test_length_that_is_asked_for_is_found() -> None:
    asked = np.log1p(50)
    assert measure("Describe Rome in 50 words.", "asked_words") == pytest.approx(asked, rel=1e-2)
    assert measure("Two short paragraphs on Rome", "asked_paragraphs") == pytest.approx(np.log1p(2), rel=1e-2)
    assert measure("List five funny ideas", "asked_items") == pytest.approx(np.log1p(5), rel=1e-2)
    assert measure("50 years ago many of the words", "asked_words") == 0.0


def test_marks_of_code_and_lists_are_counted() -> None:
    text = "Fix this:\n```\nx = f(1);\n```\n- one\n* two\n3. three\n"
    assert measure(text, "log_fences") == pytest.approx(np.log1p(2), rel=1e-2)
    assert measure(text, "log_list_lines") == pytest.approx(np.log1p(3), rel=1e-2)
    assert measure("Is it?  ", "ends_asking") == 1.0


def test_a_long_conversation_is_read_at_its_end() -> None:
    history = "old words " * 2000
    part = read(history + "What now?")
    assert part.endswith("What now?")
    assert len(part) <= FIRST + LAST + 1
    assert measure(history + "What now?", "ends_asking") == 1.0
    assert measure(history, "log_characters") == pytest.approx(
        np.log1p(len(history)), rel=1e-2
    )  # its whole length is known


def test_a_vocabulary_knows_what_prompts_share() -> None:
    prompts = [extract(LengthQuery(f"write about topic{number}", 4)) for number in range(6)]
    vocabulary = Vocabulary.common(prompts, least=5, most=1000)
    known = vocabulary.features(prompts[0])
    assert len(known.ids)
    assert plain.hashed(b"write") in vocabulary.hashes
    assert plain.hashed(b"topic0") not in vocabulary.hashes
    assert len(Vocabulary.common(prompts, least=5, most=3)) == 3
    assert vocabulary.features(extract(LengthQuery("", 0))).ids.tolist() == []


@given(st.lists(SOME_WORDS, max_size=40).map(" ".join))
def test_look_up_finds_every_known_hash_once(text: str) -> None:
    vocabulary = Vocabulary.common([extract(LengthQuery("write a story about rome now", 6))], least=1, most=1000)
    prompt = extract(LengthQuery(text, 5))
    wanted = sorted(
        {vocabulary.hashes.tolist().index(code) for code in prompt.hashes.tolist() if code in vocabulary.hashes}
    )
    assert vocabulary.features(prompt).ids.tolist() == wanted


def test_kept_features_hold_no_text_and_come_back_whole() -> None:
    texts = [f"please summarize the following report number {number}" for number in range(6)]
    vocabulary = Vocabulary.common([extract(LengthQuery(text, 8)) for text in texts], least=5, most=1000)
    secret = "please summarize the salary of Hildegard Unterberger, 48 213 euros"
    features = vocabulary.features(extract(LengthQuery(secret, 14)))
    kept = packed(features, vocabulary.fingerprint)
    for word in secret.split():
        assert word.encode() not in kept
    again = unpacked(kept, vocabulary)
    assert again.measures.tolist() == features.measures.tolist()
    assert again.ids.tolist() == features.ids.tolist()
    assert again.opening.tolist() == features.opening.tolist()
    # Words that no other prompt had leave no trace but their number: another name gives the same n-grams.
    other = vocabulary.features(extract(LengthQuery(secret.replace("Hildegard", "Kunigunde"), 14)))
    assert other.ids.tolist() == features.ids.tolist()


def test_foreign_bytes_are_refused() -> None:
    vocabulary = Vocabulary.common([extract(LengthQuery("write a story", 3))], least=1, most=100)
    kept = packed(vocabulary.features(extract(LengthQuery("a story", 2))), vocabulary.fingerprint)
    for broken in (b"", b"abc", kept[:20], b"\x63\x00" + kept[2:], kept + b"\xff\xff"):
        with pytest.raises(ValueError):
            unpacked(broken, vocabulary)
    other = Vocabulary.common([extract(LengthQuery("sing a song", 3))], least=1, most=100)
    with pytest.raises(ValueError, match="vocabulary"):
        unpacked(kept, other)
