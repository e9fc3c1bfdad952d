"""Shares of an instance's time: as a loop over whole seconds has them, and never more nor less than what was paid."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.usage.sharing import held_tokens, share

MOMENTS = st.integers(0, 30)
REQUESTS = st.lists(st.tuples(MOMENTS, MOMENTS, st.integers(0, 400), st.integers(0, 400)), max_size=8)
EDGES = st.lists(MOMENTS, unique=True, max_size=6)


def by_seconds(requests, paid) -> tuple[list[float], float]:
    """The definition, second by second."""
    shares, idle_s = [0.0] * len(requests), 0.0
    for second in range(31):
        if not any(since <= second < until for since, until in paid):
            continue
        running = {
            at: prompt + output / 2
            for at, (begin, end, prompt, output) in enumerate(requests)
            if begin <= second < end and prompt + output
        }
        for at, held in running.items():
            shares[at] += held / sum(running.values())
        idle_s += not running
    return shares, idle_s


def shared(requests, paid) -> tuple[np.ndarray, float]:
    begin, end, prompt, output = np.array(requests, dtype=float).reshape(-1, 4).T
    return share(begin, end, held_tokens(prompt, output), paid)


@given(REQUESTS, EDGES)
def test_shares_are_those_of_each_second_and_sum_to_what_was_paid(drawn, edges):
    requests = [(min(a, b), max(a, b), prompt, output) for a, b, prompt, output in drawn]
    edges = sorted(edges)[: len(edges) // 2 * 2]
    paid = list(zip(edges[::2], edges[1::2], strict=True))
    shares, idle_s = shared(requests, paid)
    expected, expected_idle_s = by_seconds(requests, paid)
    assert shares == pytest.approx(expected, abs=1e-9)
    assert idle_s == pytest.approx(expected_idle_s)
    assert shares.sum() + idle_s == pytest.approx(sum(until - since for since, until in paid))


def test_an_example_by_hand():
    """Ten seconds: alone for 2 s, then 300 tokens alongside 100 for 4 s, then nobody."""
    shares, idle_s = shared([(0, 6, 250, 100), (2, 6, 100, 0)], [(0, 10)])
    assert shares.tolist() == pytest.approx([2 + 4 * 0.75, 4 * 0.25])
    assert idle_s == pytest.approx(4)
