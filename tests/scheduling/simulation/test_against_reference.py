"""The compiled engine against the reference engine, one iteration at a time, on many small fleets."""

import numpy as np
import pytest

from scheduling.simulation.reference_fleet import ReferenceFleet
from scheduling.simulation.simulator import Simulation
from tests.scheduling.simulation.scenarios import KINDS, scenario

CLOSE_S = 1e-6


def agree(kind: str, seed: int):
    given = scenario(kind, seed)
    reference = ReferenceFleet(given.cluster, given.requests)
    expected = reference.run()
    simulation = Simulation(given.cluster, given.requests, decisions=True)
    result = simulation.run()
    for name in ("ttft_s", "e2e_s", "queue_s"):
        np.testing.assert_allclose(result.outcomes[name], expected[name], rtol=0, atol=CLOSE_S, err_msg=name)
    for name in ("instance", "endpoint", "preemptions", "attempts", "state"):
        np.testing.assert_array_equal(result.outcomes[name], expected[name], err_msg=name)
    decided = [(request, endpoint, instance) for _, request, endpoint, instance in reference.decisions]
    assert [tuple(row) for row in result.decisions[["request", "endpoint", "instance"]].tolist()] == decided
    # Whatever was placed was released.
    for left in (simulation.fleet.running, simulation.fleet.kv_tokens, simulation.fleet.remaining_tokens):
        assert not left.any()
    return expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_every_latency_and_decision_agrees(kind, seed):
    agree(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(1000, 1120))
def test_every_latency_and_decision_agrees_on_many_more(kind, seed):
    agree(kind, seed)


def test_the_scenarios_hold_what_they_are_for():
    """Otherwise agreeing on them would say little."""
    outcomes = {kind: [agree(kind, seed) for seed in range(12)] for kind in KINDS}
    assert sum(outcome["preemptions"].sum() for outcome in outcomes["memory"]) > 20
    assert sum((outcome["queue_s"] > 0).sum() for outcome in outcomes["overload"]) > 100
    everything = np.concatenate([outcome for of_kind in outcomes.values() for outcome in of_kind])
    assert (everything["state"] == 4).any(), "queues run full"
    assert (everything["endpoint"] > 0).any()
