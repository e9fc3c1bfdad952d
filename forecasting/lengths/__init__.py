"""How long a request will be: prompt tokens before an instance counts them, output tokens before they are produced.

Models of output length share one interface, `LengthModel`; `MODELS` has them by name. The data path asks a `Student`.
torch, transformers and scikit-learn are imported only when a model that needs them is fitted or asked.
"""

from typing import Final

from forecasting.lengths.models.baselines import ClassMean, PromptBuckets, TenantHistogram
from forecasting.lengths.models.ours import Ours
from forecasting.lengths.models.preserve import PreServe
from forecasting.lengths.models.proxy import Proxy
from forecasting.lengths.models.ssjf import FORMULATIONS
from forecasting.lengths.models.student import Student, bundled
from forecasting.lengths.models.trees import Trees
from forecasting.lengths.query import LengthModel, LengthQuery, Sample
from forecasting.lengths.service.prior import LengthPrior, OutputQuery
from forecasting.lengths.training.scoring import score

MODELS: Final[dict[str, type[LengthModel]]] = {
    model.name: model
    for model in (Student, Ours, ClassMean, TenantHistogram, PromptBuckets, Trees, *FORMULATIONS, PreServe)
}
"""Length models by name."""
ON_ENCODER: Final = frozenset(name for name, model in MODELS.items() if issubclass(model, Ours | Proxy))
"""Those that read prompts by an encoder: some milliseconds each."""

__all__ = [
    "MODELS",
    "ON_ENCODER",
    "LengthModel",
    "LengthPrior",
    "LengthQuery",
    "OutputQuery",
    "Sample",
    "Student",
    "bundled",
    "score",
]
