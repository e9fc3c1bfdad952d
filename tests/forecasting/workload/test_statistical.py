"""ARIMA and ETS: windows that follow move a model on as the libraries that fitted it would.

The libraries are imported by the tests that use them: it takes seconds, and most test processes only collect this file.
"""

import warnings

import numpy as np
import pytest

from forecasting.workload import arima, ets
from forecasting.workload.arima import ArimaModel, SeasonalArimaModel
from forecasting.workload.ets import FORMS, EtsModel
from tests.forecasting.workload.demand import daily

SEASON = 12


@pytest.fixture
def given_orders(monkeypatch):
    """Skip the search: `given_orders(order, seasonal, intercept)` says what it would have found."""

    def give(order, seasonal=(0, 0, 0, 0), intercept=True, harmonics=0):
        def search(self, y):
            self.order, self.seasonal_order, self.intercept = order, seasonal, intercept
            self.harmonics = harmonics

        monkeypatch.setattr(ArimaModel, "_search", search)

    return give


def series(count=240, seed=0):
    """Return a daily wave on a wandering level."""
    level = np.cumsum(0.05 * np.random.default_rng(seed + 100).standard_normal(count))
    wander = np.exp(level - 0.5 * level.mean())
    return wander * daily(count / SEASON, 86_400 / SEASON, noise=0.1, seed=seed).tokens_per_s


@pytest.mark.parametrize(
    ("order", "seasonal", "intercept"),
    [
        ((2, 0, 1), (0, 0, 0, 0), True),
        ((1, 1, 2), (0, 0, 0, 0), False),
        ((0, 2, 1), (0, 0, 0, 0), False),
        ((1, 0, 0), (1, 0, 0, SEASON), True),
        ((1, 0, 1), (0, 1, 1, SEASON), False),
        ((0, 0, 0), (0, 0, 0, 0), True),
    ],
)
def test_arima_forecasts_what_the_state_space_model_does(order, seasonal, intercept, given_orders, monkeypatch):
    """It continues with the next windows, because the filter's gain is constant by then."""
    import pmdarima

    monkeypatch.setattr(arima, "ITERATIONS", 4)  # any coefficients will do
    given_orders(order, seasonal, intercept)
    values = series()
    model = SeasonalArimaModel()
    model.fit(values, SEASON)
    library = pmdarima.ARIMA(order, seasonal_order=seasonal, with_intercept=intercept, maxiter=arima.ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few iterations on purpose
        result = library.fit(values / values.mean()).arima_res_
    expected = values.mean() * np.asarray(result.forecast(30))
    assert np.allclose(model.path(30), expected, rtol=1e-3)

    following = series(280, seed=3)[240:]
    for value in following:
        model.append(float(value))
    expected = values.mean() * np.asarray(result.append(following / values.mean(), refit=False).forecast(30))
    assert np.allclose(model.path(30), expected, rtol=1e-3)


def test_harmonics_keep_their_phase(given_orders):
    given_orders((1, 0, 1), harmonics=2)
    values = daily(6, 1800.0, noise=0.02).tokens_per_s
    model = SeasonalArimaModel()
    model.fit(values, 48)
    for value in daily(8, 1800.0, noise=0.02).tokens_per_s[288:300]:
        model.append(float(value))
    truth = daily(10, 1800.0, noise=0.0).tokens_per_s[300:396]
    assert np.abs(model.path(96) / truth - 1).mean() < 0.08


def test_a_gap_is_no_error(given_orders):
    given_orders((1, 0, 1), harmonics=0)
    model = ArimaModel()
    model.fit(series(), SEASON)
    ahead = model.path(6)
    for _ in range(3):
        model.append(float("nan"))
    assert np.allclose(model.path(3), ahead[3:])


def test_orders_are_searched_once(monkeypatch):
    searched = []
    search = ArimaModel._search
    monkeypatch.setattr(ArimaModel, "_search", lambda self, y: (searched.append(len(y)), search(self, y)))
    monkeypatch.setattr(arima, "SEARCH_WINDOWS", 40)
    monkeypatch.setattr(arima, "ITERATIONS", 2)
    model = ArimaModel()
    model.fit(series(60), SEASON)
    order = model.order
    model.fit(series(60, seed=5), SEASON)
    twin = ArimaModel()
    twin.restore(model.state())
    twin.fit(series(60, seed=6), SEASON)
    assert searched == [40]
    assert order == model.order == twin.order
    assert model.tried()[0] == f"ARIMA{order}".replace(" ", "")


def test_a_search_that_fails_leaves_exponential_smoothing(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("no stationarity")

    monkeypatch.setattr("pmdarima.auto_arima", fail)
    model = ArimaModel()
    model.fit(series(), SEASON)
    assert model.order == arima.FALLBACK
    assert np.isfinite(model.path(5)).all()


@pytest.mark.nightly
def test_the_search_finds_the_season_of_short_days():
    model = SeasonalArimaModel()
    model.fit(daily(20, 21_600.0, noise=0.05).tokens_per_s, 4)
    assert model.seasonal_order[3] == 4
    assert sum(model.seasonal_order[:3]) > 0
    truth = daily(22, 21_600.0, noise=0.0).tokens_per_s[80:84]
    assert np.abs(model.path(4) / truth - 1).mean() < 0.1


@pytest.mark.parametrize("form", FORMS)
def test_ets_forecasts_what_statsmodels_does(form):
    import pandas
    from statsmodels.tsa.exponential_smoothing.ets import ETSModel

    values = series()
    model = EtsModel()
    model.form = form
    model.fit(values, SEASON)
    library = ETSModel(
        pandas.Series(values / values.mean()),
        error="add",
        trend="add" if "trend" in form else None,
        damped_trend="trend" in form,
        seasonal="add" if "season" in form else None,
        seasonal_periods=SEASON if "season" in form else None,
        initialization_method="heuristic",
    )
    result = library.fit(disp=False, maxiter=200)
    assert np.allclose(model.path(30), values.mean() * result.forecast(30))

    following = series(270, seed=4)[240:]
    for value in following:
        model.append(float(value))
    longer = ETSModel(
        pandas.Series(np.concatenate([values, following]) / values.mean()),
        error="add",
        trend=library.trend,
        damped_trend=library.damped_trend,
        seasonal=library.seasonal,
        seasonal_periods=SEASON if library.seasonal else None,
        initialization_method="known",
        **first_states(library, result),
    ).smooth(result.params)
    assert np.allclose(model.path(30), values.mean() * longer.forecast(30))


def first_states(library, result):
    states = {"initial_level": result.initial_level}
    if library.trend:
        states["initial_trend"] = result.initial_trend
    if library.seasonal:
        states["initial_seasonal"] = result.initial_seasonal
    return states


def test_ets_takes_the_form_that_the_series_has():
    wave = EtsModel()
    wave.fit(daily(20, 7200.0, noise=0.02).tokens_per_s, SEASON)
    assert wave.form == "damped trend and season"
    steps = EtsModel()
    steps.fit(1000 * np.exp(np.cumsum(0.05 * np.random.default_rng(0).standard_normal(240))), SEASON)
    assert steps.form == "level"
    assert steps.tried() == ("ETS: level",)


def test_ets_forgets_its_season_when_there_are_no_two_days_left():
    model = EtsModel()
    model.form = "damped trend and season"
    model.fit(series(22), SEASON)
    assert model.form == "damped trend"


def test_ets_takes_a_gap_for_no_error():
    model = EtsModel()
    model.fit(series(), SEASON)
    ahead = model.path(6)
    for _ in range(3):
        model.append(float("nan"))
    assert np.allclose(model.path(3), ahead[3:])


def test_a_constant_is_a_constant():
    for make in (EtsModel, ArimaModel):
        model = make()
        model.fit(np.full(60, 7.0), SEASON)
        assert model.path(5) == pytest.approx(7.0)
        assert "constant" in model.tried()[0]
    assert ets.LEAST_WINDOWS < 60
