"""The least fleet: its question, its programme with a region lost, its search by simulation, and its file."""

import numpy as np
import pytest

from controlplane.fleet.models import GpuType, Model, SloClass
from controlplane.planning.sizing import offers
from controlplane.planning.sizing.demand import OfModel
from controlplane.planning.sizing.offers import options_of
from controlplane.planning.sizing.question import Question, curve_of
from scheduling.planning.capacity import Capability
from scheduling.planning.problem import TOLERANCE
from scheduling.planning.sizing import NINES, Sought, carried, least, settle
from tests.planning.drawn_capacity import drawn


def test_lengths_are_drawn_from_all_regions():
    """Not from the last alone, whose requests lie behind the others'."""
    lengths = [100] * 1500 + [300] * 1500
    own = OfModel(prompt=lengths, output=lengths, interactive=[True] * 3000, classes={"chat"})
    classes = {"chat": SloClass(name="chat", kind="interactive", ttft_target_ms=2000, itl_target_ms=200)}
    row = Model(name="m", weights_bytes=16 * 10**9, context_tokens=8192, kv_bytes_per_token=131_072)
    gpu_type = GpuType(name="h100-80gb", memory_bytes=85 * 10**9)
    options = options_of(row, gpu_type, None, [])
    seen = []

    def measured(engine, prompt, output, interactive, *given):
        seen.extend(np.frombuffer(prompt, np.int64))
        return Capability(100.0, 100.0, 200.0, "simulated")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offers, "_measured", measured)
        offers.offer(row, gpu_type, 1.0, options, own, classes)
    assert (len(seen), np.mean(seen)) == (offers.PAIRS, 200)


def asked(survives_loss=False, **changes):
    """Return a question of two models, two regions and two types: the second costs less for the second model."""
    values = {
        "models": ["small", "large"], "regions": ["east", "west"], "gpu_types": ["a", "b"],
        "demand_tokens_per_s": np.array([[900.0, 400.0], [500.0, 500.0]]),
        "capability_tokens_per_s": np.array([[500.0, 600.0], [0.0, 400.0]]),
        "gpus": np.array([[1, 1], [1, 2]]), "usd_per_hour": np.array([1.0, 2.0]), "survives_loss": survives_loss,
    }  # fmt: skip
    return Sought(**values | changes)


@pytest.mark.parametrize("survives_loss", [False, True])
def test_the_least_fleet_serves_all_demand_and_without_each_region_where_that_is_asked(survives_loss):
    sought = asked(survives_loss)
    counts = least(sought)
    served = (counts * sought.capability_tokens_per_s[:, None, :]).sum(axis=2)
    need = sought.demand_tokens_per_s.sum(axis=1) * (1 - TOLERANCE)
    assert np.all(served.sum(axis=1) >= need)
    assert np.all(served.min(axis=1) >= need) == survives_loss
    assert not counts[1, :, 0].any(), "the second model does not fit the first type"
    fewer = [counts - np.eye(counts.size, dtype=int)[at].reshape(counts.shape) for at in np.flatnonzero(counts)]
    problem = sought.problem(sought.demand_tokens_per_s)
    assert all(problem.shortage(each).any for each in fewer)


def test_gpus_carry_as_much_as_fits_on_them():
    sought, factor = asked(epsilon=1e-6), np.ones(2)
    counts = least(sought)
    units = (counts * sought.gpus[:, None, :]).sum(axis=0)
    assert carried(sought, units, factor) * 1.02 >= 1.0
    assert carried(sought, 4 * units, factor) > 3.0
    assert carried(sought, 0 * units, factor) == 0.0


def limited(able, much=0.97):
    """Return a judge: a model keeps *much* of its promises where it has *able* instances, and half of them otherwise."""
    return lambda counts: np.where(counts.sum(axis=(1, 2)) >= able, much, 0.5)[:, None]


def test_the_search_raises_what_misses_and_trims_what_keeps():
    sought = asked()
    first = least(sought).sum(axis=(1, 2))
    for able in (first + 3, np.maximum(1, first - 1)):
        settled = settle(sought, [limited(able)], np.array([0.95]))
        best = settled.cheapest(np.array([0.95]))
        assert [int(one.counts.sum()) for one in best] == able.tolist()
        assert settled.tried.any()
    assert settle(sought, [limited([500, 500])], np.array([0.95])).cheapest(0.95) == [None, None]


def test_what_one_draw_of_requests_refutes_is_neither_the_answer_nor_on_the_frontier():
    """The second draw needs an instance more for the promise, and never has 99%."""
    sought, able = asked(), np.array([4, 5])
    draws = [limited(able, 0.9995), limited(able + 1)]
    settled = settle(sought, draws, np.array([0.95]))
    best = settled.cheapest(0.95)
    assert [int(one.counts.sum()) for one in best] == (able + 1).tolist()
    assert all(one.worst[0] == 0.97 for one in best)
    (usd,) = {point.usd_per_month for point in settled.frontier()[:2]}
    assert usd == sum(one.usd_per_month for one in best)
    for point in settled.frontier()[2:]:
        assert point.usd_per_month is None
        assert point.why == "fleets for up to 3 times the demand reach 97.0% for small, 97.0% for large"


@pytest.mark.parametrize("runs", [0, 4])
def test_a_search_that_ends_early_has_the_promise_and_says_what_it_did_not_seek(runs):
    def late():
        return settled_runs[0] > runs

    def counting(counts):
        settled_runs[0] += 1
        return limited([4, 5])(counts)

    settled_runs = [0]
    settled = settle(asked(), [counting], np.array([0.95]), late=late)
    assert None not in settled.cheapest(0.95), "the first fleets come however late it is"
    points = settled.frontier()
    assert [point.attainment for point in points] == list(NINES)
    assert all(point.why for point in points if point.usd_per_month is None)
    assert points[-1].why == "the time of the check ended first"


@pytest.mark.parametrize(("seed", "survives_loss"), [(0, False), (1, True), (2, False)])
def test_one_gpu_less_than_the_least_drawn_fleet_breaks_a_promise(seed, survives_loss):
    sought, fleet = drawn(seed, survives_loss)
    settled = settle(sought, fleet.draws, fleet.wanted, nines=())
    best = settled.cheapest(fleet.wanted)
    counts = np.array([one.counts for one in best])
    assert settled.tried[counts > 0].all()

    def worst(of):
        lost = range(len(sought.regions)) if survives_loss else [None]
        met = []
        for region in lost:
            left = of.copy()
            if region is not None:
                left[:, region] = 0
            met += [judge(left)[:, 0] for judge in fleet.draws]
        return np.min(met, axis=0)

    assert np.all(worst(counts) >= fleet.wanted[0])
    for at in np.argwhere(counts > 0).tolist():
        fewer = counts.copy()
        fewer[tuple(at)] -= 1
        assert worst(fewer)[at[0]] < fleet.wanted[0], f"{at} could do with one less"


def test_demand_grows_by_a_percentage_or_a_curve():
    monthly = Question(percent=10, months=6)
    assert monthly.factor(6) == pytest.approx(1.1**6)
    assert monthly.months_until(1.5) == pytest.approx(4.3)
    curve = Question(growth="curve", curve="month;factor\n1;1.2\n2;1.6")
    assert (curve.over_months, curve.factor(0.5), curve.factor(2)) == (2, 1.1, 1.6)
    assert curve.months_until(1.4) == 1.6
    assert curve.months_until(2.0) is None
    assert Question(growth="forecast").factor(0) == 1.0
    with pytest.raises(ValueError, match="line 2 is 'x'"):
        curve_of("1, 1.1\nx")
