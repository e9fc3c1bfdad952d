"""How many requests an instance is given ahead: kernels against their twins, and what docs/papers/ordering.md promises."""

from hypothesis import given
from hypothesis import strategies as st

from scheduling.dispatch import dispatch
from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet, index_members
from scheduling.queueing.waiting_set import allocate_waiting, enqueue
from scheduling.routing.candidates import NO_ROWS
from scheduling.routing.requests_ahead import (
    ENDS,
    MEASURED,
    ROUND_TRIP_S,
    WEIGHT,
    allowance,
    close_ahead,
    note_end,
    note_round_trip,
    open_ahead,
    requests_ahead,
)
from scheduling.routing.routers import JOIN_SHORTEST_QUEUE, has_room, place, release
from tests.kernels import from_python
from tests.scheduling.fleets import ENDPOINTS, as_arrays, plain_fleets

allowance, close_ahead, open_ahead = map(from_python, (allowance, close_ahead, open_ahead))


def one(max_num_seqs=4, kv_capacity_tokens=1000, limit=MEASURED, round_trip_s=0.1, count=1):
    fleet, endpoints = allocate_fleet(count), allocate_endpoints(1, count)
    fleet.endpoint[:], fleet.accepting[:], fleet.ahead_limit[:] = 0, 1, limit
    fleet.max_num_seqs[:], fleet.kv_capacity_tokens[:] = max_num_seqs, kv_capacity_tokens
    fleet.round_trips[:, ROUND_TRIP_S] = round_trip_s
    index_members(fleet, endpoints)
    return fleet, endpoints


def fill(fleet, endpoints, sizes):
    """Give out requests of *sizes* until the head has no room; how many were given."""
    waiting = allocate_waiting(1, len(sizes))
    for at, (prompt, output) in enumerate(sizes):
        enqueue(waiting, 0, float(at), 0.0, 1.0, 0, prompt, output, -1, -1, -1, -1)
    given_out = 0
    while dispatch(fleet, endpoints, waiting, 0, JOIN_SHORTEST_QUEUE, NO_ROWS)[0] >= 0:
        given_out += 1
    return given_out


@given(plain=plain_fleets, endpoint=st.integers(0, ENDPOINTS - 1))
def test_allowances_are_those_of_the_twins(plain, endpoint):
    fleet, endpoints = as_arrays(plain)
    for slot, instance in enumerate(plain.instances):
        assert allowance(fleet, slot) == instance.allowance()
        assert requests_ahead(fleet, slot) == instance.requests_ahead()
    members = [slot for slot, instance in enumerate(plain.instances) if instance.endpoint == endpoint]
    opened = [plain.instances[slot].allowance() for slot in members]
    assert open_ahead(fleet, endpoints, endpoint) == (max(opened, default=0) > 0)
    assert fleet.ahead_open[members].tolist() == opened
    close_ahead(fleet, endpoints, endpoint)
    assert not fleet.ahead_open[members].any()


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(1, 2000),
    st.integers(0, 6),
)
def test_never_more_than_the_allowance_is_ahead_of_an_instance(sizes, max_num_seqs, capacity, limit):
    fleet, endpoints = one(max_num_seqs, capacity, limit)
    fleet.round_trips[0, ENDS] = limit
    fill(fleet, endpoints, sizes)
    assert requests_ahead(fleet, 0) <= min(limit, max_num_seqs)
    assert fleet.running[0] <= max_num_seqs + limit
    if limit == 0:
        assert fleet.kv_tokens[0] <= capacity


def test_ahead_only_where_no_instance_of_the_endpoint_has_room():
    fleet, endpoints = one(count=2)
    fleet.remaining_tokens[1] = 10**6  # the policy would rather not
    assert fill(fleet, endpoints, [(1, 1)] * 8) == 8
    assert fleet.running.tolist() == [4, 4]
    assert fill(fleet, endpoints, [(1, 1)] * 8) == 2
    assert fleet.running.tolist() == [5, 5]


def test_one_is_ahead_before_anything_ended_and_then_as_many_as_end_in_a_round_trip():
    fleet, endpoints = one(max_num_seqs=8)
    assert fill(fleet, endpoints, [(1, 1)] * 20) == 9
    for trip in range(40):
        for at in range(3):
            note_end(fleet, 0, trip + at * 0.04)
    assert allowance(fleet, 0) == 3
    assert fill(fleet, endpoints, [(1, 1)] * 20) == 2


def test_ends_more_than_a_round_trip_later_are_not_of_one_trip():
    fleet, _ = one(round_trip_s=0.125)
    for at in range(10):
        note_end(fleet, 0, at * 0.125)
    assert allowance(fleet, 0) == 1


def test_trips_that_differ_are_given_two_deviations_more():
    fleet, _ = one(max_num_seqs=64)
    for trip in range(200):
        for _ in range(4 if trip % 2 else 8):
            note_end(fleet, 0, float(trip))
    assert 9 <= allowance(fleet, 0) <= 11  # 6 and twice 2


def test_a_bunch_counts_whole_and_is_forgotten():
    fleet, _ = one(max_num_seqs=64)
    for _ in range(20):
        note_end(fleet, 0, 1.0)
    note_end(fleet, 0, 2.0)
    assert allowance(fleet, 0) == 20
    for at in range(60):
        note_end(fleet, 0, 3.0 + at)
    assert allowance(fleet, 0) == 1


def test_round_trips_are_smoothed():
    fleet, _ = one(round_trip_s=0.0)
    note_round_trip(fleet, 0, 0.08, WEIGHT)
    assert fleet.round_trips[0, ROUND_TRIP_S] == 0.08
    note_round_trip(fleet, 0, 0.16, WEIGHT)
    assert fleet.round_trips[0, ROUND_TRIP_S] == 0.09


@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0.001, 10.0)), max_size=40), st.sampled_from([WEIGHT, 1.0]))
def test_a_busy_instance_does_not_lengthen_its_round_trip(samples, weight):
    """However slow its API process is under load, the round trip stays within those measured first or under light load."""
    fleet, _ = one(max_num_seqs=8, round_trip_s=0.0)
    counted = []
    for running, round_trip_s in samples:
        fleet.running[0] = running
        light = running <= 2
        before_s = fleet.round_trips[0, ROUND_TRIP_S]
        note_round_trip(fleet, 0, round_trip_s, weight)
        counted += [round_trip_s] if light or not counted else []
        assert fleet.round_trips[0, ROUND_TRIP_S] <= max(counted) * (1 + 1e-12)  # rounding of the average
        assert light or not before_s or fleet.round_trips[0, ROUND_TRIP_S] <= before_s


def test_many_ahead_do_not_bring_about_more_where_each_makes_the_api_process_slower():
    """128 at once, each of which holds an answer up by 5 ms in the process: the allowance stays that of the path."""
    fleet, _ = one(max_num_seqs=128, round_trip_s=0.02)
    running, now_s, most = 128, 0.0, 0
    for _ in range(4000):
        now_s += 0.02
        fleet.running[0] = running
        note_end(fleet, 0, now_s)
        note_round_trip(fleet, 0, 0.02 + 0.005 * running, 1.0)
        most = max(most, allowance(fleet, 0))
        running = 128 + most
    assert most <= 4  # the ends of one trip, or of two where rounding joins them, with deviations


def test_memory_too_has_some_ahead_but_never_what_could_not_fit():
    fleet, endpoints = one(max_num_seqs=64, kv_capacity_tokens=100, limit=2)
    fleet.round_trips[0, ENDS] = 2.0
    assert fill(fleet, endpoints, [(15, 10)] * 9) == 6
    assert requests_ahead(fleet, 0) == 2
    for _ in range(6):
        release(fleet, 0, 25, 0)
    fleet.ahead_open[0] = 2
    assert not has_room(fleet, 0, 100, 1)
    assert has_room(fleet, 0, 99, 1)
    fleet.ahead_open[0] = 0
    place(fleet, endpoints, 0, 99, 1)
    assert requests_ahead(fleet, 0) == 0
