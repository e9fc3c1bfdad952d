"""Demand that plans are made for: the newest forecasts; where one is missing or old, what came in the last minutes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
from django.conf import settings
from numpy.typing import NDArray

from controlplane.planning.execution import strategies
from controlplane.planning.forecasts import demand
from controlplane.planning.forecasts import services as forecasts
from controlplane.planning.models import Forecast, Quantity

if TYPE_CHECKING:
    from scheduling.scaling import PlansFor

RECENT = timedelta(minutes=10)
"""Without a forecast, the demand of this past time is used."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Expected:
    """Demand by (model, region) for each window of the horizon, in tokens a second, and where it is from."""

    start: datetime
    window_s: int
    tokens_per_s: dict[demand.Endpoint, Floats] = field(default_factory=dict)
    prompt_tokens_per_s: dict[demand.Endpoint, Floats] = field(default_factory=dict)
    """The part of it that is prompts."""
    soon_tokens_per_s: dict[demand.Endpoint, Floats] = field(default_factory=dict)
    """The same demand as instances are added for; `scheduling.scaling.PlansFor`."""
    buffer_tokens_per_s: dict[demand.Endpoint, float] = field(default_factory=dict)
    notes: dict[demand.Endpoint, str] = field(default_factory=dict)

    def prompt_share(self, model: str) -> float:
        """Share of the model's tokens that are prompts; a half where none are expected."""
        total, prompt = (
            float(sum(values.sum() for (name, _), values in tokens.items() if name == model))
            for tokens in (self.tokens_per_s, self.prompt_tokens_per_s)
        )
        return min(1.0, prompt / total) if total > 0 else 0.5

    def notes_of(self, model: str) -> list[str]:
        return [note for (name, _), note in self.notes.items() if name == model]

    @property
    def end(self) -> datetime:
        count = max((len(values) for values in self.tokens_per_s.values()), default=0)
        return self.start + timedelta(seconds=self.window_s * count)


def levels(strategy: str) -> "tuple[str, PlansFor]":
    """What of forecasts plans are made for that *strategy* follows: a band, and how far up to its upper end."""
    from scheduling.scaling import PlansFor

    match settings.PLAN_DEMAND:
        case "strategy":
            return "upper_80", strategies.plans_for(strategy)
        case "mean":
            return "upper_80", PlansFor()
        case band:
            return band, PlansFor(1.0, 1.0)


def expect(now: datetime, followers: Mapping[str, str]) -> Expected | None:
    """Demand of the next windows by the newest forecasts; where one is missing or old, what came in the last minutes.

    *followers* are the strategies that will follow the plans, by model. None when neither is known of any endpoint:
    nothing is not the same as no demand.
    """
    newest = forecasts.newest(now, fresh_for())
    recent = demand.read(now - RECENT, demand.last_complete(now, demand.MINUTE_S), demand.MINUTE_S)
    if not newest and recent.known < forecasts.LEAST_WINDOWS:  # the first minute was not counted from its begin
        return None
    expected = expected_at(
        now,
        {endpoint: followers.get(endpoint[0], "") for endpoint in demand.endpoints()},
        lambda endpoint, quantity: newest.get((*endpoint, quantity)),
        recent.of,
    )
    if share := settings.PLAN_NIW_BUFFER:
        from scheduling.planning.capacity import niw_buffer

        for endpoint, rate in demand.non_interactive(now).items():
            expected.buffer_tokens_per_s[endpoint] = float(niw_buffer(rate, 1.0, share))
    return expected


def expected_at(
    at: datetime,
    followers: Mapping[demand.Endpoint, str],
    forecast_of: Callable[[demand.Endpoint, Quantity], Forecast | None],
    recent_of: Callable[[demand.Endpoint, Quantity], Floats],
) -> Expected:
    """Demand of the endpoints in *followers*, each with the strategy that follows its plans, from *at* on.

    By forecast; without a usable one, the highest of the recent minutes in every window.
    """
    count = settings.FORECAST_WINDOWS
    expected = Expected(demand.window_start(at, settings.FORECAST_WINDOW_S), settings.FORECAST_WINDOW_S)
    for endpoint, strategy in followers.items():
        total, soon = np.zeros(count), np.zeros(count)
        band, towards = levels(strategy)
        for quantity in Quantity:
            forecast = forecast_of(endpoint, quantity)
            kept = ahead(forecast, expected.start, count, band, towards.kept) if forecast else None
            sooner = ahead(forecast, expected.start, count, band, towards.soon) if forecast else None
            if kept is None or sooner is None:
                minutes = recent_of(endpoint, quantity)
                kept = sooner = np.full(count, float(np.nanmax(minutes)) if np.isfinite(minutes).any() else 0.0)
                expected.notes[endpoint] = "no forecast yet: the highest minute of the last ten stands in"
            elif forecast is not None and forecast.note:
                expected.notes.setdefault(endpoint, forecast.note)
            total += kept
            soon += sooner
            if quantity == Quantity.PROMPT:
                expected.prompt_tokens_per_s[endpoint] = kept
        expected.tokens_per_s[endpoint], expected.soon_tokens_per_s[endpoint] = total, soon
    return expected


def fresh_for() -> timedelta:
    """How old a forecast may be and still be planned by."""
    return timedelta(seconds=2 * max(settings.FORECAST_EVERY_S, settings.FORECAST_WINDOW_S))


def ahead(
    forecast: Forecast, start: datetime, count: int, band: str = "upper_80", towards: float = 0.0
) -> Floats | None:
    """Return *forecast* for *count* windows from *start*; its last one is repeated beyond its end.

    Its mean (*towards* 0), the upper end of *band* (1) or what lies between. None if it does not cover the time from
    *start* on, or its windows are of another length.
    """
    values: Floats = np.array(forecast.mean, np.float64)
    if towards:
        values += towards * (np.array(getattr(forecast, band), np.float64) - values)
    skipped = round((start - forecast.start_at).total_seconds() / forecast.window_s)
    if forecast.window_s != settings.FORECAST_WINDOW_S or skipped >= len(values):
        return None
    values = np.concatenate([np.repeat(values[:1], max(0, -skipped)), values[max(0, skipped) :]])[:count]
    values = np.maximum(0.0, np.concatenate([values, np.repeat(values[-1:], count - len(values))]))
    return values
