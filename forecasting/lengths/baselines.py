"""Length models that ignore the text: a mean by class, a moving histogram by tenant, and buckets of prompt length."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths.model import DEFAULT, Fitting, LengthModel, bounded
from forecasting.lengths.query import MEDIAN, QUANTILES, LengthQuery, Predictions, Sample

LEAST: Final = 8
"""Fewest samples of a group; smaller groups get the answer of all samples together."""
DECAY: Final = 0.999
"""Factor by which one newer answer reduces an older one's weight in the moving histogram."""
BIN_BASE: Final = 1.15
"""Ratio of the ends of adjacent bins of the histogram."""

Floats = NDArray[np.float64]


class _Grouped(LengthModel):
    """One answer, a figure and quantiles, for every group of queries. Subclasses define groups and answers."""

    reads_text = False

    def __init__(self, fitting: Fitting = DEFAULT) -> None:
        super().__init__(fitting)
        self.rows: dict[str, list[float]] = {}
        """By group: the figure and the quantiles; the empty group stands for all."""

    @abstractmethod
    def group(self, query: LengthQuery) -> str: ...

    @abstractmethod
    def answer(self, lengths: Sequence[int]) -> Floats:
        """Return the figure and the quantiles of a group with these *lengths*, oldest first."""

    @property
    def fitted(self) -> bool:
        return bool(self.rows)

    def _fit(self, samples: Sequence[Sample]) -> None:
        groups: dict[str, list[int]] = defaultdict(list)
        for sample in samples:
            groups[self.group(sample.query)].append(sample.output_tokens)
        self.rows = {key: self.answer(lengths).tolist() for key, lengths in groups.items() if len(lengths) >= LEAST}
        self.rows[""] = self.answer([sample.output_tokens for sample in samples]).tolist()

    def _predict(self, queries: Sequence[LengthQuery]) -> Predictions:
        rows = np.array([self.rows.get(self.group(query), self.rows[""]) for query in queries], float)
        return bounded(rows[:, 0], rows[:, 1:], queries)

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        model = cls()
        model.rows = dict(state["rows"])
        return model


class ClassMean(_Grouped):
    """The mean of the served model's answers in this SLO class."""

    name = "class-mean"

    def group(self, query: LengthQuery) -> str:
        return f"{query.model} {query.slo_class}"

    def answer(self, lengths: Sequence[int]) -> Floats:
        return np.array([np.mean(lengths), *np.quantile(lengths, QUANTILES)])


class TenantHistogram(_Grouped):
    """The median of a histogram of the tenant's answers by the served model, in which older ones fade."""

    name = "tenant-histogram"

    def group(self, query: LengthQuery) -> str:
        return f"{query.model} {query.tenant}"

    def answer(self, lengths: Sequence[int]) -> Floats:
        bins = np.floor(np.log(np.maximum(lengths, 1)) / np.log(BIN_BASE)).astype(int)
        weights = DECAY ** np.arange(len(lengths) - 1, -1, -1)
        histogram = np.bincount(bins, weights)
        reached = np.cumsum(histogram) / histogram.sum()
        places = np.searchsorted(reached, QUANTILES)
        quantiles = BIN_BASE ** (places + 0.5)
        return np.array([quantiles[MEDIAN], *quantiles])


class PromptBuckets(_Grouped):
    """The median over prompts of similar length, in buckets that double."""

    name = "prompt-buckets"

    def group(self, query: LengthQuery) -> str:
        return str(max(query.prompt_tokens, 1).bit_length())

    def answer(self, lengths: Sequence[int]) -> Floats:
        return np.array([np.median(lengths), *np.quantile(lengths, QUANTILES)])
