"""Fitting a student: networks by torch, trees by scikit-learn; pinball loss on log-lengths, long answers count for more.

Fitted again, a student goes on from what it knows: measures are scaled anew by all that was seen, networks are moved to the
new scales without a change of what they say, and a last stage of trees learns what the first ones are off by.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.models.forest import Forest
from forecasting.lengths.models.network import MEDIAN, Scaling, Weights
from forecasting.lengths.models.trees import Habits
from forecasting.lengths.query import QUANTILES, Predictions, Sample
from forecasting.lengths.text.features import Features, measure_matrix

if TYPE_CHECKING:
    from forecasting.lengths.models.student import Stage, Student

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
FORGET_TEXT: Final = 0.02
DROP_IDS: Final = 0.25
DROP_HIDDEN: Final = 0.1
TEACHER_SHARE: Final = 0.6
BANDS: Final = 8
LEAST_IN_BAND: Final = 40
LEAST_STEPS: Final = 200
LEAST_TO_JUDGE: Final = 400
HELD_OUT: Final = 0.1
LONG_COUNT_MORE: Final = 0.5
"""Power of the predicted length in a sample's weight."""
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
    import torch

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
    held = _held_out(samples, features, np.random.default_rng(student.seed))
    everything = {
        "measures": torch.tensor(scaling(measures)),
        "models": torch.tensor(model_rows),
        "tenants": torch.tensor(tenant_rows),
        "target": torch.tensor(np.log1p(lengths).astype(np.float32)),
        "cut": torch.tensor(cut),
    }
    if taught is not None:
        everything["lesson"] = torch.tensor(np.log1p(taught.quantiles).astype(np.float32))
    bags = (Bags([each.ids for each in features]), Bags([each.opening for each in features]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products: more threads only wait for one another
    try:
        with torch.random.fork_rng(devices=[]):
            student.networks = []
            for place, start in enumerate(starts):
                torch.manual_seed(student.seed + place)
                student.networks.append(
                    _network(torch, start, everything, bags, held, epochs, fresh, student.seed + place)
                )
            middle = np.mean(
                [_logs(torch, each, everything, bags, np.arange(len(samples)))[:, MEDIAN] for each in student.networks],
                axis=0,
            )
    finally:
        torch.set_num_threads(threads)
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
    before: Sequence["Stage"],
    measures: NDArray[np.float32],
    samples: Sequence[Sample],
    weights: NDArray[np.float64],
    learned: NDArray[np.bool_],
) -> "Stage":
    """Trees for what the stages *before* leave of the log-lengths of the samples *learned*."""
    from forecasting.lengths.models.student import Stage

    chosen = [sample for sample, mine in zip(samples, learned, strict=True) if mine]
    queries = [sample.query for sample in chosen]
    rows, target = measures[learned], np.log1p([sample.output_tokens for sample in chosen])
    for stage in before:
        target = target - stage.logs(rows, queries)
    habits = Habits().fit(chosen)
    trees, leaves = (LATER_TREES, LATER_LEAVES) if before else (student.trees, LEAVES)
    table = np.concatenate([rows, habits.rows(queries)], axis=1)
    return Stage(habits, Forest.grow(table, target, 0.5, trees, student.seed, weights[learned], leaves))


class Bags:
    """The ids of n prompts, one after the other, and batches of them as torch's EmbeddingBag takes them."""

    def __init__(self, rows: Sequence[NDArray[np.int32]]) -> None:
        self.lengths = np.array([len(row) for row in rows], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        self.ids = np.concatenate(rows).astype(np.int64) if rows else np.zeros(0, np.int64)

    def batch(
        self, chosen: NDArray[np.int64], generator: np.random.Generator | None, drop: float
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """(ids, offsets, weight of each id) of the rows *chosen*, without a share *drop* of the ids."""
        lengths = self.lengths[chosen]
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths) + np.repeat(self.starts[chosen], lengths)
        owner = np.repeat(np.arange(len(chosen)), lengths)
        if generator is not None and drop:
            kept = generator.random(len(places)) >= drop
            places, owner = places[kept], owner[kept]
        counts = np.bincount(owner, minlength=len(chosen))
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
        weights = (1.0 / np.sqrt(np.maximum(counts, 1)))[owner].astype(np.float32)
        return self.ids[places], offsets, weights


def _names(known: dict[str, int], names: Sequence[str]) -> tuple[dict[str, int], NDArray[np.int64]]:
    known = dict(known)
    for name in names:
        if name:
            known.setdefault(name, len(known) + 1)
    return known, np.array([known.get(name, 0) for name in names], np.int64)


def _network(
    torch: Any,
    start: Weights,
    everything: dict[str, Any],
    bags: Sequence[Bags],
    held: NDArray[np.bool_],
    epochs: int | None,
    fresh: bool,
    seed: int,
) -> Weights:
    """One network's weights, from *start* on; the samples *held* out choose the round to stop at."""
    tensors = {name: torch.tensor(value, requires_grad=True) for name, value in start.items()}
    steps_an_epoch = -(-len(held) // BATCH)
    rounds = epochs or max(EPOCHS, -(-LEAST_STEPS // steps_an_epoch))
    rate = RATE if fresh else GO_ON_RATE
    optimiser = torch.optim.AdamW(list(tensors.values()), lr=rate, weight_decay=0.02)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=rate, total_steps=rounds * steps_an_epoch + 1)
    generator = np.random.default_rng(seed)
    learned = np.flatnonzero(~held)
    judge = _judge(torch, tensors, everything, bags, np.flatnonzero(held))
    best, kept = np.inf, {name: value.detach().clone() for name, value in tensors.items()}
    for _ in range(rounds):
        order = generator.permutation(learned)
        for begin in range(0, len(order), BATCH):
            chosen = order[begin : begin + BATCH]
            picked = torch.tensor(chosen)
            batch = {name: value[picked] for name, value in everything.items()}
            for name in ("models", "tenants"):
                batch[name] = batch[name].masked_fill(torch.rand(len(chosen)) < FORGET_NAME, 0)
            sources = [[torch.tensor(each) for each in bag.batch(chosen, generator, DROP_IDS)] for bag in bags]
            logs = _forward(torch, tensors, batch, sources, DROP_HIDDEN)
            loss = _pinball(torch, logs, batch["target"], batch["cut"], LONG_COUNT_MORE)
            if "lesson" in batch:
                follow = torch.nn.functional.smooth_l1_loss(logs, batch["lesson"], beta=0.1)
                loss = (1.0 - TEACHER_SHARE) * loss + TEACHER_SHARE * follow
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
            plan.step()
        if held.any() and (held_loss := judge()) < best:
            best, kept = held_loss, {name: value.detach().clone() for name, value in tensors.items()}
    if held.any():
        tensors = kept
    return {name: value.detach().numpy().astype(np.float16).astype(np.float32) for name, value in tensors.items()}


def _start(student: "Student", place: int, scaling: Scaling, lengths: NDArray[np.float64], measures: int) -> Weights:
    """What network *place* begins with: the weights that it has, with a row of zeros for each new name, else random ones."""
    names = (("models", student.models), ("tenants", student.tenants))
    if student.scaling is not None:
        begin = student.scaling.moved(student.networks[place], scaling)
        for name, known in names:
            missing = len(known) + 1 - len(begin[name])
            begin[name] = np.concatenate([begin[name], np.zeros((missing, begin[name].shape[1]), np.float32)])
        return begin
    generator = np.random.default_rng(student.seed + place)
    inputs = measures + 2 * WIDTH + 2 * NAME_WIDTH

    def normal(rows: int, columns: int, size: float) -> NDArray[np.float32]:
        return (size * generator.standard_normal((rows, columns))).astype(np.float32)

    heads = len(QUANTILES)
    bias = np.full(heads, -0.8, np.float32)  # softplus(-0.8) = 0.37: a step of that much in the log-length
    bias[QUANTILES.index(0.5)] = np.log1p(np.median(lengths))
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


def _forward(
    torch: Any, weights: dict[str, Any], batch: dict[str, Any], bags: Sequence[Sequence[Any]], drop: float
) -> Any:
    """Log-quantiles (n, QUANTILES) of a batch; the same as `network.answer`, for many rows."""
    functional = torch.nn.functional
    bag_sums = [
        functional.embedding_bag(ids, weights["table"], offsets, mode="sum", per_sample_weights=each)
        for ids, offsets, each in bags
    ]
    if drop:
        hidden_text = (torch.rand(len(batch["models"]), 1) >= FORGET_TEXT).float()
        bag_sums = [each * hidden_text for each in bag_sums]
    row = torch.cat(
        [batch["measures"], *bag_sums, weights["models"][batch["models"]], weights["tenants"][batch["tenants"]]], dim=1
    )
    hidden = functional.relu(row @ weights["first"] + weights["first_bias"])
    hidden = functional.dropout(hidden, drop, training=bool(drop))
    hidden = functional.relu(hidden @ weights["second"] + weights["second_bias"])
    hidden = functional.dropout(hidden, drop, training=bool(drop))
    heads = hidden @ weights["heads"] + row @ weights["straight"] + weights["heads_bias"]
    middle = QUANTILES.index(0.5)
    steps = functional.softplus(heads)
    columns = [heads[:, middle]]
    for index in range(middle - 1, -1, -1):
        columns.insert(0, columns[0] - steps[:, index])
    for index in range(middle + 1, len(QUANTILES)):
        columns.append(columns[-1] + steps[:, index])
    return torch.stack(columns, dim=1)


def _pinball(torch: Any, logs: Any, target: Any, cut: Any, power: float) -> Any:
    """Mean pinball loss, each row weighed by its predicted length to the *power* (0: relative errors, 1: errors in tokens).

    Of a *cut* answer only predictions below it are wrong, for nobody knows how long it would have been.
    """
    levels = torch.tensor(QUANTILES)
    miss = target[:, None] - logs
    miss = torch.where(cut[:, None], miss.clamp(min=0.0), miss)
    weights = (power * logs[:, QUANTILES.index(0.5)].detach()).exp()
    return (torch.maximum(levels * miss, (levels - 1.0) * miss).mean(dim=1) * weights).sum() / weights.sum()


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
    middle = logs[:, QUANTILES.index(0.5)]
    bands = np.array_split(np.argsort(middle), min(BANDS, max(1, len(middle) // LEAST_IN_BAND)))
    student.knots = np.array([middle[band].mean() for band in bands])
    student.shifts = np.array(
        [
            [np.quantile(real[band] - logs[band, column], level) for column, level in enumerate(QUANTILES)]
            for band in bands
        ]
    )


def _logs(
    torch: Any, weights: Weights, everything: dict[str, Any], bags: Sequence[Bags], rows: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Log-quantiles of *rows* by one network."""
    tensors = {name: torch.tensor(value) for name, value in weights.items()}
    picked = torch.tensor(rows)
    batch = {name: value[picked] for name, value in everything.items()}
    sources = [[torch.tensor(each) for each in bag.batch(rows, None, 0.0)] for bag in bags]
    with torch.no_grad():
        return np.asarray(_forward(torch, tensors, batch, sources, 0.0).numpy(), float)


def _judge(
    torch: Any, tensors: dict[str, Any], everything: dict[str, Any], bags: Sequence[Bags], rows: NDArray[np.int64]
) -> Callable[[], float]:
    """What computes the loss on *rows* as the weights stand."""
    if not len(rows):
        return lambda: 0.0
    picked = torch.tensor(rows)
    batch = {name: value[picked] for name, value in everything.items()}
    sources = [[torch.tensor(each) for each in bag.batch(rows, None, 0.0)] for bag in bags]

    def loss() -> float:
        with torch.no_grad():
            logs = _forward(torch, tensors, batch, sources, 0.0)
            return float(_pinball(torch, logs, batch["target"], batch["cut"], LONG_COUNT_MORE))

    return loss
