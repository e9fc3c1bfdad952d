"""Instances that come, go, fail, sleep and change their model while requests run."""

import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest

from scheduling.simulation.cluster.description import Delays, Sharing
from scheduling.simulation.cluster.world import State
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.simulation.engine.engines import config
from tests.scheduling.simulation.small import cluster, instance

# On the easy profile a request of 100 + 1 tokens alone takes 2 s: a step of prefill, 1 + 0.01 * 100.
SHORT = {"prompt_tokens": 100, "output_tokens": 1}


def states(result) -> list[tuple[float, int, str]]:
    return [(row["time_s"], int(row["instance"]), State(row["after"]).name) for row in result.changes]


DELAYS = Delays(
    spot_median_s=0.0, start_s=3.0, local_weights_s=7.0, remote_weights_s=11.0, sleep_s=1.0, wake_s=2.0, swap_gpu_s=0.5,
    swap_cpu_s=1.5, swap_storage_s=4.5, gpu_models=1, cpu_models=1, repair_s=13.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("state", "commands", "expected"),
    [
        (State.EMPTY, [("start", 5.0)], [(5.0, "STARTING"), (8.0, "LOADING"), (19.0, "READY")]),
        (State.ASLEEP, [("wake", 5.0)], [(5.0, "WAKING"), (7.0, "READY")]),
        (State.SPOT, [("start", 5.0)], [(5.0, "RECLAIMING"), (5.0, "READY")]),
        (State.SPOT, [("stop", 5.0)], [(5.0, "EMPTY")]),
        (State.READY, [("drain", 5.0)], [(5.0, "SPOT")]),
        (State.READY, [("stop", 5.0)], [(5.0, "EMPTY")]),
        (State.READY, [("sleep", 5.0), ("wake", 7.0)],
         [(5.0, "FALLING_ASLEEP"), (6.0, "ASLEEP"), (7.0, "WAKING"), (9.0, "READY")]),
        (State.READY, [("fail", 5.0)], [(5.0, "FAILED"), (18.0, "LOADING"), (25.0, "READY")]),
        (State.READY, [("fail", 5.0, 2.0)], [(5.0, "FAILED"), (7.0, "LOADING"), (14.0, "READY")]),
        (State.READY, [("redeploy", 5.0, 1)], [(5.0, "LOADING"), (12.0, "READY")]),
        (State.SPOT, [("redeploy", 5.0, 1, True)], [(5.0, "LOADING"), (16.0, "READY")]),
        (State.READY, [("swap", 5.0, 1), ("swap", 20.0, 0)],
         [(5.0, "SWAPPING"), (9.5, "READY"), (20.0, "SWAPPING"), (21.5, "READY")]),
        # The request that comes at 30 s runs there for 2 s.
        (State.READY, [("drain", 30.5), ("start", 31.0)], [(30.5, "DRAINING"), (31.0, "READY")]),
        (State.READY, [("stop", 31.0)], [(31.0, "DRAINING"), (32.0, "EMPTY")]),
        (State.READY, [("redeploy", 31.0, 1)], [(31.0, "DRAINING"), (32.0, "LOADING"), (39.0, "READY")]),
    ],
)  # fmt: skip
def test_each_change_takes_its_time(state, commands, expected):
    fleet = cluster(instance("a", state=state), instance("b"), delays=DELAYS)
    simulation = Simulation(fleet, make_requests([30.0, 100.0], model=[0, 1], **SHORT))
    for name, at_s, *arguments in commands:
        simulation.advance(at_s)
        getattr(simulation, name)(0, *arguments)
    assert [(at_s, state) for at_s, number, state in states(simulation.run()) if number == 0] == expected


def test_an_endpoint_is_scaled_out_from_the_nearest_source_and_in_by_the_least_loaded():
    rests = [State.READY, State.EMPTY, State.ASLEEP, State.SPOT, State.READY]
    specs = [*(instance("a", state=rest) for rest in rests), instance("b", state=State.SPOT), instance("b")]
    simulation = Simulation(cluster(*specs, delays=DELAYS), make_requests([0.0, 0.0, 0.0, 100.0], 100, 900))
    simulation.advance(5.0)
    assert simulation.scale_in(0) == 1  # the instance with one of the three requests
    assert simulation.scale_out(0, 9) == 5
    assert [number for at_s, number, _ in states(simulation.result()) if at_s == 5.0] == [4, 4, 3, 2, 5, 1]


def test_one_that_fails_while_it_drains_for_another_model_is_given_to_that_unless_its_machine_is_lost():
    fleet = cluster(instance("a"), instance("b"))
    for fails, then, at_s, endpoint in (
        (Simulation.fail, "LOADING", 5.0, 1),
        (Simulation.lose, "LOADING", 105.0, 0),
    ):
        simulation = Simulation(fleet, make_requests([0.0, 800.0], model=[0, 1], prompt_tokens=50, output_tokens=900))
        simulation.advance(1.0)
        simulation.redeploy(0, 1)
        simulation.advance(5.0)
        fails(simulation, 0, 100.0)
        simulation.advance(2000.0)
        assert simulation.fleet.endpoint[0] == endpoint
        assert (at_s, 0, then) in states(simulation.run())


def test_spot_instances_are_taken_back_in_a_minute_or_so():
    fleet = cluster(*(instance(state=State.SPOT) for _ in range(400)), instance())
    simulation = Simulation(fleet, make_requests([1000.0], **SHORT))
    assert simulation.scale_out(0, 500) == 400
    result = simulation.run()
    ready_s = result.changes["time_s"][result.changes["after"] == State.READY]
    assert len(ready_s) == 400
    assert 50 < np.median(ready_s) < 72
    assert ready_s.max() <= 300


def test_an_instance_whose_start_was_measured_takes_as_long():
    rests = [State.EMPTY, State.EMPTY] + [State.SPOT] * 200
    fleet = cluster(instance(), *(instance(state=rest, start_s=7.0) for rest in rests))
    simulation = Simulation(fleet, make_requests([1000.0], **SHORT))
    assert simulation.scale_out(0, 202) == 202
    result = simulation.run()
    ready = result.changes[result.changes["after"] == State.READY]
    new = np.isin(ready["instance"], (1, 2))
    assert ready["time_s"][new].tolist() == [7.0, 7.0]
    assert 6 < np.median(ready["time_s"][~new]) < 8
    assert ready["time_s"].max() <= 5 * 7.0
    simulation = Simulation(fleet, make_requests([1000.0], **SHORT))
    simulation.fail(0, 10.0)
    simulation.fail(3, 10.0)
    result = simulation.run()
    ready = result.changes[result.changes["after"] == State.READY]
    assert dict(zip(ready["instance"].tolist(), ready["time_s"].tolist(), strict=True)) == {0: 610.0, 3: 17.0}


def test_ticks_come_at_their_times():
    seen = []
    fleet = cluster(instance(engine=config(max_num_seqs=1)))
    requests = make_requests([0.0, 0.0, 0.0, 5.0], **SHORT)
    Simulation(fleet, requests).run(on_tick=lambda simulation: seen.append(simulation.now_s), tick_s=2.0)
    assert seen == [2.0, 4.0, 6.0, 8.0], "at a moment, ticks come first: the last request ends at 8"


def test_the_series_say_what_was_so_at_each_step():
    result = Simulation(
        cluster(instance(engine=config(max_num_seqs=1))), make_requests([0.0, 0.0], **SHORT), sample_s=1.0
    ).run()
    assert result.series["t_s"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert result.series["waiting"][:, 0].tolist() == [0, 1, 1, 0, 0]
    assert result.series["running"][:, 0].tolist() == [0, 1, 1, 1, 1]
    assert result.series["kv_tokens"][:, 0].tolist() == [0, 101, 101, 101, 101]


def test_wrong_commands_are_refused():
    simulation = Simulation(cluster(instance(), instance("b", "there", gpu_type="h")), make_requests([0.0], **SHORT))
    for call, match in [
        (lambda: simulation.wake(0), "instance 0 is READY, not ASLEEP"),
        (lambda: simulation.drain(7), "no instance 7"),
        (lambda: simulation.scale_out(9), "no endpoint 9"),
        (lambda: simulation.redeploy(0, 1), "instance 0 is not in there"),
        (lambda: simulation.fail(0, -1.0), "repair_s"),
        (lambda: simulation.advance(-1.0), "before now"),
    ]:
        with pytest.raises(ValueError, match=match):
            call()


RUN = """
import hashlib
from tests.bench.simulator import cluster, trace
from scheduling.simulation.simulator import Simulation
result = Simulation(cluster(60), trace(20_000, 240, 3), seed=5, decisions=True, sample_s=600.0).run()
digest = hashlib.sha256()
for array in (result.outcomes, result.state_s, result.changes, result.decisions, *result.series.values()):
    digest.update(array.tobytes())
print(digest.hexdigest(), result.counters["scale_outs"])
"""


@pytest.mark.nightly
def test_two_processes_give_the_same_bits():
    other = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=300, check=True).stdout
    with redirect_stdout(StringIO()) as own:
        exec(RUN, {})
    assert own.getvalue() == other
    assert int(other.split()[1]) > 0


def sharing(model: str, state: State = State.ASLEEP, *of_weights: float):
    return instance(model, state=state, sharing=Sharing("pair", 3.0, 5.0, 60.0, *of_weights))


def test_a_spot_instance_that_shares_its_gpus_is_not_lent_to_another_model():
    """Its model is loaded with those of its swap group: scaling out takes the next spot instance."""
    described = cluster(sharing("a", State.SPOT), instance("a", state=State.SPOT), instance("b"))
    simulation = Simulation(described, make_requests([0.0], 100, 1, model=[1]))
    assert simulation.scale_out(described.endpoints.index(("b", described.regions[0]))) == 1
    assert State(simulation.states[0]) == State.SPOT
    assert State(simulation.states[1]) == State.LOADING


def test_weights_that_cpu_memory_does_not_hold_come_back_from_storage():
    fleet = cluster(
        sharing("a", State.READY, 10.0, 10.0),
        sharing("b", State.ASLEEP, 10.0, 10.0),
        sharing("c", State.EMPTY, 10.0, 10.0),
        delays=Delays(local_weights_s=200.0),
    )
    simulation = Simulation(fleet, make_requests([500.0], model=0, **SHORT))
    simulation.swap_to(1)  # b wakes from memory; a found it full
    simulation.advance(100.0)
    simulation.swap_to(0)  # b goes to memory, a comes from storage
    simulation.advance(200.0)
    simulation.swap_to(2)
    simulation.advance(410.0)
    simulation.swap_to(0)
    result = simulation.run()
    awake = [row for row in states(result) if row[2] == "READY"]
    assert awake == [(8.0, 1, "READY"), (163.0, 0, "READY"), (403.0, 2, "READY"), (473.0, 0, "READY")]


def test_instances_that_share_gpus_are_not_scaled():
    fleet = cluster(sharing("a", State.READY), sharing("b"))
    simulation = Simulation(fleet, make_requests([1.0], **SHORT))
    assert simulation.scale_out(1) == 0
    assert simulation.scale_in(0) == 0
