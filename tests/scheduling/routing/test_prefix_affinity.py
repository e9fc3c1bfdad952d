"""The index of prompts' beginnings: against its plain twin, and within its bounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.arrays import allocate_fleet
from scheduling.routing.prefix_affinity import (
    HOLDERS,
    MOST_NOTED,
    WINDOW,
    allocate_affinity,
    covered,
    forget,
    grow_affinity,
    learn,
    match,
    matched_tokens,
    note,
    unmatch,
)
from tests.kernels import from_python
from tests.oracles.dispatch import PlainFleet, PlainInstance
from tests.oracles.lookahead import PlainIndex, noted_places

matched_tokens = from_python(matched_tokens)

INSTANCES = 12
PROMPT = 10_000


def fleet_of(count=INSTANCES, memory=1000):
    fleet = allocate_fleet(count)
    fleet.endpoint[:], fleet.kv_capacity_tokens[:] = 0, memory
    return fleet


def known(fleet, affinity, hashes, block_tokens=16, endpoint=0):
    """Return the tokens of a prompt that each instance is expected to have."""
    note(affinity, 0, np.array(hashes, np.int64), 0, len(hashes), block_tokens)
    touched = match(fleet, affinity, endpoint, 0)
    tokens = [matched_tokens(affinity, instance, 0, PROMPT) for instance in range(fleet.endpoint.size)]
    unmatch(affinity, touched)
    assert not affinity.matched.any()
    return tokens


def taught(fleet, affinity, hashes, instance, tokens=0, endpoint=0):
    note(affinity, 0, np.array(hashes, np.int64), 0, len(hashes), 16)
    learn(fleet, affinity, endpoint, 0, instance)
    fleet.placed_tokens[instance] += tokens


prompts = st.tuples(st.integers(0, 2), st.integers(0, 70), st.integers(0, 70)).map(
    # Beginning of a prompt, its length, and the length of the prompt: some fork.
    lambda drawn: [1 + (drawn[0] if at < drawn[1] else 7 + drawn[0] * 3) * 1000 + at for at in range(drawn[2])]
)


@given(
    st.lists(st.tuples(prompts, st.integers(0, INSTANCES - 1), st.integers(0, 400), st.integers(0, 1)), max_size=40),
    prompts,
)
def test_knows_what_its_twin_knows(history, asked):
    fleet, affinity, index = fleet_of(), allocate_affinity(INSTANCES, 1, 1 << 14), PlainIndex()
    plain = PlainFleet([PlainInstance(endpoint=0, kv_capacity_tokens=1000) for _ in range(INSTANCES)])
    for hashes, instance, tokens, endpoint in history:
        taught(fleet, affinity, hashes, instance, tokens, endpoint)
        index.learn(plain, endpoint, hashes, instance)
        plain.instances[instance].placed_tokens += tokens
    expected = [index.cached_tokens(plain, 0, asked, 16, instance, PROMPT) for instance in range(INSTANCES)]
    assert known(fleet, affinity, asked) == expected


def test_places_are_the_same_for_every_prompt_and_reach_far():
    assert [covered(number + 1) for number in range(MOST_NOTED)] == noted_places(10**6)
    assert covered(16) == 16
    assert covered(17) == 18
    assert covered(MOST_NOTED) == 240


def test_the_last_token_is_always_computed():
    fleet, affinity = fleet_of(), allocate_affinity(INSTANCES, 1)
    taught(fleet, affinity, [1, 2], 0)
    note(affinity, 0, np.array([1, 2]), 0, 2, 16)
    touched = match(fleet, affinity, 0, 0)
    assert [matched_tokens(affinity, 0, 0, tokens) for tokens in (1, 16, 32, 40)] == [0, 15, 31, 32]
    assert matched_tokens(affinity, 0, -1, 40) == 0
    unmatch(affinity, touched)


def test_an_instance_whose_cache_is_gone_has_nothing():
    fleet, affinity = fleet_of(), allocate_affinity(INSTANCES, 1)
    taught(fleet, affinity, [1, 2], 0)
    taught(fleet, affinity, [1, 2], 1)
    forget(fleet, 0)
    assert known(fleet, affinity, [1, 2])[:2] == [0, 32]
    taught(fleet, affinity, [1, 2], 0)
    assert known(fleet, affinity, [1, 2])[:2] == [32, 32]


def test_only_so_many_instances_are_remembered_the_latest():
    fleet, affinity = fleet_of(), allocate_affinity(INSTANCES, 1)
    for instance in range(INSTANCES):
        taught(fleet, affinity, [1], instance)
        fleet.placed_tokens[: instance + 1] += 1  # they all work on
    matched = known(fleet, affinity, [1])
    assert [instance for instance, tokens in enumerate(matched) if tokens] == list(
        range(INSTANCES - HOLDERS, INSTANCES)
    )


def test_a_table_that_is_too_small_keeps_the_latest_and_never_lies():
    fleet, affinity = fleet_of(memory=10**9), allocate_affinity(INSTANCES, 1, 64)
    for prompt in range(500):
        taught(fleet, affinity, [10 * prompt + 1], prompt % INSTANCES)
    matched = [known(fleet, affinity, [10 * prompt + 1]) for prompt in range(500)]
    kept = [prompt for prompt, tokens in enumerate(matched) if any(tokens)]
    assert 499 in kept
    assert 20 <= len(kept) <= 64
    assert np.mean(kept) > 400
    assert all(matched[prompt][prompt % INSTANCES] == 16 and sum(matched[prompt]) == 16 for prompt in kept)


def test_it_grows_with_the_fleet_and_the_waiting_set():
    fleet, affinity = fleet_of(2), allocate_affinity(2, 1)
    taught(fleet, affinity, [1, 2], 1)
    affinity = grow_affinity(affinity, INSTANCES, 5)
    assert affinity.noted_count.tolist() == [2, 0, 0, 0, 0]
    grown = fleet_of()
    grown.placed_tokens[:2] = fleet.placed_tokens
    assert known(grown, affinity, [1, 2])[1] == 32
    with pytest.raises(ValueError, match="cannot grow to 3 and 5"):
        grow_affinity(affinity, 3, 5)


@pytest.mark.parametrize("places", [0, WINDOW // 2, 100])
def test_a_table_of_a_wrong_size_is_refused(places):
    with pytest.raises(ValueError, match="power of two"):
        allocate_affinity(1, 1, places)
