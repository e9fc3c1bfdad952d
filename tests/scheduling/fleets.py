"""Random small fleets for property tests, as plain instances and as arrays."""

from hypothesis import strategies as st

from scheduling.fleet.arrays import EndpointArrays, FleetArrays, allocate_endpoints, allocate_fleet, index_members
from scheduling.routing.requests_ahead import ROUND_TRIP_S, note_end
from tests.oracles.dispatch import PlainFleet, PlainInstance

ENDPOINTS = 3

# Few distinct values: ties, full instances and empty endpoints must be common.
plain_instances = st.builds(
    PlainInstance,
    endpoint=st.integers(-1, ENDPOINTS - 1),
    accepting=st.booleans() | st.just(True),
    running=st.integers(0, 4),
    max_num_seqs=st.integers(0, 5),
    kv_tokens=st.integers(0, 8),
    kv_capacity_tokens=st.sampled_from([0, 3, 6, 9, 12, 24]),
    remaining_tokens=st.integers(0, 5),
    ahead_limit=st.sampled_from([-1, 0, 1, 3]),
    ahead_open=st.sampled_from([0, 0, 1, 2]),
    round_trip_s=st.sampled_from([0.0, 1.0]),
)
ends = st.lists(st.integers(0, 8).map(lambda drawn: drawn / 4), max_size=8).map(sorted)


def after(instance: PlainInstance, moments: list[float]) -> PlainInstance:
    """Record that requests of *instance* ended at *moments*."""
    for now_s in moments:
        instance.note_end(now_s)
    return instance


plain_fleets = st.builds(
    PlainFleet,
    instances=st.lists(st.builds(after, plain_instances, ends), min_size=1, max_size=12),
    cursor=st.dictionaries(st.integers(0, ENDPOINTS - 1), st.integers(-1, 12)),
)


def as_arrays(plain: PlainFleet, endpoint_count: int = ENDPOINTS) -> tuple[FleetArrays, EndpointArrays]:
    """Return the arrays equivalent to *plain*."""
    fleet = allocate_fleet(len(plain.instances))
    endpoints = allocate_endpoints(endpoint_count, len(plain.instances))
    for slot, instance in enumerate(plain.instances):
        fleet.endpoint[slot] = instance.endpoint
        fleet.accepting[slot] = instance.accepting
        fleet.running[slot] = instance.running
        fleet.max_num_seqs[slot] = instance.max_num_seqs
        fleet.kv_tokens[slot] = instance.kv_tokens
        fleet.kv_capacity_tokens[slot] = instance.kv_capacity_tokens
        fleet.remaining_tokens[slot] = instance.remaining_tokens
        fleet.queued_prompt_tokens[slot] = instance.queued_prompt_tokens
        fleet.placed_tokens[slot] = instance.placed_tokens
        fleet.memory_tokens[slot] = instance.memory_tokens
        fleet.profile[slot] = instance.profile or 0.0
        fleet.look_ahead[slot, :3] = instance.iterations, instance.memory_above, instance.beta
        fleet.ahead_limit[slot], fleet.ahead_open[slot] = instance.ahead_limit, instance.ahead_open
        fleet.round_trips[slot, ROUND_TRIP_S] = instance.round_trip_s
        for now_s in (each for trip in instance.trips for each in trip):
            note_end(fleet, slot, now_s)
    for endpoint, slot in plain.cursor.items():
        endpoints.cursor[endpoint] = slot
    index_members(fleet, endpoints)
    return fleet, endpoints
