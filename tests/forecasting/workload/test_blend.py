import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.files import StateError
from forecasting.workload import trees
from forecasting.workload.blend import (
    DAY_MEMORY,
    DAY_PARTS,
    GRID,
    LEAST_LEVEL,
    MEMORY,
    BlendModel,
    between_grid,
)
from forecasting.workload.experts import NAMES, OF_A_KIND, OFFSET_SHARE, Regression, Trail, days_before, opinions
from forecasting.workload.forecaster import PointModel, SeasonalNaive
from forecasting.workload.trees import LEAST_ROWS, Boosted, Forest, _table
from tests.examples import costly
from tests.forecasting.workload.demand import daily

SEASON, WINDOW_S = 24, 3600.0


@pytest.fixture(scope="module", autouse=True)
def few_trees():
    """Growing trees takes nearly all of the time here; backtests judge forecasts with all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trees, "TREES", 8)
        patch.setattr(trees, "BOOSTED_TREES", 8)
        yield


def pairs(trail, count=12):
    """Return some early and late (origin, horizon) pairs."""
    origins = np.linspace(0, len(trail) - 1, count).astype(np.int64)
    return np.repeat(origins, 4), np.tile(np.array([1, 3, 24, 40]), count)


def test_a_trail_that_grew_is_the_trail_of_everything():
    first = daily(6, WINDOW_S, gaps=0.08, seed=1).tokens_per_s
    values = np.concatenate([first, first[::-1]])  # the same mean, so the same offset
    grown, whole = Trail(first, SEASON, WINDOW_S), Trail(values, SEASON, WINDOW_S)
    for value in first[::-1]:
        grown.append(float(value))
    for name in ("z", "known", "means", "medians", "levels", "smooth"):
        assert np.allclose(getattr(grown, name), getattr(whole, name), equal_nan=True), name


@costly(10)
@given(st.integers(0, 10_000), st.integers(30, 200))
def test_nothing_after_the_origin_is_looked_at(seed, origin):
    """Other values after the origin change no opinion, and no forecast of a regression or the forest made at it."""
    values = daily(10, WINDOW_S, gaps=0.05, seed=seed).tokens_per_s
    other = values.copy()
    after = other[origin + 1 :]
    after[:] = after[np.random.default_rng(seed).permutation(len(after))]  # the same mean, so the same offset
    one, two = Trail(values, SEASON, WINDOW_S), Trail(other, SEASON, WINDOW_S)
    horizons = np.arange(1, 60)
    origins = np.full(len(horizons), origin)
    assert np.allclose(opinions(one, origins, horizons), opinions(two, origins, horizons), equal_nan=True)
    horizons, origins = horizons[:6], origins[:6]
    for kind in (Regression, Forest, Boosted):
        first, second = kind((1, 2, 6)), kind((1, 2, 6))
        first.fit(one, origin + 1)
        second.fit(two, origin + 1)
        said = first.predict(one, origins, horizons)
        assert np.allclose(said, second.predict(two, origins, horizons), equal_nan=True), kind


def test_days_before_are_the_days_before():
    """Compare with a plain loop over days and windows."""
    trail = Trail(daily(9, WINDOW_S, gaps=0.03, seed=2).tokens_per_s, SEASON, WINDOW_S)
    z, width = trail.z, trail.widths[2]

    def smoothed(index):
        return z[index - width : index + width + 1].mean()

    for origin, horizon in zip(*pairs(trail), strict=True):
        moved, ended = [], []
        back = 1
        while back * SEASON < horizon + width:
            back += 1
        for day in range(back, back + 3):
            now = origin - day * SEASON
            if now - width >= 0:
                moved.append(smoothed(now + horizon) - smoothed(now))
                ended.append(smoothed(now + horizon))
        means, value = days_before(trail, np.array([origin]), np.array([horizon]), 3, 2)
        if moved:
            assert means[-1, 0] == pytest.approx(np.mean(moved))
            assert means[0, 0] == pytest.approx(moved[0])
            assert value[0] == pytest.approx(np.mean(ended))
        else:
            assert np.isnan(means[-1, 0])
            assert np.isnan(value[0])


def test_every_opinion_has_a_name_and_the_last_window_always_speaks():
    trail = Trail(daily(3, WINDOW_S).tokens_per_s, SEASON, WINDOW_S)
    said = opinions(trail, *pairs(trail))
    assert len(said) == len((*NAMES, *OF_A_KIND))
    assert not np.isnan(said[0]).any()


@pytest.mark.parametrize("days", [2, 9])
def test_walking_at_once_is_walking_step_by_step(days):
    values = daily(days + 3, WINDOW_S, noise=0.2, gaps=0.06, seed=3).tokens_per_s
    at_once, by_steps = BlendModel(), BlendModel()
    for model in (at_once, by_steps):
        model.fit(values[: days * SEASON], SEASON)
    following = values[days * SEASON :]
    assert np.allclose(at_once.walk(following), PointModel.walk(by_steps, following))
    assert np.allclose(at_once.losses, by_steps.losses)
    assert np.allclose(at_once.by_part, by_steps.by_part)
    assert np.allclose(at_once.path(60), by_steps.path(60))


def test_losses_are_what_the_opinions_earned():
    """Compare with a plain sum over the past, for opinions without coefficients."""
    values = daily(9, WINDOW_S, noise=0.2, gaps=0.1, seed=4).tokens_per_s
    model = BlendModel()
    model.fit(values, SEASON)
    trail = model.trail
    for opinion, grid in ((0, 0), (4, 2), (NAMES.index("last, 3 days"), 5)):
        expected, by_part = 0.0, np.zeros(DAY_PARTS)
        for target in range(len(values) - len(values) // 3, len(values)):
            if not np.isnan(values[target]):
                origin, horizon = np.array([target - GRID[grid]]), np.array([GRID[grid]])
                said = np.exp(float(opinions(trail, origin, horizon)[opinion, 0])) - trail.offset
                scale = max(values[target], LEAST_LEVEL / OFFSET_SHARE * trail.offset)
                loss = min(2.0, abs(max(said, 0.0) - values[target]) / scale)
                expected = MEMORY * expected + loss
                part = target % SEASON // (SEASON // DAY_PARTS)
                by_part[part] = DAY_MEMORY ** (DAY_PARTS / SEASON) * by_part[part] + loss
        assert model.losses[opinion, grid] == pytest.approx(expected)
        assert model.by_part[0, :, opinion, grid] == pytest.approx(by_part)


def test_a_later_fit_keeps_losses_and_the_time_of_day():
    """Also if the oldest windows are dropped, and not a whole number of days."""
    values = daily(9, WINDOW_S, noise=0.2, gaps=0.05, seed=4).tokens_per_s
    model = BlendModel()
    model.fit(values[: 5 * SEASON], SEASON)
    for value in values[5 * SEASON : 7 * SEASON]:
        model.append(float(value))
    losses, by_part, weights = model.losses.copy(), model.by_part.copy(), model.weights(len(model.trail))
    model.fit(values[7 : 7 * SEASON], SEASON)
    assert np.array_equal(model.losses, losses)
    assert np.array_equal(model.by_part, by_part)
    assert np.allclose(model.weights(len(model.trail)), weights)
    model.append(float(values[7 * SEASON]))
    assert not np.array_equal(model.by_part[0], by_part[0])
    assert np.array_equal(model.by_part[1:], by_part[1:])


def test_the_state_of_another_version_is_refused():
    state = BlendModel().state()
    for other in (
        {name: value for name, value in state.items() if name != "phase"},
        state | {"forest": {"horizons": [1], "begins": np.zeros(1)}},
        state | {"boosted": {"horizons": [1], "forest": {"base": 0.0}}},
    ):
        with pytest.raises(StateError, match="another version"):
            BlendModel().restore(other)


def test_weights_add_up_and_leave_what_is_wrong():
    model = BlendModel()
    model.fit(daily(9, WINDOW_S, noise=0.02, seed=5).tokens_per_s, SEASON)
    weights = model.weights(len(model.trail))
    assert np.allclose(weights.sum(axis=0), 1.0)
    best, worst = np.argmin(model.losses[:, 4]), np.argmax(model.losses[:, 4])
    assert weights[best, 4] == weights[:, 4].max()
    assert weights[worst, 4] < 1e-3 < weights[best, 4]


@pytest.mark.parametrize(("kind", "library"), [(Forest, "ExtraTrees"), (Boosted, "HistGradientBoosting")])
def test_trees_are_walked_as_their_library_walks_them(monkeypatch, kind, library):
    library = getattr(importlib.import_module("sklearn.ensemble"), f"{library}Regressor")
    grown, tables = [], []
    fit = library.fit

    def kept(self, table, *others, **more):
        tables.append(table)
        grown.append(fit(self, table, *others, **more))
        return grown[-1]

    monkeypatch.setattr(library, "fit", kept)
    trail = Trail(daily(9, WINDOW_S, noise=0.2, gaps=0.05, seed=7).tokens_per_s, SEASON, WINDOW_S)
    forest = kind((1, 3, 12))
    forest.fit(trail, len(trail))
    origins, horizons = np.arange(SEASON, len(trail))[:, None], np.arange(1, 13)
    origin, horizon = np.broadcast_arrays(origins, horizons)
    expected = grown[0].predict(_table(trail, origin.ravel(), horizon.ravel())).reshape(origin.shape)
    assert np.ptp(expected) > 0.1
    assert np.allclose(forest.predict(trail, origins, horizons), trail.z[origins] + expected, atol=1e-5)


def test_boosted_trees_are_not_steered_by_bursts():
    """They predict the median, as forecasts are judged, not the mean."""
    rng = np.random.default_rng(2)
    table, moves = rng.random((600, 3)).astype(np.float32), np.where(rng.random(600) < 0.2, 3.0, 0.0)
    assert Boosted((1,)).grow(table, moves, np.ones(600)).predict(table).mean() == pytest.approx(0.0, abs=0.1)


def test_a_forest_without_enough_windows_or_beyond_its_horizons_is_silent():
    trail = Trail(daily(9, WINDOW_S, seed=8).tokens_per_s, SEASON, WINDOW_S)
    forest = Forest((1, 2))
    origins = np.array([SEASON - 1, len(trail) - 1])
    assert np.isnan(forest.predict(trail, origins, np.array([1, 1]))).all()
    forest.fit(trail, len(trail))
    assert np.isnan(forest.predict(trail, origins, np.array([1, 3]))).all()  # a day must lie behind; 3 was not learned
    assert not np.isnan(forest.predict(trail, origins[1:], np.array([2]))).any()
    forest.fit(trail, SEASON + LEAST_ROWS // 2)  # what it had learned is forgotten, since less is known
    assert np.isnan(forest.predict(trail, origins[1:], np.array([2]))).all()


def test_bursts_that_go_are_learned_by_the_forest():
    """Bursts on a wandering level: a big move reverts and a small one stays, which no line through both can express."""
    rng = np.random.default_rng(9)
    level = np.zeros(40 * SEASON)
    for index in range(1, len(level)):
        level[index] = 0.98 * level[index - 1] + 0.1 * rng.standard_normal()
    values = 1000.0 * np.exp(level)
    bursts = np.flatnonzero(rng.random(len(values)) < 0.06)
    values[bursts] *= rng.uniform(2.0, 3.0, len(bursts))
    trail = Trail(values, SEASON, WINDOW_S)
    half = len(values) // 2
    errors = {}
    for kind in (Forest, Regression):
        model = kind((1, 2, 3))
        model.fit(trail, half)
        origins = np.arange(half, len(values) - 1)
        said = model.predict(trail, origins, np.ones(len(origins), np.int64))
        errors[kind] = np.mean(np.abs(said - trail.z[origins + 1]), axis=-1).min()
    assert errors[Forest] < errors[Regression]


def test_horizons_between_the_grid_are_between():
    matrix = between_grid(200)
    assert np.allclose(matrix.sum(axis=0), 1.0)
    for column, horizon in enumerate(GRID):
        assert matrix[column, horizon - 1] == pytest.approx(1.0)
    assert matrix[3, 4] == pytest.approx(0.5)  # 5 is half way from 4 to 6
    assert matrix[-1, 199] == pytest.approx(1.0)


def test_it_beats_the_day_before_when_the_level_moves():
    series = daily(12, WINDOW_S, noise=0.05, seed=6).tokens_per_s.copy()
    series *= np.exp(np.cumsum(0.03 * np.random.default_rng(6).standard_normal(len(series))))
    errors = {}
    for make in (BlendModel, SeasonalNaive):
        model = make()
        model.fit(series[: 9 * SEASON], SEASON)
        said = model.walk(series[9 * SEASON :])[:, 0]
        errors[make] = np.mean(np.abs(said / series[9 * SEASON :] - 1))
    assert errors[BlendModel] < 0.75 * errors[SeasonalNaive]


def test_a_burst_before_a_gap_is_not_taken_for_the_level_after_it():
    values = daily(6, WINDOW_S, noise=0.02, seed=7).tokens_per_s.copy()
    values[-20] *= 4
    values[-19:] = np.nan
    usual = daily(7, WINDOW_S, noise=0.0).tokens_per_s[6 * SEASON]
    model = BlendModel()
    model.fit(values, SEASON)
    assert model.path(1)[0] == pytest.approx(usual, rel=0.25)


@pytest.mark.nightly
@given(st.integers(12, 400), st.floats(0, 1), st.integers(0, 1000))
@costly(15)
def test_any_length_and_any_zeros_make_a_forecast(count, share, seed):
    random = np.random.default_rng(seed)
    values = np.where(random.random(count) < share, 0.0, random.lognormal(5, 2, count))
    model = BlendModel()
    model.fit(values, SEASON)
    assert np.isfinite(model.path(150)).all()


def test_the_best_opinion_by_day_is_not_forgotten_by_night():
    """A series that follows the previous day by day and wanders by night: each opinion has weight at its good hours."""
    rng = np.random.default_rng(3)
    season, days = 48, 14
    hour = np.arange(season * days) % season
    night = (hour < 16) | (hour >= 40)
    z = np.sin(2 * np.pi * (hour - 16) / 24) * ~night
    wandering = np.zeros(len(z))
    for index in range(1, len(z)):
        wandering[index] = night[index] * (wandering[index - 1] + 0.5 * rng.standard_normal())
    values = 1000 * np.exp(z + wandering + 0.02 * rng.standard_normal(len(z)))
    model = BlendModel()
    model.fit(values, season)
    end = len(values)
    day, last = [NAMES.index(name) for name in ("3 days", "last")]
    by_day, by_night = (model.weights(end + at)[:, 0] for at in (28, 4))
    assert by_day[day] / by_day[last] > 3 * by_night[day] / by_night[last]


def test_idle_windows_do_not_decide_whose_opinion_counts():
    """Nearly all windows are almost empty: relative errors there must not decide the weights."""
    rng = np.random.default_rng(4)
    busy, idle = rng.lognormal(6, 0.3, 14 * SEASON), rng.lognormal(0, 0.7, 14 * SEASON)
    values = np.where(rng.random(14 * SEASON) < 0.3, busy, idle)
    model = BlendModel()
    model.fit(values, SEASON)
    idle = values < 50
    assert idle.mean() > 0.6
    targets = np.flatnonzero(idle)[-40:]
    assert model._loss(targets)[0, 0, values[targets - 1] < 50].max() < 0.5
