"""What every forecaster must do, whichever model it has."""

import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from forecasting.files import FORMAT, write_state
from forecasting.workload import FORECASTERS, Series, StateError, arima, load, mlstm, trees
from tests.examples import at_night_but, costly
from tests.forecasting.workload.demand import daily

WINDOW_S = 1800.0
QUICK = ["seasonal_naive", "ets", "blend"]
ALL = list(FORECASTERS)
LONGEST = 200
WIDTHS_S = [60.0, 600.0, 7200.0, 86_400.0]
COSTLY = sorted(set(ALL) - set(QUICK))
SHAPES = ["random", "zeros", "constant", "gaps", "begins with a gap", "ends with a gap", "one burst"]
SHAPES += ["tiny", "huge", "valley"]


def check(forecast, horizon):
    """Assert what holds for any forecast."""
    assert len(forecast) == horizon
    for name in ("mean", "lower_80", "upper_80", "lower_95", "upper_95"):
        values = getattr(forecast, name)
        assert values.shape == (horizon,)
        assert np.isfinite(values).all()
        assert (values >= 0).all()
    assert (forecast.lower_95 <= forecast.lower_80).all()
    assert (forecast.lower_80 <= forecast.mean).all()
    assert (forecast.mean <= forecast.upper_80).all()
    assert (forecast.upper_80 <= forecast.upper_95).all()


@pytest.fixture(scope="module", autouse=True)
def soon_done():
    """Searches and training are shortened here; other tests judge their results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arima, "SEARCH_WINDOWS", 40)
        patch.setattr(arima, "ITERATIONS", 2)
        patch.setattr(mlstm, "EPOCHS", 4)
        patch.setattr(mlstm, "EPOCHS_AGAIN", 2)
        patch.setattr(trees, "TREES", 8)
        patch.setattr(trees, "BOOSTED_TREES", 8)
        yield


@pytest.fixture(scope="module")
def fitted(soon_done):
    """Every forecaster, fitted on six days of half-hour windows with a few gaps."""
    series = daily(6, WINDOW_S, gaps=0.03)
    made = {}
    for name, make in FORECASTERS.items():
        made[name] = make()
        made[name].fit(series)
    return series, made


def same(one, other):
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("mean", "lower_80", "upper_80", "lower_95", "upper_95")
    ) and (one.start_s, one.window_s, one.forecaster, one.note) == (
        other.start_s,
        other.window_s,
        other.forecaster,
        other.note,
    )


@pytest.mark.parametrize("name", ALL)
def test_a_day_with_a_wave_is_forecast_from_where_the_series_ends(name, fitted):
    series, made = fitted
    forecast = made[name].predict(12)
    check(forecast, 12)
    assert forecast.start_s == series.end_s
    assert forecast.window_s == WINDOW_S
    assert (forecast.forecaster, forecast.note) == (name, "")
    assert 300 < forecast.mean[0] < 3000


@pytest.mark.parametrize("name", ALL)
def test_asked_twice_it_answers_the_same(name, fitted):
    forecaster = fitted[1][name]
    assert same(forecaster.predict(5), forecaster.predict(5))
    assert np.array_equal(forecaster.predict(50).mean[:5], forecaster.predict(5).mean)


@pytest.mark.parametrize("name", ALL)
def test_stored_and_loaded_it_continues_unchanged(name, fitted, tmp_path):
    forecaster = fitted[1][name]
    path = tmp_path / "state.npz"
    forecaster.save(path)
    twin, third = load(path), type(forecaster).load(path)
    assert type(twin) is type(forecaster)
    assert same(twin.predict(9), forecaster.predict(9))
    following = np.array([900.0, np.nan, 1200.0])
    twin.update(following)
    third.update(following)
    assert same(twin.predict(9), third.predict(9))
    assert twin.predict(1).start_s == forecaster.predict(1).start_s + 3 * WINDOW_S
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", QUICK)
def test_windows_one_by_one_or_all_at_once(name):
    series = daily(7, 7200.0, gaps=0.05)
    at_once, one_by_one = FORECASTERS[name](), FORECASTERS[name]()
    for forecaster in (at_once, one_by_one):
        forecaster.fit(series.part(0, 70))
    rest = series.tokens_per_s[70:]
    at_once.update(rest)
    for index in range(len(rest)):
        one_by_one.update(rest[index : index + 1])
    assert same(at_once.predict(6), one_by_one.predict(6))
    at_once.update(np.empty(0))
    assert same(at_once.predict(6), one_by_one.predict(6))


@pytest.mark.parametrize("name", ALL)
def test_with_few_points_the_simplest_is_used_and_says_so(name):
    forecaster = FORECASTERS[name]()
    forecaster.fit(Series(0.0, 600.0, np.array([10.0, 20.0, np.nan, 30.0])))
    forecast = forecaster.predict(3)
    assert forecast.mean == pytest.approx(20.0)
    assert forecast.note == (
        f"3 known windows, {name} needs {type(forecaster).model_class.least(144)}: the latest level stands in"
    )
    assert forecast.forecaster == name


def test_what_stands_in_follows_what_is_known():
    forecaster, series = FORECASTERS["mlstm"](), daily(2, 1800.0, noise=0.0)
    forecaster.fit(series)
    forecast = forecaster.predict(48)
    assert "the same time of the day before stands in" in forecast.note
    assert np.allclose(forecast.mean, series.tokens_per_s[48:])
    for values in ([], [np.nan] * 5):
        forecaster.fit(Series(0.0, 600.0, np.array(values)))
        forecast = forecaster.predict(4)
        assert forecast.mean.tolist() == [0.0] * 4
        assert "0 known windows" in forecast.note


def test_the_real_model_takes_over_once_it_can():
    series = daily(3, 7200.0)
    forecaster = FORECASTERS["ets"]()
    forecaster.fit(series.part(0, 10))
    assert "stands in" in forecaster.predict(1).note
    forecaster.update(series.tokens_per_s[10:])
    forecast = forecaster.predict(1)
    assert forecast.note == ""
    assert forecast.start_s == series.end_s


def test_a_day_later_it_is_fitted_again():
    series = daily(12, 7200.0)
    forecaster = FORECASTERS["ets"]()
    forecaster.fit(series.part(0, 60))
    seen = []
    forecaster._own.fit, fit = (
        lambda values, season: (seen.append(len(values)), fit(values, season)),
        forecaster._own.fit,
    )
    forecaster.update(series.tokens_per_s[60:96])
    assert seen == [72, 84, 96]


def test_the_past_that_is_kept_is_bounded():
    forecaster = FORECASTERS["seasonal_naive"]()
    forecaster.fit(daily(60, 7200.0))
    assert len(forecaster.values) == 28 * 12


@pytest.mark.parametrize("name", QUICK)
def test_misuse_is_refused_in_words(name):
    forecaster = FORECASTERS[name]()
    with pytest.raises(RuntimeError, match="fit the forecaster"):
        forecaster.predict(1)
    with pytest.raises(RuntimeError, match="fit the forecaster"):
        forecaster.update(np.ones(1))
    forecaster.fit(daily(3, 7200.0))
    with pytest.raises(ValueError, match="at least one window"):
        forecaster.predict(0)
    with pytest.raises(ValueError, match="from 0 up"):
        forecaster.update(np.array([-1.0]))


def test_files_that_are_none_of_ours_are_refused_in_words(tmp_path, monkeypatch):
    path = tmp_path / "state.npz"
    with pytest.raises(OSError):
        load(path)
    path.write_bytes(b"no such thing")
    with pytest.raises(StateError, match="not a forecaster's state"):
        load(path)
    np.savez(path, values=np.ones(3))
    with pytest.raises(StateError, match="not a forecaster's state"):
        load(path)
    write_state(path, {"forecaster": "oracle"})
    with pytest.raises(StateError, match="'oracle'"):
        load(path)
    with pytest.raises(ValueError, match="not of 'ets'"):
        FORECASTERS["ets"].load({"forecaster": "blend"})
    monkeypatch.setattr("forecasting.files.FORMAT", FORMAT + 1)
    write_state(path, {"forecaster": "blend"})
    monkeypatch.undo()
    with pytest.raises(StateError, match=f"format {FORMAT + 1}, this version reads {FORMAT}"):
        load(path)
    naive = FORECASTERS["seasonal_naive"]()
    naive.fit(daily(3, 7200.0))
    with pytest.raises(StateError, match="another version"):
        FORECASTERS["seasonal_naive"].load(naive.state() | {"model": {"day": np.ones(12)}})


def test_a_state_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "state.npz"
    write_state(path, {"forecaster": "blend", "kept": 1})
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_state(path, {"forecaster": "blend", "bad": object()})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_fit_has_one_thread_of_linear_algebra(monkeypatch):
    """Two cores and two threads: an ARIMA fit took twelve times the processor time of one thread."""
    threads = []

    class Watched(FORECASTERS["seasonal_naive"].model_class):
        def fit(self, values, season):
            threads.extend(each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas")
            super().fit(values, season)

    forecaster = FORECASTERS["seasonal_naive"]()
    monkeypatch.setattr(forecaster, "model_class", Watched)
    with threadpool_limits(2, user_api="blas"):
        assert {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"} == {2}
        forecaster.fit(daily(3, window_s=WINDOW_S))
    assert set(threads) == {1}


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, forecasting.workload;"
        "print([name for name in ('torch', 'pmdarima', 'statsmodels', 'scipy', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Every kind of short series


def values_of(shape, count, seed=0):
    """Return *count* rates of the given *shape*."""
    random = np.random.default_rng(seed)
    values = 100.0 * random.random(count)
    match shape:
        case "zeros":
            values[:] = 0.0
        case "constant":
            values[:] = 7.0
        case "gaps":
            values[random.random(count) < 0.3] = np.nan
        case "begins with a gap":
            values[: count // 2] = np.nan
        case "ends with a gap":
            values[count - count // 3 :] = np.nan
        case "one burst":
            values[:] = 0.0
            values[count // 2 : count // 2 + 2] = 1e6
        case "tiny":
            values[:] = 1e-200 * np.arange(count)
        case "huge":
            values *= 1e298
        case "valley":  # C34
            values[:] = np.resize(1000.0 * np.array([54, 17, 16, 7, 5, 4, 5, 7, 20, 20, 25, 33, 34]), count)
    return values


def check_whole_life(name, series, following, horizons, path=None):
    """Fit, forecast, take in what follows, store and load: a forecast each time, and the same after loading."""
    forecaster = FORECASTERS[name]()
    forecaster.fit(series)
    for horizon in horizons:
        check(forecaster.predict(horizon), horizon)
    twin = forecaster
    if path is not None:
        forecaster.save(path)
        twin = load(path)
    for one in {id(each): each for each in (forecaster, twin)}.values():
        one.update(following)
        for horizon in horizons:
            check(one.predict(horizon), horizon)
    assert np.array_equal(forecaster.predict(5).mean, twin.predict(5).mean)
    assert forecaster.predict(1).start_s == series.end_s + len(following) * series.window_s


FOLLOWING = np.array([1.0, np.nan, 0.0, 30.0])


@pytest.mark.parametrize("width_s", at_night_but((60.0,), WIDTHS_S))
@pytest.mark.parametrize("name", QUICK)
def test_no_shape_and_no_length_breaks_it(name, width_s, tmp_path):
    for shape, count in [*product(SHAPES, (0, 1, 13, 41)), *(("random", count) for count in (29, LONGEST))]:
        series = Series(0.0, width_s, values_of(shape, count))
        check_whole_life(name, series, FOLLOWING, (1, 7, 36, 150), tmp_path / "state.npz")


@pytest.mark.parametrize("name", QUICK)
@costly(15)
@given(
    width_s=st.sampled_from(WIDTHS_S),
    shape=st.sampled_from(SHAPES),
    count=st.integers(0, LONGEST),
    seed=st.integers(0, 99),
    following=st.lists(st.one_of(st.floats(0, 1e6), st.just(float("nan")), st.just(0.0)), max_size=12),
    horizon=st.integers(1, 200),
)
def test_whatever_came_it_lives_on(name, width_s, shape, count, seed, following, horizon):
    series = Series(0.0, width_s, values_of(shape, count, seed))
    check_whole_life(name, series, np.array(following), (horizon,))


@pytest.mark.parametrize("days", at_night_but((2.2,), [1.1, 2.2, 7.3]))
@pytest.mark.parametrize("name", QUICK)
def test_with_a_day_or_a_week_behind_it(name, days, tmp_path):
    series = daily(days, 600.0 if days < 7 else 3600.0, gaps=0.05)
    check_whole_life(name, series, np.append(series.tokens_per_s[:6], np.nan), (1, 36, 200), tmp_path / "state.npz")


@pytest.mark.parametrize("name", COSTLY)
@pytest.mark.parametrize(
    ("shape", "count"),
    at_night_but(
        (("gaps", 29), ("gaps", 30), ("zeros", 31)),
        [("gaps", 29), ("gaps", 30), ("zeros", 31), ("huge", 31), ("one burst", 41), ("valley", 13)],
    ),
)
def test_the_costly_ones_at_the_lengths_from_which_they_speak(name, shape, count, tmp_path):
    series = Series(0.0, 7200.0, values_of(shape, count))
    check_whole_life(name, series, FOLLOWING, (1, 36), tmp_path / "state.npz")


@pytest.mark.parametrize("name", at_night_but(QUICK, ALL))
@pytest.mark.parametrize("last", [1.0, 1.1])
def test_a_level_is_forecast_as_that_level(name, last):
    """C31: forty windows of 1.0, or the last one a little higher."""
    forecaster = FORECASTERS[name]()
    forecaster.fit(Series(0.0, 7200.0, np.append(np.ones(39), last)))
    forecast = forecaster.predict(12)
    check(forecast, 12)
    assert forecast.mean == pytest.approx(1.0, rel=0.05 if last == 1.0 else 0.11)
    if last > 1.0:
        assert (forecast.upper_95 > forecast.lower_95).all()


@pytest.mark.parametrize("name", at_night_but(QUICK, ALL))
def test_a_forecast_has_the_unit_of_its_series(name):
    """C33: a millionth of the tokens is a millionth of the forecast."""
    trend, forecasts = 0.5 * np.arange(60) + 100.0, []
    for factor in (1.0, 1e-6):
        forecaster = FORECASTERS[name]()
        forecaster.fit(Series(0.0, 7200.0, factor * trend))
        forecasts.append(forecaster.predict(12).mean / factor)
    assert forecasts[1] == pytest.approx(forecasts[0], rel=1e-3)


@pytest.mark.parametrize("name", sorted(FORECASTERS))
@pytest.mark.parametrize("count", [1, 2, 5])
def test_in_the_first_minutes_nothing_is_expected_far_beyond_what_came(name, count):
    """A plan for the upper end of the band must not ask for thirty times the fleet because only two minutes are known."""
    forecaster = FORECASTERS[name]()
    forecaster.fit(Series(0.0, 60.0, np.array([3000.0, 2000.0, 2500.0, 2800.0, 2200.0])[:count]))
    forecast = forecaster.predict(60)
    assert forecast.upper_95.max() <= 6000.0
    assert forecast.upper_80[:4].max() <= 2.2 * forecast.mean.max()
