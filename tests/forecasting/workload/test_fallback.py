"""When a forecaster fails, a simpler one stands in, and its forecasts say so."""

import numpy as np
import pytest

from forecasting.workload import FORECASTERS, Fallback
from forecasting.workload.blend import BlendModel
from forecasting.workload.ets import EtsModel
from forecasting.workload.forecaster import SeasonalNaive
from tests.forecasting.workload.demand import daily
from tests.forecasting.workload.test_forecasters import check

SERIES = daily(3, 7200.0)


def fails(*_):
    raise IndexError("index 20 is out of bounds")


@pytest.fixture
def fallback():
    return Fallback(FORECASTERS["blend"]())


def test_without_a_failure_it_is_the_forecaster(fallback):
    plain = FORECASTERS["blend"]()
    for one in (plain, fallback):
        one.fit(SERIES.part(0, 30))
        one.update(SERIES.tokens_per_s[30:])
    expected, made = plain.predict(5), fallback.predict(5)
    assert np.array_equal(expected.mean, made.mean)
    assert (made.forecaster, made.note, fallback.failed, fallback.error) == ("blend", "", [], None)


@pytest.mark.parametrize("when", ["fit", "append", "path"])
def test_ets_replaces_it_whenever_it_fails(fallback, monkeypatch, when):
    if when == "append":
        fallback.fit(SERIES.part(0, 30))
    monkeypatch.setattr(BlendModel, when, fails)
    if when != "append":
        fallback.fit(SERIES.part(0, 30))
    fallback.update(SERIES.tokens_per_s[30:])
    made = fallback.predict(5)
    check(made, 5)
    assert made.start_s == SERIES.end_s
    assert made.forecaster == "ets"
    assert made.note == "blend failed (IndexError: index 20 is out of bounds): ets stands in"
    assert isinstance(fallback.error, IndexError)


def test_and_the_naive_one_for_both(fallback, monkeypatch):
    monkeypatch.setattr(BlendModel, "fit", fails)
    monkeypatch.setattr(EtsModel, "fit", fails)
    fallback.fit(SERIES)
    made = fallback.predict(3)
    assert made.forecaster == "seasonal_naive"
    assert [text.split()[0] for text in fallback.failed] == ["blend", "ets"]
    assert made.note.endswith("seasonal_naive stands in")


def test_what_the_simplest_raises_is_raised(fallback, monkeypatch):
    for model in (BlendModel, EtsModel, SeasonalNaive):
        monkeypatch.setattr(model, "fit", fails)
    with pytest.raises(IndexError):
        fallback.fit(SERIES)


def test_misuse_is_no_failure(fallback):
    fallback.fit(SERIES)
    with pytest.raises(ValueError, match="at least one window"):
        fallback.predict(0)
    with pytest.raises(ValueError, match="from 0 up"):
        fallback.update(np.array([-1.0]))
    assert fallback.failed == []
