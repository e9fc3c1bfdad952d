"""Instances that come, go, fail, sleep and change their model while requests run."""

import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest

from scheduling.policy import Batching
from scheduling.scaling import Reactive
from scheduling.simulation.cluster.description import Delays, Sharing
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.simulator import Pause, Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.simulation.engine.engines import config
from tests.scheduling.simulation.small import cluster, instance

# On the easy profile a request of 100 + 1 tokens alone takes 2 s: a step of prefill, 1 + 0.01 * 100.
SHORT = {"prompt_tokens": 100, "output_tokens": 1}


def states(result) -> list[tuple[float, int, str]]:
    return [(row["time_s"], int(row["instance"]), State(row["after"]).name) for row in result.changes]


def test_a_draining_instance_finishes_what_it_has_and_is_lent_out():
    simulation = Simulation(cluster(instance(), instance()), make_requests([0.0, 0.0, 1.5], **SHORT))
    assert simulation.advance(1.0) == Pause.UNTIL
    simulation.drain(0)
    result = simulation.run()
    assert result.outcomes["instance"].tolist() == [0, 1, 1]
    assert result.outcomes["e2e_s"].tolist() == [2.0, 2.0, 2.5]
    assert states(result) == [(1.0, 0, "DRAINING"), (2.0, 0, "SPOT")]
    assert result.state_s[0, [State.READY, State.DRAINING, State.SPOT]].tolist() == [1.0, 1.0, 2.0]


def test_a_failure_queues_again_what_had_no_token_yet_and_fails_the_rest():
    engine = config(max_num_seqs=2)
    simulation = Simulation(
        cluster(instance(engine=engine), delays=Delays(repair_s=10.0, local_weights_s=20.0)),
        make_requests([0.0, 2.5, 2.5], 100, [50, 1, 1]),
    )
    simulation.advance(3.0)
    assert simulation.fail(0) == 0, "nothing else serves the model, or will before it is repaired"
    result = simulation.run()
    assert result.outcomes["state"].tolist() == [Outcome.FAILED] * 2 + [Outcome.DONE]
    assert result.outcomes["e2e_s"][2] == pytest.approx(30.5 + 2.0)
    assert states(result) == [(3.0, 0, "FAILED"), (13.0, 0, "LOADING"), (33.0, 0, "READY")]

    simulation = Simulation(cluster(instance(engine=engine), instance()), make_requests([0.0, 0.0], 100, 50))
    simulation.advance(1.0)
    assert simulation.fail(0) == 1
    result = simulation.run()
    assert result.outcomes["state"].tolist() == [Outcome.DONE] * 2
    assert result.outcomes["attempts"].tolist() == [2, 1]
    assert result.outcomes["instance"].tolist() == [1, 1]
    assert not simulation.fleet.kv_tokens.any()
    assert not simulation.fleet.remaining_tokens.any()


def test_sleeping_and_waking_take_their_time():
    delays = Delays(sleep_s=3.0, wake_s=5.0)
    simulation = Simulation(cluster(instance(), delays=delays), make_requests([20.0], **SHORT))
    simulation.sleep(0)
    simulation.advance(10.0)
    assert simulation.states[0] == State.ASLEEP
    simulation.advance(18.0)
    simulation.wake(0)
    result = simulation.run()
    assert result.outcomes["ttft_s"].tolist() == [3.0 + 2.0]  # held for three seconds until it is awake
    assert states(result) == [(0.0, 0, "FALLING_ASLEEP"), (3.0, 0, "ASLEEP"), (18.0, 0, "WAKING"), (23.0, 0, "READY")]


def test_redeploying_changes_model_engine_and_endpoint():
    big = config(max_num_seqs=3, kv_blocks=500)
    fleet = cluster(instance("a"), instance("b", engine=big))
    simulation = Simulation(fleet, make_requests([700.0], model=1, **SHORT))
    simulation.redeploy(0, 1)
    simulation.advance(650.0)
    assert simulation.fleet.endpoint.tolist() == [1, 1]
    assert simulation.fleet.max_num_seqs.tolist() == [3, 3]
    assert simulation.fleet.kv_capacity_tokens.tolist() == [2000, 2000]
    result = simulation.run()
    assert result.outcomes["instance"].tolist() == [0]
    assert states(result) == [(0.0, 0, "LOADING"), (600.0, 0, "READY")]
    remote = Simulation(fleet, make_requests([8000.0], model=1, **SHORT))
    remote.redeploy(0, 1, remote=True)
    assert states(remote.run())[-1] == (7200.0, 0, "READY")


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


def test_swapping_back_is_quicker_than_the_first_time():
    delays = Delays(swap_storage_s=60.0, swap_cpu_s=5.0)
    simulation = Simulation(
        cluster(instance("a"), instance("b"), delays=delays), make_requests([500.0], model=0, **SHORT)
    )
    simulation.swap(0, 1)
    simulation.advance(100.0)
    simulation.swap(0, 0)
    result = simulation.run()
    assert states(result) == [
        (0.0, 0, "SWAPPING"),
        (60.0, 0, "READY"),
        (100.0, 0, "SWAPPING"),
        (105.0, 0, "READY"),
    ]
    assert result.counters["swaps"] == 2


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
    with pytest.raises(ValueError, match="instance 0: start_s must be a number from 0 up, not -1"):
        cluster(instance(start_s=-1))


def test_scaling_out_goes_the_shortest_way():
    fleet = cluster(
        instance(),
        instance(state=State.EMPTY),
        instance(state=State.SPOT),
        instance("b", state=State.SPOT),
        instance("b", "there", state=State.SPOT),
    )
    simulation = Simulation(fleet, make_requests([0.0], **SHORT))
    assert simulation.scale_out(0, 5) == 3
    names = [State(state).name for state in simulation.states]
    assert names == ["READY", "STARTING", "RECLAIMING", "LOADING", "SPOT"]
    assert simulation.scale_in(0, 5) == 1


def test_the_reactive_trigger_scales_out_and_in():
    fleet = cluster(
        instance(),
        *(instance(state=State.SPOT) for _ in range(3)),
        reactive=Reactive(min_instances=1, max_instances=3, cooldown_s=15.0),
    )
    burst = np.concatenate([np.arange(200) * 0.2, 600 + np.arange(20) * 40.0])
    result = Simulation(fleet, make_requests(burst, 50, 20)).run()
    assert result.counters["scale_outs"] == 2, "three at most"
    assert result.counters["scale_ins"] >= 2
    changed_s = [time_s for time_s, _, after in states(result) if after in ("RECLAIMING", "DRAINING", "SPOT")]
    assert (result.outcomes["state"] == Outcome.DONE).all()
    assert changed_s == sorted(changed_s)


def test_dynamic_batching_fills_a_batch_or_waits_no_longer_than_it_may():
    batching = Batching("dynamic", max_batch_size=2, wait_timeout_s=3.0)
    simulation = Simulation(cluster(batching=batching), make_requests([0.0, 1.0, 1.5, 10.0], **SHORT))
    result = simulation.run()
    # Two together at 1.0, which takes 1 + 0.01 * 200 = 3 s; the third joins no running batch, and then waits in vain.
    assert result.outcomes["queue_s"].tolist() == [1.0, 0.0, 4.0 + 3.0 - 1.5, 3.0]
    assert result.outcomes["e2e_s"].tolist() == [4.0, 3.0, 5.5 + 2.0, 5.0]


def test_no_batching_runs_one_at_a_time():
    result = Simulation(cluster(batching=Batching("none")), make_requests([0.0, 0.0, 0.0], **SHORT)).run()
    assert result.outcomes["e2e_s"].tolist() == [2.0, 4.0, 6.0]


def test_ways_between_regions_count_both_ways():
    fleet = cluster(instance("a", "east"), instance("b", "west"), latency_s=[[0.0, 0.25], [0.5, 0.0]])
    result = Simulation(fleet, make_requests([0.0, 10.0], model=1, region=[0, 1], **SHORT)).run()
    assert result.outcomes["ttft_s"].tolist() == [0.25 + 2.0 + 0.5, 2.0]
    assert result.outcomes["queue_s"].tolist() == [0.25, 0.0]
    assert result.counters["forwarded"] == 1


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


def sharing(model: str, state: State = State.ASLEEP, weights_bytes: float = 0.0):
    return instance(model, state=state, sharing=Sharing("pair", 3.0, 5.0, 60.0, weights_bytes))


def test_a_spot_instance_that_shares_its_gpus_is_not_lent_to_another_model():
    """Its model is loaded with those of its swap group: scaling out takes the next spot instance."""
    described = cluster(sharing("a", State.SPOT), instance("a", state=State.SPOT), instance("b"))
    simulation = Simulation(described, make_requests([0.0], 100, 1, model=[1]))
    assert simulation.scale_out(described.endpoints.index(("b", described.regions[0]))) == 1
    assert State(simulation.states[0]) == State.SPOT
    assert State(simulation.states[1]) == State.LOADING


def test_a_swap_drains_sleeps_and_wakes_and_what_came_meanwhile_is_served():
    requests = make_requests([0.0, 1.0, 1.0], model=[0, 0, 1], prompt_tokens=100, output_tokens=1)
    simulation = Simulation(cluster(sharing("a", State.READY), sharing("b")), requests)
    simulation.advance(1.5)  # the second of a runs until 4
    simulation.swap_to(1)
    with pytest.raises(ValueError, match="cannot swap now"):
        simulation.swap_to(1)
    with pytest.raises(ValueError, match="swap to it"):
        simulation.wake(1)
    result = simulation.run()
    assert states(result) == [
        (1.5, 0, "DRAINING"),
        (4.0, 0, "FALLING_ASLEEP"),
        (7.0, 0, "ASLEEP"),
        (7.0, 1, "WAKING"),
        (12.0, 1, "READY"),
    ]
    assert result.outcomes["state"].tolist() == [Outcome.DONE] * 3
    assert result.outcomes["e2e_s"].tolist() == [2.0, 3.0, 13.0]
    assert result.counters["swaps"] == 1


def test_weights_that_cpu_memory_does_not_hold_come_back_from_storage():
    fleet = cluster(
        sharing("a", State.READY, 10.0),
        sharing("b", weights_bytes=10.0),
        sharing("c", State.EMPTY, 10.0),
        swap_memory_bytes={"pair": 10.0},
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


def test_a_holder_that_fails_gives_the_gpus_away_and_ends_stopped():
    requests = make_requests([0.0, 0.0], model=[0, 1], prompt_tokens=100, output_tokens=50)
    fleet = cluster(sharing("a", State.READY), sharing("b"), delays=Delays(repair_s=10.0))
    simulation = Simulation(fleet, requests)
    simulation.advance(1.0)
    simulation.swap_to(1)
    simulation.fail(0)
    result = simulation.run()
    assert states(result)[1:] == [(1.0, 0, "FAILED"), (1.0, 1, "WAKING"), (6.0, 1, "READY"), (11.0, 0, "EMPTY")]


def test_instances_that_share_gpus_are_not_scaled():
    fleet = cluster(sharing("a", State.READY), sharing("b"))
    simulation = Simulation(fleet, make_requests([1.0], **SHORT))
    assert simulation.scale_out(1) == 0
    assert simulation.scale_in(0) == 0


@pytest.mark.parametrize(
    ("specs", "more", "words"),
    [
        ([sharing("a", State.READY), sharing("b", State.READY)], {}, "one of its instances at most"),
        ([sharing("a"), instance("b", "there", state=State.EMPTY, sharing=Sharing("pair", 1, 1, 1))], {}, "one region"),
        ([sharing("a")], {"swap_memory_bytes": {"other": 1.0}}, "no instance is of swap group other"),
    ],
)
def test_swap_groups_that_make_no_sense(specs, more, words):
    with pytest.raises(ValueError, match=words):
        cluster(*specs, **more)
