"""A run under `qlm` of requests that nobody can serve comes to its end, as under every other order."""

import pytest

from scheduling.simulation.cluster.world import State
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.simulation.small import cluster, instance


@pytest.mark.parametrize("ordering", ["fcfs", "qlm"])
def test_requests_that_wait_forever_are_reported(ordering):
    fleet = cluster(instance(dispatch_max_num_seqs=1), ordering=ordering)
    simulation = Simulation(fleet, make_requests([0.0, 0.125], 10, 50))
    simulation.advance(0.25)
    simulation.lives.drain(0, State.SPOT)
    with pytest.raises(RuntimeError, match="1 requests wait for ever"):
        simulation.run()
