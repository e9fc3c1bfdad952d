"""Measures by hand-made examples and against SciPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.lengths import score
from forecasting.lengths.query import Predictions
from forecasting.lengths.scoring import class_edges, classes, coverage, full_score, pinball, rank_correlation


def test_measures_by_hand() -> None:
    scores = score([100, 100, 100, 100], [100, 125, 150, 300])
    assert scores["mae"] == pytest.approx((0 + 25 + 50 + 200) / 4)
    assert (scores["acc_25"], scores["acc_50"], scores["acc_100"]) == (0.5, 0.75, 0.75)


def test_classes_hold_a_fifth_each() -> None:
    lengths = np.arange(1, 101)
    assert np.bincount(classes(lengths, class_edges(lengths))).tolist() == [20] * 5
    assert score(lengths, lengths)["five_class_accuracy"] == 1.0
    assert score(lengths, np.full(100, 1))["five_class_accuracy"] == pytest.approx(0.2)
    assert score([1, 50], [2, 60], edges=[10, 20, 30, 40])["five_class_accuracy"] == 1.0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=40))
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    from scipy.stats import spearmanr  # here: most test processes only collect this file

    first, second = (np.array(side, float) for side in zip(*pairs, strict=True))
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert rank_correlation(first, second) == 0.0
    else:
        assert rank_correlation(first, second) == pytest.approx(spearmanr(first, second).statistic, abs=1e-9)


def test_pinball_and_coverage() -> None:
    quantiles = np.array([[10.0, 20.0, 30.0, 40.0, 50.0]] * 2)
    assert coverage([25, 45], quantiles) == {"0.1": 0.0, "0.25": 0.0, "0.5": 0.5, "0.75": 0.5, "0.9": 1.0}
    assert pinball([30], quantiles[:1]) == pytest.approx((0.1 * 20 + 0.25 * 10 + 0 + 0.25 * 10 + 0.1 * 20) / 5)
    scores = full_score([25, 45], Predictions(quantiles[:, 2], quantiles))
    assert scores["mae"] == 10.0
    assert scores["coverage"]["0.9"] == 1.0


def test_unlike_or_empty_lists_are_refused() -> None:
    for real, guess in (([], []), ([1, 2], [1]), ([[1]], [[1]])):
        with pytest.raises(ValueError):
            score(real, guess)
