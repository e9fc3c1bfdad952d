"""Forecasts inside a simulation know what came before, and nothing else."""

import numpy as np
import pytest

from controlplane.simulation.forecasts import SeriesForecasts, by_window, forecaster_named
from forecasting.workload import FORECASTERS


def series(name: str, minutes: np.ndarray, history: int = 6) -> SeriesForecasts:
    return SeriesForecasts(name, 600.0, minutes, np.full(history, 40.0), 7200.0)


@pytest.mark.parametrize("name", ["recent", "seasonal_naive", "ets"])
def test_later_values_change_no_forecast(name: str) -> None:
    minutes = 50 + 20 * np.sin(np.arange(240) / 20)
    other = minutes.copy()
    other[130:] *= 7
    one, two = series(name, minutes), series(name, other)
    for now_s in (0.0, 1200.0, 4500.0, 7800.0):
        before, after = one.ahead(now_s, 3), two.ahead(now_s, 3)
        assert np.array_equal(before.mean, after.mean)
        assert np.array_equal(before.upper, after.upper)
    later = 14_000.0
    assert not np.array_equal(one.ahead(later, 3).mean, two.ahead(later, 3).mean)


def test_within_a_window_nothing_is_forecast_again() -> None:
    one = series("ets", 50 + 20 * np.sin(np.arange(240) / 20))
    before = one.ahead(1200.0, 3)
    assert one.ahead(1799.0, 3) is before
    assert one.ahead(1799.0, 4).mean.size == 4
    assert not np.array_equal(one.ahead(1800.0, 3).mean, before.mean)


class Counting:
    """A forecaster that counts what it is asked."""

    def __init__(self) -> None:
        self.one, self.asked = FORECASTERS["ets"](), 0

    def __getattr__(self, name: str):
        return getattr(self.one, name)

    def predict(self, steps: int):
        self.asked += 1
        return self.one.predict(steps)


def test_another_runs_windows_are_reused_and_the_rest_is_forecast_independently(monkeypatch) -> None:
    asked: list[Counting] = []
    monkeypatch.setitem(FORECASTERS, "counting", lambda: asked.append(Counting()) or asked[-1])
    minutes = 50 + 20 * np.sin(np.arange(600) / 20)
    times_s = [0.0, 600.0, 1800.0, 3000.0, 9000.0, 9600.0]
    one = series("ets", minutes)
    alone = [one.ahead(now_s, 3) for now_s in times_s]

    first, second, third = (series("counting", minutes) for _ in range(3))
    for now_s in times_s[:3]:
        first.ahead(now_s, 3)
    before = sum(each.asked for each in asked)
    made = [second.ahead(now_s, 3) for now_s in times_s[:3]]
    assert sum(each.asked for each in asked) == before > 0
    third.ahead(0.0, 2)  # another question, after which all are others
    third.ahead(1200.0, 3)
    made += [second.ahead(now_s, 3) for now_s in times_s[3:]]
    assert sum(each.asked for each in asked) > before
    for got, expected in zip(made, alone, strict=True):
        assert np.array_equal(got.mean, expected.mean)
        assert np.array_equal(got.upper, expected.upper)


def test_an_oracle_knows_the_windows_from_now_on() -> None:
    minutes = np.arange(60, dtype=np.float64)
    band = series("oracle", minutes).ahead(1500.0, 5)
    assert band.mean.tolist() == [24.5, 34.5, 44.5, 54.5, 0.0]
    assert band.upper is band.mean


def test_too_little_is_known_at_first() -> None:
    minutes = np.array([10.0, 30.0, 20.0] + [0.0] * 57)
    band = series("ets", minutes, history=0).ahead(180.0, 2)
    assert band.mean.tolist() == [30.0, 30.0]


def test_windows_beyond_the_end_are_empty() -> None:
    assert by_window(np.array([2.0, 4.0, 6.0]), 120.0, 3).tolist() == [3.0, 3.0, 0.0]


def test_a_forecaster_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match=r"must be one of oracle, recent, .*not 'crystal'"):
        forecaster_named("crystal")
