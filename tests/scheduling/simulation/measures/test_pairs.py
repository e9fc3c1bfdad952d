"""Decisions side by side, around the first difference: by plain logs."""

from dataclasses import replace

import pytest

from scheduling.simulation.measures.differences import (
    BEFORE,
    INSTANCE,
    INSTANCES,
    ORDER,
    REGION,
    ROWS,
    SWAP,
    DecisionPair,
    around,
    differences,
)
from tests.scheduling.simulation.measures.test_differences import log


def side_by_side(first, other, kind, region="east"):
    (one,) = [each for each in differences(first, other) if (each.kind, each.region) == (kind, region)]
    return around(first, other, one)


def test_requests_by_serving_region():
    first, other = log([0, 1, 0, -1], [0, 0, 0.25, 0]), log([0, 0, 2, 0], [0, 0, 2.0, 0])
    rows, marked = side_by_side(first, other, INSTANCE)
    assert marked == 1
    assert rows == [
        DecisionPair(0.0, "m", "e1", "e1", False),
        DecisionPair(1.0, "m", "e2", "e1", True),
        DecisionPair(2.0, "m", "e1, after 250 ms", "w1, in west, after 2.0 s", True),
        DecisionPair(3.0, "m", "is never begun", "e1", True),
    ]
    rows, marked = side_by_side(first, other, REGION)
    assert rows[marked].other == "w1, in west, after 2.0 s"


def test_changes_of_instances_with_their_reasons():
    first = log([0], moves=[(5.0, "m", "east", 1, "use"), (60.0, "m", "east", 2, "use"), (70.0, "m", "west", 1, "use")])
    other = log([0], moves=[(5.0, "m", "east", 1, "a plan"), (180.0, "m", "east", -1, "")])
    rows, marked = side_by_side(first, other, INSTANCES)
    assert marked == 1
    assert rows == [
        DecisionPair(5.0, "m", "adds 1: use", "adds 1: a plan", False),
        DecisionPair(60.0, "m", "adds 2: use", "", True),
        DecisionPair(180.0, "m", "", "takes away 1", True),
    ]


def test_swaps():
    rows, marked = side_by_side(log([0], swaps=[(7.0, "e1", "m", "east")]), log([0]), SWAP)
    assert (rows, marked) == ([DecisionPair(7.0, "m", "swaps e1 to m", "", True)], 0)


def test_the_order_of_what_waited():
    first, other = log([0, 0, 0], [5.0, 5.0, 5.0]), log([0, 0, 0], [9.0, 5.0, 0.25])
    rows, marked = side_by_side(first, other, ORDER)
    assert marked == 0
    assert (rows[0].first, rows[0].other) == (
        "begins request 1, which had waited 5.0 s", "begins request 3, which had waited 250 ms",
    )  # fmt: skip
    assert [row.differs for row in rows] == [True, False, True]


@pytest.mark.parametrize(("at", "begin"), [(5, 0), (100, 100 - BEFORE), (199, 199 - BEFORE)])
def test_they_are_few_and_around_the_first_difference(at, begin):
    first = log([0] * 200)
    served = first.instance.copy()
    served[at:] = 1
    rows, marked = side_by_side(first, replace(first, instance=served), INSTANCE)
    assert len(rows) == min(ROWS, 200 - begin)
    assert rows[0].at_s == begin
    assert rows[marked].at_s == at
    assert rows[marked].differs
    assert not any(row.differs for row in rows[:marked])
