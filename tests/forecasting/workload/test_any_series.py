"""Every forecaster on every kind of short series: it never raises, and what it says is a forecast."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.workload import BEST, FORECASTERS, Series, arima, load, mlstm
from tests.examples import at_night_but, costly
from tests.forecasting.workload.demand import daily
from tests.forecasting.workload.test_forecasters import ALL, QUICK, check

LONGEST = 200
WIDTHS_S = [60.0, 600.0, 7200.0, 86_400.0]
COSTLY = sorted(set(ALL) - set(QUICK))
SHAPES = ["random", "zeros", "constant", "gaps", "begins with a gap", "ends with a gap", "one burst", "tiny", "huge"]


@pytest.fixture(scope="module", autouse=True)
def soon_done():
    """Searches and training are short: what is found is another test's business."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arima, "SEARCH_WINDOWS", 40)
        patch.setattr(arima, "ITERATIONS", 1)
        patch.setattr(mlstm, "EPOCHS", 2)
        patch.setattr(mlstm, "EPOCHS_AGAIN", 1)
        yield


def values_of(shape, count, seed=0):
    """*count* rates that look as *shape* says."""
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


@pytest.mark.parametrize("name", QUICK)
def test_no_length_of_one_minute_windows_breaks_it(name):
    """The demo's windows: in the first hour each number of them may be fitted on."""
    for count in [*range(0, 64, 1 if name == BEST else 6), 97, 150, LONGEST]:
        forecaster = FORECASTERS[name]()
        forecaster.fit(Series(0.0, 60.0, values_of("random", count)))
        check(forecaster.predict(10), 10)


@pytest.mark.parametrize("width_s", at_night_but((60.0,), WIDTHS_S))
@pytest.mark.parametrize("name", QUICK)
def test_no_shape_breaks_it(name, width_s, tmp_path):
    for shape in SHAPES:
        for count in (0, 1, 13, 41):
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
        [("gaps", 29), ("gaps", 30), ("zeros", 31), ("huge", 31), ("one burst", 41)],
    ),
)
def test_the_costly_ones_at_the_lengths_from_which_they_speak(name, shape, count, tmp_path):
    series = Series(0.0, 7200.0, values_of(shape, count))
    check_whole_life(name, series, FOLLOWING, (1, 36), tmp_path / "state.npz")


@pytest.mark.parametrize("name", sorted(FORECASTERS))
@pytest.mark.parametrize("count", [1, 2, 5])
def test_in_the_first_minutes_nothing_is_expected_far_beyond_what_came(name, count):
    """A plan for the upper end of the band must not ask for thirty times the fleet because two minutes are known."""
    forecaster = FORECASTERS[name]()
    forecaster.fit(Series(0.0, 60.0, np.array([3000.0, 2000.0, 2500.0, 2800.0, 2200.0])[:count]))
    forecast = forecaster.predict(60)
    assert forecast.upper_95.max() <= 6000.0
    assert forecast.upper_80[:4].max() <= 2.2 * forecast.mean.max()
