"""What a cheap model sees of a prompt: as its plain twin reads it, and nothing that a text could be read off."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.lengths import kernels
from forecasting.lengths.features import (  # fmt: skip
    BUCKETS,
    CATEGORIES,
    FIRST,
    HASHES,
    KINDS,
    LAST,
    MEASURES,
    UNITS,
    VALUES,
    TextScore,
    extract,
    features,
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


def measure(text: str, name: str) -> float:
    return float(extract(LengthQuery(text, 10)).measures[MEASURES.index(name)])


@given(st.lists(PIECES, max_size=12).map("".join))
def test_kernel_reads_as_its_plain_twin(text: str) -> None:
    data = text.encode("utf-8", "replace")
    hashes = np.empty(kernels.MAX_HASHES, np.int64)
    counts, demands, categories = np.zeros(kernels.COUNTS), np.zeros(len(UNITS)), np.zeros(len(CATEGORIES))
    size = kernels.read_bytes(
        np.frombuffer(data, np.uint8),
        HASHES,
        KINDS,
        VALUES,
        len(UNITS),
        len(CATEGORIES),
        hashes,
        counts,
        demands,
        categories,
    )
    expected = plain.read_bytes(data)
    assert hashes[:size].tolist() == expected[0]
    for got, wanted in zip((counts, demands, categories), expected[1:], strict=True):
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


def score_of(texts: list[str], target: list[float]) -> tuple[TextScore, list[float]]:
    prompts = [extract(LengthQuery(text, 5)) for text in texts]
    score, others = TextScore.fit(prompts, np.array(target), np.arange(len(texts)) % 5)
    return score, others.tolist()


def test_a_text_score_is_learned_from_n_grams_and_out_of_fold() -> None:
    texts = [f"{('write', 'name')[number % 2]} something {number}" for number in range(60)]
    score, others = score_of(texts, [1.0, -1.0] * 30)
    long, short = (score(extract(LengthQuery(f"{verb} it", 5))) for verb in ("write", "name"))
    assert long > 0.2 > -0.2 > short
    assert all((other > 0) == (number % 2 == 0) for number, other in enumerate(others))
    assert score(extract(LengthQuery("", 0))) == 0.0


def test_kept_features_hold_no_text_and_come_back_whole() -> None:
    score = TextScore(np.random.default_rng(1).standard_normal(BUCKETS).astype(np.float32))
    secret = "please summarize the salary of Hildegard Unterberger, 48 213 euros"
    row = features(extract(LengthQuery(secret, 14)), score)
    kept = packed(row, score)
    assert len(kept) == 6 + 2 * (len(MEASURES) + 1)
    for word in secret.split():
        assert word.encode() not in kept
    assert unpacked(kept, score).tolist() == row.tolist()
    for broken in (b"", b"abc", kept[:20], b"\x63\x00" + kept[2:], kept + b"\xff\xff"):
        with pytest.raises(ValueError):
            unpacked(broken, score)
    with pytest.raises(ValueError, match="text score"):
        unpacked(kept, TextScore(np.zeros(BUCKETS, np.float32)))
