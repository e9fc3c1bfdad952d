"""What only a simulation has: batches, links between regions that take time, and callers that evict. Times by hand."""

import pytest

from scheduling.fleet.profile import Profile
from scheduling.policy import Batching
from scheduling.routing.models import Fallback
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.simulation.engine.engines import config
from tests.scheduling.simulation.small import cluster, instance

# On the easy profile requests of 100 + 1 tokens take one step of 1 + 0.01 times all their tokens.
SHORT = {"prompt_tokens": 100, "output_tokens": 1}


@pytest.mark.parametrize(
    ("batching", "arrivals_s", "given_s"),
    [
        (Batching(), [0.0, 0.1], [0.0, 0.1]),
        (Batching("none"), [0.0, 0.1, 0.2], [0.0, 2.0, 4.0]),
        (Batching("dynamic", 3, 1.0), [0.0, 0.1, 0.25], [0.25] * 3),  # full
        (Batching("dynamic", 3, 1.0), [0.0, 0.5], [1.0] * 2),  # the oldest has waited long enough
        (Batching("dynamic", 2, 0.5), [0.0, 0.0, 1.0, 2.0], [0.0, 0.0, 3.0, 3.0]),  # once the first batch is over
        (Batching("dynamic", 2, 0.5), [0.0, 0.0, 2.0], [0.0, 0.0, 3.5]),  # waits from when an instance is idle
    ],
)
def test_whole_batches_are_given_once_they_are_full_or_old(batching, arrivals_s, given_s):
    result = Simulation(cluster(batching=batching), make_requests(arrivals_s, **SHORT), decisions=True).run()
    assert result.decisions["time_s"].tolist() == pytest.approx(given_s)
    assert result.decisions["request"].tolist() == sorted(result.decisions["request"].tolist())


def test_requests_take_links_there_and_back():
    fleet = cluster(instance(region="there"), regions=["here", "there"], latency_s=[[0.0, 0.25], [0.5, 0.0]])
    result = Simulation(fleet, make_requests([0.0, 10.0], region=[0, 1], **SHORT), decisions=True).run()
    assert result.decisions["time_s"].tolist() == [0.25, 10.0]
    assert result.outcomes["ttft_s"].tolist() == [0.25 + 2.0 + 0.5, 2.0]
    assert result.outcomes["e2e_s"].tolist() == [2.75, 2.0]


ITERATION_S, ROUND_TRIP_S = 0.25, 1.0


def test_one_that_is_evicted_on_its_way_leaves_after_the_first_iteration_with_it_there():
    """The instance has no free sequence for it, so nothing else would end the iterations that are counted at once."""
    engine = config(max_num_seqs=1, profile=Profile(0.0, ITERATION_S, 0.0, 0.0, ITERATION_S, 0.0, 0.0))
    fleet = cluster(instance(engine=engine, dispatch_max_num_seqs=2), dispatch_round_trip_ms=1000 * ROUND_TRIP_S)
    simulation = Simulation(fleet, make_requests([0.0, 3.0], [10, 10], [60, 5]), decisions=True)
    simulation.advance(3.5)
    simulation.evict(1)
    with pytest.raises(ValueError, match="1"):
        simulation.evict(1)
    result = simulation.run()
    sent_s = result.decisions["time_s"][result.decisions["request"] == 1]
    assert result.outcomes["evictions"].tolist() == [0, 1]
    assert sent_s[0] == 3.0
    assert 3.0 + ROUND_TRIP_S <= sent_s[1] <= 3.0 + ROUND_TRIP_S + ITERATION_S


def test_a_fallback_that_serves_nothing_is_no_fallback():
    """Where nothing serves the other model either, requests are refused or wait as without it."""
    models = [instance(model, state=State.EMPTY) for model in "mn"]
    fleet = cluster(*models, fallbacks={"m": Fallback("n")}, sweeps=True)
    result = Simulation(fleet, make_requests([0.0, 1.0], hold_s=5.0, **SHORT)).run()
    assert (result.outcomes["state"] == Outcome.REFUSED).all()
    assert not result.outcomes["model_rule"].any()
