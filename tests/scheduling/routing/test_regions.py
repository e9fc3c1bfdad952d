"""The global router against its plain twin, on random fleets."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet, index_members
from scheduling.routing.regions import (
    BACKLOG_S,
    COMPUTE_S,
    UNKNOWN_MS,
    add_prefill,
    by_preference,
    choose_region,
    latency_ms,
    pressure,
)

instance = st.fixed_dictionaries(
    {
        "endpoint": st.integers(0, 2),
        "accepting": st.booleans(),
        "running": st.integers(0, 8),
        "kv_tokens": st.integers(0, 100),
    }
)


NOW_S = 12.0


def plain_pressure(instances: list[dict], endpoint: int, waiting: int, asked: list[tuple[int, float]] = ()) -> float:
    serving = [each for each in instances if each["endpoint"] == endpoint and each["accepting"]]
    if not serving:
        return math.inf
    sequences, capacity = 8 * len(serving), 100 * len(serving)
    kv = sum(each["kv_tokens"] for each in serving) / capacity
    work_s = sum(
        (0.01 * 50 + 0.002 * 10) * math.exp((at_s - NOW_S) / COMPUTE_S)
        for slot, at_s in asked
        if instances[slot]["endpoint"] == endpoint
    )
    clear_at_s = 0.0
    for slot, at_s in asked:
        if instances[slot]["endpoint"] == endpoint:
            clear_at_s = max(clear_at_s, at_s) + (0.01 * 50 + 0.002 * 10) / len(serving)
    compute = max(work_s / (COMPUTE_S * len(serving)), (clear_at_s - NOW_S) / BACKLOG_S)
    return max(kv, sum(each["running"] for each in serving) / sequences, compute) + waiting / sequences


def plain_choice(pressures: list[float], candidates: list[int]) -> int:
    for endpoint in candidates:
        if pressures[endpoint] < 0.7:
            return endpoint
    best = min(candidates, key=lambda endpoint: pressures[endpoint], default=-1)
    return best if best >= 0 and pressures[best] < math.inf else -1


@given(
    st.lists(instance, max_size=12),
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
    st.permutations([0, 1, 2]),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 12)), max_size=300),
)
def test_equals_its_plain_twin(instances, waiting, order, count, asked):
    fleet, endpoints = allocate_fleet(max(1, len(instances))), allocate_endpoints(3, max(1, len(instances)))
    for slot, each in enumerate(instances):
        for name, value in each.items():
            getattr(fleet, name)[slot] = value
        fleet.max_num_seqs[slot], fleet.kv_capacity_tokens[slot] = 8, 100
    index_members(fleet, endpoints)
    fleet.profile[:] = 0.0, 0.0, 0.01, 0.0, 0.02, 0.002, 0.0
    asked = sorted(((slot, float(at_s)) for slot, at_s in asked if slot < len(instances)), key=lambda each: each[1])
    for slot, at_s in asked:
        add_prefill(fleet, endpoints, slot, 50, 10, at_s)
    pressures = [plain_pressure(instances, endpoint, waiting[endpoint], asked) for endpoint in range(3)]
    for endpoint in range(3):
        assert pressure(fleet, endpoints, endpoint, waiting[endpoint], NOW_S) == pytest.approx(pressures[endpoint])
    pressures = [pressure(fleet, endpoints, endpoint, waiting[endpoint], NOW_S) for endpoint in range(3)]
    candidates = list(order[:count])
    chosen = choose_region(fleet, endpoints, np.array(candidates, np.int32), np.array(waiting, np.int64), 0.7, NOW_S)
    assert chosen == plain_choice(pressures, candidates)


PLACES = ["a", "b", "c", "d"]
rows = st.dictionaries(st.tuples(*[st.sampled_from(PLACES)] * 2), st.floats(0, 100), max_size=6)


@given(rows, st.sampled_from(PLACES), st.permutations(PLACES), st.integers(0, 4))
def test_the_own_region_is_preferred_then_the_nearest(given_ms, origin, order, count):
    served = order[:count]
    nearest = by_preference(origin, served, lambda region: latency_ms(given_ms, origin, region))
    assert sorted(nearest) == sorted(served)
    if origin in served:
        assert nearest.pop(0) == origin
    far = [(latency_ms(given_ms, origin, region), region) for region in nearest]
    assert far == sorted(far)


def test_a_latency_holds_for_the_way_back_unless_that_is_given_too():
    given_ms = {("a", "b"): 10.0, ("b", "c"): 20.0, ("c", "b"): 25.0}
    assert latency_ms(given_ms, "b", "a") == 10.0
    assert latency_ms(given_ms, "c", "b") == 25.0
    assert latency_ms(given_ms, "a", "c") == UNKNOWN_MS
    assert latency_ms(given_ms, "a", "a") == 0.0
