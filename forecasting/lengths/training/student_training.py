"""Fitting a student: networks in NumPy, trees by scikit-learn; pinball loss on log-lengths, long answers count more.

Fitted again, a student goes on from what it knows: measures are scaled anew by all that was seen, networks are moved to the
new scales without a change of what they say, and a last stage of trees learns what the first ones are off by.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.models.network import Scaling, Weights
from forecasting.lengths.models.trees import HabitTrees
from forecasting.lengths.query import MEDIAN, QUANTILES, Predictions, Sample
from forecasting.lengths.text.features import Features, measure_matrix
from forecasting.lengths.training.network_training import (
    LONG_COUNT_MORE,
    Bags,
    Optimiser,
    Rows,
    forward,
    gradients,
    loss,
)

if TYPE_CHECKING:
    from forecasting.lengths.models.student import Student

WIDTH: Final = 14
"""Of an n-gram's row."""
HIDDEN: Final = 64
NAME_WIDTH: Final = 8
EPOCHS: Final = 5
BATCH: Final = 256
RATE: Final = 4e-3
GO_ON_RATE: Final = 1e-3
FORGET_NAME: Final = 0.15
"""Chance that a name is hidden in training, so that what is said of unknown models and tenants is learned too."""
DROP_IDS: Final = 0.25
BANDS: Final = 8
LEAST_IN_BAND: Final = 40
LEAST_STEPS: Final = 200
LEAST_TO_JUDGE: Final = 400
HELD_OUT: Final = 0.1
LEAVES: Final = 24
LATER_TREES: Final = 40
LATER_LEAVES: Final = 8


def train(
    student: "Student",
    features: Sequence[Features],
    samples: Sequence[Sample],
    taught: Predictions | None = None,
    epochs: int | None = None,
) -> None:
    """Fit *student*; samples that reached their max_tokens count as "at least so long"."""
    from threadpoolctl import threadpool_limits

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
    known = Rows(
        scaling(measures),
        model_rows,
        tenant_rows,
        np.log1p(lengths).astype(np.float32),
        cut,
        None if taught is None else np.log1p(taught.quantiles).astype(np.float32),
    )
    bags = [
        Bags(ids, len(starts[0]["table"]))
        for ids in ([each.ids for each in features], [each.opening for each in features])
    ]
    everyone = np.arange(len(samples))
    with threadpool_limits(1):  # small products: more threads only wait for one another
        student.networks = [
            _network(start, known, bags, held, epochs, fresh, student.fitting.seed + place)
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
        _put_right(
            student,
            np.stack([student.logs(features[row], samples[row].query) for row in rows]),
            np.log1p(lengths)[held],
        )
        if student.trees and fresh:  # what was held out has done its service
            student.stages = [_stage(student, [], measures, samples, weights, np.ones(len(samples), bool))]


def _stage(
    student: "Student",
    before: Sequence[HabitTrees],
    measures: NDArray[np.float32],
    samples: Sequence[Sample],
    weights: NDArray[np.float64],
    learned: NDArray[np.bool_],
) -> HabitTrees:
    """Trees for what the stages *before* leave of the log-lengths of the samples *learned*."""
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
    rows: Rows,
    bags: Sequence[Bags],
    held: NDArray[np.bool_],
    epochs: int | None,
    fresh: bool,
    seed: int,
) -> Weights:
    """Fit one network from its first *weights* on; the samples *held* out choose the round to stop at."""
    steps_an_epoch = -(-len(held) // BATCH)
    rounds = epochs or max(EPOCHS, -(-LEAST_STEPS // steps_an_epoch))
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
    """What network *place* begins with: the weights that it has, with a row of zeros for each new name, else random ones."""
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
    """Which samples judge each round, by whole prompts: a tenth, none of few."""
    if len(samples) < LEAST_TO_JUDGE:
        return np.zeros(len(samples), bool)
    keys = [sample.query.asked or each.ids.tobytes() for sample, each in zip(samples, features, strict=True)]
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    chosen = generator.random(len(places)) < HELD_OUT
    return chosen[[places[key] for key in keys]]


def _put_right(student: "Student", logs: NDArray[np.float64], real: NDArray[np.float64]) -> None:
    """How far each quantile is off on held-out prompts, by bands of the predicted median."""
    middle = logs[:, MEDIAN]
    bands = np.array_split(np.argsort(middle), min(BANDS, max(1, len(middle) // LEAST_IN_BAND)))
    student.knots = np.array([middle[band].mean() for band in bands])
    student.shifts = np.array(
        [
            [np.quantile(real[band] - logs[band, column], level) for column, level in enumerate(QUANTILES)]
            for band in bands
        ]
    )
