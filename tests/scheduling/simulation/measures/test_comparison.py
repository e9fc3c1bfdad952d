"""Intervals, verdicts, regret and its prices, each against a plain twin or numbers from the literature."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.simulation.measures.comparison import (
    Interval,
    Verdict,
    curve,
    of_shares,
    over_seeds,
    regret,
    t_975,
    verdict,
    verdicts,
)

NUMBERS = st.floats(-1e6, 1e6)
COSTS = st.integers(1, 500)
MISSES = st.integers(0, 300)


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
    made = of_shares([990, 994], [1000, 1000]).widened(0.02, 0.0, 1.0)
    assert made.wide_high == 1.0
    assert made.wide_low == pytest.approx(made.low - 0.02)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.991, 0.999, Verdict.MEETS),
        (0.95, 0.999, Verdict.CLOSE),
        (0.9, 0.98, Verdict.MISSES),
        (0.99, 1.0, Verdict.MEETS),
    ],
)
def test_a_verdict_is_by_the_wider_interval(low, high, expected):
    assert verdict(Interval(0.99, 0.99, 0.99, low, high), 0.99) == expected


def test_the_cheapest_of_those_that_meet_it():
    good, bad = Interval(0.999, 1, 1, 0.995, 1.0), Interval(0.9, 0.9, 0.9, 0.9, 0.9)
    made = verdicts({"A": good, "B": good, "C": bad, "D": None}, {"A": 9.0, "B": 8.0, "C": 1.0, "D": 1.0}, 0.99)
    assert made == {"A": Verdict.MEETS, "B": Verdict.CHEAPEST, "C": Verdict.MISSES, "D": Verdict.UNKNOWN}


futures = st.integers(1, 4).flatmap(
    lambda seeds: st.lists(
        st.tuples(st.lists(COSTS, min_size=seeds, max_size=seeds), st.lists(MISSES, min_size=seeds, max_size=seeds)),
        min_size=2,
        max_size=6,
    )
)


def best_at(price: Fraction, means: dict[str, tuple[Fraction, Fraction]]) -> Fraction:
    return min(cost + price * missed for cost, missed in means.values())


@given(futures, st.integers(0, 40))
def test_regret_is_over_the_best_of_each_seed_and_holds_between_its_prices(given_futures, cents):
    names = "ABCDEF"[: len(given_futures)]
    cost = {name: each[0] for name, each in zip(names, given_futures, strict=True)}
    missed = {name: each[1] for name, each in zip(names, given_futures, strict=True)}
    made = regret(cost, missed, cents / 100)
    seeds = len(given_futures[0][0])
    for row, name in enumerate(made.names):
        for seed in range(seeds):
            totals = {each: cost[each][seed] + cents / 100 * missed[each][seed] for each in names}
            assert made.usd[row, seed] == pytest.approx(totals[name] - min(totals.values()))
    means = {name: (Fraction(sum(cost[name]), seeds), Fraction(sum(missed[name]), seeds)) for name in names}
    low, high = made.holds_above, made.holds_below
    assert low - 1e-9 <= cents / 100 <= high + 1e-9
    # Within its prices the best is the best, and past them it is not.
    inside = [Fraction(low), Fraction(cents, 100)] + ([Fraction(high)] if high < math.inf else [Fraction(low) + 1000])
    mine_cost, mine_missed = means[made.best]
    for price in inside:
        assert float(mine_cost + price * mine_missed) <= float(best_at(price, means)) + 1e-6
    if low > 0:
        price = Fraction(low) * Fraction(99, 100)
        assert mine_cost + price * mine_missed > best_at(price, means)
        assert made.below in names
    if high < math.inf:
        price = Fraction(high) * Fraction(101, 100) + Fraction(1, 1000)
        assert mine_cost + price * mine_missed > best_at(price, means)
        assert made.above in names


def test_no_future_has_no_regret():
    with pytest.raises(ValueError, match="no future"):
        regret({}, {}, 1.0)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=280), st.integers(0, 20))
def test_a_curve_is_the_share_up_to_each_edge(counts, never):
    edges = np.arange(len(counts) + 1.0)
    total = sum(counts) + never
    made = curve(edges, counts, total)
    if not sum(counts):
        assert made == []
        return
    assert len(made) <= 100
    for value, share in made:
        assert share == pytest.approx(sum(counts[: int(value)]) / total)
    assert made[0][1] == 0.0
    assert made[-1][1] == pytest.approx(sum(counts) / total)
