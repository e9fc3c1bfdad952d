"""A live fleet as the start of a simulation: what its gateway cannot see is inferred as the simulator would have it."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
from msgspec import convert

from scheduling.control.swaps import EVERY_S
from scheduling.fleet.state import FleetState
from scheduling.queueing.held import OPPORTUNISTIC
from scheduling.queueing.swapping.sharing import COMES, LEAVES, STAYS, WAITS
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.engine.state import sequences_in_use
from scheduling.simulation.scenario.file import check_scenario
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.staging import stage
from scheduling.simulation.staging.fork import fork
from scheduling.simulation.swapping import Swapping
from tests.scheduling.queueing.test_groups import queue_of
from tests.scheduling.simulation.test_scenario import RIGHT
from tests.scheduling.simulation.test_staging import SHARED

SOURCE = Path("scenario")
INSTANCE = {
    "name": "m-east-1", "model": "m", "region": "east", "gpu": "g", "state": "READY", "since_s": -100.0, "ends_s": None,
    "round_trips": [0.0] * 5,
}  # fmt: skip
RUNNING = {
    "request_id": "1", "model": "m", "region": "east", "served_in": "east", "slo_class": "iw", "arrival_s": -0.02,
    "prompt_tokens": 200, "predicted_tokens": 50, "sequences": 1, "attempts": 1, "instance": 0, "placed_s": -0.01,
    "streamed": False, "output_tokens": 0, "expected_prompt": 200, "expected_tokens": 250, "ahead": 90, "tenant": "acme",
}  # fmt: skip

OF_RUNNING = {"instance", "placed_s", "streamed", "output_tokens", "expected_prompt", "expected_tokens", "ahead"}
WAITING = {name: value for name, value in RUNNING.items() if name not in OF_RUNNING}


def forked(scenario, **values):
    """Return the stage of *scenario*, and the fleet of *values* on its cluster."""
    staged = stage(scenario, SOURCE, 1)
    state = convert({"running": [], "waiting": [], "endpoints": []} | values, FleetState)
    return staged, fork(state, scenario, staged.cluster, list(staged.tenants), 1)


@pytest.mark.parametrize(("values", "ahead"), [
    ({}, None),
    ({"ahead": None}, None),
    ({"streamed": True, "output_tokens": 0}, None),
    ({"streamed": True, "output_tokens": 7}, 90),
    ({"streamed": True, "output_tokens": 7, "ahead": None}, 6),
])  # fmt: skip
def test_a_request_is_in_the_look_ahead_map_once_it_has_a_token(values, ahead):
    """It enters with its first token: one that was there before would count twice, and its line would never end."""
    text = RIGHT.replace("[classes.iw]", "[policies]\nrouting = 'preserve'\n[classes.iw]")
    scenario = check_scenario(tomllib.loads(text), SOURCE)
    staged, state = forked(scenario, instances=[INSTANCE], running=[RUNNING | values])
    maps = Simulation(staged.cluster, staged.requests, state=state).world.engines.ahead
    known = [int(maps.clock[at] - maps.began[slot]) for slot, at in enumerate(maps.instance) if at >= 0]
    assert known == [ahead] * (ahead is not None)


def test_answers_that_are_not_streamed_fill_no_batch_beyond_its_size():
    """On a busy machine they take longer than their profile: one that should have a token by now may still wait."""
    values = tomllib.loads(RIGHT)
    values["fleet"][0]["max_num_seqs"] = 4
    scenario = check_scenario(values, SOURCE)
    rows = [RUNNING | {"request_id": str(at), "arrival_s": -9.0, "placed_s": -3.0 + at / 100} for at in range(6)]
    rows[5] |= {"streamed": True, "output_tokens": 7}
    staged, state = forked(scenario, instances=[INSTANCE], running=rows)
    simulation = Simulation(staged.cluster, staged.requests, state=state)
    here = simulation.world.engines.sequences[sequences_in_use(simulation.world.engines)]
    assert here[np.argsort(here["number"])]["streaming"].tolist() == [1, 1, 1, 0, 0, 1]
    assert (simulation.run().outcomes["state"][:6] == Outcome.DONE).all()


def test_held_requests_stay_held_until_there_is_room_and_keep_their_age():
    """One instance of four sequences, busy with three interactive requests: use is above the mark until they end."""
    text = RIGHT.replace("[classes.iw]", "[classes.batch]\nkind = 'non_interactive'\ndeadline_s = 3600\n[classes.iw]")
    values = tomllib.loads(text)
    values["fleet"][0] |= {"max_num_seqs": 4, "instances": 1, "regions": ["east"]}
    scenario = check_scenario(values, SOURCE)
    rows = [RUNNING | {"request_id": str(at)} for at in range(3)]
    held = [
        WAITING | {"request_id": f"held {at}", "slo_class": "batch", "arrival_s": -100.0 * at, "served_in": "east"}
        for at in (2, 1)
    ]
    staged, state = forked(scenario, instances=[INSTANCE], running=rows, held=held)
    assert [float(state.requests.arrival_s[row]) for row in state.held] == [-200.0, -100.0]
    simulation = Simulation(staged.cluster, staged.requests, state=state)
    simulation.advance(0.6)
    assert len(simulation.holding.holding.work) == 2
    result = simulation.run()
    assert (result.outcomes["state"][: state.requests.count] == Outcome.DONE).all()
    waited_s = result.outcomes["queue_s"][list(state.held)]
    ended_s = max(result.outcomes["e2e_s"][row] for row in range(state.requests.count) if row not in state.held)
    assert (waited_s > [200.0, 100.0]).all()
    assert (waited_s - [200.0, 100.0] <= ended_s + 1.0).all()


OTHER = INSTANCE | {"name": "other-east-1", "model": "other", "swap_group": "pair"}
SHARES = INSTANCE | {"swap_group": "pair"}


def forked_pair(m, other, by_queue=True, held=0):
    """A simulation of two models on the same GPUs, begun while both have groups in their virtual queue: of the other model
    one that was there first, and of the first model two."""
    text = RIGHT.replace("kv_tokens = 16000\n", SHARED).replace("instances = 2", "instances = 1")
    text = text.replace("asleep = 2", "asleep = 1").replace('regions = ["east", "west"]', 'regions = ["east"]')
    text = text.replace("[classes.iw]", "[policies]\nordering = 'qlm'\nswap_by_queue = BY\n[classes.iw]")
    scenario = check_scenario(tomllib.loads(text.replace("BY", str(by_queue).lower())), SOURCE)
    instances = [SHARES | m, OTHER | other]
    waiting = [
        WAITING | {"request_id": str(at), "model": model, "arrival_s": -5.0 + at}
        for at, model in enumerate(("m", "other", "m"))
    ]
    about = {"joined": 1, "prompt_tokens": 200.0, "output_tokens": 50.0, "opened_s": -5.0}
    groups = [
        about | {"endpoint": at, "kind": kind, "number": number, "pinned": False, "is_open": False, "instance": at,
                 "members": [member]}
        for at, kind, number, member in ((1, 0, 6, 1), (0, 0, 5, 0), (0, 1, 7, 2))
    ]  # fmt: skip
    endpoint = {"region": "east", "ordering": "qlm", "mean_tokens": 250.0, "group_limit": 4}
    means = {"m": 50.0, "other": 40.0}
    staged, state = forked(
        scenario,
        instances=instances,
        waiting=waiting,
        endpoints=[endpoint | {"model": model, "mean_output": mean} for model, mean in means.items()],
        groups={
            "groups": groups, "classes": [(0, -1)], "next_number": 8,
        },
    )  # fmt: skip
    requests = staged.requests._replace(held=np.full_like(staged.requests.held, held))
    return Simulation(staged.cluster, requests, state=state)


def numbers(simulation, queue):
    return [int(simulation.waiting.groups.groups["number"][group]) for group in queue_of(simulation.waiting, queue)]


def test_a_swap_in_progress_continues():
    simulation = forked_pair({"state": "DRAINING", "leaves": True}, {"state": "ASLEEP", "waits": True})
    arrays = simulation.waiting.groups
    assert arrays.phase.tolist() == [LEAVES, WAITS]
    assert arrays.mean_output.tolist() == [50.0, 40.0]
    swaps = Swapping(simulation)
    assert numbers(simulation, 0) == [6, 5, 7], "in the queue that they have together, as they stood"
    assert not numbers(simulation, 1)
    result = simulation.run(swaps, EVERY_S, until_s=20.0)
    other = [(one["after"], float(one["time_s"])) for one in result.changes if one["instance"] == 1]
    assert [(State(int(after)).name, time_s) for after, time_s in other[:2]] == [
        ("WAKING", 1.0),
        ("READY", 10.0),
    ]
    assert result.outcomes["state"][1] == Outcome.DONE


def test_one_that_comes_up_is_up_when_the_gateway_expects_it():
    simulation = forked_pair({"state": "ASLEEP"}, {"state": "LOADING", "ends_s": 2.5})
    assert simulation.waiting.groups.phase.tolist() == [STAYS, COMES]
    assert simulation.waiting.groups.up_s[1] == 2.5
    result = simulation.run(Swapping(simulation), EVERY_S, until_s=3.0)
    assert [float(one["time_s"]) for one in result.changes if one["after"] == State.READY] == [2.5]


@pytest.mark.parametrize(("held", "means"), [(0, [250.0, 250.0]), (OPPORTUNISTIC, [250.0, 250.0, 0.0, 0.0])])
def test_without_swaps_by_queue_each_has_its_groups(held, means):
    simulation = forked_pair({}, {"state": "ASLEEP"}, by_queue=False, held=held)
    Swapping(simulation)
    assert simulation.waiting.groups.mean_tokens.tolist() == means, (
        "where instances are donated, their endpoints follow"
    )
    assert numbers(simulation, 1) == [6]
