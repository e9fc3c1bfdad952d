"""Routers that look ahead against their plain twins, and what they promise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.arrays import EndpointArrays, FleetArrays, allocate_endpoints, allocate_fleet, index_members
from scheduling.lookahead import maps as lookahead
from scheduling.queueing.waiting_set import allocate_waiting, enqueue, push
from scheduling.routing.candidates import (
    CACHED,
    COLUMNS,
    DECODE,
    IN_SECONDS,
    INSTANCE,
    KV,
    MEMORY,
    NO_ROWS,
    PREFILL,
    QUEUED,
    REMAINING,
    ROOM,
    RUNNING,
    SCORE,
)
from scheduling.routing.predictive import dispatch_ahead, least_delay, preserve, route_ahead
from scheduling.routing.prefix_affinity import allocate_affinity, learn, note
from scheduling.routing.routers import LEAST_DELAY, POLICY_CODES, PRESERVE, place, prefilled
from tests.kernels import from_python
from tests.oracles.dispatch import PlainFleet, PlainInstance
from tests.oracles.lookahead import PREDICTIVE as TWINS
from tests.oracles.lookahead import PlainMap, Sight, delay_s, load_tokens
from tests.scheduling.fleets import ENDPOINTS, as_arrays

least_delay, preserve, route_ahead = map(from_python, (least_delay, preserve, route_ahead))

ROUTERS = {"preserve": preserve, "least_delay": least_delay}
SLOW = (0.03, 0.0, 1.2e-4, 1e-9, 0.026, 1.2e-4, 7.5e-7)
eighths = st.integers(0, 16).map(lambda number: number / 8)
"""Sums and products of a few of these are exact, so that ties are ties for both."""
profiles = st.one_of(
    st.just(()),
    st.tuples(eighths, eighths, eighths, eighths, eighths.map(lambda value: value + 0.125), eighths, eighths),
)
few_tokens = st.integers(1, 6)


@st.composite
def loads(draw):
    """Draw an instance and its decoding requests: (prompt, predicted, produced)."""
    queued = draw(st.integers(0, 5))
    capacity = draw(st.sampled_from([8, 64, 64, 256]))
    requests = draw(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 12)), max_size=4))
    instance = PlainInstance(
        endpoint=draw(st.integers(0, ENDPOINTS - 1)),
        accepting=draw(st.integers(0, 5)) > 0,
        running=len(requests) + draw(st.integers(0, 2)),
        max_num_seqs=draw(st.integers(1, 7)),
        kv_tokens=draw(st.integers(0, capacity)),
        kv_capacity_tokens=capacity,
        remaining_tokens=queued + draw(st.integers(0, 20)),
        queued_prompt_tokens=queued,
        placed_tokens=draw(st.integers(0, 90)),
        memory_tokens=draw(st.sampled_from([0, 0, 16, 128])),
        profile=draw(profiles),
        ahead_open=draw(st.sampled_from([0, 0, 1, 2])),
        iterations=draw(st.sampled_from([100, 1, 5])),
        memory_above=draw(st.sampled_from([0.8, 0.25, 1.0])),
        beta=draw(st.sampled_from([1.0, 0.0, 2.0])),
    )
    return instance, requests


def world(drawn):
    """Return the plain fleet with its knowledge, and the same in arrays."""
    plain = PlainFleet([instance for instance, _ in drawn])
    maps, ahead = [], lookahead.allocate(len(drawn), 4 * len(drawn) + 1)
    for number, (_, requests) in enumerate(drawn):
        of_instance = PlainMap()
        for name, (prompt, predicted, produced) in enumerate(requests):
            of_instance.enter(name, prompt, predicted)
            slot = lookahead.add(ahead, number, prompt, predicted, 0)
            of_instance.token(name, produced)
            lookahead.token(ahead, slot, produced)
        maps.append(of_instance)
    fleet, endpoints = as_arrays(plain)
    return plain, Sight(maps, block_tokens=2), fleet, endpoints, ahead, allocate_affinity(len(drawn), 2, 64)


histories = st.lists(st.tuples(st.lists(st.integers(1, 3), max_size=5), st.integers(0, 7)), max_size=6)


@pytest.mark.parametrize("policy", ROUTERS)
@given(
    drawn=st.lists(loads(), min_size=1, max_size=8),
    endpoint=st.integers(0, ENDPOINTS - 1),
    prompt_tokens=few_tokens,
    output_tokens=few_tokens,
    seen=histories,
    asked=st.lists(st.integers(1, 3), max_size=5),
)
def test_kernel_decides_as_its_twin(policy, drawn, endpoint, prompt_tokens, output_tokens, seen, asked):
    plain, sight, fleet, endpoints, ahead, affinity = world(drawn)
    for hashes, at in seen:
        slot = at % len(drawn)
        note(affinity, 1, np.array(hashes, np.int64), 0, len(hashes), 2)
        learn(fleet, affinity, plain.instances[slot].endpoint, 1, slot)
        sight.index.learn(plain, plain.instances[slot].endpoint, hashes, slot)
    sight.hashes = asked
    note(affinity, 0, np.array(asked, np.int64), 0, len(asked), 2)
    expected = TWINS[policy](plain, sight, endpoint, prompt_tokens, output_tokens)
    request = (endpoint, 0, prompt_tokens, output_tokens)
    assert ROUTERS[policy](fleet, endpoints, ahead, affinity, *request, NO_ROWS) == expected
    assert route_ahead(fleet, endpoints, ahead, affinity, POLICY_CODES[policy], *request, NO_ROWS) == expected
    rows = np.full((3, COLUMNS), np.nan)
    assert route_ahead(fleet, endpoints, ahead, affinity, POLICY_CODES[policy], *request, rows) == expected
    if expected >= 0:
        members = sum(instance.endpoint == endpoint for instance in plain.instances)
        rows = rows[rows[:, INSTANCE] >= 0]
        assert rows[0, INSTANCE] == expected
        assert np.unique(rows[:, INSTANCE]).size == min(members, 3)
        assert rows[0, SCORE] == rows[rows[:, ROOM] == 1, SCORE].min()
    else:
        assert np.isnan(rows).all()
    assert expected < 0 or plain.instances[expected].has_room(prompt_tokens, output_tokens)
    assert (expected < 0) == (not plain.with_room(endpoint, prompt_tokens, output_tokens))
    assert not affinity.matched.any()


@given(
    drawn=st.lists(loads(), min_size=1, max_size=6),
    scale=st.sampled_from([1e-12, 1.0, 1e12]),
    prompt_tokens=st.sampled_from([1, 7, 10**9]),
    output_tokens=st.sampled_from([1, 10**9]),
)
def test_no_number_keeps_it_from_an_instance_with_room(drawn, scale, prompt_tokens, output_tokens):
    plain, _, fleet, endpoints, ahead, affinity = world(drawn)
    fleet.ahead_open[:] = 0
    fleet.profile[:] *= scale
    fleet.kv_capacity_tokens[:] *= 10**10
    fleet.memory_tokens[::2] = 1
    for router in ROUTERS.values():
        for endpoint in range(ENDPOINTS):
            chosen = router(fleet, endpoints, ahead, affinity, endpoint, -1, prompt_tokens, output_tokens, NO_ROWS)
            able = [
                slot
                for slot, each in enumerate(plain.instances)
                if each.endpoint == endpoint and each.accepting and each.running < each.max_num_seqs
            ]
            assert chosen in able or (chosen == -1 and not able)


def idle(count, *, profile=SLOW, kv_capacity_tokens=100_000):
    fleet, endpoints = allocate_fleet(count), allocate_endpoints(1, count)
    fleet.endpoint[:], fleet.accepting[:], fleet.max_num_seqs[:] = 0, 1, 64
    fleet.kv_capacity_tokens[:], fleet.profile[:] = kv_capacity_tokens, profile
    index_members(fleet, endpoints)
    return fleet, endpoints, lookahead.allocate(count, 64 * count), allocate_affinity(count, 2, 1024)


def run_on(fleet, endpoints, ahead, instance, requests, prompt_tokens=100, output_tokens=200):
    """Enter *requests* that decode on *instance*."""
    for _ in range(requests):
        place(fleet, endpoints, instance, prompt_tokens, output_tokens)
        prefilled(fleet, instance, prompt_tokens)
        fleet.remaining_tokens[instance] -= prompt_tokens
        lookahead.add(ahead, instance, prompt_tokens, output_tokens, 0)


def test_a_cached_prefix_draws_a_request_but_makes_no_hot_spot():
    fleet, endpoints, ahead, affinity = idle(4)
    hashes = np.arange(1, 33, dtype=np.int64)
    note(affinity, 0, hashes, 0, 32, 64)
    learn(fleet, affinity, 0, 0, 2)
    chosen = []
    for _ in range(40):
        chosen.append(least_delay(fleet, endpoints, ahead, affinity, 0, 0, 2100, 100, NO_ROWS))
        run_on(fleet, endpoints, ahead, chosen[-1], 1, 2100, 100)
        learn(fleet, affinity, 0, 0, chosen[-1])
    assert chosen[0] == 2
    assert min(chosen.count(instance) for instance in range(4)) >= 5, (
        "all take their part of a prompt that everybody sends"
    )


def test_an_unknown_policy_code_is_refused():
    fleet, endpoints, ahead, affinity = idle(1)
    with pytest.raises(ValueError, match="unknown routing policy"):
        route_ahead(fleet, endpoints, ahead, affinity, 0, 0, -1, 1, 1, NO_ROWS)


@pytest.mark.parametrize("policy", [PRESERVE, LEAST_DELAY])
def test_the_explanation_is_what_the_decision_saw(policy):
    fleet, endpoints, ahead, affinity = idle(3, kv_capacity_tokens=10_000)
    waiting = allocate_waiting(1, 2)
    fleet.max_num_seqs[2] = 1
    run_on(fleet, endpoints, ahead, 0, 9, 300, 100)
    run_on(fleet, endpoints, ahead, 1, 4, 200, 300)
    run_on(fleet, endpoints, ahead, 2, 1)
    slot = enqueue(waiting, 0, 0.0, 0.0, 1.0, 0, 500, 80, -1, -1, -1, -1)
    note(affinity, slot, np.arange(1, 9, dtype=np.int64), 0, 8, 50)
    learn(fleet, affinity, 0, slot, 0)
    before = [array.copy() for array in fleet]
    was = FleetArrays(*before)
    alone = [array.copy() for array in before], [array.copy() for array in endpoints]
    rows = np.full((4, COLUMNS), np.nan)
    taken, chosen = dispatch_ahead(fleet, endpoints, waiting, ahead, affinity, 0, policy, rows)
    assert taken == slot
    push(waiting, 0, slot, 0.0)
    unasked = FleetArrays(*alone[0]), EndpointArrays(*alone[1])
    assert dispatch_ahead(*unasked, waiting, ahead, affinity, 0, policy, NO_ROWS) == (slot, chosen)
    assert all((old == new).all() for old, new in zip(unasked[0], fleet, strict=True)), "asking changes nothing"
    assert rows[:, INSTANCE].tolist() == [chosen, 1 - chosen, 2, -1]
    rows = rows[np.argsort(rows[:3, INSTANCE])]
    assert (rows[:, IN_SECONDS] == (policy == LEAST_DELAY)).all()
    assert rows[:, ROOM].tolist() == [1, 1, 0]
    for column, loads in (
        (RUNNING, was.running), (KV, was.kv_tokens), (REMAINING, was.remaining_tokens), (QUEUED, was.queued_prompt_tokens),
    ):  # fmt: skip
        assert rows[:, column].tolist() == loads[:3].tolist(), "without this request"
    able = rows[:2]
    assert int(np.argmin(able[:, SCORE])) == chosen
    # Against the plain twin, over what was there before.
    plain = PlainFleet(
        [
            PlainInstance(
                endpoint=0, accepting=True, running=int(was.running[at]), max_num_seqs=64, kv_tokens=int(was.kv_tokens[at]),
                kv_capacity_tokens=10_000, remaining_tokens=int(was.remaining_tokens[at]), profile=SLOW,
                queued_prompt_tokens=int(was.queued_prompt_tokens[at]),
            )
            for at in range(2)
        ]
    )  # fmt: skip
    maps = [PlainMap() for _ in range(2)]
    for at, (count, prompt, output) in enumerate([(9, 300, 100), (4, 200, 300)]):
        for name in range(count):
            maps[at].enter(name, prompt, output)
    score = delay_s if policy == LEAST_DELAY else load_tokens
    cached = [400, 0] if policy == LEAST_DELAY else [0, 0]
    assert rows[:2, CACHED].tolist() == cached
    for at in range(2):
        assert math.isclose(rows[at, SCORE], score(plain, Sight(maps), at, 500, 80, cached[at]), rel_tol=1e-12)
    assert rows[0, MEMORY] >= 0
    if policy == PRESERVE:
        assert rows[1, PREFILL] == 500
        assert rows[1, DECODE] == 4 * 300 + 80
