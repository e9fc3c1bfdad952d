import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet, index_members
from scheduling.routing.routers import (
    POLICIES,
    POLICY_CODES,
    advance,
    advance_many,
    has_room,
    place,
    release,
    route,
    shortest_queue,
)
from tests.oracles import dispatch as reference
from tests.oracles import lookahead as reference_ahead
from tests.scheduling.fleets import ENDPOINTS, as_arrays, plain_fleets

endpoint_numbers = st.integers(0, ENDPOINTS - 1)
few_tokens = st.integers(1, 6)


def idle_fleet(count, max_num_seqs=4, kv_capacity_tokens=100):
    """Return *count* instances of endpoint 0, all accepting and idle."""
    fleet, endpoints = allocate_fleet(count), allocate_endpoints(1, count)
    fleet.endpoint[:], fleet.accepting[:] = 0, 1
    fleet.max_num_seqs[:], fleet.kv_capacity_tokens[:] = max_num_seqs, kv_capacity_tokens
    index_members(fleet, endpoints)
    return fleet, endpoints


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 4), st.integers(0, 4))))
def test_the_shortest_queue_is_the_same_by_counts_and_by_bounds_of_them(instances):
    """Places are (room, tokens, errors of the lower and the upper bound); only those that
    may have the fewest are counted.
    """
    lower, counted = np.full(len(instances), np.inf), []

    def most_left(seen, at, fewest):
        room, tokens, below, above = instances[at]
        if not room or tokens - below > fewest:
            return np.inf
        lower[at] = tokens - below
        return float(tokens + above)

    def tokens_left(seen, at):
        counted.append(at)
        return instances[at][1]

    best = shortest_queue.py_func(
        0, len(instances), most_left, lambda seen, at, fewest: lower[at] <= fewest, tokens_left, None
    )
    with_room = [(tokens, at) for at, (room, tokens, _, _) in enumerate(instances) if room]
    assert best == (min(with_room)[1] if with_room else -1)
    fewest = min((tokens + above for room, tokens, _, above in instances if room), default=0)
    assert all(instances[at][1] - instances[at][2] <= fewest for at in counted)


def test_every_policy_has_a_twin_and_a_code():
    assert set(POLICIES) == set(reference.POLICIES)
    assert set(POLICIES) | set(reference_ahead.PREDICTIVE) == set(POLICY_CODES)
    assert len(set(POLICY_CODES.values())) == len(POLICY_CODES)


@pytest.mark.parametrize("policy", POLICIES)
@given(plain=plain_fleets, endpoint=endpoint_numbers, prompt_tokens=few_tokens, output_tokens=few_tokens)
def test_kernel_decides_as_its_twin(policy, plain, endpoint, prompt_tokens, output_tokens):
    fleet, endpoints = as_arrays(plain)
    expected = reference.POLICIES[policy](plain, endpoint, prompt_tokens, output_tokens)
    assert POLICIES[policy](fleet, endpoints, endpoint, prompt_tokens, output_tokens) == expected
    assert route(fleet, endpoints, POLICY_CODES[policy], endpoint, prompt_tokens, output_tokens) == expected


@pytest.mark.parametrize("policy", POLICIES)
@given(plain=plain_fleets, endpoint=endpoint_numbers)
def test_kernels_only_read(policy, plain, endpoint):
    fleet, endpoints = as_arrays(plain)
    before = [array.copy() for array in (*fleet, *endpoints)]
    POLICIES[policy](fleet, endpoints, endpoint, 1, 1)
    assert all((old == new).all() for old, new in zip(before, (*fleet, *endpoints), strict=True))


@given(plain=plain_fleets, prompt_tokens=few_tokens, output_tokens=few_tokens)
def test_room_is_as_its_twin(plain, prompt_tokens, output_tokens):
    fleet, _ = as_arrays(plain)
    for slot, instance in enumerate(plain.instances):
        assert has_room(fleet, slot, prompt_tokens, output_tokens) == instance.has_room(prompt_tokens, output_tokens)


def test_minimum_use_compares_shares_exactly():
    fleet, endpoints = idle_fleet(2)
    # 1/3 against 333...3/1000...0: equal as rounded floats of few digits, different as fractions.
    fleet.kv_capacity_tokens[:] = 3_000_000, 1_000_000
    fleet.kv_tokens[:] = 1_000_000, 333_333
    assert POLICIES["minimum_use"](fleet, endpoints, 0, 1, 1) == 1


def test_an_unknown_policy_code_is_refused():
    fleet, endpoints = idle_fleet(1)
    with pytest.raises(ValueError, match="unknown routing policy"):
        route(fleet, endpoints, 99, 0, 1, 1)


def test_load_follows_a_request_that_ends_as_predicted():
    fleet, endpoints = idle_fleet(1)
    place(fleet, endpoints, 0, 30, 10)
    assert (fleet.running[0], fleet.kv_tokens[0], fleet.remaining_tokens[0]) == (1, 40, 40)
    advance(fleet, 0, 40, 0, 31)  # the prompt and the first token
    assert (fleet.kv_tokens[0], fleet.remaining_tokens[0]) == (40, 9)
    advance(fleet, 0, 40, 31, 9)
    assert (fleet.kv_tokens[0], fleet.remaining_tokens[0]) == (40, 0)
    release(fleet, 0, 40, 40)
    assert (fleet.running[0], fleet.kv_tokens[0], fleet.remaining_tokens[0]) == (0, 0, 0)


def test_a_request_that_outruns_its_prediction_holds_more_kv_and_leaves_the_work_of_others():
    fleet, endpoints = idle_fleet(1)
    place(fleet, endpoints, 0, 5, 5)
    place(fleet, endpoints, 0, 20, 20)
    advance(fleet, 0, 10, 8, 6)
    assert (fleet.kv_tokens[0], fleet.remaining_tokens[0]) == (10 + 40 + 4, 2 + 6 + 40)


@given(
    requests=st.lists(
        st.tuples(st.integers(0, 2), few_tokens, few_tokens, st.lists(st.integers(0, 7), max_size=5)), max_size=10
    ),
    together=st.booleans(),
)
def test_an_instance_is_idle_again_when_all_its_requests_left(requests, together):
    fleet, endpoints = idle_fleet(3, max_num_seqs=100, kv_capacity_tokens=10_000)
    for instance, prompt_tokens, output_tokens, _ in requests:
        place(fleet, endpoints, instance, prompt_tokens, output_tokens)
    steps = []
    for instance, prompt_tokens, output_tokens, chunks in requests:
        done_tokens = 0
        for tokens in chunks:
            steps.append((instance, prompt_tokens + output_tokens, done_tokens, tokens))
            done_tokens += tokens
    if together:
        columns = np.array(steps, np.int64).reshape(-1, 4).T.copy()
        advance_many(fleet, *columns)
    else:
        for step in steps:
            advance(fleet, *step)
    assert (fleet.remaining_tokens >= 0).all()
    for instance, prompt_tokens, output_tokens, chunks in requests:
        release(fleet, instance, prompt_tokens + output_tokens, sum(chunks))
    assert not fleet.running.any()
    assert not fleet.kv_tokens.any()
    assert not fleet.remaining_tokens.any()
