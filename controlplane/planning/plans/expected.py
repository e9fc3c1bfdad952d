"""Demand used for planning: the newest forecasts, or recent demand where a forecast is missing or stale."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.execution import strategies
from controlplane.planning.forecasts import demand
from controlplane.planning.forecasts import services as forecasts
from controlplane.planning.models import Forecast, Quantity
from controlplane.planning.plans import waiting
from controlplane.tuning.selectors import tuned

if TYPE_CHECKING:
    from scheduling.planning.advisor import Band, Demand
    from scheduling.scaling import PlansFor

RECENT_MINUTES = 10
"""Minutes of recent demand used without a forecast, and over which the load of now is measured."""
Floats = NDArray[np.float64]


class Expected(NamedTuple):
    """Demand of each window of the horizon, and what is known of it."""

    demand: "Demand"
    follows: dict[str, "PlansFor"]
    """What plans are made for, by model."""
    notes: dict[demand.Endpoint, str]
    unknown: set[str]
    """Models of which an endpoint has neither a usable forecast nor a counted minute, which is not zero demand."""


def levels(model: str, strategy: str) -> "tuple[str, PlansFor]":
    """Return the forecast band, and the level within it, that plans of *model* under *strategy* are made for."""
    from scheduling.planning.advisor import at_level

    level = tuned(model).PLAN_DEMAND
    band = "upper_80" if level in ("strategy", "mean") else level
    return band, at_level(strategies.plans_for(strategy), level)


def expect(now: datetime, followers: Mapping[str, str]) -> Expected | None:
    """Return demand of the next windows by the newest forecasts, or the highest recent minute where one is missing or
    stale.

    *followers* are the strategies that follow the plans, by model. None when neither is known for any endpoint: unknown
    is not zero demand.
    """
    from scheduling.planning.advisor import Band, Demand, EndpointDemand

    newest = forecasts.newest(now, fresh_for())
    until, over_s = demand.last_complete(now, demand.MINUTE_S), demand.deferred_over_s()
    past = demand.read(until - max(demand.BURSTS_OVER, timedelta(seconds=over_s)), until, demand.MINUTE_S)
    if not newest and past.known < forecasts.LEAST_WINDOWS:  # the first minute is only partly counted
        return None
    count, window_s = tuned().FORECAST_WINDOWS, tuned().FORECAST_WINDOW_S
    start = demand.window_start(now, window_s)
    of: dict[demand.Endpoint, EndpointDemand] = {}
    follows: dict[str, PlansFor] = {}
    notes: dict[demand.Endpoint, str] = {}
    unknown: set[str] = set()
    for endpoint in demand.endpoints():
        model = endpoint[0]
        band, follows[model] = levels(model, followers.get(model, ""))
        bands = []
        for quantity in (Quantity.PROMPT, Quantity.OUTPUT):
            forecast = newest.get((*endpoint, quantity))
            expected = ahead(forecast, start, count, band) if forecast else None
            if expected is None:
                minutes = past.of(endpoint, quantity)[-RECENT_MINUTES:]
                if not np.isfinite(minutes).any():
                    unknown.add(model)
                    minutes = np.zeros(1)
                expected = Band(*[np.full(count, float(np.nanmax(minutes)))] * 2)
                notes[endpoint] = "no forecast yet: the highest minute of the last ten stands in"
            elif forecast is not None and forecast.note:
                notes.setdefault(endpoint, forecast.note)
            bands.append(expected)
        share, cv = tuned(model).PLAN_NIW_BUFFER, past.arrival_cv(endpoint)
        beta = share * past.rate(endpoint, over_s, demand.DEFERRED)
        now_over_s = RECENT_MINUTES * demand.MINUTE_S
        asked = past.rate(endpoint, now_over_s) + share * past.rate(endpoint, now_over_s, demand.DEFERRED)
        of[endpoint] = EndpointDemand.of(bands[0], bands[1], follows[model], beta, cv, asked)
    held = waiting.read()
    due = {model: held[model].due(tuned(model).PLAN_NIW_BUFFER) for model in follows.keys() & held.keys()}
    # Minute rows have requests that have ended: those that wait came besides.
    expected_demand = Demand(start.timestamp(), float(window_s), of).with_due(due, 0.0, over_s)
    return Expected(expected_demand, follows, notes, unknown)


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
