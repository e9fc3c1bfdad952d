"""The chart of a model, or of the fleet: demand in all regions with the forecast's bands, and what instances can do."""

from dataclasses import replace
from datetime import datetime

from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import Chart
from controlplane.console.pages.forecast.charts import demand_and_forecast, unit_title
from controlplane.console.pages.forecast.selectors import Asked, see
from controlplane.planning.forecasts.demand import EVERY_CLASS, TOKENS
from controlplane.tuning.selectors import tuned

KEY = "model"
BACK = 3  # times as far as forecasts look ahead
EVERY_S = 10
NO_DEMAND = "No request in the time shown. The first one that ends makes the first minute of demand."


def hours_back() -> float:
    return BACK * tuned().FORECAST_WINDOWS * tuned().FORECAST_WINDOW_S / 3600


def demand_and_capacity(model: str, quantity: str, now: datetime) -> Chart:
    """As on the forecast page, of all classes and regions together, and without a *model* of all models. Built once in ten
    seconds for everybody who looks.
    """

    def build() -> list[Chart]:
        chart = demand_and_forecast(see(Asked(model, "", quantity, hours_back(), EVERY_CLASS), now).outlook, NO_DEMAND)
        over = "regions" if model else "endpoints"
        caption = f"{unit_title(quantity)} per second of all classes and regions; bands are summed over {over}"
        return [
            replace(
                chart,
                key=KEY,
                title="Demand and capacity" if quantity == TOKENS else "Demand",
                caption=caption,
                size="medium",
            )
        ]

    return once((KEY, model, quantity, int(now.timestamp()) // EVERY_S), build)[0]
