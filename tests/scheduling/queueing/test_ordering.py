"""Queue keys: kernels against their twins, aging against a queue that ages, and the bounds of docs/papers/ordering.md."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.profile import USUAL, Profile
from scheduling.queueing.ordering import NO_DEADLINE_S, ORDERINGS, engine_priority, first_due_s, queue_key
from scheduling.queueing.waiting_set import allocate_waiting, enqueue, free_slot, pop
from scheduling.simulation.engine.reference import EngineConfig, EngineRequest
from tests.oracles.dispatch import plain_engine_priority, plain_first_due_s, plain_queue_key
from tests.oracles.single_instance import serve

NAMES = sorted(ORDERINGS)
# Whole multiples of a power of two: sums are exact, and ties are ties.
moments = st.integers(0, 400).map(lambda drawn: drawn / 4)
services = st.integers(1, 80).map(lambda drawn: drawn / 8)
stretches = st.sampled_from([0.0, 0.25, 1.0, 2.0, 8.0, 64.0])
coefficients = st.integers(0, 64).map(lambda drawn: drawn / 1024)


@given(
    st.sampled_from(NAMES),
    st.floats(0, 1e8),
    st.floats(1e-3, 1e9) | st.just(math.inf),
    st.integers(-(2**15), 2**15 - 1),
    st.floats(0, 1e7),
    stretches,
)
def test_keys_are_those_of_the_twins(name, arrival_s, deadline_s, priority, service_s, stretch):
    row = arrival_s, arrival_s + deadline_s, priority, service_s, stretch
    key = queue_key(ORDERINGS[name], *row)
    assert key == plain_queue_key(name, *row)
    assert not math.isnan(key)
    priority_given = engine_priority(ORDERINGS[name], priority, key)
    assert priority_given == plain_engine_priority(name, priority, key)
    assert -(2**63) <= priority_given < 2**63


def test_an_unknown_ordering_is_refused():
    with pytest.raises(ValueError, match="unknown ordering"):
        queue_key(99, 0.0, 1.0, 0, 1.0, 1.0)
    with pytest.raises(KeyError):
        plain_queue_key("best", 0.0, 1.0, 0, 1.0, 1.0)


due = st.floats(0.01, 1e5) | st.just(math.inf)


@given(due, due, st.lists(coefficients, min_size=7, max_size=7), st.integers(1, 300), st.integers(1, 2000))
def test_when_a_first_token_is_due_is_as_its_twin_says(ttft_s, end_s, values, prompt, output):
    values[0] += 0.125
    values[4] += 0.125
    profile = Profile(*values)
    decode_s = profile.decode_time_s(prompt, output)
    due_s = first_due_s(ttft_s, end_s, decode_s)
    assert due_s == pytest.approx(plain_first_due_s(ttft_s, end_s, profile, prompt, output), abs=1e-9)
    assert due_s <= ttft_s
    assert due_s + decode_s <= end_s or due_s == 0.0 or due_s + decode_s == pytest.approx(end_s)
    assert first_due_s(ttft_s, end_s, profile.decode_time_s(prompt, output + 1)) <= due_s  # more to say: sooner
    assert decode_s >= (profile.service_time_s(prompt, output) - profile.service_time_s(prompt, 1)) * 0.999


@given(st.lists(coefficients, min_size=7, max_size=7), st.integers(1, 300), st.integers(1, 60))
def test_service_time_is_the_sum_of_the_steps_of_an_engine_that_has_nothing_else_to_do(values, prompt, output):
    values[0] += 0.125  # no step takes no time
    values[4] += 0.125
    profile = Profile(*values)
    config = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=512,
        block_size_tokens=16,
        kv_blocks=64,
        policy="fcfs",
        max_model_len=512,
        profile=profile,
    )
    timeline = serve(config, [EngineRequest("a", prompt, output, 0, 0.0)])["a"]
    assert profile.service_time_s(prompt, output) == pytest.approx(timeline.e2e_s, rel=1e-9)


def test_service_time_rises_with_prompt_and_output_without_measurements():
    assert USUAL.service_time_s(100, 10) < USUAL.service_time_s(100, 11)
    assert USUAL.service_time_s(1000, 10) < USUAL.service_time_s(2000, 10)


# Aging


@st.composite
def queues(draw):
    """Draw (arrival_s, actual service, predicted service) in order of arrival, and a stretch."""
    rows = draw(st.lists(st.tuples(moments, services, services), min_size=1, max_size=25))
    return sorted(rows, key=lambda row: row[0]), draw(stretches)


def single_server(rows, key_of):
    """Return when each of *rows* starts on one work-conserving, non-preemptive server that takes the lowest key."""
    waiting = allocate_waiting(1, len(rows))
    of_slot, begins, now_s, arrived, served = {}, [0.0] * len(rows), 0.0, 0, []
    while len(served) < len(rows):
        if not waiting.size[0]:
            now_s = max(now_s, rows[arrived][0])
        while arrived < len(rows) and rows[arrived][0] <= now_s:
            slot = enqueue(waiting, 0, key_of(rows[arrived]), rows[arrived][0], np.inf, 0, 1, 1, -1, -1, -1, -1)
            of_slot[slot] = arrived
            arrived += 1
        slot = pop(waiting, 0)
        number = of_slot.pop(slot)
        free_slot(waiting, slot)
        begins[number] = now_s
        served.append(number)
        now_s += rows[number][1]
    return begins, served


def aged(rows, stretch):
    """The same server over a queue that ages: each request's rank falls by one per second of waiting."""
    begins, now_s, arrived, waiting, served = [0.0] * len(rows), 0.0, 0, [], []
    while len(served) < len(rows):
        if not waiting:
            now_s = max(now_s, rows[arrived][0])
        while arrived < len(rows) and rows[arrived][0] <= now_s:
            waiting.append(arrived)
            arrived += 1
        number = min(waiting, key=lambda each: (stretch * rows[each][2] - (now_s - rows[each][0]), each))
        waiting.remove(number)
        begins[number] = now_s
        served.append(number)
        now_s += rows[number][1]
    return begins, served


def ssjf(stretch):
    return lambda row: queue_key(ORDERINGS["ssjf"], row[0], math.inf, 0, row[2], stretch)


@given(queues())
def test_constant_keys_order_as_explicit_aging_does(drawn):
    rows, stretch = drawn
    assert single_server(rows, ssjf(stretch)) == aged(rows, stretch)


@given(queues())
def test_stretch_nought_is_first_come_and_a_long_one_shortest_first(drawn):
    rows, _ = drawn
    assert single_server(rows, ssjf(0.0)) == single_server(rows, lambda row: row[0])
    at_once = [(0.0, real_s, predicted_s) for _, real_s, predicted_s in rows]
    assert single_server(at_once, ssjf(64.0)) == single_server(at_once, lambda row: row[2])


@given(st.lists(st.tuples(moments, services, st.integers(1, 200) | st.just(math.inf)), min_size=1, max_size=25))
def test_by_deadline_only_those_that_come_before_it_overtake(drawn):
    rows = sorted(drawn, key=lambda row: row[0])
    for name in ("deadline", "slack"):
        code = ORDERINGS[name]
        keys = [queue_key(code, row[0], row[0] + row[2], 0, row[1], 1.0) for row in rows]
        for at, (arrival_s, _, due) in enumerate(rows):
            until_s = arrival_s + min(due, NO_DEADLINE_S)
            for later in range(at + 1, len(rows)):
                if keys[later] < keys[at]:
                    assert rows[later][0] < until_s


@given(st.integers(-5, 5), st.integers(-5, 5), services, services, stretches, moments, moments)
def test_a_class_is_above_every_length_and_every_wait(one, other, one_s, other_s, stretch, came_s, also_s):
    for name in ("priority", "ssjf"):
        keys = [
            queue_key(ORDERINGS[name], arrival_s, math.inf, priority, service_s, 1e6 * stretch)
            for arrival_s, priority, service_s in ((came_s, one, one_s), (also_s, other, other_s))
        ]
        if one != other:
            assert (keys[0] < keys[1]) == (one < other)


def test_a_deployment_is_refused_the_others_with_a_reason():
    from controlplane.fleet.models.serving import NOT_LIVE
    from scheduling.policy import LIVE_ORDERS

    assert sorted((*LIVE_ORDERS, *NOT_LIVE)) == sorted(ORDERINGS)
