"""How long a request will be: prompt tokens before an instance counts them, output tokens before they are produced."""

from forecasting.lengths.prior import LengthPrior, OutputQuery

__all__ = ["LengthPrior", "OutputQuery"]
