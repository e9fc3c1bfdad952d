"""When one that is to leave its instance does so, on both simulators."""

from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.workload.requests import make_requests
from tests.oracles.fleet import Command
from tests.scheduling.simulation.cluster.agreeing import agree
from tests.scheduling.simulation.cluster.drawn import Drawn

ITERATION_S, ROUND_TRIP_S = 0.25, 1.0


def test_one_that_is_evicted_on_its_way_leaves_after_the_first_iteration_with_it_there():
    """The instance has no free sequence for it, so nothing else would end the iterations that are counted at once."""
    engine = EngineConfig(
        max_num_seqs=1, max_num_batched_tokens=64, block_size_tokens=1, kv_blocks=200, policy="fcfs",
        max_model_len=100,
        profile=Profile(0.0, ITERATION_S, 0.0, 0.0, ITERATION_S, 0.0, 0.0),
    )  # fmt: skip
    cluster = Cluster(
        instances=[InstanceSpec("m", "r", engine, dispatch_max_num_seqs=2)], models=["m"], regions=["r"],
        policies=EndpointPolicy(dispatch_round_trip_ms=1000 * ROUND_TRIP_S),
    )  # fmt: skip
    requests = make_requests([0.0, 3.0], [10, 10], [60, 5])
    evicted = Command(time_s=3.5, name="evict", arguments=(1,))
    _, result = agree(Drawn(cluster, requests, (evicted,), seed=0))
    sent_s = result.decisions["time_s"][result.decisions["request"] == 1]
    assert result.outcomes["evictions"].tolist() == [0, 1]
    assert sent_s[0] == 3.0
    assert 3.0 + ROUND_TRIP_S <= sent_s[1] <= 3.0 + ROUND_TRIP_S + ITERATION_S
