"""Work that arrives later and goes first, in a request's wait."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.waits.overtaking import MOST_SHARE, Arrivals

THETA = 100.0


def came(per_s, kinds, for_s=1000.0):
    """Return arrivals at *per_s* in turn of *kinds*, (offset, tokens) each, and their last moment."""
    arrivals, count = Arrivals(), round(per_s * for_s)
    for at in range(count):
        arrivals.add(at / per_s, *kinds[at % len(kinds)])
    return arrivals, (count - 1) / per_s


def said(arrivals, now_s, wait_s, left_s):
    return arrivals.overtaken_s(wait_s, left_s, now_s, THETA)


@pytest.mark.parametrize(
    ("wait_s", "left_s", "expected_s"),
    [
        (10.0, 5.0, 10.0),  # all that come later are due later
        (10.0, 1000.0, 20.0),  # half of the throughput goes to what comes meanwhile
        (10.0, 9.0, 12.0),  # until what comes is due later than it, which is after 4 s
        (0.0, 1000.0, 0.0),
    ],
)
def test_the_wait_is_the_fixed_point(wait_s, left_s, expected_s):
    arrivals, now_s = came(1.0, [(5.0, 50.0)])
    assert said(arrivals, now_s, wait_s, left_s) == pytest.approx(expected_s, rel=0.03)


def test_only_classes_that_are_due_earlier_overtake():
    arrivals, now_s = came(1.0, [(5.0, 50.0), (500.0, 5000.0)])
    assert said(arrivals, now_s, 30.0, 100.0) == pytest.approx(30.0 / (1.0 - 0.25), rel=0.03)


def test_an_overload_of_earlier_classes_counts_up_to_a_share():
    arrivals, now_s = came(10.0, [(-1e9, 50.0)])
    assert said(arrivals, now_s, 10.0, 60.0) == pytest.approx(10.0 / (1.0 - MOST_SHARE))


def test_arrivals_that_have_ceased_are_forgotten():
    arrivals, now_s = came(1.0, [(5.0, 50.0)])
    assert said(arrivals, now_s + 4 * Arrivals.FORGOTTEN_S, 10.0, 1000.0) == pytest.approx(10.0, rel=0.02)


@given(
    st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(1.0, 500.0)), min_size=1, max_size=40),
    st.floats(0.1, 50.0), st.floats(0.0, 100.0),
)  # fmt: skip
def test_it_satisfies_its_equation_and_no_request_waits_less_for_what_comes(kinds, wait_s, left_s):
    arrivals, now_s = came(0.5, kinds)
    solved_s = said(arrivals, now_s, wait_s, left_s)
    decayed = arrivals.count / Arrivals.FORGOTTEN_S / (1.0 - math.exp(-now_s / Arrivals.FORGOTTEN_S))
    windows_s = np.maximum(left_s - np.array(arrivals.offsets_s), 0.0)
    shares = np.array(arrivals.tokens) * decayed / len(arrivals.tokens) / THETA
    right_s = wait_s + float((shares * np.minimum(solved_s, windows_s)).sum())
    assert wait_s <= solved_s * (1.0 + 1e-9)
    assert solved_s <= max(right_s, wait_s / (1.0 - MOST_SHARE) + float((shares * windows_s).sum())) * (1.0 + 1e-9)
    if shares[windows_s > wait_s].sum() < MOST_SHARE:
        assert solved_s == pytest.approx(right_s, rel=1e-6)
