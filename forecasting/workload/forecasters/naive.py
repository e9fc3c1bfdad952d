"""The yardstick: what was measured at the same time of the day before."""

from forecasting.workload.forecasters.calibrated import Calibrated
from forecasting.workload.forecasters.points import SeasonalNaive


class Naive(Calibrated):
    name = "seasonal_naive"
    model_class = SeasonalNaive
