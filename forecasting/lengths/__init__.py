"""Predicted lengths of requests: prompt tokens before an instance counts them, output tokens before they are produced.

Models of output length share one interface, `LengthModel`; `MODELS` has them by name. The data path asks `Trees`.
scikit-learn is imported only when a model is fitted that needs it, torch and transformers when one on an encoder is
opened.
"""

from typing import Final

from forecasting import models_extra
from forecasting.lengths.baselines import ClassMean, PromptBuckets, TenantHistogram
from forecasting.lengths.model import Fitting, LengthModel
from forecasting.lengths.online import LengthPrior
from forecasting.lengths.ours import Ours
from forecasting.lengths.papers import FORMULATIONS, PreServe
from forecasting.lengths.query import Estimate, LengthQuery, Sample
from forecasting.lengths.scoring import score
from forecasting.lengths.trees import Trees, bundled

MODELS: Final[dict[str, type[LengthModel]]] = {
    model.name: model for model in (Trees, Ours, ClassMean, TenantHistogram, PromptBuckets, *FORMULATIONS, PreServe)
}
"""Length models by name."""
ON_ENCODER: Final = frozenset(name for name, model in MODELS.items() if model.on_encoder)
TEXTLESS: Final = frozenset(name for name, model in MODELS.items() if not model.reads_text)
"""Models that learn from samples without text."""


def unavailable_reason(kind: str) -> str:
    """Return why length models of *kind* can be neither fitted nor asked here; empty if they can."""
    return models_extra.missing_for(f"The length model {kind}") if kind in ON_ENCODER else ""


__all__ = [
    "MODELS",
    "ON_ENCODER",
    "TEXTLESS",
    "Estimate",
    "Fitting",
    "LengthModel",
    "LengthPrior",
    "LengthQuery",
    "Sample",
    "Trees",
    "bundled",
    "score",
    "unavailable_reason",
]
