import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.arrays import (
    EMPTY,
    allocate_endpoints,
    allocate_fleet,
    assign_endpoint,
    grow_endpoints,
    grow_fleet,
)
from tests.scheduling.fleets import ENDPOINTS, as_arrays, plain_fleets


def members(endpoints, endpoint):
    return endpoints.members[endpoints.first[endpoint] : endpoints.first[endpoint + 1]].tolist()


def test_new_slots_are_empty_and_take_no_work():
    fleet = allocate_fleet(3)
    assert fleet.endpoint.tolist() == [EMPTY] * 3
    assert not fleet.accepting.any()
    assert all(array.shape[0] == 3 for array in fleet)


@given(plain=plain_fleets)
def test_members_are_the_instances_of_each_endpoint_in_slot_order(plain):
    _, endpoints = as_arrays(plain)
    for endpoint in range(ENDPOINTS):
        assert members(endpoints, endpoint) == [
            slot for slot, instance in enumerate(plain.instances) if instance.endpoint == endpoint
        ]


@given(moves=st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 2)), max_size=20))
def test_assigning_keeps_the_members_true(moves):
    fleet, endpoints = allocate_fleet(5), allocate_endpoints(3, 5)
    serving = {}
    for slot, endpoint in moves:
        assign_endpoint(fleet, endpoints, slot, endpoint)
        serving[slot] = endpoint
        for each in range(3):
            assert members(endpoints, each) == sorted(s for s, e in serving.items() if e == each)


def test_assigning_to_an_endpoint_that_does_not_exist_is_refused():
    fleet, endpoints = allocate_fleet(1), allocate_endpoints(2, 1)
    with pytest.raises(ValueError, match="no such endpoint"):
        assign_endpoint(fleet, endpoints, 0, 2)
    assert fleet.endpoint[0] == EMPTY


def test_growing_keeps_what_was_and_adds_empty_slots():
    fleet, endpoints = allocate_fleet(2), allocate_endpoints(1, 2)
    assign_endpoint(fleet, endpoints, 1, 0)
    fleet.running[1], fleet.kv_capacity_tokens[1] = 7, 10**12
    endpoints.cursor[0] = 1

    fleet = grow_fleet(fleet, 4)
    endpoints = grow_endpoints(fleet, endpoints, 3)
    assign_endpoint(fleet, endpoints, 3, 0)
    assign_endpoint(fleet, endpoints, 0, 2)

    assert fleet.running.tolist() == [0, 7, 0, 0]
    assert fleet.kv_capacity_tokens[1] == 10**12
    assert endpoints.cursor.tolist() == [1, EMPTY, EMPTY]
    assert [members(endpoints, endpoint) for endpoint in range(3)] == [[1, 3], [], [0]]


def test_shrinking_is_refused():
    fleet, endpoints = allocate_fleet(2), allocate_endpoints(2, 2)
    with pytest.raises(ValueError, match="2 slots cannot grow to 1"):
        grow_fleet(fleet, 1)
    with pytest.raises(ValueError, match="2 endpoints cannot grow to 1"):
        grow_endpoints(fleet, endpoints, 1)
