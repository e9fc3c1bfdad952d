"""Online learning from finished requests: the prior, and corrections of a length model per tenant and model.

All of it works in logarithms, so that a factor too long weighs as much as a factor too short, and one request moves it
by a bounded step: neither an outlier nor a malicious tenant can carry it away.
"""

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.query import QUANTILES, LengthQuery
from forecasting.lengths.trees import Trees

MOST_KEPT: Final = 4096

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """A value per key, such as (model, tenant), for the *most* recently used keys."""

    def __init__(self, make: Callable[[], Value], most: int = MOST_KEPT) -> None:
        self._make, self._most = make, most
        self._kept: OrderedDict[Key, Value] = OrderedDict()

    def __getitem__(self, key: Key) -> Value:
        """Return the value of *key*, a new one if there is none."""
        value = self._kept.get(key)
        if value is None:
            value = self._kept[key] = self._make()
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return value

    def get(self, key: Key) -> Value | None:
        """Return the value of *key*, if there is one; this does not count as use."""
        return self._kept.get(key)

    def values(self) -> list[Value]:
        return list(self._kept.values())

    def items(self) -> list[tuple[Key, Value]]:
        return list(self._kept.items())


CHARACTERS_PER_TOKEN = 4.0  # English text under the tokenizers of Llama and GPT; only until the first answer
OUTPUT_TOKENS = 256.0  # until the first answer
ENOUGH = 20.0  # answers after which a narrower mean is trusted by itself


@dataclass(slots=True)
class _Mean:
    """Exponentially weighted mean of the last few hundred values; `weight` counts them up to 1 / RATE."""

    RATE = 0.01
    value: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.weight = self.weight * (1.0 - self.RATE) + 1.0
        self.value += (value - self.value) / self.weight


class LengthPrior:
    def __init__(self) -> None:
        self._characters: RecentlyUsed[str, _Mean] = RecentlyUsed(_Mean)
        self._output: RecentlyUsed[tuple[str, ...], _Mean] = RecentlyUsed(_Mean)

    def prompt_tokens(self, model: str, characters: int) -> int:
        """Return the estimated tokens of a prompt of *characters*; at least 1."""
        mean = self._characters.get(model)
        per_token = mean.value if mean else CHARACTERS_PER_TOKEN
        return max(1, round(characters / per_token))

    def output_tokens(self, query: LengthQuery) -> int:
        """Return the expected output tokens over all sequences of the request; at least one a sequence."""
        if query.ignore_eos and query.max_tokens:
            return query.max_tokens * query.sequences
        estimate = OUTPUT_TOKENS
        for key in self._keys(query):  # from wide to narrow: each narrower mean weighs in by what it has seen
            mean = self._output.get(key)
            if mean:
                trust = min(1.0, mean.weight / ENOUGH)
                estimate += trust * (mean.value - estimate)
        if query.max_tokens:
            estimate = min(estimate, query.max_tokens)
        return max(1, query.min_tokens, round(estimate)) * query.sequences

    def learn(self, query: LengthQuery, output_tokens: int, characters: int, prompt_tokens: int) -> None:
        """Learn from one finished request; *characters* is 0 if its prompt came as token ids."""
        if characters and prompt_tokens:
            self._characters[query.model].add(characters / prompt_tokens)
        if query.ignore_eos or not output_tokens:
            return  # a forced length says nothing of what the model would do
        for key in self._keys(query):
            self._output[key].add(output_tokens / query.sequences)

    @staticmethod
    def _keys(query: LengthQuery) -> tuple[tuple[str, ...], ...]:
        return (
            (query.model,),
            (query.model, query.slo_class),
            (query.model, query.tenant, query.slo_class),
        )


MOST_SHIFT: Final = math.log(16.0)
"""A prediction is corrected by at most a factor of 16 either way."""
BOUND: Final = math.log(2.0)
"""Errors farther than a factor of two from the present correction are clipped to it."""
SHRINK: Final = 5.0
"""Weight, in requests, of the prior belief that no correction is needed."""
RATE: Final = 0.02
"""Least weight of a new error: a shift rests on the last 50 requests."""
QUANTILE_RATE: Final = 0.05
"""Step of a quantile's own shift, in logarithms, after many requests."""


def log_ratio(real: float, predicted: float) -> float:
    """Return the logarithm of *real* over *predicted*, both at least 1 token."""
    return math.log(max(real, 1.0) / max(predicted, 1.0))


def _within(value: float, most: float) -> float:
    return max(-most, min(most, value))


@dataclass(slots=True)
class Calibration:
    """Running correction of the predictions for one (model, tenant)."""

    seen: float = 0.0
    level: float = 0.0
    """Clipped mean error, before shrinking."""
    quantiles: list[float] = field(default_factory=lambda: [0.0] * len(QUANTILES))

    @property
    def shift(self) -> float:
        return _within(self.level * self.seen / (self.seen + SHRINK), MOST_SHIFT)

    def apply(self, tokens: float, quantiles: Sequence[float]) -> tuple[float, tuple[float, ...]]:
        """Return the corrected (tokens, quantiles); each at least 1, the quantiles ascending."""
        shift = self.shift
        ends, least = [], 1.0
        for quantile, own in zip(quantiles, self.quantiles, strict=True):
            least = max(least, quantile * math.exp(_within(shift + own, MOST_SHIFT)))
            ends.append(least)
        return max(1.0, tokens * math.exp(shift)), tuple(ends)

    def learn(
        self, tokens: float, quantiles: Sequence[float], real: float, *, cut: bool = False, factor: float = 1.0
    ) -> None:
        """Learn from a request of *real* tokens that the model predicted as (*tokens*, *quantiles*).

        One that was *cut* by its limit is at least as long, so it never shortens the correction. *factor*: by which
        the corrected quantiles were multiplied.
        """
        _, served = self.apply(tokens, quantiles)
        error = log_ratio(real, tokens)
        if cut and error < self.shift:
            return
        step = max(RATE, 1.0 / (self.seen + 1.0))
        # The first errors may be far from nothing, and are: the bound is on the distance of one from the others.
        bound = BOUND if self.seen >= SHRINK else MOST_SHIFT
        self.level = _within(self.level + step * _within(error - self.level, bound), MOST_SHIFT)
        self.seen += 1.0
        step = max(QUANTILE_RATE, 0.5 / math.sqrt(self.seen))
        for index, (promised, quantile) in enumerate(zip(QUANTILES, served, strict=True)):
            if real > quantile * factor:
                self.quantiles[index] = _within(self.quantiles[index] + step * promised, MOST_SHIFT)
            elif not cut:
                self.quantiles[index] = _within(self.quantiles[index] - step * (1.0 - promised), MOST_SHIFT)


BELIEF: Final = 100.0
"""Weight, in requests, of the belief in no correction, for a measure one standard deviation from its mean."""
MOST_CORRECTION: Final = math.log(4.0)
"""Largest correction: a factor of 4."""
MEMORY: Final = 1.0 / 5000.0
"""Weight that one more request takes from all before: a correction rests on some thousands of requests."""
LEAST_VARIANCE: Final = 1e-5
WEIGHT: Final = 0.5
"""Weight of a measure: there are dozens, and many small corrections add up."""
TENANTS: Final = 512
"""Most tenants remembered, the recently used ones: some 20 kB each."""

MEDIAN_OF: Final = 100
MEDIAN_BELIEF: Final = 1.0
"""Weight, in requests, of the class's median against a tenant's own."""
START_WEIGHT: Final = 0.2
"""Weight of the model's prediction for a new tenant, against the usual length."""
MIN_WEIGHT, MAX_WEIGHT = 0.02, 0.98
WEIGHT_STEP: Final = 0.5
"""Weight of one request's gain in the odds."""
Measures = NDArray[np.float32]


class Adaptation:
    """Correction of the predictions for one tenant, linear in the measures of the prompt (recursive least squares)."""

    __slots__ = ("_covariance", "_weights")

    def __init__(self) -> None:
        self._weights: NDArray[np.float64] | None = None
        self._covariance: NDArray[np.float64] = np.zeros((0, 0))

    def correction(self, measures: Measures) -> float:
        """Return the correction of the logarithm of a predicted length."""
        if self._weights is None:
            return 0.0
        return max(-MOST_CORRECTION, min(MOST_CORRECTION, WEIGHT * float(self._weights @ measures)))

    def learn(self, measures: Measures, error: float) -> None:
        """Learn that the logarithm of a length was *error* above the corrected prediction."""
        if self._weights is None:
            self._weights = np.zeros(len(measures))
            self._covariance = np.eye(len(measures)) / BELIEF
        row = WEIGHT * measures.astype(float)
        moved = self._covariance @ row
        gain = moved / (1.0 + row @ moved)
        self._weights += gain * max(-BOUND, min(BOUND, error))
        self._covariance -= np.outer(gain, moved)
        # Forgetting adds to what is uncertain, but never more than there was in the beginning.
        diagonal = self._covariance.diagonal()
        self._covariance[np.diag_indices_from(self._covariance)] = np.clip(
            diagonal + MEMORY * (1.0 / BELIEF - diagonal), LEAST_VARIANCE, None
        )


class RunningMedian:
    """Median of the last `MEDIAN_OF` values."""

    __slots__ = ("_ordered", "_recent")

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, value: float) -> None:
        if len(self._recent) == MEDIAN_OF:
            del self._ordered[bisect_left(self._ordered, self._recent.popleft())]
        self._recent.append(value)
        insort(self._ordered, value)

    @property
    def value(self) -> float:
        """The median; raises IndexError without values."""
        ordered, middle = self._ordered, len(self._ordered) // 2
        return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(slots=True)
class Weight:
    """Weight of the model's prediction against the usual length, from the errors of both.

    It follows (A, B)-Prod (Sani, Neu and Lazaric, NIPS 2014): whatever lengths come, one request after another, the errors
    of the weighted mean, each in units of the longer prediction, exceed those of the usual length by at most
    -log(1 - `START_WEIGHT`) / `WEIGHT_STEP` = 0.45 in all, and by `MIN_WEIGHT` / (1 - `MIN_WEIGHT`) for each request.
    """

    value: float = START_WEIGHT

    def learn(self, usual: float, said: float, real: float) -> None:
        """Learn from a request of *real* tokens, of which the model *said* so many."""
        gain = (abs(usual - real) - abs(said - real)) / max(usual, said)
        odds = self.value / (1.0 - self.value) * (1.0 + WEIGHT_STEP * gain)
        self.value = min(MAX_WEIGHT, max(MIN_WEIGHT, odds / (1.0 + odds)))


class Corrected(NamedTuple):
    """A corrected prediction, and what learning from the real length needs."""

    tokens: float
    quantiles: tuple[float, ...]
    raw_tokens: float
    """The model's own prediction."""
    adapted: tuple[float, tuple[float, ...]]
    """(tokens, quantiles) after the tenant's correction, before the calibration."""
    measures: Measures
    usual: float
    """Usual tokens of such requests,"""
    calibrated: float
    """and the model's prediction after the calibration; `tokens` lies between."""


class Online:
    """Corrections by tenant, and by model and tenant. Not for several threads.

    A model does not know the tenants that it was not fitted to: each begins at the median of its class, and the model's
    prediction earns its weight. The first requests of a class are the exception: there is nothing else to go by.

    *reader* reads and scales features: the bundled trees, for every model.
    """

    def __init__(self, reader: Trees) -> None:
        self.reader = reader
        self.adaptations: RecentlyUsed[str, Adaptation] = RecentlyUsed(Adaptation, TENANTS)
        self.calibrations: RecentlyUsed[tuple[str, str], Calibration] = RecentlyUsed(Calibration)
        self.weights: RecentlyUsed[str, Weight] = RecentlyUsed(Weight)
        self.medians: RecentlyUsed[tuple[str, str], RunningMedian] = RecentlyUsed(RunningMedian)
        """Logarithms of lengths by (model, tenant),"""
        self.classes: RecentlyUsed[str, RunningMedian] = RecentlyUsed(RunningMedian)
        """and by class."""

    def correct(self, query: LengthQuery, tokens: float, quantiles: Sequence[float]) -> Corrected:
        """Correct a model's prediction for *query*; each figure at least 1, quantiles ascending."""
        measures = self.reader.scaled(query)
        factor = math.exp(self.adaptations[query.tenant].correction(measures))
        adapted = max(1.0, tokens * factor), tuple(max(1.0, quantile * factor) for quantile in quantiles)
        middle, ends = self.calibrations[query.model, query.tenant].apply(*adapted)
        usual = self._usual(query, middle)
        served = usual + self.weights[query.tenant].value * (middle - usual)
        ends = tuple(max(1.0, end * served / middle) for end in ends)
        return Corrected(served, ends, tokens, adapted, measures, usual, middle)

    def _usual(self, query: LengthQuery, calibrated: float) -> float:
        """Return the usual tokens: the (model, tenant)'s median, at first the class's, without that *calibrated*."""
        own, alike = self.medians[query.model, query.tenant], self.classes[query.slo_class]
        if not len(own) and len(alike) < ENOUGH:
            return calibrated
        usual = alike.value if len(alike) >= ENOUGH else math.log(calibrated)
        if count := len(own):
            usual += count / (count + MEDIAN_BELIEF) * (own.value - usual)
        return math.exp(usual)

    def learn(self, query: LengthQuery, corrected: Corrected, real: float, *, cut: bool = False) -> None:
        """Learn the *real* tokens of *query*; *cut*: no more were allowed, so it is at least as long."""
        calibration = self.calibrations[query.model, query.tenant]
        error = log_ratio(real, corrected.adapted[0]) - calibration.shift
        if not (cut and error < 0.0):
            self.adaptations[query.tenant].learn(corrected.measures, error)
        factor = corrected.tokens / corrected.calibrated
        calibration.learn(*corrected.adapted, real, cut=cut, factor=factor)
        real = max(real, 1.0)
        if cut and real < max(corrected.usual, corrected.calibrated):
            return
        self.weights[query.tenant].learn(corrected.usual, corrected.calibrated, real)
        self.learn_usual(query, real)

    def learn_usual(self, query: LengthQuery, real: float) -> None:
        """Learn the *real* tokens of *query*, which was not predicted."""
        self.medians[query.model, query.tenant].add(math.log(real))
        self.classes[query.slo_class].add(math.log(real))
