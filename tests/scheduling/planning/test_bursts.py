"""Burstiness from counts, the root law of reserves, and what plans make of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.profile import Profile
from scheduling.planning.advisor import Demand, EndpointDemand, PlanInputs, PlanSettings, make_plan
from scheduling.planning.bursts import arrival_cv, highest_load_kept, instances_for, pooled_reserve, usable_instances
from scheduling.planning.capacity import MEASURED, Capability, instances_needed, profile_capability
from scheduling.planning.places import Deployed, Fleet
from scheduling.planning.simulated_capability import simulated_capability
from scheduling.queueing.promises import Promise
from scheduling.scaling import PlansFor
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.measures.results import kept
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.generator import Client, LengthsByClass, Lognormal, generate
from scheduling.simulation.workload.requests import make_requests
from tests.examples import at_night_but


def by_minute(cv: float, swing: float = 0.0) -> np.ndarray:
    lengths = LengthsByClass(Lognormal(10, 20), Lognormal(10, 20))
    client = Client("one", "m", "interactive", 2.0, lengths, cv=cv, daily_swing=swing)
    return np.bincount((generate([client], 86_400.0, seed=3).arrival_s // 60).astype(int), minlength=1440)


@pytest.mark.parametrize("cv", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("swing", [0.0, 0.9])
def test_the_cv_of_arrivals_comes_out_of_their_counts_whatever_the_course_of_the_day(cv, swing):
    assert arrival_cv(by_minute(cv, swing)) == pytest.approx(cv, rel=0.12)


def test_too_few_minutes_are_taken_for_poisson():
    assert arrival_cv([0, 90, 0, 90]) == 1.0
    assert arrival_cv([]) == 1.0
    assert arrival_cv(np.full(500, np.nan)) == 1.0


@given(st.floats(0.01, 500.0), st.floats(0.0, 0.6), st.floats(1.0, 6.0))
def test_as_many_instances_as_a_load_needs_can_use_just_that_load(load, reserve, cv):
    n = instances_for(load, reserve, cv)
    assert n >= load * (1 - 1e-9)
    assert usable_instances(n, reserve, cv) == pytest.approx(load, rel=1e-6)


def test_ten_instances_need_about_three_times_the_reserve_of_one():
    one, ten = (float(n - usable_instances(n, 0.1, 2.0)) for n in (1.0, 10.0))
    assert ten == pytest.approx(np.sqrt(10.0) * one)


def test_a_lucky_window_at_a_high_load_is_pooled_with_its_unlucky_neighbours():
    load, requests = [1.0, 2.0, 3.0, 4.0, 5.0], np.full(5, 100.0)
    assert highest_load_kept(load, [0, 1, 20, 30, 0], 0.05 * requests, requests) == 2.0
    # An unlucky one between kept ones does not end them.
    assert highest_load_kept(load, [0, 8, 0, 1, 50], 0.05 * requests, requests) == 4.0
    assert highest_load_kept(load, np.full(5, 50), 0.05 * requests, requests) == 0.0


def test_windows_of_endpoints_of_different_sizes_show_the_same_instance():
    able = Capability(0.0, 0.0, 0.0, "unknown", reserve=0.2)
    sizes = np.repeat([1.0, 4.0, 9.0], 12)
    tokens = 600.0 * 100.0 * usable_instances(sizes, 0.2, 2.0)
    seen = profile_capability(tokens, 0.0 * tokens, 0.0 * sizes, 0.0 * sizes + 50, sizes, 600.0, expected=able, cv=2.0)
    assert (seen.source, seen.windows) == (MEASURED, 36)
    assert seen.total_tokens_per_s == pytest.approx(100.0)


def plan(cv: float, regions: int = 1, mean: float = 800.0, level: float = 800.0):
    """Return the share within SLO at 800 tokens a second over all regions, where an instance serves 100."""
    able = {("m", "gpu"): Capability(1e9, 1e9, 100.0, MEASURED, reserve=0.3)}
    names = [f"region-{at}" for at in range(regions)]
    fleet = Fleet({("m", name, "gpu"): Deployed(1, 0, 1, 50, 1, 1.0) for name in names}, {})
    each, means = (np.full(3, rate / regions) for rate in (level, mean))
    demand = {("m", name): EndpointDemand(each, each, 0.5 * each, cv=cv, mean=means) for name in names}
    return make_plan(0.0, PlanInputs(Demand(0.0, 600.0, demand), fleet, able, {"m": PlansFor()}, PlanSettings()))


def test_a_plan_has_more_instances_the_burstier_its_arrivals():
    planned = [int(plan(cv).plan.targets.sum()) for cv in (1.0, 2.0, 4.0)]
    assert planned == [np.ceil(instances_for(8.0, 0.3, cv)) for cv in (1.0, 2.0, 4.0)]
    assert planned == sorted(set(planned))
    assert plan(2.0).endpoints["m", "region-0"].forecast_tokens_per_s == 800.0  # the reserve is no demand
    assert plan(2.0).reserve_tokens_per_s["m", "region-0"] == pytest.approx(
        100.0 * instances_for(8.0, 0.3, 2.0) - 800.0
    )


def test_regions_share_their_reserve_though_not_as_one_queue():
    four, one = plan(3.0, regions=4).reserve_tokens_per_s, plan(3.0).reserve_tokens_per_s
    assert len(set(four.values())) == 1
    separately = 4 * (100.0 * instances_for(2.0, 0.3, 3.0) - 200.0)
    assert sum(one.values()) < sum(four.values()) < 0.7 * separately
    # A region of no weight is none.
    assert pooled_reserve(0.3, [1.0, 0.0]) == 0.3
    assert pooled_reserve(0.3, [2.0, 2.0]) == pytest.approx(0.3 * 2**0.1)


def test_a_forecast_in_doubt_and_bursts_add_up_as_deviations():
    reserve = 100.0 * float(instances_for(8.0, 0.3, 2.0)) - 800.0
    doubted = plan(2.0, mean=600.0).reserve_tokens_per_s["m", "region-0"]
    assert doubted == pytest.approx(np.hypot(200.0, reserve) - 200.0)
    assert 0 < doubted < reserve


def test_algorithm_2_has_the_reserve_too():
    able = Capability(1000.0, 100.0, 900.0, MEASURED, reserve=0.3)
    assert instances_needed(able, 3600.0, 0.0) == np.ceil(instances_for(4.0, 0.3))
    assert instances_needed(able, 3600.0, 0.0, cv=3.0) == np.ceil(instances_for(4.0, 0.3, 3.0))


CODE = EngineConfig(128, 8192, 16, 30_000, "fcfs", 32_768, Profile(0.02, 0.005, 5e-5, 1e-10, 0.012, 2e-4, 2e-8))


@pytest.mark.parametrize("cv", at_night_but([3.0], [1.0, 3.0]))
@pytest.mark.parametrize(("regions", "each"), at_night_but([(3, 2)], [(1, 2), (3, 2), (1, 6)]))
def test_the_law_keeps_the_promise_in_one_region_and_over_several_small_ones(cv, regions, each):
    """Long prompts. The formula treats regions as one pool: a burst in one must reach another in time."""
    random = np.random.default_rng(5)

    def lengths(count):
        prompts = np.clip(3000 * np.exp(0.8 * random.standard_normal(count)), 50, 16_000).astype(np.int64)
        return prompts, random.integers(5, 60, count)

    prompts, outputs = lengths(4000)
    promise = Promise(ttft_s=2.0)
    able = simulated_capability(CODE, prompts, outputs, promise, percentile=95.0, cv=cv)
    served_per_s = able.total_tokens_per_s / (prompts.mean() + outputs.mean())
    rate = float(usable_instances(regions * each, able.reserve, cv)) * served_per_s / regions
    count = 12_000 // regions
    gaps = random.standard_gamma(cv**-2, (regions, count)) * cv**2 / rate
    arrival_s, region = np.cumsum(gaps, axis=1).ravel(), np.repeat(np.arange(regions), count)
    order = np.argsort(arrival_s)
    prompts, outputs = lengths(arrival_s.size)
    requests = make_requests(arrival_s[order], prompts, outputs, region=region[order])
    names = ["east", "west", "north"][:regions]
    cluster = Cluster([InstanceSpec("m", name, CODE) for name in names for _ in range(each)])
    judged, met = kept(Simulation(cluster, requests).run(until_s=float(arrival_s.max()) + 600.0), [promise])
    assert met[judged].mean() > 0.945
