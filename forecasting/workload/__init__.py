"""Workload series and their forecasters. pmdarima, statsmodels and torch are imported only when one of theirs is fitted."""

from pathlib import Path
from typing import Final

from forecasting import models_extra
from forecasting.files import StateError, read_state
from forecasting.workload.arima import Arima, SeasonalArima
from forecasting.workload.backtesting import backtest
from forecasting.workload.blend import Blend
from forecasting.workload.ets import Ets
from forecasting.workload.fallback import Fallback
from forecasting.workload.forecaster import Forecast, Forecaster, Naive
from forecasting.workload.mlstm import Mlstm
from forecasting.workload.series import Series

BEST: Final = Blend.name
"""The default forecaster."""

FORECASTERS: Final[dict[str, type[Forecaster]]] = {
    forecaster.name: forecaster for forecaster in (Naive, Arima, SeasonalArima, Ets, Mlstm, Blend)
}


def unavailable_reason(name: str) -> str:
    """Return why the forecaster *name* cannot be fitted here; empty if it can, and for an unknown name."""
    kind = FORECASTERS.get(name)
    return models_extra.missing_for(f"The forecaster {name}") if kind is not None and kind.needs_models_extra else ""


def usable(name: str) -> str:
    """Return *name*, or the best forecaster's if none is named or it rests."""
    return BEST if not name or unavailable_reason(name) else name


def load(path: Path) -> Forecaster:
    """Return the forecaster that `save` wrote, of any kind. Raises StateError if there is none, OSError as `open`."""
    state = read_state(path)
    forecaster = FORECASTERS.get(str(state.get("forecaster")))
    if forecaster is None:
        raise StateError(f"{path}: no forecaster is called {state.get('forecaster')!r}")
    return forecaster.load(state)


__all__ = [
    "BEST",
    "FORECASTERS",
    "Fallback",
    "Forecast",
    "Series",
    "StateError",
    "backtest",
    "load",
    "unavailable_reason",
    "usable",
]
