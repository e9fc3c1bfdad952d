"""What is learned of a length model while it answers: corrections by tenant, then calibrations by (model, tenant).

The live service and the measurements of it put predictions right by this same class.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from forecasting.lengths.models.student import Student
from forecasting.lengths.query import LengthQuery
from forecasting.lengths.service.adaptation import TENANTS, Adaptation, Measures
from forecasting.lengths.service.calibration import Calibration, PerPair, log_ratio
from forecasting.lengths.text.features import extract


class Righted(NamedTuple):
    """A prediction that was put right, and what is needed to learn from how it came."""

    tokens: float
    quantiles: tuple[float, ...]
    corrected: tuple[float, tuple[float, ...]]
    """(tokens, quantiles) after the tenant's correction, before the calibration."""
    measures: Measures


class Online:
    """Not for several threads. *reader* brings measures to one size: the bundled student, whatever model answers."""

    def __init__(self, reader: Student) -> None:
        self.reader = reader
        self.adaptations: PerPair[str, Adaptation] = PerPair(Adaptation, TENANTS)
        self.calibrations: PerPair[tuple[str, str], Calibration] = PerPair(Calibration)

    def right(self, query: LengthQuery, tokens: float, quantiles: Sequence[float]) -> Righted:
        """What a model said of *query*, put right; each figure at least 1, quantiles ascending."""
        measures = self.reader.scaled(extract(query).measures)
        factor = math.exp(self.adaptations[query.tenant].correction(measures))
        said = max(1.0, tokens * factor), tuple(max(1.0, quantile * factor) for quantile in quantiles)
        return Righted(*self.calibrations[query.model, query.tenant].apply(*said), said, measures)

    def learn(self, query: LengthQuery, righted: Righted, real: float, *, cut: bool = False) -> None:
        """*query* came to *real* tokens; *cut*: because no more were allowed, so it is known to be at least as long."""
        calibration = self.calibrations[query.model, query.tenant]
        error = log_ratio(real, righted.corrected[0]) - calibration.shift
        if not (cut and error < 0.0):
            self.adaptations[query.tenant].learn(righted.measures, error)
        calibration.learn(*righted.corrected, real, cut=cut)

    def clear(self) -> None:
        """Forget everything, as when another version answers."""
        self.adaptations.clear()
        self.calibrations.clear()
