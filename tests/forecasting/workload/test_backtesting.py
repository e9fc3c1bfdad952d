import csv
import math
from pathlib import Path

import numpy as np
import pytest

from forecasting.workload import FORECASTERS, Series, backtest
from forecasting.workload.backtesting import PINBALL_LEVELS
from forecasting.workload.forecaster import Forecast
from forecasting.workload.series import without_partial
from tests.forecasting.workload.demand import daily

SERVEGEN = Path(__file__).parents[4] / "shared" / "data" / "servegen"


class LastSeen:
    """Says what it last saw, times the step; keeps what it was given."""

    name = "last_seen"

    def __init__(self):
        self.seen = []

    def prepare(self):
        pass

    def describe(self):
        return ""

    def fit(self, series):
        self.seen = list(series.tokens_per_s)
        self.start_s, self.window_s = series.start_s, series.window_s

    def update(self, tokens_per_s):
        self.seen += list(tokens_per_s)

    def predict(self, horizon):
        last = next(value for value in reversed(self.seen) if not math.isnan(value))
        mean = last * np.arange(1, horizon + 1)
        end_s = self.start_s + len(self.seen) * self.window_s
        return Forecast(end_s, self.window_s, mean, 0.9 * mean, 1.1 * mean, 0.8 * mean, 1.2 * mean, self.name, "a note")


def test_figures_are_those_of_a_plain_loop():
    random = np.random.default_rng(0)
    values = 100 * np.exp(0.1 * random.standard_normal(30))
    values[[12, 20, 21]] = np.nan
    values[25] = 0.0
    series = Series(0.0, 600.0, values, "x")
    (row,) = backtest(series, {"last_seen": LastSeen}, 10, 3)
    ape, inside, pinball, rates, off = {1: [], 2: [], 3: []}, [], [], [], []
    for origin in range(10, 30):
        last = [value for value in values[:origin] if not math.isnan(value)][-1]
        for step in (1, 2, 3):
            target = origin + step - 1
            if target >= 30 or math.isnan(values[target]):
                continue
            said, actual = last * step, values[target]
            if actual > 0:
                ape[step].append(abs(said - actual) / actual)
            off.append(abs(said - actual))
            inside.append(0.9 * said <= actual <= 1.1 * said)
            quantiles = [0.8 * said, 0.9 * said, said, 1.1 * said, 1.2 * said]
            pinball.append(
                np.mean([
                    max(level * (actual - q), (level - 1) * (actual - q))
                    for level, q in zip(PINBALL_LEVELS, quantiles, strict=True)
                ])
            )  # fmt: skip
            rates.append(actual)
    everything = [error for errors in ape.values() for error in errors]
    assert row["error"] == pytest.approx(sum(off) / sum(rates))  # a window was empty
    assert row["mean_ape"] == pytest.approx(np.mean(everything))
    assert row["max_ape"] == pytest.approx(max(everything))
    assert row["coverage_80"] == pytest.approx(np.mean(inside))
    assert row["pinball"] == pytest.approx(np.mean(pinball) / np.mean(rates))
    assert (row["windows"], row["zero_windows"], row["note"], row["series"]) == (16, 1, "a note", "x")
    once = values[9] * np.arange(1, 21)
    judged = [index for index in range(20) if values[10 + index] > 0]
    assert row["one_origin_mean_ape"] == pytest.approx(np.mean([abs(once[i] / values[10 + i] - 1) for i in judged]))


def test_nothing_is_given_before_its_time():
    class Watched(LastSeen):
        def predict(self, horizon):
            assert len(self.seen) == self.expected
            return super().predict(horizon)

        def update(self, tokens_per_s):
            super().update(tokens_per_s)
            assert len(tokens_per_s) == 1
            self.expected += 1

        def fit(self, series):
            super().fit(series)
            assert len(series) == 10
            self.expected = 10

    seen = []
    values = np.arange(1.0, 21.0)
    (row,) = backtest(
        Series(0.0, 600.0, values), {"w": Watched}, 10, 2, test_windows=5, progress=lambda *call: seen.append(call)
    )
    assert row["windows"] == 5
    assert seen == [("last_seen", done, 5) for done in range(1, 6)]


def test_the_last_horizons_that_reach_nothing_are_none():
    values = np.ones(12)
    (row,) = backtest(Series(0.0, 600.0, values), {"last_seen": LastSeen}, 10, 4)
    assert row["error_by_horizon"] == [0.0, 1.0, None, None]
    assert row["error"] == row["mean_ape"]


@pytest.mark.parametrize(
    ("values", "fit", "horizon", "words"),
    [
        (np.ones(10), 10, 1, "none is left to judge"),
        (np.ones(10), 0, 1, "at least one window"),
        (np.ones(10), 5, 0, "horizon"),
        (np.array([1.0, 1.0, np.nan, 0.0]), 2, 1, "no window of the test part"),
    ],
)
def test_what_cannot_be_judged_is_refused(values, fit, horizon, words):
    with pytest.raises(ValueError, match=words):
        backtest(Series(0.0, 600.0, values), {"last_seen": LastSeen}, fit, horizon)


@pytest.mark.nightly
def test_bands_of_the_quick_ones_hold_what_they_promise():
    series = daily(16, 3600.0, noise=0.15, gaps=0.02)
    quick = {name: FORECASTERS[name] for name in ("seasonal_naive", "blend")}
    for row in backtest(series, quick, 10 * 24, 3):
        assert 0.72 < row["coverage_80"] < 0.88, row["forecaster"]
        assert 0.90 < row["coverage_95"] < 0.99, row["forecaster"]


def servegen(name, quantity):
    file = SERVEGEN / f"{name}_10min_days1-10.csv"
    if not file.exists():
        pytest.skip("the ServeGen data is not there")
    with file.open() as opened:
        rows = list(csv.DictReader(opened))
    rates = [float(row[f"{quantity}_tokens"]) / 600 if float(row["requests"]) else math.nan for row in rows]
    return without_partial(Series(0.0, 600.0, np.array(rates), name))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["m-small", "m-mid"])
@pytest.mark.parametrize("quantity", ["prompt", "output"])
def test_ours_is_best_on_public_demand_and_its_bands_hold(name, quantity):
    """Fitted on days 1 to 7 and judged on 8 to 10, an hour ahead, as in docs/papers/forecasting.md."""
    series = servegen(name, quantity)
    rivals = {other: FORECASTERS[other] for other in ("seasonal_naive", "arima", "ets", "blend")}
    rows = {row["forecaster"]: row for row in backtest(series, rivals, 1008, 6, test_windows=432)}
    assert min(rows, key=lambda other: rows[other]["mean_ape"]) == "blend"
    assert min(rows, key=lambda other: rows[other]["error_by_horizon"][1]) == "blend"
    assert 0.75 <= rows["blend"]["coverage_80"] <= 0.85
