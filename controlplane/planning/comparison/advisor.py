"""Plans inside a simulation of the last hours, made as they are live and by what was known then."""

from bisect import bisect_right
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.forecasts import demand
from controlplane.planning.models import Forecast, Quantity
from controlplane.planning.plans import capability, inventory
from controlplane.planning.plans.expected import RECENT, Expected, expected_at, fresh_for, levels
from controlplane.planning.plans.round import plan_settings

if TYPE_CHECKING:
    from scheduling.scaling import Advice, EndpointView

RECENT_MINUTES = int(RECENT.total_seconds()) // demand.MINUTE_S


class Advisor:
    """The planner of a simulation: that of live plans, by the forecasts of that time."""

    def __init__(self, fleet: inventory.Fleet, from_at: datetime, to_at: datetime, strategy: str = "") -> None:
        """*from_at* to *to_at* is simulated; *strategy* is who follows the plans."""
        from scheduling.planning.advisor import SimulatedPlanner

        self._from_at = from_at
        self._endpoints = dict.fromkeys(((model, region) for model, region, _ in fleet.deployments), strategy)
        self._counted = demand.read(from_at - RECENT - timedelta(minutes=1), to_at, demand.MINUTE_S)
        rows = Forecast.objects.filter(slo_class="", made_at__gte=from_at - fresh_for(), made_at__lt=to_at)
        self._within_s = fresh_for().total_seconds()
        self._forecasts: dict[tuple[str, str, str], tuple[list[float], list[Forecast]]] = {}
        for row in rows.order_by("made_at"):
            times, forecasts = self._forecasts.setdefault((row.model, row.region, row.quantity), ([], []))
            times.append(row.made_at.timestamp())
            forecasts.append(row)
        self._planner = SimulatedPlanner(
            demand_at=lambda now_s: self._expected(now_s).to_plan(from_at.timestamp()),
            fleet_of=fleet.to_plan().with_instances,
            capability=capability.read(fleet, to_at),
            follows={model: levels(model, strategy)[1] for model, _ in self._endpoints},
            settings=plan_settings(),
        )

    def advise(self, now_s: float, views: Sequence["EndpointView"]) -> list["Advice | None"]:
        """As live: make a new plan when it is due, and advise by the one in force."""
        return self._planner.advise(now_s, views)

    def _expected(self, now_s: float) -> Expected:
        """Demand of the windows to come, as known at that time."""
        at = self._from_at + timedelta(seconds=now_s)
        at_s = at.timestamp()
        until = int((at - self._counted.start).total_seconds() // demand.MINUTE_S)

        def forecast_of(endpoint: demand.Endpoint, quantity: Quantity) -> Forecast | None:
            times, rows = self._forecasts.get((*endpoint, quantity), ([], []))
            number = bisect_right(times, at_s) - 1
            return rows[number] if number >= 0 and at_s - times[number] <= self._within_s else None

        def recent_of(endpoint: demand.Endpoint, quantity: Quantity) -> NDArray[np.float64]:
            return self._counted.of(endpoint, quantity)[max(0, until - RECENT_MINUTES) : until]

        return expected_at(at, self._endpoints, forecast_of, recent_of)
