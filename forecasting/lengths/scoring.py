"""Measures of predicted lengths against real ones: PreServe's (section 5.2.2), SSJF's (section 4.3), and ours."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forecasting.lengths.query import QUANTILES

Values = NDArray[np.float64]

CLASSES = 5  # of SSJF: by percentiles, so that each holds a fifth


def score(real: ArrayLike, predicted: ArrayLike, edges: ArrayLike | None = None) -> dict[str, float]:
    """Return measures of *predicted* against *real* tokens, both (n,).

    `mae` in tokens; `acc_25`, `acc_50`, `acc_100`: share within so many tokens; `rank_correlation`: Spearman's, 0 if
    one side does not vary; `five_class_accuracy`: share in the right class, by the *edges* (ascending, four; the
    percentiles 20, 40, 60, 80 of the lengths trained on, else of *real*); `five_class_f1`: mean over the classes.
    Raises ValueError for no values or unequal numbers of them.
    """
    truth, guess = np.asarray(real, float), np.asarray(predicted, float)
    if truth.ndim != 1 or truth.shape != guess.shape or not len(truth):
        raise ValueError(
            f"Real and predicted lengths must be two lists of the same length, not {truth.shape}, {guess.shape}."
        )
    error = np.abs(truth - guess)
    bounds = class_edges(truth) if edges is None else np.asarray(edges, float)
    right, said = classes(truth, bounds), classes(guess, bounds)
    return {
        "mae": float(error.mean()),
        "acc_25": float((error <= 25).mean()),
        "acc_50": float((error <= 50).mean()),
        "acc_100": float((error <= 100).mean()),
        "rank_correlation": rank_correlation(truth, guess),
        "five_class_accuracy": float((right == said).mean()),
        "five_class_f1": float(np.mean([_f1(right == each, said == each) for each in np.unique(right)])),
    }


def _f1(real: NDArray[np.bool_], said: NDArray[np.bool_]) -> float:
    return 2.0 * float((real & said).sum()) / float(real.sum() + said.sum())


def class_edges(lengths: ArrayLike, count: int = CLASSES) -> Values:
    """Return the inner percentiles that divide *lengths* into *count* classes of equal size."""
    edges: Values = np.percentile(np.asarray(lengths, float), np.linspace(0, 100, count + 1)[1:-1])
    return edges


def classes(lengths: ArrayLike, edges: ArrayLike) -> NDArray[np.int64]:
    """Return the class of each length, from 0 to the number of *edges*."""
    return np.searchsorted(np.asarray(edges, float), np.asarray(lengths, float), side="left").astype(np.int64)


def ranks(values: Values) -> Values:
    """Return ranks from 0; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts + 1) / 2)[place], float)


def rank_correlation(first: Values, second: Values) -> float:
    """Return Spearman's rank correlation; 0 if one side does not vary."""
    one, two = ranks(first), ranks(second)
    one, two = one - one.mean(), two - two.mean()
    scale = float(np.sqrt((one @ one) * (two @ two)))
    return float(one @ two) / scale if scale else 0.0


def pinball(real: ArrayLike, quantiles: ArrayLike) -> float:
    """Return the mean pinball loss in tokens over `QUANTILES`; *quantiles* is (n, QUANTILES)."""
    miss = np.asarray(real, float)[:, None] - np.asarray(quantiles, float)
    levels = np.asarray(QUANTILES)
    return float(np.maximum(levels * miss, (levels - 1.0) * miss).mean())


def coverage(real: ArrayLike, quantiles: ArrayLike) -> dict[str, float]:
    """Return the share of real lengths at most each predicted quantile; the level itself for a calibrated model."""
    below = np.asarray(real, float)[:, None] <= np.asarray(quantiles, float)
    return {f"{level:g}": float(share) for level, share in zip(QUANTILES, below.mean(axis=0), strict=True)}


def full_score(real: ArrayLike, predictions: Any, edges: ArrayLike | None = None) -> dict[str, Any]:
    """Return `score` of the tokens of *predictions*, with `pinball` and `coverage` of their quantiles."""
    return {
        **score(real, predictions.tokens, edges),
        "pinball": pinball(real, predictions.quantiles),
        "coverage": coverage(real, predictions.quantiles),
    }
