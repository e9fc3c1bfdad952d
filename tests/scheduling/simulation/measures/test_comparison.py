"""Intervals and verdicts, each against a plain twin or numbers from the literature."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.simulation.measures.comparison import (
    Interval,
    Verdict,
    of_shares,
    over_seeds,
    t_975,
    to_decide,
    verdict,
    verdicts,
)

NUMBERS = st.floats(-1e6, 1e6)


@pytest.mark.parametrize("freedom", [1, 2, 5, 29, 30, 31, 60, 1000])
def test_students_percentile(freedom):
    from scipy import stats  # here: every test process reads this module

    assert t_975(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-3)


@given(st.lists(NUMBERS, min_size=2, max_size=40))
def test_an_interval_over_seeds_is_students(values):
    made = over_seeds(values)
    from scipy import stats

    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values) or 1e-300)
    scale = 1e-3 * max(1.0, *map(abs, values))
    assert made.low == pytest.approx(low, abs=scale)
    assert made.high == pytest.approx(high, abs=scale)


def test_what_is_not_known_is_left_out():
    assert over_seeds([]) is None
    assert over_seeds([math.nan]) is None
    assert over_seeds([3.0, math.nan]).mean == 3.0
    assert of_shares([0], [0]) is None


def test_one_seed_has_wilsons_interval():
    made = of_shares([90], [100])
    assert (made.low, made.high) == pytest.approx((0.8256, 0.9448), abs=1e-4)  # Wilson 1927, by statsmodels
    sure = of_shares([1000], [1000])
    assert sure.high == 1.0
    assert 0.99 < sure.low < 1.0


def test_the_wider_interval_has_the_simulations_error():
    alone = of_shares([990, 994], [1000, 1000])
    made = alone.widened(0.02, 0.0, 1.0)
    assert made.high == 1.0
    assert made.low == pytest.approx(alone.low - 0.02)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.991, 0.999, Verdict.MEETS),
        (0.95, 0.999, Verdict.CLOSE),
        (0.9, 0.98, Verdict.MISSES),
        (0.99, 1.0, Verdict.MEETS),
    ],
)
def test_a_verdict_is_by_the_interval(low, high, expected):
    assert verdict(Interval(0.99, low, high), 0.99) == expected


def test_the_cheapest_of_those_that_meet_it():
    good, bad, close = Verdict.MEETS, Verdict.MISSES, Verdict.CLOSE
    of = {"A": [good, good], "B": [Verdict.UNKNOWN, good], "C": [good, close, bad], "D": [], "E": [good, close]}
    made = verdicts(of, {"A": 9.0, "B": 8.0, "C": 1.0, "D": 1.0, "E": 0.5})
    assert made == {"A": good, "B": Verdict.CHEAPEST, "C": bad, "D": Verdict.UNKNOWN, "E": close}


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=12), st.floats(0, 2))
def test_so_many_repetitions_decide(values, error):
    """As many as it takes until Student's interval of this mean and deviation leaves out 0, and no fewer."""
    from scipy import stats

    made, most = to_decide(values, error=error, most=40), 40
    mean, deviation = abs(np.mean(values)) - error, np.std(values, ddof=1)

    def decides(count):
        return stats.t.ppf(0.975, count - 1) * deviation / math.sqrt(count) < mean

    counts = [count for count in range(len(values), most + 1) if decides(count)]
    halves = [stats.t.ppf(0.975, count - 1) * deviation / math.sqrt(count) for count in range(len(values), most + 1)]
    near = any(math.isclose(half, mean, rel_tol=2e-3, abs_tol=1e-9) for half in halves)
    assert near or made == next(iter(counts), None)


def test_one_repetition_says_nothing_about_more():
    assert to_decide([0.3]) is None
    assert to_decide([0.2, 0.2, 0.2]) == 3
    assert to_decide([0.0, 0.0]) is None
    assert to_decide([0.98, 0.99, 0.97], than=0.9, error=0.2) is None  # closer than the simulator's error
