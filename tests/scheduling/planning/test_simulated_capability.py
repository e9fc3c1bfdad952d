"""Capability by simulation: it falls with bursts and percentiles, and holds on fleets that it was not measured on."""

import numpy as np
import pytest

from controlplane.experiments.shared.scenes import SAGESERVE_MODELS
from scheduling.planning import simulated_capability as measuring
from scheduling.planning.bursts import usable_instances
from scheduling.planning.simulated_capability import simulated_capability
from scheduling.queueing.promises import Promise
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.measures.results import kept
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests

ENGINE = SAGESERVE_MODELS[1].engine()
LENGTHS = np.array([600, 900, 1500, 2400]), np.array([300, 150, 250, 80])
PROMISE = Promise(ttft_s=2.0)


def able(cv: float = 1.0, percentile: float = 95.0, promise: Promise = PROMISE):
    return simulated_capability(ENGINE, *LENGTHS, promise, percentile=percentile, cv=cv)


def test_bursts_and_stricter_percentiles_leave_less_of_the_same_instances():
    smooth, uneven, strict = able(), able(3.0), able(3.0, 99.0)
    left = [
        float(usable_instances(3, each.reserve, each.cv)) * each.total_tokens_per_s for each in (smooth, uneven, strict)
    ]
    assert left[0] > 1.2 * left[1] > 1.2 * left[2] > 0
    assert (uneven.source, uneven.percentile, uneven.cv) == ("simulated", 95.0, 3.0)
    assert uneven.prompt_tokens_per_s + uneven.output_tokens_per_s == pytest.approx(uneven.total_tokens_per_s)


@pytest.mark.parametrize(
    ("instances", "cv"),
    [
        pytest.param(6, 2.0, marks=pytest.mark.nightly),
        pytest.param(12, 2.0, marks=pytest.mark.nightly),
        (6, 3.0),
    ],
)
def test_a_fleet_of_another_size_keeps_its_percentile_at_what_it_is_said_to_serve(instances, cv):
    one = able(cv)
    tokens_per_s = one.total_tokens_per_s * float(usable_instances(instances, one.reserve, cv))
    random = np.random.default_rng(5)
    rate = 0.95 * tokens_per_s / float(LENGTHS[0].mean() + LENGTHS[1].mean())
    arrival_s = np.cumsum(random.standard_gamma(cv**-2, 20_000) * cv**2) / rate
    at = random.integers(0, 4, arrival_s.size)
    result = Simulation(
        Cluster([InstanceSpec("one", "here", ENGINE)] * instances),
        make_requests(arrival_s, LENGTHS[0][at], LENGTHS[1][at]),
    ).run()
    judged, met = kept(result, [PROMISE])
    assert (judged & met).mean() > 0.93


@pytest.mark.parametrize("ttft_s", [0.4, 0.2, 0.1])
def test_a_goal_out_of_reach_plans_for_what_can_be_reached(ttft_s):
    """Neither for almost nothing, which pins the fleet at its maximum, nor for an overload that breaks every promise."""
    one, reachable = able(promise=Promise(ttft_s=ttft_s)), able()
    assert 0.6 < one.total_tokens_per_s / reachable.total_tokens_per_s <= 1.0
    assert one.reserve >= reachable.reserve
    assert 0.4 < one.out_of_reach <= 1.0
    assert "on an idle instance" in one.note
    assert (reachable.out_of_reach, "idle" in reachable.note) == (0.0, False)


def test_nothing_to_draw_from_and_wrong_percentiles_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        simulated_capability(ENGINE, [], [], PROMISE)
    with pytest.raises(ValueError, match="percentile"):
        able(percentile=0.0)


def test_a_rough_estimate_falls_with_length():
    assert measuring.rough_requests_per_s(ENGINE, 1000, 200) < measuring.rough_requests_per_s(ENGINE, 500, 100)
