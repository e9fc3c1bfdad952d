"""The rule of the spot pool, and the simulator that follows it."""

import pytest

from scheduling.fleet.profile import Profile
from scheduling.scaling.spot import Donated, first_to_redeploy, redeploy_s
from scheduling.simulation.cluster.description import Cluster, Delays, InstanceSpec
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests

ENGINE = EngineConfig(4, 2048, 16, 400, "fcfs", 2000, Profile(0.01, 0.0, 1e-4, 0.0, 0.02, 1e-3, 1e-6))


@pytest.mark.parametrize(
    ("donated", "first"),
    [
        ([Donated(2.0, 600), Donated(1.0, 600)], 1),
        ([Donated(1.0, 600), Donated(9.0, 120)], 1),
        ([Donated(1.0, 600, 3), Donated(1.0, 600, 1)], 1),
        ([Donated(1.0, 600), Donated(1.0, 600)], 0),
    ],
    ids=["cheapest", "soonest before cheapest", "fewest requests", "first"],
)
def test_which_is_redeployed(donated, first):
    assert first_to_redeploy(donated) == first


def test_none_to_redeploy_is_an_error():
    with pytest.raises(ValueError, match="no instance is donated"):
        first_to_redeploy([])


@pytest.mark.parametrize(
    ("same_architecture_s", "pull_s", "seconds"), [(None, 0, 600), (120, 0, 120), (None, 6600, 7200), (900, 0, 600)]
)
def test_how_long_a_redeployment_takes(same_architecture_s, pull_s, seconds):
    assert redeploy_s(600, same_architecture_s, pull_s) == seconds


def simulation(**lent):
    specs = [
        InstanceSpec("small", "east", ENGINE, "h100", state=State.SPOT, usd_per_hour=3.0),
        InstanceSpec("small", "east", ENGINE, "h100", state=State.SPOT, usd_per_hour=2.0),
        InstanceSpec("large", "east", ENGINE, "h100", state=State.READY),
        InstanceSpec("large", "east", ENGINE, "h100", state=State.EMPTY, **lent),
    ]
    delays = Delays(start_s=20.0, local_weights_s=600.0, remote_weights_s=7200.0)
    requests = make_requests([0.0, 20_000.0], [50, 50], [5, 5])
    return Simulation(Cluster(specs, delays=delays, models=["large", "small"], share_spot=True), requests)


def becomes_ready_s(simulated, instance: int) -> float:
    changes = simulated.run().changes
    return next(float(one["time_s"]) for one in changes if one["instance"] == instance and one["after"] == State.READY)


@pytest.mark.parametrize(("lent", "loads_s"), [({}, 600.0), ({"pull_s": 900.0}, 1500.0)])
def test_the_simulator_redeploys_the_one_that_the_rule_picks(lent, loads_s):
    simulated = simulation(**lent)
    (endpoint,) = [at for at, (model, _) in enumerate(simulated.cluster.endpoints) if model == "large"]
    assert simulated.scale_out(endpoint, 1) == 1
    assert simulated.states[1] == State.LOADING, "the cheaper one"
    assert becomes_ready_s(simulated, 1) == pytest.approx(loads_s)


@pytest.mark.parametrize(("pull_s", "loads_s"), [(None, 7200.0), (0.0, 600.0), (300.0, 900.0)])
def test_a_new_machine_loads_by_where_its_weights_are(pull_s, loads_s):
    simulated = simulation(pull_s=pull_s)
    simulated.lives.start(3)
    assert becomes_ready_s(simulated, 3) == pytest.approx(20.0 + loads_s)
