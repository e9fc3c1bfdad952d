"""How long a request will be: prompt tokens before an instance counts them, output tokens before they are produced.

Models of output length share one interface, `LengthModel`; `MODELS` has them by name. The data path asks a `Student`.
scikit-learn is imported only when a model is fitted that needs it, torch and transformers when one on an encoder is opened.
"""

from typing import Final

from forecasting import models_extra
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


def rests(kind: str) -> str:
    """Why length models of *kind* can be neither fitted nor asked here; empty if they can."""
    return models_extra.missing_for(f"The length model {kind}") if kind in ON_ENCODER else ""


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
    "rests",
    "score",
]
