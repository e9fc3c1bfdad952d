"""Fitting one of a student's small networks in NumPy: what it says of many rows, the gradient of the loss, and AdamW.

The network is that of `forecasting.lengths.models.network`. It is so small that automatic gradients are not worth a gigabyte
of torch on every machine that trains.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.models.network import Weights
from forecasting.lengths.query import MEDIAN, QUANTILES

Floats = NDArray[np.float32]

LEVELS: Final = np.array(QUANTILES, np.float32)
FORGET_TEXT: Final = 0.02
DROP_HIDDEN: Final = 0.1
TEACHER_SHARE: Final = 0.6
SMOOTH_WITHIN: Final = 0.1
"""Of a teacher's log-quantile: errors below it count by their square, larger ones by their size."""
LONG_COUNT_MORE: Final = 0.5
"""Power of the predicted length in a sample's weight."""
DECAY: Final = 0.02
SQUARES_KEPT: Final = 0.999
LEAST_SIZE: Final = 1e-8
WARM_UP: Final = 0.3
"""Share of the steps in which the rate rises; then it falls, both along a cosine."""
FIRST_RATE: Final = 1 / 25
LAST_RATE: Final = 1 / 250_000
"""Both as shares of the highest."""
MOMENTUM: Final = 0.95
LEAST_MOMENTUM: Final = 0.85
"""At the highest rate (Smith and Topin, "Super-convergence", 2018)."""


class Bags:
    """The ids of n prompts, one after the other; batches are sparse matrices, whose product with a table are the bags."""

    def __init__(self, rows: Sequence[NDArray[np.int32]], table_rows: int) -> None:
        self.table_rows = table_rows
        self.lengths = np.array([len(row) for row in rows], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        self.ids = np.concatenate(rows).astype(np.int32) if rows else np.zeros(0, np.int32)

    def batch(self, chosen: NDArray[np.int64], generator: np.random.Generator | None = None, drop: float = 0.0) -> Any:
        """(n, rows of the table): the weight of each id of the rows *chosen*, without a share *drop* of the ids."""
        from scipy.sparse import csr_array

        lengths = self.lengths[chosen]
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths) + np.repeat(self.starts[chosen], lengths)
        owner = np.repeat(np.arange(len(chosen)), lengths)
        if generator is not None and drop:
            kept = generator.random(len(places)) >= drop
            places, owner = places[kept], owner[kept]
        counts = np.bincount(owner, minlength=len(chosen))
        weights = (1.0 / np.sqrt(np.maximum(counts, 1)))[owner].astype(np.float32)
        ends = np.concatenate([[0], np.cumsum(counts)])
        return csr_array((weights, self.ids[places], ends), shape=(len(chosen), self.table_rows))


@dataclass(frozen=True, slots=True)
class Rows:
    """What networks learn from: n rows, or a batch of them."""

    measures: Floats
    models: NDArray[np.int64]
    tenants: NDArray[np.int64]
    target: Floats
    """Log-lengths."""
    cut: NDArray[np.bool_]
    """Whether the answer was cut, so that it is at least so long."""
    lesson: Floats | None = None
    """(n, QUANTILES) log-quantiles of a teacher."""

    def of(self, chosen: NDArray[np.int64]) -> "Rows":
        lesson = None if self.lesson is None else self.lesson[chosen]
        return Rows(
            self.measures[chosen],
            self.models[chosen],
            self.tenants[chosen],
            self.target[chosen],
            self.cut[chosen],
            lesson,
        )


@dataclass(slots=True)
class Pass:
    """One batch through a network, and what the way back needs of it."""

    weights: Weights
    rows: Rows
    bags: Sequence[Any]
    row: Floats
    first: Floats
    second: Floats
    heads: Floats
    logs: Floats
    """(n, QUANTILES) log-quantiles."""
    kept_text: Floats | float = 1.0
    kept_first: Floats | float = 1.0
    kept_second: Floats | float = 1.0
    """What of text and hidden units was kept, scaled so that their mean stays."""


def forward(weights: Weights, rows: Rows, bags: Sequence[Any], generator: np.random.Generator | None = None) -> Pass:
    """The same as `network.answer`, for many rows; with a *generator* some text and hidden units are dropped."""
    count = len(rows.models)
    kept_text: Floats | float = 1.0
    kept_first: Floats | float = 1.0
    kept_second: Floats | float = 1.0
    if generator is not None:
        hidden = (count, weights["first"].shape[1])
        kept_text = (generator.random((count, 1)) >= FORGET_TEXT).astype(np.float32)
        kept_first = (generator.random(hidden) >= DROP_HIDDEN).astype(np.float32) / np.float32(1.0 - DROP_HIDDEN)
        kept_second = (generator.random(hidden) >= DROP_HIDDEN).astype(np.float32) / np.float32(1.0 - DROP_HIDDEN)
    text = [(bag @ weights["table"]) * kept_text for bag in bags]
    row = np.concatenate(
        [rows.measures, *text, weights["models"][rows.models], weights["tenants"][rows.tenants]], axis=1
    )
    first = np.maximum(row @ weights["first"] + weights["first_bias"], 0.0) * kept_first
    second = np.maximum(first @ weights["second"] + weights["second_bias"], 0.0) * kept_second
    heads = second @ weights["heads"] + row @ weights["straight"] + weights["heads_bias"]
    steps = np.logaddexp(heads, np.float32(0.0))
    steps[:, MEDIAN] = 0.0
    below = -np.cumsum(steps[:, MEDIAN::-1], axis=1)[:, ::-1]
    above = np.cumsum(steps[:, MEDIAN:], axis=1)
    logs = heads[:, MEDIAN, None] + np.concatenate([below[:, :-1], above], axis=1)
    return Pass(weights, rows, bags, row, first, second, heads, logs, kept_text, kept_first, kept_second)


def loss(rows: Rows, logs: Floats) -> tuple[float, Floats]:
    """Mean pinball loss of *logs*, and its gradient by them; each row is weighed by its predicted length to a power.

    Of a cut answer only predictions below it are wrong, for nobody knows how long it would have been.
    """
    miss = rows.target[:, None] - logs
    counts = (miss >= 0) | ~rows.cut[:, None]
    weights = np.exp(LONG_COUNT_MORE * logs[:, MEDIAN])
    weights /= weights.sum()
    slope: Floats = np.where(miss > 0, LEVELS, LEVELS - 1) * counts
    each = (slope * miss).mean(axis=1)
    return float(each @ weights), -slope * (weights[:, None] / len(LEVELS))


def lesson_loss(rows: Rows, logs: Floats) -> tuple[float, Floats]:
    """How far *logs* are from what the teacher says, and the gradient by them."""
    assert rows.lesson is not None
    off = logs - rows.lesson
    near = np.abs(off) < SMOOTH_WITHIN
    each = np.where(near, off * off / (2 * SMOOTH_WITHIN), np.abs(off) - SMOOTH_WITHIN / 2)
    slope: Floats = np.where(near, off / SMOOTH_WITHIN, np.sign(off))
    return float(each.mean()), slope / np.float32(off.size)


def backward(made: Pass, by_logs: Floats) -> Weights:
    """Gradients of the weights from that *by_logs*."""
    weights, rows = made.weights, made.rows
    by_heads = np.empty_like(made.heads)
    # A step moves its own quantile and all that are further from the median.
    by_heads[:, :MEDIAN] = -np.cumsum(by_logs[:, :MEDIAN], axis=1)
    by_heads[:, MEDIAN + 1 :] = np.cumsum(by_logs[:, :MEDIAN:-1], axis=1)[:, ::-1]
    by_heads /= 1.0 + np.exp(-np.clip(made.heads, -80.0, 80.0))
    by_heads[:, MEDIAN] = by_logs.sum(axis=1)
    by_second = (by_heads @ weights["heads"].T) * made.kept_second * (made.second > 0)
    by_first = (by_second @ weights["second"].T) * made.kept_first * (made.first > 0)
    by_row = by_first @ weights["first"].T + by_heads @ weights["straight"].T
    width, names = weights["table"].shape[1], weights["models"].shape[1]
    at = rows.measures.shape[1]
    by_table = np.zeros_like(weights["table"])
    for place, bag in enumerate(made.bags):
        by_table += bag.T @ (by_row[:, at + place * width : at + (place + 1) * width] * made.kept_text)
    at += len(made.bags) * width
    return {
        "table": by_table,
        "models": _by_names(weights["models"], rows.models, by_row[:, at : at + names]),
        "tenants": _by_names(weights["tenants"], rows.tenants, by_row[:, at + names :]),
        "first": made.row.T @ by_first,
        "first_bias": by_first.sum(axis=0),
        "second": made.first.T @ by_second,
        "second_bias": by_second.sum(axis=0),
        "heads": made.second.T @ by_heads,
        "straight": made.row.T @ by_heads,
        "heads_bias": by_heads.sum(axis=0),
    }


def _by_names(table: Floats, chosen: NDArray[np.int64], by_rows: Floats) -> Floats:
    gradient = np.zeros_like(table)
    np.add.at(gradient, chosen, by_rows)
    return gradient


def gradients(
    weights: Weights, rows: Rows, bags: Sequence[Any], generator: np.random.Generator | None = None
) -> Weights:
    """Gradients of the loss of one batch, of the teacher's lesson too where there is one."""
    made = forward(weights, rows, bags, generator)
    by_logs = loss(rows, made.logs)[1]
    if rows.lesson is not None:
        by_logs = (1.0 - TEACHER_SHARE) * by_logs + TEACHER_SHARE * lesson_loss(rows, made.logs)[1]
    return backward(made, by_logs.astype(np.float32, copy=False))


class Optimiser:
    """AdamW (Loshchilov and Hutter, 2019) over *steps* steps of one cycle; it moves *weights* in place."""

    def __init__(self, weights: Weights, rate: float, steps: int) -> None:
        self.weights, self.rate, self.steps, self.done = weights, rate, steps, 0
        self.means = {name: np.zeros_like(value) for name, value in weights.items()}
        self.squares = {name: np.zeros_like(value) for name, value in weights.items()}

    def move(self, gradients: Weights) -> None:
        rate, momentum = self._now()
        self.done += 1
        bias, scale = 1.0 - momentum**self.done, float(np.sqrt(1.0 - SQUARES_KEPT**self.done))
        for name, value in self.weights.items():
            gradient, mean, square = gradients[name], self.means[name], self.squares[name]
            mean += (1.0 - momentum) * (gradient - mean)
            square += (1.0 - SQUARES_KEPT) * (gradient * gradient - square)
            value[:] = (1.0 - rate * DECAY) * value - (rate / bias) * mean / (np.sqrt(square) / scale + LEAST_SIZE)

    def _now(self) -> tuple[float, float]:
        """The rate and the momentum of the next step."""
        peak = max(WARM_UP * self.steps - 1.0, 1e-9)
        if self.done <= peak:
            return (
                self.rate * _between(FIRST_RATE, 1.0, self.done / peak),
                _between(MOMENTUM, LEAST_MOMENTUM, self.done / peak),
            )
        past = (self.done - peak) / (self.steps - 1.0 - peak)
        return self.rate * _between(1.0, LAST_RATE, past), _between(LEAST_MOMENTUM, MOMENTUM, past)


def _between(begin: float, end: float, share: float) -> float:
    """Along half a cosine."""
    return float(end + (begin - end) * 0.5 * (1.0 + np.cos(np.pi * share)))
