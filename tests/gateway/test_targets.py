"""Comparison of weighted targets: intervals by conversation, and verdicts only where an interval shows a difference."""

import random

import pytest

from controlplane.gateway.targets import Interval, Served, compare, difference, ratio


def conversations(count, ttft_ms, *, requests=1, failed=0, seed=0, spread=0.3, tokens=100.0):
    """Return *requests* each of *count* conversations, whose times vary by conversation; the first *failed* fail."""
    draw = random.Random(seed)
    served = []
    for at in range(count):
        own_ms = ttft_ms * draw.lognormvariate(0, spread)
        values = {"ttft_ms": own_ms, "itl_ms": None, "e2e_ms": 10 * own_ms, "output_tokens": tokens}
        served += [Served(f"c{at}", at < failed, values if at >= failed else {}) for _ in range(requests)]
    return served


def test_the_heaviest_is_the_baseline_of_a_slower_one():
    rows = compare(
        "chat", {"new": 5, "old": 95}, {"old": conversations(200, 100.0), "new": conversations(100, 130.0, seed=1)}
    )
    old, new = rows
    assert (old.target, old.baseline, old.verdict, old.share) == ("old", "", "Baseline", 0.95)
    low, high = new.ratios["ttft_ms"]
    assert 1.1 < low < 1.3 < high < 1.5
    assert new.verdict == f"TTFT slower by {100 * (low - 1):.0f} to {100 * (high - 1):.0f}%; E2E slower by " + (
        f"{100 * (low - 1):.0f} to {100 * (high - 1):.0f}%"
    )


def test_of_two_alike_nothing_is_said():
    """About one in twenty has a difference by chance; of these seeds none."""
    for seed in range(1, 6):
        one = compare(
            "chat", {"a": 2, "b": 1}, {"a": conversations(80, 100.0), "b": conversations(80, 100.0, seed=seed)}
        )[1]
        assert one.verdict == "No difference shown"


def test_requests_of_one_conversation_count_as_one():
    few = {"a": conversations(10, 100.0, requests=50), "b": conversations(10, 500.0, requests=50, seed=1)}
    row = compare("chat", {"a": 2, "b": 1}, few)[1]
    assert (row.requests, row.conversations, row.ratios) == (500, 10, {})
    assert row.verdict.startswith("Too few")
    assert compare("chat", {"a": 2, "b": 1}, {})[1].error_ratio is None


def test_more_errors_are_said():
    row = compare("chat", {"a": 2, "b": 1}, {"a": conversations(300, 1.0), "b": conversations(100, 1.0, failed=12)})[1]
    assert (row.error_ratio, row.errors.low > 0, row.verdict) == (0.12, True, "more errors")


def test_newcombe_s_own_example():
    """Newcombe (1998), table II, contrast (a): 56/70 against 48/80, method 10."""
    assert difference(56, 70, 48, 80) == pytest.approx(Interval(0.0524, 0.3339), abs=1e-4)


def test_an_interval_covers_the_true_ratio_as_often_as_it_says():
    covered = 0
    for seed in range(300):
        draw = random.Random(seed)
        one, two = ([draw.gauss(mean, 0.5) for _ in range(40)] for mean in (0.2, 0.0))
        low, high = ratio(one, two)
        covered += low <= 1.2214 <= high
    assert 0.91 < covered / 300 < 0.99
