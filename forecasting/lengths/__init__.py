"""How long a request will be: prompt tokens before an instance counts them, output tokens before they are produced.

Models of output length share one interface, `LengthModel`; `MODELS` has them by name. The data path asks a `Student`.
torch, transformers and scikit-learn are imported only when a model that needs them is fitted or asked.
"""

from typing import Final

from forecasting.lengths.baselines import ClassMean, PromptBuckets, TenantHistogram
from forecasting.lengths.ours import Ours
from forecasting.lengths.preserve import PreServe
from forecasting.lengths.prior import LengthPrior, OutputQuery
from forecasting.lengths.query import QUANTILES, LengthModel, LengthQuery, Predictions, Sample
from forecasting.lengths.scoring import score
from forecasting.lengths.ssjf import FORMULATIONS, Pairwise
from forecasting.lengths.student import Student, bundled
from forecasting.lengths.trees import Trees

MODELS: Final[dict[str, type[LengthModel]]] = {
    model.name: model
    for model in (Student, Ours, ClassMean, TenantHistogram, PromptBuckets, Trees, *FORMULATIONS, Pairwise, PreServe)
}
"""Length models by name."""

__all__ = [
    "MODELS",
    "QUANTILES",
    "LengthModel",
    "LengthPrior",
    "LengthQuery",
    "OutputQuery",
    "Predictions",
    "Sample",
    "Student",
    "bundled",
    "score",
]
