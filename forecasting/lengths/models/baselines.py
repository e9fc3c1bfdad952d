"""Length models that look at no text: a mean by class, a moving histogram by tenant, and buckets of prompt length."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.models.spread import bounded
from forecasting.lengths.models.state import load_model, save_model
from forecasting.lengths.query import QUANTILES, LengthQuery, Predictions, Sample

VERSION: Final = 1
LEAST: Final = 8
"""Samples that a group needs; smaller ones answer as all together."""
DECAY: Final = 0.999
"""Of the moving histogram: what one newer answer leaves of an older one's weight."""
BIN_BASE: Final = 1.15
"""Of the histogram: each bin ends this many times further up."""

Row = NDArray[np.float64]


class _Grouped(ABC):
    """Every group of queries has one answer: a figure and quantiles. Sub-classes say what a group and an answer are."""

    name: str

    def __init__(self) -> None:
        self.rows: dict[str, list[float]] = {}
        """By group: the figure and the quantiles; the empty group stands for all."""

    @abstractmethod
    def group(self, query: LengthQuery) -> str: ...

    @abstractmethod
    def answer(self, lengths: Sequence[int]) -> Row:
        """The figure and the quantiles of a group with these *lengths*, oldest first."""

    def fit(self, samples: Sequence[Sample]) -> Self:
        if not samples:
            raise ValueError("A length model cannot be fitted to no samples.")
        groups: dict[str, list[int]] = defaultdict(list)
        for sample in samples:
            groups[self.group(sample.query)].append(sample.output_tokens)
        self.rows = {key: self.answer(lengths).tolist() for key, lengths in groups.items() if len(lengths) >= LEAST}
        self.rows[""] = self.answer([sample.output_tokens for sample in samples]).tolist()
        return self

    def predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        if not self.rows:
            raise ValueError(f"The length model {self.name!r} was asked before it was fitted.")
        rows = np.array([self.rows.get(self.group(query), self.rows[""]) for query in queries], float)
        rows = rows.reshape(-1, 1 + len(QUANTILES))
        return bounded(rows[:, 0], rows[:, 1:], queries)

    def save(self, path: Path) -> None:
        if not self.rows:
            raise ValueError(f"The length model {self.name!r} was not fitted: there is nothing to save.")
        save_model(path, self.name, VERSION, {"rows": self.rows})

    @classmethod
    def load(cls, path: Path) -> Self:
        model = cls()
        model.rows = dict(load_model(path, cls.name, VERSION)["rows"])
        return model


class ClassMean(_Grouped):
    """The mean of the served model's answers in this SLO class."""

    name = "class-mean"

    def group(self, query: LengthQuery) -> str:
        return f"{query.model} {query.slo_class}"

    def answer(self, lengths: Sequence[int]) -> Row:
        return np.array([np.mean(lengths), *np.quantile(lengths, QUANTILES)])


class TenantHistogram(_Grouped):
    """The median of a histogram of the tenant's answers by the served model, in which older ones fade."""

    name = "tenant-histogram"

    def group(self, query: LengthQuery) -> str:
        return f"{query.model} {query.tenant}"

    def answer(self, lengths: Sequence[int]) -> Row:
        bins = np.floor(np.log(np.maximum(lengths, 1)) / np.log(BIN_BASE)).astype(int)
        weights = DECAY ** np.arange(len(lengths) - 1, -1, -1)
        histogram = np.bincount(bins, weights)
        reached = np.cumsum(histogram) / histogram.sum()
        places = np.searchsorted(reached, QUANTILES)
        quantiles = BIN_BASE ** (places + 0.5)
        return np.array([quantiles[QUANTILES.index(0.5)], *quantiles])


class PromptBuckets(_Grouped):
    """The median over prompts of a like length: buckets that double."""

    name = "prompt-buckets"

    def group(self, query: LengthQuery) -> str:
        return str(max(query.prompt_tokens, 1).bit_length())

    def answer(self, lengths: Sequence[int]) -> Row:
        return np.array([np.median(lengths), *np.quantile(lengths, QUANTILES)])
