import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecasting.files import StateError
from forecasting.workload.bands import EAGERNESS, GROWTH, LOSS_DECAY, MEMORY, QUANTILES, Bands
from tests.examples import at_night_but


def walk(bands, paths, actual):
    """Return the bands given before each window."""
    ends = []
    for path, value in zip(paths, actual, strict=True):
        ends.append(bands.ends(path))
        bands.ask(path)
        bands.learn(value)
    return np.array(ends)


@given(
    st.lists(st.tuples(st.floats(0, 1e7), st.one_of(st.floats(0, 1e7), st.just(float("nan")))), max_size=12),
    st.integers(1, 12),
)
def test_ends_are_ordered_and_never_below_zero(steps, horizon):
    bands = Bands(4, np.full(4, 1000.0))
    for said, came in steps:
        bands.ask(np.full(4, said))
        bands.learn(came)
    path = np.linspace(0.0, 5000.0, horizon)
    ends = bands.ends(path)
    assert ends.shape == (horizon, 4)
    assert np.isfinite(ends).all()
    lower_80, upper_80, lower_95, upper_95 = ends.T
    assert (lower_95 >= 0).all()
    assert (lower_95 <= lower_80).all()
    assert (lower_80 <= path).all()
    assert (path <= upper_80).all()
    assert (upper_80 <= upper_95).all()


@pytest.mark.parametrize("noise", at_night_but([0.3], [0.02, 0.3]))
def test_shares_inside_are_as_promised_whatever_the_noise(noise):
    random = np.random.default_rng(1)
    truth = 1000 * np.exp(noise * random.standard_t(4, 1200))
    ends = walk(Bands(1, np.full(4, 1000.0)), np.full((1200, 1), 1000.0), truth)[300:, 0]
    truth = truth[300:]
    assert np.mean((truth >= ends[:, 0]) & (truth <= ends[:, 1])) == pytest.approx(0.80, abs=0.03)
    assert np.mean((truth >= ends[:, 2]) & (truth <= ends[:, 3])) == pytest.approx(0.95, abs=0.02)


@pytest.mark.nightly
def test_bands_follow_when_the_noise_grows_sixfold():
    random = np.random.default_rng(2)
    noise = np.where(np.arange(1600) < 800, 0.03, 0.18)
    truth = 1000 * np.exp(noise * random.standard_normal(1600))
    ends = walk(Bands(1, np.full(4, 1000.0)), np.full((1600, 1), 1000.0), truth)[:, 0]
    inside = (truth >= ends[:, 0]) & (truth <= ends[:, 1])
    assert inside[500:800].mean() == pytest.approx(0.80, abs=0.06)
    assert inside[900:].mean() == pytest.approx(0.80, abs=0.05)
    width = ends[:, 1] - ends[:, 0]
    assert width[1200:].mean() > 4 * width[500:800].mean()


def test_a_biased_forecast_gets_a_band_that_is_not_around_it():
    random = np.random.default_rng(3)
    truth = 1300 * np.exp(0.02 * random.standard_normal(600))
    ends = walk(Bands(1, np.full(4, 1000.0)), np.full((600, 1), 1000.0), truth)[-1, 0]
    assert ends[1] > 1250
    assert ends[0] == 1000.0  # the forecast itself stays inside


def test_each_horizon_learns_from_its_own_errors():
    random = np.random.default_rng(4)
    steps = 0.05 * random.standard_normal(800)
    truth = 1000 * np.exp(np.cumsum(steps) - np.cumsum(steps).mean())
    paths = np.repeat(
        np.concatenate([[1000.0], truth[:-1]])[:, None], 8, axis=1
    )  # a random walk's best: the last value
    ends = walk(Bands(8, np.full(4, 1000.0)), paths, truth)[-1]
    width = np.log(ends[:, 1] / ends[:, 0])
    assert width[7] / width[0] == pytest.approx(np.sqrt(8), rel=0.4)


def test_gaps_teach_nothing():
    bands = Bands(2, np.full(4, 100.0))
    walk(bands, np.full((20, 2), 100.0), np.full(20, 110.0))
    before = bands.scores.copy(), bands.scale.copy(), bands.tails.copy()
    walk(bands, np.full((5, 2), 100.0), np.full(5, np.nan))
    assert np.array_equal(before[0], bands.scores, equal_nan=True)
    assert np.array_equal(before[1], bands.scale)
    assert np.array_equal(before[2], bands.tails)


def test_beyond_what_was_learned_bands_only_get_wider():
    bands = Bands(3, np.full(4, 100.0))
    walk(bands, np.full((60, 3), 100.0), 100 + 10 * np.sin(np.arange(60)))
    width = np.diff(bands.ends(np.full(40, 100.0))[:, :2])[:, 0]
    assert (np.diff(width[2:]) >= 0).all()
    assert width[39] > width[2]


def test_memory_is_bounded_and_state_is_everything():
    bands = Bands(2, np.full(4, 100.0))
    random = np.random.default_rng(5)
    walk(bands, np.full((MEMORY + 50, 2), 100.0), random.uniform(50, 150, MEMORY + 50))
    assert bands.scores.shape == (2, MEMORY)
    twin = Bands.load(bands.state())
    path = np.array([90.0, 120.0])
    assert np.array_equal(twin.ends(path), bands.ends(path))
    walk(bands, np.full((3, 2), 100.0), [80.0, 130.0, 99.0])
    walk(twin, np.full((3, 2), 100.0), [80.0, 130.0, 99.0])
    assert np.array_equal(twin.ends(path), bands.ends(path))


def test_no_end_is_beyond_twice_what_the_series_has_shown():
    """After hours without a request an error is enormous as a factor; bands must not follow it."""
    random = np.random.default_rng(6)
    truth = np.where(random.random(900) < 0.05, 500.0 * random.random(900), 0.0)
    paths = np.repeat(np.concatenate([[0.0], truth[:-1]])[:, None], 4, axis=1)
    bands = Bands(4, truth[:50])
    ends = walk(bands, paths, truth)
    highest = np.maximum.accumulate(np.concatenate([[truth[:50].max()], truth[:-1]]))
    assert (ends <= np.maximum(GROWTH * highest, paths.max(axis=1))[:, None, None] + 1e-6).all()
    inside = (truth >= ends[:, 0, 2]) & (truth <= ends[:, 0, 3])
    assert inside[300:].mean() == pytest.approx(0.95, abs=0.03)


@pytest.mark.nightly
def test_where_most_windows_are_empty_levels_take_the_place_of_errors():
    random = np.random.default_rng(7)
    truth = np.where(random.random(1500) < 0.3, 100.0 * np.exp(random.standard_normal(1500)), 0.0)
    sparse, dense = Bands(1, truth[:100]), Bands(1, np.full(100, 100.0))
    walk(sparse, np.full((1500, 1), 10.0), truth)
    # A random walk: the last window says much, how high the last days were says little.
    walked = 100.0 * np.exp(np.cumsum(0.1 * random.standard_normal(1500)) - 0.002 * np.arange(1500))
    walk(dense, np.concatenate([[100.0], walked[:-1]])[:, None], walked)
    assert sparse._share_of_levels()[0].mean() > 0.5
    assert dense._share_of_levels()[0].mean() < 0.05


def test_each_end_has_the_mean_of_both_rules_by_their_losses():
    """Compare with a plain sum over the past."""
    random = np.random.default_rng(8)
    history, truth = random.uniform(50, 150, 60), random.uniform(50, 150, 40)
    bands = Bands(1, history)
    losses = np.zeros((2, 4))
    known = list(history)
    for value in truth:
        path = np.array([100.0])
        by_errors = bands._by_errors(path)[0]
        assert (by_errors <= GROWTH * max(known)).all()
        below = bands.tails[0] * [1, -1, 1, -1] + [0, 1, 0, 1]
        by_levels = np.quantile(known, below)
        errors, levels = losses
        share = 1 / (
            1 + np.exp(np.clip(EAGERNESS * (levels - errors) / np.maximum(np.minimum(*losses), 1e-6), -50, 50))
        )
        lower_80, upper_80, lower_95, upper_95 = (1 - share) * by_errors + share * by_levels
        lower_80, upper_80 = min(lower_80, 100.0), max(upper_80, 100.0)
        ends = [lower_80, upper_80, min(lower_95, lower_80), max(upper_95, upper_80)]
        assert bands.ends(path)[0] == pytest.approx(ends)
        bands.ask(path)
        bands.learn(float(value))
        for rule, said in enumerate((by_errors, by_levels)):
            off = value - said
            losses[rule] = LOSS_DECAY * losses[rule] + np.maximum(QUANTILES * off, (QUANTILES - 1) * off)
        known.append(float(value))


def test_bands_of_another_version_are_refused_in_words():
    state = Bands(3, np.array([1.0, 2.0])).state()
    assert Bands.load(state).reach == 3
    for other in ({**state, "older": 1.0}, {"reach": 3}):
        with pytest.raises(StateError, match="another version"):
            Bands.load(other)
