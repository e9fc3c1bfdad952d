"""Online correction of predictions."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.lengths.online import MOST_KEPT, MOST_SHIFT, Calibration, RecentlyUsed
from forecasting.lengths.query import QUANTILES

USUAL = (50.0, 70.0, 100.0, 140.0, 200.0)


def drawn(dice, median, sigma=0.8):
    return max(1.0, median * dice.lognormvariate(0, sigma))


def test_nothing_is_corrected_before_the_first_request():
    assert Calibration().apply(100.0, USUAL) == (100.0, USUAL)


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 3.0, 10.0])
def test_a_constant_factor_is_learnt_and_quantiles_keep_their_promise(factor):
    dice, calibration = random.Random(5), Calibration()
    below, tokens, count = [0] * len(QUANTILES), [], 3000
    for request in range(count + 500):
        real = drawn(dice, 500 * factor)
        middle, quantiles = calibration.apply(500.0, tuple(5 * each for each in USUAL))
        assert list(quantiles) == sorted(quantiles)
        if request >= 500:
            tokens.append(middle)
            below = [number + (real <= quantile) for number, quantile in zip(below, quantiles, strict=True)]
        calibration.learn(500.0, tuple(5 * each for each in USUAL), real)
    assert sum(tokens) / count == pytest.approx(500 * factor, rel=0.12)
    assert [number / count for number in below] == pytest.approx(QUANTILES, abs=0.03)


def test_half_of_a_factor_of_ten_is_corrected_after_ten_requests():
    calibration = Calibration()
    for _ in range(10):
        calibration.learn(100.0, USUAL, 1000.0)
    assert calibration.apply(100.0, USUAL)[0] > 100 * math.sqrt(10)


def test_an_outlier_moves_little():
    calibration = Calibration()
    for _ in range(100):
        calibration.learn(100.0, USUAL, 100.0)
    for _ in range(3):
        calibration.learn(100.0, USUAL, 1_000_000.0)
    assert calibration.apply(100.0, USUAL)[0] < 110


def test_a_cut_length_moves_nothing_down():
    calibration = Calibration()
    for _ in range(50):
        calibration.learn(100.0, USUAL, 10.0, cut=True)
    assert calibration.apply(100.0, USUAL) == (100.0, USUAL)
    calibration.learn(100.0, USUAL, 1000.0, cut=True)
    assert calibration.apply(100.0, USUAL)[0] > 100


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1, 1e6), st.booleans()), max_size=60))
def test_whatever_comes_it_stays_bounded_and_ascending(requests):
    calibration = Calibration()
    for predicted, real, cut in requests:
        quantiles = tuple(predicted * each for each in (0.5, 0.7, 1.0, 1.4, 2.0))
        calibration.learn(predicted, quantiles, real, cut=cut)
        tokens, served = calibration.apply(predicted, quantiles)
        assert 1.0 <= tokens <= predicted * math.exp(MOST_SHIFT) * 1.001
        assert list(served) == sorted(served)
        assert served[0] >= 1.0
        assert served[-1] <= max(1.0, quantiles[-1] * math.exp(MOST_SHIFT) * 1.001)


def test_pairs_are_bounded():
    pairs = RecentlyUsed(Calibration)
    first = pairs["m", "t"]
    for number in range(MOST_KEPT + 10):
        pairs["m", str(number)].seen = 1.0
    assert len(pairs.items()) == MOST_KEPT
    assert pairs["m", "t"] is not first
