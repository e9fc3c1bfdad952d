"""Forecasts of every endpoint's demand, made from the ledger's minute rows and stored as rows.

Fitted forecasters are stored in the state folder, one file per series, refitted rarely and otherwise updated with new
windows. Losing a file costs a fit. Plans use the series of all interactive SLO classes together; those of all deferred
classes together are for display.

A model for which no forecaster is set has the one of the least error in backtests on its own demand, of those that are quick
to fit (`choose_forecasters`).

Forecasters that are slow to fit (ARIMA, mLSTM) are fitted by a separate job, `fit_forecasters`: until then, and for
other series, the best quick one is used, and the forecast notes it.
"""

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from django.conf import settings
from numpy.typing import NDArray

from controlplane.events.models import Event, Severity
from controlplane.events.services import record
from controlplane.fleet.models import Region
from controlplane.planning.forecasts import demand, selectors
from controlplane.planning.json_values import plain
from controlplane.planning.models import Forecast, Quantity
from controlplane.tuning.selectors import tuned

if TYPE_CHECKING:
    from forecasting.workload import Fallback
    from forecasting.workload import Forecast as Predicted
    from forecasting.workload.calendar import Calendar

logger = logging.getLogger(__name__)

LEAST_WINDOWS = 2
"""Minimum windows for a forecast; with fewer, plans use recent demand."""
GROWN = 1.5
"""Refit once the known windows have grown by this factor."""
REFITS_SHARE = 0.5
"""Share of the forecast period after which no more forecasters are refitted; the others wait for the next round."""
LEAST_BACKTEST = 48
"""Minimum windows of a model's demand for a backtest; with fewer, the best of the shipped backtests is used."""
JUDGED = 144
"""Newest windows that a backtest judges, at most."""
HOUR_S, LEAST_HOURS = 3600, 48
"""Windows of a look further ahead than plans, and how many of them must be known."""
FAILED_KIND = "planning.forecaster_failed"
SAY_AGAIN = timedelta(minutes=15)
"""Minimum interval between events about failed forecasters."""


def make_forecasts(now: datetime) -> list[Forecast]:
    """Forecast prompt and output tokens of every endpoint for the next windows; return one row per series.

    The series are of all interactive, and of all deferred SLO classes together. A failed forecaster is replaced by a
    simpler one, which the row's note names; if all fail, only that series has no forecast. Raises the first error if no
    series has a forecast.
    """
    known, rows = _known(now), []
    if known.known < LEAST_WINDOWS:
        return []
    making = _Making(known)
    for endpoint in demand.endpoints():
        for quantity in Quantity:
            for group in ("", demand.DEFERRED):
                key = (endpoint, quantity, group)
                if (not group or np.nansum(known.of(*key))) and (predicted := making.predicted(key)):
                    rows.append(_row(key, predicted, now))
    Forecast.objects.bulk_create(rows)
    making.report(now)
    return rows


def by_hour(model: str, region: str, now: datetime, hours: int) -> list[selectors.ForecastWindow]:
    """Forecast all demand that plans count of *model* in *region* (empty: all) by hour, further ahead than plans look.

    It is of the sum alone, and not stored; empty before two days are known. The seasonal naive forecast keeps the shape of a
    day for a week, in 0.05 s; that of plans (`BEST`) is flat from the fourth day on, after 3 s.
    """
    until = demand.window_start(now, HOUR_S)
    starts = selectors.grid(until - timedelta(days=tuned().FORECAST_HISTORY_DAYS), until, HOUR_S)
    rates = selectors.demand(model, region, demand.TOKENS, starts, HOUR_S, demand.EVERY_CLASS)
    known = np.array(rates, np.float64)
    if np.isfinite(known).sum() < LEAST_HOURS:
        return []
    made = _ahead(known, starts[0], f"{model} {region}", region, hours)
    bands = zip(made.mean, made.lower_80, made.upper_80, made.lower_95, made.upper_95, strict=True)
    return [
        selectors.ForecastWindow(until + at * timedelta(seconds=HOUR_S), *map(float, values))
        for at, values in enumerate(bands)
    ]


def endpoints_by_hour(now: datetime, hours: int) -> "dict[demand.Endpoint, list[Predicted]]":
    """Forecast prompt and output tokens of interactive classes of each endpoint for *hours*, as `by_hour` and from the same
    hour on; endpoints of which less than two days are known are left out.
    """
    until = demand.window_start(now, HOUR_S)
    known = demand.read(until - timedelta(days=tuned().FORECAST_HISTORY_DAYS), until, HOUR_S)
    made = {}
    for endpoint in demand.endpoints():
        series = [known.of(endpoint, quantity) for quantity in Quantity]
        if np.isfinite(series).all(axis=0).sum() >= LEAST_HOURS:
            name, region = " ".join(endpoint), endpoint[1]
            made[endpoint] = [_ahead(each, known.start, name, region, hours) for each in series]
    return made


def _ahead(known: NDArray[np.float64], start: datetime, name: str, region: str, hours: int) -> "Predicted":
    """Forecast the next *hours* of the series *known* by hour from *start*."""
    from forecasting.workload import Series
    from forecasting.workload.forecaster import Naive

    first = int(np.isfinite(known).argmax())
    forecaster, calendar = Naive(), _calendar(region) if region else None
    forecaster.fit(Series(start.timestamp() + first * HOUR_S, float(HOUR_S), known[first:], name, calendar))
    return forecaster.predict(hours)


def _known(now: datetime) -> demand.DemandSeries:
    """Return the demand that forecasts are made from."""
    window_s = tuned().FORECAST_WINDOW_S
    until = demand.last_complete(now, window_s)
    return demand.read(until - timedelta(days=tuned().FORECAST_HISTORY_DAYS), until, window_s)


class _Making:
    """One round of forecasts: known demand and failed forecasters."""

    def __init__(self, known: demand.DemandSeries) -> None:
        self.known = known
        self.refit_until_s = time.monotonic() + REFITS_SHARE * tuned().FORECAST_EVERY_S
        self.stood_in: dict[str, Exception] = {}
        """Forecaster errors by name of a series that uses a fallback since."""
        self.without: dict[str, Exception] = {}
        """Forecaster errors by name of a series without a forecast."""

    def predicted(self, key: demand.Key) -> "Predicted | None":
        """Return the next windows of one series; None if its forecaster and all fallbacks failed."""
        from forecasting.workload import BEST, unavailable_reason

        try:
            learner = _Learner(key, self.known, self.refit_until_s)
            made = learner.predict(tuned().FORECAST_WINDOWS)
            if reason := unavailable_reason(tuned(key[0][0]).FORECASTER):
                made = replace(made, note=f"{reason} Until then {learner.name} stands in. {made.note}".rstrip())
        except NotFitted as note:
            made = _Learner(key, self.known, self.refit_until_s, BEST).predict(tuned().FORECAST_WINDOWS)
            return replace(made, note=f"{note}: {made.forecaster} stands in")
        except Exception as error:
            self.without[_name(key)] = error
            return None
        if learner.error is not None:
            self.stood_in[_name(key)] = learner.error
        return made

    def report(self, now: datetime) -> None:
        """Report all failures at once: an event with a traceback, or a log line while that event is recent."""
        failed = self.without or self.stood_in
        if not failed:
            return
        series, error = next(iter(failed.items()))
        what = "have no forecast" if self.without else "are forecast by a simpler forecaster"
        text = f"{len(failed)} series {what}. {series}: {type(error).__name__}: {error}"[:500]
        reported = Event.objects.filter(kind=FAILED_KIND, at__gt=now - SAY_AGAIN).exists()
        logger.warning("planning: %s", text, exc_info=None if reported else error)
        if not reported:
            severity = Severity.CRITICAL if self.without else Severity.WARNING
            record(FAILED_KIND, actor="planner", reason=text, inputs={"series": sorted(failed)}, severity=severity)
        if self.without and not Forecast.objects.filter(made_at=now).exists():
            raise error


def fit_forecasters(now: datetime, requested_work_waits: Callable[[], bool] = lambda: False) -> int:
    """Fit slow forecasters of the series used by plans, where due; return their number.

    Stops early when *requested_work_waits*. Failures are reported as by `make_forecasts`.
    """
    endpoints = demand.endpoints()
    if not endpoints:
        return 0
    known = _known(now)
    if known.known < LEAST_WINDOWS:
        return 0
    choose_forecasters(known, requested_work_waits)
    endpoints = [endpoint for endpoint in endpoints if _is_slow(forecaster_name(endpoint[0]))]
    making, count = _Making(known), 0
    for endpoint in endpoints:
        for quantity in Quantity:
            if requested_work_waits():
                return count
            key = (endpoint, quantity, "")
            learner = _Learner(key, known)
            count += learner.fit_when_due()
            if learner.error is not None:
                making.stood_in[_name(key)] = learner.error
    making.report(now)
    return count


def choose_forecasters(known: demand.DemandSeries, requested_work_waits: Callable[[], bool]) -> None:
    """Choose the forecaster of each model for which none is set, by a backtest on its demand in all regions; once a refit
    period, or when that has grown.
    """
    from forecasting.workload import FORECASTERS, Series, backtest, unavailable_reason

    quick = {name: of for name, of in FORECASTERS.items() if not of.slow_to_fit and not unavailable_reason(name)}
    chosen, at_s = _chosen(), time.time()
    for model in {model for model, _ in demand.endpoints() if not tuned(model).FORECASTER}:
        if requested_work_waits():
            return
        own = [known.of(each, of) for each in demand.endpoints() if each[0] == model for of in Quantity]
        tokens = np.asarray(np.sum(own, axis=0), np.float64)
        series = Series(known.start.timestamp(), float(known.window_s), tokens, model)
        windows = int(np.count_nonzero(series.known))
        before = chosen.get(model, {"windows": 0, "at_s": 0.0})
        grown = windows > GROWN * before["windows"]
        if windows < LEAST_BACKTEST or (not grown and at_s - before["at_s"] < tuned().FORECAST_REFIT_S):
            continue
        judged = min(len(series) // 3, JUDGED)
        try:
            rows = backtest(series, quick, len(series) - judged, tuned().FORECAST_WINDOWS)
        except ValueError:  # nothing was asked of it lately
            continue
        errors = {row["forecaster"]: row["error"] for row in rows}
        chosen[model] = {
            "name": min(errors, key=errors.__getitem__),
            "errors": errors,
            "windows": windows,
            "at_s": at_s,
        }
        _chosen_file().parent.mkdir(parents=True, exist_ok=True)
        _chosen_file().write_text(json.dumps(chosen))


def _chosen_file() -> Path:
    return Path(settings.STATE_DIR) / "forecasters" / "chosen.json"


def _chosen() -> dict[str, Any]:
    """Return by model its last backtest, and the forecaster of the least error in that."""
    try:
        return cast("dict[str, Any]", json.loads(_chosen_file().read_text()))
    except (OSError, ValueError):
        return {}


def _is_slow(name: str) -> bool:
    from forecasting.workload import FORECASTERS

    return FORECASTERS[name].slow_to_fit


def forecaster_name(model: str = "") -> str:
    """Return the forecaster used for *model*: the one that is set, else the best in its backtests, else by default."""
    from forecasting.workload import usable

    return usable(tuned(model).FORECASTER or _chosen().get(model, {}).get("name", ""))


@dataclass(frozen=True, slots=True)
class _Fitted:
    """Time of a forecaster's fit and the number of known windows then."""

    at_s: float
    windows: int
    failed: Sequence[str] = ()
    """Failures that preceded the stored forecaster."""


def _calendar(region: str) -> "Calendar":
    """Return the clock and holidays of the people who ask in *region*."""
    from forecasting.workload.calendar import Calendar

    row = Region.objects.get(name=region)
    return Calendar(row.time_zone or settings.TIME_ZONE, row.days_off)


class NotFitted(Exception):
    """A slow forecaster has not been fitted, or never is for deferred demand."""


class _Learner:
    """Forecaster of one series, with its file."""

    def __init__(
        self, key: demand.Key, known: demand.DemandSeries, refit_until_s: float = math.inf, name: str = ""
    ) -> None:
        from forecasting.workload import Series

        self.name = name or forecaster_name(key[0][0])
        self.series = Series(
            known.start.timestamp(), float(known.window_s), known.of(*key), _name(key), _calendar(key[0][1])
        )
        self.deferred = bool(key[2])
        self.file = _file(key, known.window_s, self.name)
        self.note = self.file.with_suffix(".json")
        self.refit_until_s = refit_until_s
        self.error: Exception | None = None
        """Error of the forecaster, which a simpler one replaces from then on."""

    def predict(self, horizon: int) -> "Predicted":
        """Return the next windows. Raises NotFitted before the first fit of a slow forecaster."""
        slow = _is_slow(self.name)
        if slow:
            self.refit_until_s = -math.inf  # refitted by `fit_forecasters`
        pair = self._loaded()
        if pair is None:
            if slow:
                self.note.unlink(missing_ok=True)  # the stored one is unusable
                raise NotFitted(f"{self.name} is not fitted " + ("for deferred demand" if self.deferred else "yet"))
            pair = self._fitted()
        forecaster, fitted = pair
        failed = len(forecaster.failed)
        predicted = forecaster.predict(horizon)
        if len(forecaster.failed) > failed:
            self._keep(forecaster, fitted)
        self.error = forecaster.error
        return predicted

    def fit_when_due(self) -> bool:
        """Fit and store the forecaster if the stored one is too old; return whether it was fitted."""
        try:
            fitted = _Fitted(**json.loads(self.note.read_text()))
            if not self._is_old(fitted) and not self._has_grown(fitted):
                return False
        except (OSError, ValueError, TypeError):
            pass  # missing or unreadable
        self.error = self._fitted()[0].error
        return True

    def _fitted(self, kept: "Fallback | None" = None) -> "tuple[Fallback, _Fitted]":
        """Fit a new forecaster, or refit *kept*, which keeps its learned errors."""
        from forecasting.workload import FORECASTERS, Fallback

        fitted = self._fitted_now()
        if kept is None:
            kept = Fallback(FORECASTERS[self.name]())
            kept.fit(self.series)
        else:
            kept.refit(self.series)
        self._keep(kept, fitted)
        return kept, fitted

    def _fitted_now(self) -> _Fitted:
        return _Fitted(datetime.now(UTC).timestamp(), self._known_windows())

    def _loaded(self) -> "tuple[Fallback, _Fitted] | None":
        """Load the stored forecaster, updated with new windows and refitted once old; None if a new one is needed."""
        from forecasting.workload import Fallback, load

        try:
            fitted = _Fitted(**json.loads(self.note.read_text()))
            may_refit = time.monotonic() < self.refit_until_s
            if may_refit and (self._has_grown(fitted) or (fitted.failed and self._is_old(fitted))):
                return None
            forecaster = Fallback(load(self.file), fitted.failed)
            knows_until_s = forecaster.predict(1).start_s
        except FileNotFoundError:
            return None
        except Exception as error:
            logger.warning("planning: %s is refitted, its file cannot be read: %s", self.series.name, error)
            return None
        new = round((self.series.end_s - knows_until_s) / self.series.window_s)
        if not 0 <= new <= len(self.series):
            return None
        if new:
            forecaster.update(self.series.tokens_per_s[len(self.series) - new :])
            if forecaster.forecaster.since_fit == 0:  # refitted on a day of new windows
                fitted = self._fitted_now()
        if may_refit and self._is_old(fitted):
            return self._fitted(forecaster)
        if new:
            self._keep(forecaster, fitted)
        return forecaster, fitted

    def _is_old(self, fitted: _Fitted) -> bool:
        return datetime.now(UTC).timestamp() - fitted.at_s > tuned().FORECAST_REFIT_S

    def _has_grown(self, fitted: _Fitted) -> bool:
        return self._known_windows() > GROWN * fitted.windows

    def _keep(self, forecaster: "Fallback", fitted: _Fitted) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        forecaster.forecaster.save(self.file)
        kept = {"at_s": fitted.at_s, "windows": fitted.windows, "failed": forecaster.failed}
        self.note.write_text(json.dumps(kept))

    def _known_windows(self) -> int:
        return int(np.count_nonzero(self.series.known))


def _name(key: demand.Key) -> str:
    (model, region), quantity, slo_class = key
    return " ".join(filter(None, (model, region, quantity, slo_class)))


def _file(key: demand.Key, window_s: int, forecaster: str) -> Path:
    digest = hashlib.sha256(f"{_name(key)} as asked {window_s}".encode()).hexdigest()[:20]
    return Path(settings.STATE_DIR) / "forecasters" / forecaster / f"{digest}.npz"


def _row(key: demand.Key, predicted: "Predicted", now: datetime) -> Forecast:
    (model, region), quantity, slo_class = key
    bands = {
        name: plain(np.round(getattr(predicted, name), 3))
        for name in ("mean", "lower_80", "upper_80", "lower_95", "upper_95")
    }
    return Forecast(
        made_at=now,
        model=model,
        region=region,
        slo_class=slo_class,
        quantity=quantity,
        forecaster=predicted.forecaster,
        window_s=int(predicted.window_s),
        start_at=datetime.fromtimestamp(predicted.start_s, UTC),
        note=predicted.note[:255],
        **bands,
    )


def newest(now: datetime, within: timedelta) -> dict[tuple[str, str, str], Forecast]:
    """Return the newest forecast of each (model, region, quantity) made *within* that time, for interactive classes."""
    rows = Forecast.objects.filter(slo_class="", made_at__gt=now - within, made_at__lte=now).order_by("pk")
    return {(row.model, row.region, row.quantity): row for row in rows}
