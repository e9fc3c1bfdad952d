"""Capability by simulation: it falls with bursts and percentiles, and holds on fleets that it was not measured on."""

import numpy as np
import pytest

from controlplane.experiments.shared.scenes import SAGESERVE_MODELS
from scheduling.fleet.profile import Profile
from scheduling.planning import simulated_capability as measuring
from scheduling.planning.bursts import usable_instances
from scheduling.planning.simulated_capability import simulated_capability
from scheduling.queueing.promises import Promise
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.measures.results import kept, latency_s
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


LLAMA = Profile(0.0228808, 0.00379609, 4.73168e-05, 2.23414e-09, 0.00844396, 2.27225e-05, 7.23735e-08)
CODE = EngineConfig(12, 8192, 16, 65_000, "priority", 131_072, LLAMA)


def mixed(count: int, interactive_share: float, random: np.random.Generator):
    """Interactive prompts of some 4,000 tokens, and deferred ones of some 10,000."""
    interactive = random.random(count) < interactive_share
    spread = np.exp(0.6 * random.standard_normal((2, count)))
    medians = np.where(interactive, 4000, 9600), np.where(interactive, 680, 1700)
    prompts, outputs = medians * spread
    return np.clip(prompts, 1, 80_000).astype(np.int64), np.clip(outputs, 1, 40_000).astype(np.int64), interactive


@pytest.mark.parametrize("as_if_all_were_interactive", [False, True])
def test_requests_out_of_reach_take_nothing_from_what_the_others_are_served(as_if_all_were_interactive):
    """Of a mix of which 3 to 8% break the promise alone, 5% being allowed, an instance serves about as much as of any."""
    served, out_of_reach = [], set()
    for share in (0.9, 0.8, 0.6, 0.45):
        prompts, outputs, interactive = mixed(400, share, np.random.default_rng(7))
        of = True if as_if_all_were_interactive else interactive
        one = simulated_capability(CODE, prompts, outputs, Promise(ttft_s=1.0, itl_s=0.2), interactive=of)
        served.append(one.total_tokens_per_s * float(usable_instances(8, one.reserve)))
        out_of_reach.add(one.out_of_reach > 0)
    assert min(served) > 0.6 * max(served)
    assert out_of_reach == ({False, True} if as_if_all_were_interactive else {False})


def test_deferred_work_that_keeps_no_promise_does_not_pile_up():
    """Its capability is what the simulator serves: more waits ever longer, with or without a promise beside it."""
    random = np.random.default_rng(3)
    prompts, outputs, _ = mixed(400, 0.5, random)
    one = simulated_capability(CODE, prompts, outputs, Promise(ttft_s=1.0), interactive=False)
    waits_s = []
    for load in (0.7, 1.4):
        rate = load * 4 * one.total_tokens_per_s / float(prompts.mean() + outputs.mean())
        arrival_s, at = np.cumsum(random.exponential(1 / rate, 4000)), random.integers(0, 400, 4000)
        cluster = Cluster([InstanceSpec("one", "here", CODE)] * 4)
        waits_s.append(
            latency_s(Simulation(cluster, make_requests(arrival_s, prompts[at], outputs[at])).run(), "queue")
        )
    assert np.percentile(waits_s[0], 95) < 30.0
    assert np.percentile(waits_s[1], 95) > 300.0


def test_nothing_to_draw_from_and_wrong_percentiles_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        simulated_capability(ENGINE, [], [], PROMISE)
    with pytest.raises(ValueError, match="percentile"):
        able(percentile=0.0)


def test_a_rough_estimate_falls_with_length():
    assert measuring.rough_requests_per_s(ENGINE, 1000, 200) < measuring.rough_requests_per_s(ENGINE, 500, 100)
