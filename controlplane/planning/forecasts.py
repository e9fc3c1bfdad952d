"""Forecasts of every endpoint's demand, made from the ledger's minute rows and kept as rows.

What a forecaster has learned is kept in the state folder, one file a series, so that it is fitted rarely and otherwise
only told what is new. Losing those files costs a fit. Plans are made from the series of all SLO classes together; those of
single classes are for who looks.
"""

import hashlib
import json
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from controlplane.planning import demand
from controlplane.planning.json_values import plain
from controlplane.planning.models import Forecast, Quantity

if TYPE_CHECKING:
    from forecasting.workload import Forecast as Predicted
    from forecasting.workload import Forecaster

logger = logging.getLogger(__name__)

LEAST_WINDOWS = 2
"""With fewer there is nothing to forecast from; plans go by the last minutes."""
GROWN = 1.5
"""A forecaster that was fitted on few windows is fitted anew when there are so many times as many."""
CLASSES_SHARE = 0.1
"""How much of the time between forecasts those of single classes may take: plans do without them, and come after them."""


def make_forecasts(now: datetime) -> list[Forecast]:
    """Forecast prompt and output tokens of every endpoint for the next windows; one row a series.

    Series are of all SLO classes together, whose rows are stored first, and of each class with demand. A forecaster that
    cannot be made, loaded or asked costs its series alone: the others are made, and it is logged.
    """
    window_s = settings.FORECAST_WINDOW_S
    until = demand.last_complete(now, window_s)
    known = demand.read(until - timedelta(days=settings.FORECAST_HISTORY_DAYS), until, window_s)
    if known.known < LEAST_WINDOWS:
        return []
    every = {}
    for endpoint in demand.endpoints():
        for quantity in Quantity:
            if predicted := _predicted((endpoint, quantity, ""), known):
                every[endpoint, quantity] = predicted
    rows = Forecast.objects.bulk_create([_row((*key, ""), predicted, now) for key, predicted in every.items()])
    return rows + Forecast.objects.bulk_create(_of_classes(known, every, now))


def _of_classes(
    known: demand.Demand, every: dict[tuple[demand.Endpoint, Quantity], "Predicted"], now: datetime
) -> list[Forecast]:
    """Forecasts of single classes, until their time is over: those left come first the next time.

    A class that alone makes up the demand of an endpoint has the forecast of *every* class together.
    """
    until_s = time.monotonic() + CLASSES_SHARE * settings.FORECAST_EVERY_S
    rows, keys = [], []
    for key in known.by_class():
        endpoint, quantity, _ = key
        if not np.array_equal(known.of(*key), known.of(endpoint, quantity), equal_nan=True):
            keys.append(key)
        elif predicted := every.get((endpoint, quantity)):
            rows.append(_row(key, predicted, now))
    keys.sort(key=lambda key: _kept_s(_file(key, known.window_s)))
    for place, key in enumerate(keys):
        if time.monotonic() > until_s:
            logger.info("planning: %d series of single classes wait for the next forecasts", len(keys) - place)
            break
        if predicted := _predicted(key, known):
            rows.append(_row(key, predicted, now))
    return rows


def _predicted(key: demand.Key, known: demand.Demand) -> "Predicted | None":
    """The next windows of one series; None if its forecaster failed."""
    try:
        return _Learner(key, known).predict(settings.FORECAST_WINDOWS)
    except ImproperlyConfigured:
        raise
    except Exception:
        logger.exception("planning: no forecast of %s", _name(key))
        return None


def forecaster_name() -> str:
    """The forecaster in use. Raises ImproperlyConfigured if the setting names one that does not exist."""
    from forecasting.workload import BEST, FORECASTERS

    name = settings.FORECASTER or BEST
    if name not in FORECASTERS:
        raise ImproperlyConfigured(f"PILOTHOUSE_FORECASTER: there is no {name!r}; there are {', '.join(FORECASTERS)}")
    return name


@dataclass(frozen=True, slots=True)
class _Fitted:
    """When and on how many known windows a forecaster was fitted."""

    at_s: float
    windows: int


class _Learner:
    """The forecaster of one series, with its file."""

    def __init__(self, key: demand.Key, known: demand.Demand) -> None:
        from forecasting.workload import Series

        self.name = forecaster_name()
        self.series = Series(known.start.timestamp(), float(known.window_s), known.of(*key), _name(key))
        self.file = _file(key, known.window_s)
        self.note = self.file.with_suffix(".json")

    def predict(self, horizon: int) -> "Predicted":
        from forecasting.workload import FORECASTERS

        forecaster = self._loaded()
        if forecaster is None:
            forecaster = FORECASTERS[self.name]()
            forecaster.fit(self.series)
            self._keep(forecaster, _Fitted(datetime.now(UTC).timestamp(), self._known_windows()))
        return forecaster.predict(horizon)

    def _loaded(self) -> "Forecaster | None":
        """The forecaster of the last time, told what came since; None if it is to be fitted."""
        from forecasting.workload import load

        try:
            fitted = _Fitted(**json.loads(self.note.read_text()))
            if datetime.now(UTC).timestamp() - fitted.at_s > settings.FORECAST_REFIT_S:
                return None
            if self._known_windows() > GROWN * fitted.windows:
                return None
            forecaster = load(self.file)
            knows_until_s = forecaster.predict(1).start_s
        except FileNotFoundError:
            return None
        except Exception as error:
            logger.warning("planning: %s is fitted anew, its file cannot be read: %s", self.series.name, error)
            return None
        new = round((self.series.end_s - knows_until_s) / self.series.window_s)
        if not 0 <= new <= len(self.series):
            return None
        if new:
            forecaster.update(self.series.tokens_per_s[len(self.series) - new :])
            self._keep(forecaster, fitted)
        return forecaster

    def _keep(self, forecaster: "Forecaster", fitted: _Fitted) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        forecaster.save(self.file)
        self.note.write_text(json.dumps({"at_s": fitted.at_s, "windows": fitted.windows}))

    def _known_windows(self) -> int:
        return int(np.count_nonzero(self.series.known))


def _name(key: demand.Key) -> str:
    (model, region), quantity, slo_class = key
    return " ".join(filter(None, (model, region, quantity, slo_class)))


def _file(key: demand.Key, window_s: int) -> Path:
    digest = hashlib.sha256(f"{_name(key)} {window_s}".encode()).hexdigest()[:20]
    return Path(settings.STATE_DIR) / "forecasters" / forecaster_name() / f"{digest}.npz"


def _kept_s(file: Path) -> float:
    """When *file* was written last, in seconds since 1970; 0 if it never was."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


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
    """The newest forecast of each (model, region, quantity), all classes together, that was made *within* that time."""
    rows = Forecast.objects.filter(slo_class="", made_at__gt=now - within, made_at__lte=now).order_by("pk")
    return {(row.model, row.region, row.quantity): row for row in rows}
