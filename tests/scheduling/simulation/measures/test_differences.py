"""Which decisions differ first between two simulations, and what came of them: logs made by hand, and plain searches."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.simulation.measures.differences import INSTANCE, INSTANCES, ORDER, REGION, SWAP, Log, differences

INSTANCES_NAMED = [("e1", "m", "east"), ("e2", "m", "east"), ("w1", "m", "west")]
NONE = {"t_s": [0.0, 60.0], "endpoints": [["m", "east"], ["m", "west"]], "waiting": [[0, 0], [0, 0]]}


def log(served, waited_s=None, region=None, **values) -> Log:
    """Return a request per second from the east, on the instance of that number, after that delay."""
    count = len(served)
    arrival_s = np.arange(count, dtype=float)
    made = Log(
        instances=INSTANCES_NAMED,
        regions=["east", "west"],
        models=["m"],
        region=np.zeros(count, np.int16) if region is None else np.array(region, np.int16),
        model=np.zeros(count, np.int16),
        arrival_s=arrival_s,
        instance=np.array(served, np.int32),
        begin_s=arrival_s + (np.zeros(count) if waited_s is None else np.array(waited_s, float)),
        judged=np.ones(count, bool),
        met=np.ones(count, bool),
        in_run=np.zeros(count, bool),
        moves=[],
        swaps=[],
        series=NONE,
    )
    return replace(made, **values)


def kinds(first, other):
    return {(each.region, each.kind): each for each in differences(first, other)}


def test_equal_decisions_do_not_differ():
    one = log([0, 1, 2, -1], moves=[(5.0, "m", "east", 1, "why")])
    assert differences(one, replace(one, moves=[(5.0, "m", "east", 1, "another reason")])) == []


def test_calls_of_runs_may_come_at_other_times():
    one = log([0, 1, 2], in_run=np.array([False, True, True]))
    assert differences(one, replace(one, arrival_s=one.arrival_s + one.in_run)) == []


def test_other_requests_cannot_be_compared():
    with pytest.raises(ValueError, match="same requests"):
        differences(log([0, 1]), log([0, 1, 2]))
    with pytest.raises(ValueError, match="same requests"):
        differences(log([0, 1]), replace(log([0, 1]), arrival_s=np.array([0.0, 9.0])))


def test_a_request_on_another_instance_and_one_in_another_region():
    made = kinds(log([0, 1, 0, 0]), log([0, 0, 2, 0]))
    instance, region = made["east", INSTANCE], made["east", REGION]
    assert (instance.at_s, instance.first, instance.other) == (
        1.0, "gives a request to e2", "gives a request to e1",
    )  # fmt: skip
    assert (region.at_s, region.first) == (
        2.0, "serves a request itself (0.0% of its requests leave it in the 15 min after)",
    )  # fmt: skip
    assert region.other == "sends a request to west (50.0% of its requests leave it in the 15 min after)"
    assert set(made) == {("east", INSTANCE), ("east", REGION)}


def test_a_move_that_comes_later_and_one_that_does_not_come():
    first = log([0], moves=[(60.0, "m", "east", 2, "use"), (600.0, "m", "west", -1, "")])
    other = log([0], moves=[(180.0, "m", "east", 2, "plan")])
    made = kinds(first, other)
    east, west = made["east", INSTANCES], made["west", INSTANCES]
    assert (east.at_s, east.first, east.other) == (60.0, "adds 2 m: use", "adds 2 m 2 min later: plan")
    assert (west.at_s, west.first, west.other) == (600.0, "takes away 1 m", "makes no further move")


def test_a_swap():
    made = kinds(log([0], swaps=[(7.0, "e1", "m", "east")]), log([0]))["east", SWAP]
    assert (made.at_s, made.model, made.first, made.other) == (7.0, "m", "swaps e1 to m", "swaps nothing then")


def test_an_order_that_differs():
    made = kinds(log([0, 0, 0], [5.0, 5.0, 5.0]), log([0, 0, 0], [9.0, 5.0, 0.25]))["east", ORDER]
    assert made.at_s == 2.25  # when the other one begins the last that came
    assert made.first == "begins a request that had waited 5.0 s"
    assert made.other == "begins a request that had waited 250 ms"


def test_what_came_of_it_is_of_the_quarter_hour_after_it():
    waits = {**NONE, "waiting": [[0, 8], [100, 100]]}
    other = replace(log([0, 0, 1, 0]), series=waits, met=np.array([False, True, True, False]))
    made = kinds(log([0, 0, 0, 0]), other)["east", INSTANCE]
    assert made.at_s == 2.0
    assert made.waiting == 8.0  # of the east, at 60 s; what was before the difference does not count
    assert made.slo_met == pytest.approx(-0.5)
    assert made.weight == pytest.approx(508.0)
    nobody = replace(other, judged=np.zeros(4, bool))
    assert kinds(log([0, 0, 0, 0]), nobody)["east", INSTANCE].slo_met is None


def test_the_greatest_effect_comes_first():
    first = log([0, 2], region=[0, 1], moves=[(0.0, "m", "west", 1, "")])
    other = replace(log([1, 2], region=[0, 1]), met=np.array([True, False]))
    assert [(each.region, each.kind) for each in differences(first, other)] == [("west", INSTANCES), ("east", INSTANCE)]


@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(-1, 2), st.integers(0, 1)), min_size=1, max_size=12))
def test_first_differences_of_place_are_those_of_a_search(requests):
    ours, theirs, regions = ([row[at] for row in requests] for at in range(3))
    made = kinds(log(ours, region=regions), log(theirs, region=regions))
    expected = {}
    for at, (one, two, region) in enumerate(requests):
        if -1 in (one, two) or one == two:
            continue
        kind = INSTANCE if INSTANCES_NAMED[one][2] == INSTANCES_NAMED[two][2] else REGION
        expected.setdefault((["east", "west"][region], kind), float(at))
    assert {key: each.at_s for key, each in made.items()} == expected
