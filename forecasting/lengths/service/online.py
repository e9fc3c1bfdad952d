"""What is learned of a length model while it answers: corrections by tenant, then calibrations by (model, tenant).

The live service and the measurements of it correct predictions by this same class.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from forecasting.lengths.models.student import Student
from forecasting.lengths.query import LengthQuery
from forecasting.lengths.service.adaptation import TENANTS, Adaptation, Measures
from forecasting.lengths.service.calibration import Calibration, log_ratio
from forecasting.lengths.service.recently_used import RecentlyUsed
from forecasting.lengths.text.features import extract


class Corrected(NamedTuple):
    """A corrected prediction, and what is needed to learn from the real length."""

    tokens: float
    quantiles: tuple[float, ...]
    raw_tokens: float
    """As the model predicted."""
    adapted: tuple[float, tuple[float, ...]]
    """(tokens, quantiles) after the tenant's correction, before the calibration."""
    measures: Measures


class Online:
    """Not for several threads. *reader* brings measures to one size: the bundled student, whatever model answers."""

    def __init__(self, reader: Student) -> None:
        self.reader = reader
        self.adaptations: RecentlyUsed[str, Adaptation] = RecentlyUsed(Adaptation, TENANTS)
        self.calibrations: RecentlyUsed[tuple[str, str], Calibration] = RecentlyUsed(Calibration)

    def correct(self, query: LengthQuery, tokens: float, quantiles: Sequence[float]) -> Corrected:
        """What a model predicted for *query*, corrected; each figure at least 1, quantiles ascending."""
        measures = self.reader.scaled(extract(query).measures)
        factor = math.exp(self.adaptations[query.tenant].correction(measures))
        said = max(1.0, tokens * factor), tuple(max(1.0, quantile * factor) for quantile in quantiles)
        calibrated = self.calibrations[query.model, query.tenant].apply(*said)
        return Corrected(*calibrated, tokens, said, measures)

    def learn(self, query: LengthQuery, corrected: Corrected, real: float, *, cut: bool = False) -> None:
        """*query* came to *real* tokens; *cut*: because no more were allowed, so it is known to be at least as long."""
        calibration = self.calibrations[query.model, query.tenant]
        error = log_ratio(real, corrected.adapted[0]) - calibration.shift
        if not (cut and error < 0.0):
            self.adaptations[query.tenant].learn(corrected.measures, error)
        calibration.learn(*corrected.adapted, real, cut=cut)
