"""The yardstick: what was measured at the same time of the day before."""

from forecasting.workload.calibrated import Calibrated
from forecasting.workload.points import SeasonalNaive


class Naive(Calibrated):
    name = "seasonal_naive"
    model_class = SeasonalNaive
