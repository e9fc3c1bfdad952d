"""Fitting a student: networks in NumPy, trees by scikit-learn; pinball loss on log-lengths, weighted towards long answers.

A student that was fitted before continues from its weights: measures are rescaled by everything seen so far, networks are
moved to the new scales without a change of their outputs, and a last stage of trees learns the error of the first ones.

    python -m forecasting.lengths.student_training FOLDER-OF-DATA-SETS

builds the bundled student. It learns from the sets whose licence lets a fitted model be shipped (`datasets.FREE`), from
nine tenths of their prompts (the rest is for tests), alone and with made histories. Tenants are hidden, names of served
models stay. The same data, seed and packages give the same file.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.datasets import free_answers, with_histories
from forecasting.lengths.features import Features, measure_matrix
from forecasting.lengths.query import MEDIAN, QUANTILES, Sample
from forecasting.lengths.student import BUNDLED, Scaling, Student, Weights
from forecasting.lengths.trees import HabitTrees
from forecasting.threads import one_thread

Floats = NDArray[np.float32]

LEVELS: Final = np.array(QUANTILES, np.float32)
FORGET_TEXT: Final = 0.02
DROP_HIDDEN: Final = 0.1
LONG_COUNT_MORE: Final = 0.5
"""Exponent of the predicted length in a sample's weight."""
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
"""Momentum at the highest rate (Smith and Topin, "Super-convergence", 2018)."""


class Bags:
    """The ids of n prompts in one array; batches are sparse matrices, whose products with a table are the bags."""

    def __init__(self, rows: Sequence[NDArray[np.int32]], table_rows: int) -> None:
        self.table_rows = table_rows
        self.lengths = np.array([len(row) for row in rows], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        self.ids = np.concatenate(rows).astype(np.int32) if rows else np.zeros(0, np.int32)

    def batch(self, chosen: NDArray[np.int64], generator: np.random.Generator | None = None, drop: float = 0.0) -> Any:
        """Return the weight of each id of the rows *chosen*, (n, rows of the table), without a share *drop* of the ids."""
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
class TrainingRows:
    """n samples to learn from, or a batch of them."""

    measures: Floats
    models: NDArray[np.int64]
    tenants: NDArray[np.int64]
    target: Floats
    """Log-lengths."""
    cut: NDArray[np.bool_]
    """Whether the answer was cut, so that it is at least this long."""

    def of(self, chosen: NDArray[np.int64]) -> "TrainingRows":
        return TrainingRows(
            self.measures[chosen], self.models[chosen], self.tenants[chosen], self.target[chosen], self.cut[chosen]
        )


@dataclass(slots=True)
class ForwardPass:
    """One batch through a network, with what the backward pass needs."""

    weights: Weights
    rows: TrainingRows
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
    """Dropout of text and hidden units, scaled so that their mean stays."""


def forward(
    weights: Weights, rows: TrainingRows, bags: Sequence[Any], generator: np.random.Generator | None = None
) -> ForwardPass:
    """Compute `student.answer` for many rows; with a *generator*, drop some text and hidden units."""
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
    return ForwardPass(weights, rows, bags, row, first, second, heads, logs, kept_text, kept_first, kept_second)


def loss(rows: TrainingRows, logs: Floats) -> tuple[float, Floats]:
    """Return the mean pinball loss of *logs*, and its gradient; rows are weighted by a power of their predicted length.

    For a cut answer only predictions below it are wrong: its full length is unknown.
    """
    miss = rows.target[:, None] - logs
    counts = (miss >= 0) | ~rows.cut[:, None]
    weights = np.exp(LONG_COUNT_MORE * logs[:, MEDIAN])
    weights /= weights.sum()
    slope: Floats = np.where(miss > 0, LEVELS, LEVELS - 1) * counts
    each = (slope * miss).mean(axis=1)
    return float(each @ weights), -slope * (weights[:, None] / len(LEVELS))


def backward(made: ForwardPass, by_logs: Floats) -> Weights:
    """Return gradients of the weights from the gradient *by_logs*."""
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
    weights: Weights, rows: TrainingRows, bags: Sequence[Any], generator: np.random.Generator | None = None
) -> Weights:
    """Return gradients of the loss of one batch."""
    made = forward(weights, rows, bags, generator)
    return backward(made, loss(rows, made.logs)[1].astype(np.float32, copy=False))


class Optimiser:
    """AdamW (Loshchilov and Hutter, 2019) over *steps* steps of one cycle; it updates *weights* in place."""

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
        """Return the rate and the momentum of the next step."""
        peak = max(WARM_UP * self.steps - 1.0, 1e-9)
        if self.done <= peak:
            return (
                self.rate * _between(FIRST_RATE, 1.0, self.done / peak),
                _between(MOMENTUM, LEAST_MOMENTUM, self.done / peak),
            )
        past = (self.done - peak) / (self.steps - 1.0 - peak)
        return self.rate * _between(1.0, LAST_RATE, past), _between(LEAST_MOMENTUM, MOMENTUM, past)


def _between(begin: float, end: float, share: float) -> float:
    """Interpolate along half a cosine."""
    return float(end + (begin - end) * 0.5 * (1.0 + np.cos(np.pi * share)))


if TYPE_CHECKING:
    from forecasting.lengths.student import Student

WIDTH: Final = 14
"""Width of an n-gram's row."""
HIDDEN: Final = 64
NAME_WIDTH: Final = 8
EPOCHS: Final = 5
BATCH: Final = 256
RATE: Final = 4e-3
GO_ON_RATE: Final = 1e-3
FORGET_NAME: Final = 0.15
"""Chance that a name is hidden in training, so that predictions for unknown models and tenants are learned too."""
DROP_IDS: Final = 0.25
BANDS: Final = 8
LEAST_IN_BAND: Final = 40
LEAST_STEPS: Final = 200
LEAST_TO_JUDGE: Final = 400
HELD_OUT: Final = 0.1
LEAVES: Final = 24
LATER_TREES: Final = 40
LATER_LEAVES: Final = 8


def train(student: "Student", features: Sequence[Features], samples: Sequence[Sample]) -> None:
    """Fit *student*; samples that reached their max_tokens count as "at least this long"."""
    fresh = not student.networks
    measures = measure_matrix(features)
    measured = Scaling.of(measures)
    scaling = measured if student.scaling is None else student.scaling.with_more(measured)
    student.models, model_rows = _names(student.models, [sample.query.model for sample in samples])
    student.tenants, tenant_rows = _names(student.tenants, [sample.query.tenant for sample in samples])
    lengths = np.array([sample.output_tokens for sample in samples], float)
    starts = [
        _start(student, place, scaling, lengths, measures.shape[1])
        for place in range(student.size if fresh else len(student.networks))
    ]
    student.scaling = scaling
    cut = np.array([sample.query.max_tokens is not None and sample.output_tokens >= sample.query.max_tokens
                    for sample in samples])  # fmt: skip
    held = _held_out(samples, features, np.random.default_rng(student.fitting.seed))
    known = TrainingRows(
        scaling(measures),
        model_rows,
        tenant_rows,
        np.log1p(lengths).astype(np.float32),
        cut,
    )
    bags = [
        Bags(ids, len(starts[0]["table"]))
        for ids in ([each.ids for each in features], [each.opening for each in features])
    ]
    everyone = np.arange(len(samples))
    with one_thread():
        student.networks = [
            _network(start, known, bags, held, fresh, student.fitting.seed + place)
            for place, start in enumerate(starts)
        ]
        whole = [bag.batch(everyone) for bag in bags]
        middle = np.mean(
            [forward(each, known, whole).logs[:, MEDIAN] for each in student.networks], axis=0, dtype=float
        )
    if student.trees:
        weights = np.exp(LONG_COUNT_MORE * np.clip(middle, 0.0, None))
        before = student.stages[:1]
        student.stages = [*before, _stage(student, before, measures, samples, weights, ~held)]
    if held.any():
        rows: list[int] = np.flatnonzero(held).tolist()
        _correct_quantiles(
            student,
            np.stack([student.logs(features[row], samples[row].query) for row in rows]),
            np.log1p(lengths)[held],
        )
        if student.trees and fresh:  # the held-out samples have served their purpose
            student.stages = [_stage(student, [], measures, samples, weights, np.ones(len(samples), bool))]


def _stage(
    student: "Student",
    before: Sequence[HabitTrees],
    measures: NDArray[np.float32],
    samples: Sequence[Sample],
    weights: NDArray[np.float64],
    learned: NDArray[np.bool_],
) -> HabitTrees:
    """Return trees for the residual of the stages *before* on the log-lengths of the samples *learned*."""
    chosen = [sample for sample, mine in zip(samples, learned, strict=True) if mine]
    queries = [sample.query for sample in chosen]
    rows, target = measures[learned], np.log1p([sample.output_tokens for sample in chosen])
    for stage in before:
        target = target - stage.predict(rows, queries)
    trees, leaves = (LATER_TREES, LATER_LEAVES) if before else (student.trees, LEAVES)
    return HabitTrees.grow(rows, chosen, target, trees, leaves, student.fitting.seed, weights[learned])


def _names(known: dict[str, int], names: Sequence[str]) -> tuple[dict[str, int], NDArray[np.int64]]:
    known = dict(known)
    for name in names:
        if name:
            known.setdefault(name, len(known) + 1)
    return known, np.array([known.get(name, 0) for name in names], np.int64)


def _network(
    weights: Weights,
    rows: TrainingRows,
    bags: Sequence[Bags],
    held: NDArray[np.bool_],
    fresh: bool,
    seed: int,
) -> Weights:
    """Fit one network, starting from *weights*; the samples *held* out choose the round to stop at."""
    steps_an_epoch = -(-len(held) // BATCH)
    rounds = max(EPOCHS, -(-LEAST_STEPS // steps_an_epoch))
    optimiser = Optimiser(weights, RATE if fresh else GO_ON_RATE, rounds * steps_an_epoch + 1)
    generator = np.random.default_rng(seed)
    learned, judging = np.flatnonzero(~held), np.flatnonzero(held)
    judged, judged_bags = rows.of(judging), [bag.batch(judging) for bag in bags] if len(judging) else []
    best, kept = np.inf, weights
    for _ in range(rounds):
        order = generator.permutation(learned)
        for begin in range(0, len(order), BATCH):
            chosen = order[begin : begin + BATCH]
            models, tenants = (
                np.where(generator.random(len(chosen)) < FORGET_NAME, 0, names[chosen])
                for names in (rows.models, rows.tenants)
            )
            batch = replace(rows.of(chosen), models=models, tenants=tenants)
            sources = [bag.batch(chosen, generator, DROP_IDS) for bag in bags]
            optimiser.move(gradients(weights, batch, sources, generator))
        if judged_bags and (off := loss(judged, forward(weights, judged, judged_bags).logs)[0]) < best:
            best, kept = off, {name: value.copy() for name, value in weights.items()}
    return {name: value.astype(np.float16).astype(np.float32) for name, value in kept.items()}


def _start(student: "Student", place: int, scaling: Scaling, lengths: NDArray[np.float64], measures: int) -> Weights:
    """Return initial weights of network *place*: its own with a row of zeros per new name, else random ones."""
    names = (("models", student.models), ("tenants", student.tenants))
    if student.scaling is not None:
        begin = student.scaling.moved(student.networks[place], scaling)
        for name, known in names:
            missing = len(known) + 1 - len(begin[name])
            begin[name] = np.concatenate([begin[name], np.zeros((missing, begin[name].shape[1]), np.float32)])
        return begin
    generator = np.random.default_rng(student.fitting.seed + place)
    inputs = measures + 2 * WIDTH + 2 * NAME_WIDTH

    def normal(rows: int, columns: int, size: float) -> NDArray[np.float32]:
        return (size * generator.standard_normal((rows, columns))).astype(np.float32)

    heads = len(QUANTILES)
    bias = np.full(heads, -0.8, np.float32)  # softplus(-0.8) = 0.37: a step of that much in the log-length
    bias[MEDIAN] = np.log1p(np.median(lengths))
    return {
        "table": normal(len(student.vocabulary or ()) + 1, WIDTH, 0.05),
        "models": normal(len(student.models) + 1, NAME_WIDTH, 0.1),
        "tenants": normal(len(student.tenants) + 1, NAME_WIDTH, 0.1),
        "first": normal(inputs, HIDDEN, np.sqrt(2.0 / inputs)),
        "first_bias": np.zeros(HIDDEN, np.float32),
        "second": normal(HIDDEN, HIDDEN, np.sqrt(2.0 / HIDDEN)),
        "second_bias": np.zeros(HIDDEN, np.float32),
        "heads": normal(HIDDEN, heads, 0.3 / np.sqrt(HIDDEN)),
        "straight": np.zeros((inputs, heads), np.float32),
        "heads_bias": bias,
    }


def _held_out(
    samples: Sequence[Sample], features: Sequence[Features], generator: np.random.Generator
) -> NDArray[np.bool_]:
    """Return which samples judge each round, by whole prompts: a tenth, none of few."""
    if len(samples) < LEAST_TO_JUDGE:
        return np.zeros(len(samples), bool)
    keys = [sample.query.asked or each.ids.tobytes() for sample, each in zip(samples, features, strict=True)]
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    chosen = generator.random(len(places)) < HELD_OUT
    return chosen[[places[key] for key in keys]]


def _correct_quantiles(student: "Student", logs: NDArray[np.float64], real: NDArray[np.float64]) -> None:
    """Learn the error of each quantile on held-out prompts, by bands of the predicted median."""
    middle = logs[:, MEDIAN]
    bands = np.array_split(np.argsort(middle), min(BANDS, max(1, len(middle) // LEAST_IN_BAND)))
    student.knots = np.array([middle[band].mean() for band in bands])
    student.shifts = np.array(
        [
            [np.quantile(real[band] - logs[band, column], level) for column, level in enumerate(QUANTILES)]
            for band in bands
        ]
    )


def build(folder: Path, path: Path = BUNDLED) -> int:
    """Write the bundled student to *path*; return its number of samples. Raises DataMissing without the free sets."""
    samples = with_histories(free_answers(folder))
    Student().fit(samples).save(path)
    path.chmod(0o644)
    return len(samples)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the bundled student again.")
    parser.add_argument("folder", type=Path, help="with one folder a data set below it")
    parser.add_argument("--to", type=Path, default=BUNDLED)
    arguments = parser.parse_args()
    build(arguments.folder, arguments.to)
