"""Fallbacks of models under both clocks: the same requests are served by another model, by the same rule."""

from dataclasses import replace as changed

import numpy as np
import pytest
from msgspec.structs import replace

from controlplane.dispatch.port import Asked, FellBack
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.routing.models import RULES, Fallback, ModelRule
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.dispatch.test_failure_twin import Failing, fail_in_both
from tests.dispatch.test_twin import assert_alike

COUNT = 300
M, N = 0, 1


class FallingBack(Failing):
    """The dispatcher with fallbacks, and the records of what they serve. Instances fail at *fails*."""

    def __init__(self, fleet, fails=()):
        self.fell_back = {}
        super().__init__(fleet)
        self.fails, take = list(fails), self.dispatcher.take

        def submit(record):
            if isinstance(record, Asked) and (fallback := fleet.fallbacks.get(record.model)):
                record = replace(record, fallback=fallback.model, fallback_wait_s=fallback.wait_s)
            take(record)

        self.dispatcher.take = submit

    def take(self, record):
        super().take(record)
        if isinstance(record, FellBack):
            self.fell_back[record.number] = record.rule


def fleet_of(wait_s=None, queue_bound=None, ordering="fcfs", own=2, sweeps=True):
    engine = EngineConfig(4, 64, 4, 200, "fcfs", 120, Profile(0.05, 0.04, 1e-3, 0.0, 0.04, 0.002, 1e-5))
    specs = [simulated.InstanceSpec("m", "east", engine)] * own + [simulated.InstanceSpec("n", "east", engine)] * 3
    return simulated.Cluster(
        specs,
        policies=EndpointPolicy(ordering=ordering, queue_bound=queue_bound),
        fallbacks={"m": Fallback("n", wait_s)},
        sweeps=sweeps,
    )


def demand(per_s=16.0, count=COUNT):
    random = np.random.default_rng(7)
    output = np.clip(random.geometric(1 / 20, count), 1, 60)
    return make_requests(
        np.cumsum(random.exponential(1 / per_s, count)),
        random.integers(1, 55, count),
        output,
        predicted_tokens=np.clip(output + random.integers(-15, 15, count), 1, None),
        model=np.where(random.random(count) < 0.7, M, N),
    )


def both(fleet, requests, fails=()):
    live = FallingBack(fleet, fails)
    result = fail_in_both(live, fleet, requests, fails)
    rules = {
        int(request): str(RULES[result.outcomes["model_rule"][request]])
        for request in np.flatnonzero(result.outcomes["model_rule"])
    }
    return live, result, rules


@pytest.mark.parametrize(
    ("options", "fails", "rules"),
    [
        ({"queue_bound": 6}, (), {ModelRule.UNAVAILABLE}),
        ({"queue_bound": 6, "ordering": "ssjf"}, ((1.503, 0),), {ModelRule.UNAVAILABLE}),
        ({}, ((1.503, 0), (3.017, 1)), {ModelRule.UNAVAILABLE, ModelRule.FAILURE}),
        ({"own": 1, "queue_bound": 30}, ((2.211, 0),), {ModelRule.UNAVAILABLE}),
    ],
)
async def test_both_clocks_fall_back_alike(options, fails, rules):
    fleet, requests = fleet_of(**options), demand()
    live, result, by_simulator = both(fleet, requests, fails)
    assert_alike(live, result)
    assert by_simulator == live.fell_back
    assert set(by_simulator.values()) == rules
    assert len(by_simulator) > 20
    states = result.outcomes["state"]
    assert np.flatnonzero(states == Outcome.REFUSED).tolist() == sorted(number for number, _ in live.refused)
    other = sorted(by_simulator)
    assert set(result.requests.model[other]) == {N}
    assert set(result.requests.asked[other]) == {M}
    assert result.counters["fell_back_unavailable"] + result.counters["fell_back_failure"] == len(other)
    assert (requests.model[other] == M).all(), "the requests that were given are not changed"


async def test_both_clocks_fall_back_after_a_wait_alike():
    """By estimates that are nearly the same: nearly as many, and after nearly as long a wait."""
    fleet, requests = fleet_of(wait_s=1.5), demand(14.0, 1500)
    live, result, by_simulator = both(fleet, requests)
    assert set(live.fell_back.values()) == set(by_simulator.values()) == {ModelRule.WAIT}
    assert 0.03 * requests.count < len(live.fell_back) < 0.5 * requests.count
    assert len(by_simulator) == pytest.approx(len(live.fell_back), rel=0.25)
    assert (result.outcomes["state"] == Outcome.DONE).all()
    waits_s = result.outcomes["queue_s"]
    without = Simulation(changed(fleet, fallbacks={}), requests).run().outcomes["queue_s"]
    assert np.percentile(waits_s, 95) < 0.7 * np.percentile(without, 95)


def test_a_fallback_that_serves_nothing_is_no_fallback():
    """Where nothing serves the other model either, requests are refused or wait as without it."""
    fleet = fleet_of()
    fleet.instances = [changed(spec, state=simulated.State.EMPTY) for spec in fleet.instances]
    requests = demand(count=20)._replace(hold_s=np.full(20, 5.0))
    result = Simulation(fleet, requests).run()
    assert (result.outcomes["state"] == Outcome.REFUSED).all()
    assert not result.outcomes["model_rule"].any()
    with pytest.raises(ValueError, match="the fallback of m must be another model"):
        changed(fleet, fallbacks={"m": Fallback("m")})
