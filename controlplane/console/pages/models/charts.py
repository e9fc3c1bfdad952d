"""The chart of a model: its demand in all regions with the forecast's bands, and what its instances can do."""

from dataclasses import replace

from controlplane.console.charts.spec import Chart
from controlplane.console.pages.forecast.charts import demand_and_forecast
from controlplane.console.pages.forecast.selectors import Seen

KEY = "model"
NO_DEMAND = "No request in the time shown. The first one that ends makes the first minute of demand."


def demand_and_capacity(seen: Seen) -> Chart:
    """As on the forecast page, of all regions together. A row shows its lines, an open one all of it."""
    chart = demand_and_forecast(seen.outlook, NO_DEMAND)
    return replace(
        chart,
        key=KEY,
        title="Demand and capacity",
        caption="Output tokens per second of the interactive classes, all regions; bands are summed over regions",
        size="medium",
    )
