"""Demand used for planning: the newest forecasts, or recent demand where a forecast is missing or stale."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.execution import strategies
from controlplane.planning.forecasts import demand
from controlplane.planning.forecasts import services as forecasts
from controlplane.planning.models import Forecast, Quantity
from controlplane.planning.plans import waiting as waiting_work
from controlplane.tuning.selectors import tuned

if TYPE_CHECKING:
    from scheduling.planning.advisor import Band, Demand, EndpointDemand
    from scheduling.scaling import PlansFor

RECENT = timedelta(minutes=10)
"""Period of recent demand used without a forecast."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Expected:
    """Demand by (model, region) for each window of the horizon, and its source."""

    start: datetime
    window_s: int
    of: dict[demand.Endpoint, "EndpointDemand"] = field(default_factory=dict)
    follows: dict[str, "PlansFor"] = field(default_factory=dict)
    """Demand level that plans are made for, by model."""
    notes: dict[demand.Endpoint, str] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    """Models of which an endpoint has neither a usable forecast nor a counted minute, which is not zero demand."""

    def notes_of(self, model: str) -> list[str]:
        return [note for (name, _), note in self.notes.items() if name == model]

    def to_plan(self, since_s: float = 0.0) -> "Demand":
        """Return demand as the planner's type, on a clock that was 0 at *since_s*."""
        from scheduling.planning.advisor import Demand

        return Demand(self.start.timestamp() - since_s, float(self.window_s), self.of)


def levels(model: str, strategy: str) -> "tuple[str, PlansFor]":
    """Return the forecast band, and the level within it, that plans of *model* under *strategy* are made for."""
    from scheduling.planning.advisor import at_level

    level = tuned(model).PLAN_DEMAND
    band = "upper_80" if level in ("strategy", "mean") else level
    return band, at_level(strategies.plans_for(strategy), level)


def expect(now: datetime, followers: Mapping[str, str]) -> Expected | None:
    """Return demand of the next windows by the newest forecasts, or by recent demand where one is missing or stale.

    *followers* are the strategies that follow the plans, by model. None when neither is known for any endpoint: unknown
    is not zero demand.
    """
    newest = forecasts.newest(now, fresh_for())
    recent = demand.read(now - RECENT, demand.last_complete(now, demand.MINUTE_S), demand.MINUTE_S)
    if not newest and recent.known < forecasts.LEAST_WINDOWS:  # the first minute is only partly counted
        return None
    expected = expected_at(
        now,
        {endpoint: followers.get(endpoint[0], "") for endpoint in demand.endpoints()},
        lambda endpoint, quantity: newest.get((*endpoint, quantity)),
        recent.of,
    )
    waiting = waiting_work.read()
    due = {
        model: waiting[model].due(tuned(model).PLAN_NIW_BUFFER) for model in expected.follows.keys() & waiting.keys()
    }
    # Minute rows have requests that have ended: those that wait came besides.
    return replace(expected, of=dict(expected.to_plan().with_due(due, 0.0, demand.deferred_over_s()).of))


def expected_at(
    at: datetime,
    followers: Mapping[demand.Endpoint, str],
    forecast_of: Callable[[demand.Endpoint, Quantity], Forecast | None],
    recent_of: Callable[[demand.Endpoint, Quantity], Floats],
) -> Expected:
    """Return demand of the endpoints in *followers* (strategy by model) from *at*.

    By forecast; without a usable one, the highest recent minute in every window; with neither, 0.
    """
    from scheduling.planning.advisor import Band, EndpointDemand

    count = tuned().FORECAST_WINDOWS
    expected = Expected(demand.window_start(at, tuned().FORECAST_WINDOW_S), tuned().FORECAST_WINDOW_S)
    deferred = demand.deferred(at)
    cvs = demand.arrival_cvs(at)
    for endpoint, strategy in followers.items():
        band, plans_for = levels(endpoint[0], strategy)
        bands: dict[Quantity, Band] = {}
        for quantity in Quantity:
            forecast = forecast_of(endpoint, quantity)
            ahead_of = ahead(forecast, expected.start, count, band) if forecast else None
            if ahead_of is None:
                minutes = recent_of(endpoint, quantity)
                if not np.isfinite(minutes).any():
                    expected.unknown.add(endpoint[0])
                    minutes = np.zeros(1)
                highest = np.full(count, float(np.nanmax(minutes)))
                ahead_of = Band(highest, highest)
                expected.notes[endpoint] = "no forecast yet: the highest minute of the last ten stands in"
            elif forecast is not None and forecast.note:
                expected.notes.setdefault(endpoint, forecast.note)
            bands[quantity] = ahead_of
        beta = tuned(endpoint[0]).PLAN_NIW_BUFFER * deferred.get(endpoint, 0.0)
        expected.of[endpoint] = EndpointDemand.of(
            bands[Quantity.PROMPT], bands[Quantity.OUTPUT], plans_for, beta, cvs.get(endpoint, 1.0)
        )
        expected.follows[endpoint[0]] = plans_for
    return expected


def fresh_for() -> timedelta:
    """Return the maximum age of a forecast used for planning."""
    return timedelta(seconds=2 * max(tuned().FORECAST_EVERY_S, tuned().FORECAST_WINDOW_S))


def ahead(forecast: Forecast, start: datetime, count: int, band: str = "upper_80") -> "Band | None":
    """Return *forecast* for *count* windows from *start* with the upper end of *band*, its last window repeated beyond
    its end.

    None if it does not cover *start*, or its windows have another length.
    """
    from scheduling.planning.advisor import Band

    skipped = round((start - forecast.start_at).total_seconds() / forecast.window_s)
    if forecast.window_s != tuned().FORECAST_WINDOW_S or skipped >= len(forecast.mean):
        return None

    def shifted(values: list[float]) -> Floats:
        known = [*values[:1] * max(0, -skipped), *values[max(0, skipped) :]][:count]
        return np.array([*known, *known[-1:] * (count - len(known))], np.float64)

    return Band(shifted(forecast.mean), shifted(getattr(forecast, band)))
