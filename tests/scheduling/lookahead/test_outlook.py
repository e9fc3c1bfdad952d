"""What is coming to an instance: what decodes there, its prompts that are not prefilled, its part of those that wait."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from scheduling.fleet.arrays import allocate_fleet
from scheduling.lookahead.maps import add, allocate, project
from scheduling.lookahead.outlook import look, waiting_tokens
from scheduling.lookahead.rule import LookAheadRule
from scheduling.queueing.waiting_set import allocate_waiting, enqueue, pop


def seen(tokens, capacity, given=0, waits=0.0, rule=LookAheadRule()):  # noqa: B008
    fleet = allocate_fleet(1)
    fleet.look_ahead[0] = astuple(rule)
    fleet.kv_capacity_tokens[0], fleet.queued_prompt_tokens[0] = capacity, given
    return look(fleet, 0, np.array(tokens, np.int64), waits)


@pytest.mark.parametrize(("iterations_above", "expected"), [(10, False), (11, True)])
def test_overloaded_is_more_than_a_tenth_of_the_next_hundred(iterations_above, expected):
    ahead, tokens = allocate(1, 2), np.zeros(LookAheadRule().iterations, np.int64)
    add(ahead, 0, 951, iterations_above, 0)
    project(ahead, 0, tokens)
    assert seen(tokens, 1000) == (expected, (950 + iterations_above) / 1000)
    assert seen(tokens, 2000)[0] is False
    assert seen(tokens, 0) == (False, 0.0)  # capacity not known yet


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=120),
    st.integers(1, 1200),
    st.integers(0, 300),
    st.floats(0, 300),
    st.sampled_from([0.95, 0.5, 1.5]),
    st.sampled_from([0.1, 0.0, 0.6]),
)
def test_queued_requests_count_in_every_iteration(tokens, capacity, given, waits, limit, share):
    held = [each + given + waits for each in tokens]
    above = sum(each > limit * capacity for each in held)
    overloaded, peak = seen(tokens, capacity, given, waits, LookAheadRule(overload_above=limit, overload_share=share))
    assert overloaded == (above > share * len(tokens))
    assert peak == pytest.approx(max(held) / capacity)  # added up in another order


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 500), st.integers(1, 500)), max_size=12), st.integers(0, 3))
def test_of_what_waits_the_prompts_count(requests, popped):
    waiting, prompts = allocate_waiting(2, 16), ([], [])
    for number, (endpoint, prompt, output) in enumerate(requests):
        enqueue(waiting, endpoint, float(number), 0.0, 0.0, 0, prompt, output, -1, -1, -1, -1)
        prompts[endpoint].append(prompt)
    for _ in range(min(popped, len(prompts[0]))):
        pop(waiting, 0)
        prompts[0].pop(0)
    assert [waiting_tokens(waiting, endpoint) for endpoint in range(2)] == [sum(each) for each in prompts]
