"""Columns of a comparison, each against loops over requests, samples and changes."""

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.queueing.promises import Promise
from scheduling.simulation.cluster.world import CHANGE, Outcome, State
from scheduling.simulation.measures.columns import (
    MAX_TIMES,
    MOST_SAMPLES,
    Counted,
    columns,
    latency_over_time,
    over_time,
    paid_s,
)
from tests.scheduling.simulation.measures.test_results import CLASSES, FOUR, result

PROMISES = [Promise(ttft_s=1.5), Promise()]
UNPAID = (State.EMPTY, State.SPOT, State.LOST)


def series(t_s, waiting, ready=None):
    """Of two endpoints, by time."""
    waiting = np.array(waiting)
    return {"t_s": np.array(t_s, float), "waiting": waiting, "ready": waiting if ready is None else np.array(ready)}


def changes(rows):
    """(time, instance, before, after) as records."""
    made = np.zeros(len(rows), CHANGE)
    for record, (time_s, instance, before, after) in zip(made, rows, strict=True):
        record["time_s"], record["instance"], record["endpoint"] = time_s, instance, instance
        record["before"], record["after"] = before, after
    return made


@st.composite
def histories(draw):
    """(first state, changes as (time, state)) of each of two instances, times in whole seconds."""
    states = st.sampled_from(list(State))
    return [
        (
            draw(states),
            sorted(draw(st.lists(st.tuples(st.integers(0, 20), states), max_size=6)), key=lambda one: one[0]),
        )
        for _ in range(2)
    ]


def plain_paid_s(first, moves, from_s, until_s):
    """Second by second."""
    paid = 0
    for second in range(from_s, until_s):
        state = first
        for time_s, after in moves:
            if time_s <= second:
                state = after
        paid += state not in UNPAID
    return paid


@given(histories(), st.integers(0, 25), st.integers(0, 25))
def test_paid_time_is_all_but_empty_and_lent_out(instances, one, other):
    from_s, until_s = min(one, other), max(one, other)
    rows = []
    state_s = np.zeros((2, len(State)))
    for number, (first, moves) in enumerate(instances):
        state = first
        state_s[number, first] = 30.0
        for time_s, after in moves:
            rows.append((time_s, number, state, after))
            state = after
    made = result(FOUR, changes=changes(sorted(rows, key=lambda row: row[0])), state_s=state_s)
    expected = [plain_paid_s(first, moves, from_s, until_s) for first, moves in instances]
    assert paid_s(made, from_s, until_s).tolist() == expected


def test_columns_of_four_requests():
    counted = {"all": Counted(0.0, 4.0), "first": Counted(0.0, 1.0), "class": Counted(0.0, 4.0, frozenset({0}))}
    waits = series([0.0, 2.0, 4.0, 6.0], [[1, 0], [2, 3], [0, 1], [9, 9]])
    rows = columns(result(FOUR, PROMISES, changes=changes([]), series=waits), counted)
    every, first, of_class = rows["all"], rows["first"], rows["class"]
    # Of class 0 the first is in time, the third late, the fourth failed; class 1 is promised nothing.
    assert (every["requests"], every["judged"], every["missed"]) == (4, 3, 2)
    assert every["slo_met"] == pytest.approx(1 / 3)
    assert every["ttft_p50_ms"] == 1000.0
    assert every["ttft_p95_ms"] == pytest.approx(np.percentile([500, 1000, 2000], 95), abs=1e-3)
    # The first instance was ready, the second empty for most of the time: its state then is EMPTY.
    assert every["cost_usd"] == pytest.approx(4 * 4.0 / 3600, abs=1e-4)
    assert every["cost_usd_per_h"] == 4.0
    assert every["queue_peak"] == 5
    assert (first["requests"], first["queue_peak"], first["slo_met"]) == (1, 1, 1.0)
    assert of_class["requests"] == 3


def test_without_requests_nothing_is_measured():
    row = columns(result(FOUR, PROMISES, changes=changes([])), {"none": Counted(50.0, 60.0)})["none"]
    assert (row["requests"], row["slo_met"], row["ttft_p99_ms"], row["queue_peak"]) == (0, None, None, None)


@given(st.lists(st.one_of(st.none(), st.floats(1e-5, 2e4)), min_size=4, max_size=4))
def test_latency_over_time_is_of_the_requests_that_arrived_in_each_part(ttft_s):
    outcomes = [
        (np.nan if one is None else one, inf, 0.0, 0, Outcome.FAILED if one is None else Outcome.DONE) for one in ttft_s
    ]
    made = result(outcomes)
    counted = Counted(0.0, 4.0)
    curves = latency_over_time(made, counted)
    for number, name in enumerate(one.slo_class for one in CLASSES):
        own = np.flatnonzero((made.requests.slo_class == number) & [one is not None for one in ttft_s])
        expected = [None] * MAX_TIMES
        for at in range(MAX_TIMES):
            inside = [at == int(MAX_TIMES * made.requests.arrival_s[each] / 4.0) for each in own]
            values = [1000 * ttft_s[each] for each, yes in zip(own, inside, strict=True) if yes]
            expected[at] = pytest.approx(np.percentile(values, 95), abs=1e-3) if values else None
        assert curves["ttft_p95_ms"].get(name) == (expected if own.size else None)


@given(st.integers(1, 3 * MOST_SAMPLES), st.integers(0, 2**16))
def test_many_samples_are_joined_and_keep_their_highest_queue(count, seed):
    random = np.random.default_rng(seed)
    waiting, ready = random.integers(0, 9, (count, 2)), random.integers(0, 9, (count, 2))
    made = over_time(result(FOUR, series=series(range(count), waiting, ready)), inf)
    step = -(-count // MOST_SAMPLES)
    parts = [range(first, min(first + step, count)) for first in range(0, count, step)]
    assert made["t_s"] == [part[0] for part in parts]
    for endpoint in range(2):
        assert made["waiting"][endpoint] == [max(waiting[at, endpoint] for at in part) for part in parts]
        assert made["ready"][endpoint] == [ready[part[-1], endpoint] for part in parts]
