"""Swaps by queue alongside swaps on demand, in whole simulations of two models that share the GPUs of one instance."""

import pytest

from tests.examples import at_night_but
from tests.scheduling.simulation.shared_gpus import FOR_S, SWAP_S, simulated


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("per_s", "slo_s"),
    at_night_but(
        [((2.2, 2.2), (90.0, 90.0))],
        [((2.0, 2.0), (30.0, 300.0)), ((2.5, 2.5), (60.0, 120.0)), ((2.2, 2.2), (90.0, 90.0))],
    ),
)
def test_swaps_by_queue_are_fewer_and_keep_no_fewer_in_time(per_s, slo_s, seed):
    _, in_time, swaps = simulated(per_s, slo_s, seed=seed)
    _, on_demand, swaps_on_demand = simulated(per_s, slo_s, seed=seed, by_queue=False)
    assert in_time.mean() >= on_demand.mean()
    assert 0 < swaps < swaps_on_demand


def test_alternating_requests_are_grouped_by_model():
    """C77: each is for the other of two models. One a second leaves the GPUs idle, so that swaps cost no request time;
    of what keeps them busy, at most a tenth of the time goes into swaps.
    """
    outcomes, in_time, swaps = simulated((0.5, 0.5), (60.0, 60.0), seed=77, alternating=True)
    assert in_time.all()
    assert 0 < swaps <= len(outcomes) / 8
    _, in_time, swaps = simulated((2.0, 2.0), (60.0, 60.0), seed=77, alternating=True)
    assert in_time.all()
    assert 0 < swaps * SWAP_S <= 0.1 * FOR_S


def test_orders_without_groups_swap_on_demand_as_before():
    queue = simulated((1.0, 1.0), (30.0, 200.0), seed=1, ordering="deadline")
    demand = simulated((1.0, 1.0), (30.0, 200.0), seed=1, ordering="deadline", by_queue=False)
    assert queue[0].tobytes() == demand[0].tobytes()
    assert queue[2] == demand[2] > 0
