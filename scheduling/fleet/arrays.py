"""The fleet as a structure of arrays: what the live gateway and the simulator both hold, and every kernel reads.

Numba takes a `NamedTuple` of arrays as one argument. All arrays of `FleetArrays` have one element, or one row, an instance
slot. An endpoint is all instances of one model in one region. Slots and endpoints are numbered by the
caller that allocates the arrays.
"""

from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from scheduling.compiled import compiled
from scheduling.lookahead.rule import LookAheadRule
from scheduling.struct_of_arrays import struct_of_arrays

EMPTY = -1
COEFFICIENTS: Final = 7
"""Of a performance profile, in the order of the fields of `profile.Profile`."""
TRIP_COLUMNS: Final = 5
"""Of a row of `round_trips`; `allowance` says which."""


@struct_of_arrays
class FleetArrays(NamedTuple):
    """Live load and limits of every instance slot."""

    accepting: NDArray[np.uint8]
    """1 while the instance may be given work."""
    endpoint: NDArray[np.int32]
    """Its endpoint, -1 for an empty slot. Write it by `assign_endpoint`, which keeps `members` true."""
    model: NDArray[np.int32]
    region: NDArray[np.int32]
    running: NDArray[np.int32]
    """Requests dispatched to it and not finished."""
    max_num_seqs: NDArray[np.int32]
    """Requests that it runs at once (vLLM's --max-num-seqs)."""
    kv_tokens: NDArray[np.int64]
    """KV tokens held by or reserved for what runs there."""
    kv_capacity_tokens: NDArray[np.int64]
    """KV tokens that it has room for; 0 while unknown."""
    remaining_tokens: NDArray[np.int64]
    """Prompt tokens not yet prefilled + predicted output tokens not yet produced, of what runs there."""
    observed_waiting: NDArray[np.int32]
    """Requests in the instance's own queue, as its metrics last said."""
    queued_prompt_tokens: NDArray[np.int64]
    """Of `remaining_tokens`, the prompts whose first token has not come out."""
    placed_tokens: NDArray[np.int64]
    """All tokens that were ever given to it: the clock of its prefix cache (`affinity`)."""
    memory_tokens: NDArray[np.int64]
    """KV tokens that it can hold where more may be given to it, to wait in its own queue; 0: `kv_capacity_tokens`."""
    profile: NDArray[np.float64]
    """instances x COEFFICIENTS: its step time; all 0 while unknown."""
    ahead_limit: NDArray[np.int32]
    """Requests at most that may be given to it beyond its room (`allowance`); 0: none, -1: as many as is measured."""
    ahead_open: NDArray[np.int32]
    """Of those, what the decision being made may count on; 0 but within `dispatch`."""
    round_trips: NDArray[np.float64]
    """instances x TRIP_COLUMNS: how long it takes to replace a request that ends there, and how many end meanwhile."""
    cached_share: NDArray[np.float64]
    """Share of the tokens of its prompts that lately were in its prefix cache."""
    look_ahead: NDArray[np.float64]
    """instances x fields of `LookAheadRule`: the look-ahead horizon, and the limits within it."""


@struct_of_arrays
class EndpointArrays(NamedTuple):
    """Which instances serve an endpoint, and the state of its router."""

    cursor: NDArray[np.int64]
    """Instance that was given work last, after which round robin continues. -1 at first."""
    asked_work_s: NDArray[np.float64]
    """Engine seconds that what was given out asks for, older ones forgotten; as of `asked_at_s` (`routing.use`)."""
    asked_at_s: NDArray[np.float64]
    clear_at_s: NDArray[np.float64]
    """When all that was given out will be computed, if its instances share it evenly."""
    first: NDArray[np.int32]
    """One element more than endpoints: `members[first[e]:first[e + 1]]` are the instances of endpoint e, ascending."""
    members: NDArray[np.int32]
    """Instance slots grouped by endpoint; as long as the fleet."""


def allocate_fleet(instances: int) -> FleetArrays:
    """Arrays for *instances* empty slots."""
    return FleetArrays(
        accepting=np.zeros(instances, np.uint8),
        endpoint=np.full(instances, EMPTY, np.int32),
        model=np.full(instances, EMPTY, np.int32),
        region=np.full(instances, EMPTY, np.int32),
        running=np.zeros(instances, np.int32),
        max_num_seqs=np.zeros(instances, np.int32),
        kv_tokens=np.zeros(instances, np.int64),
        kv_capacity_tokens=np.zeros(instances, np.int64),
        remaining_tokens=np.zeros(instances, np.int64),
        observed_waiting=np.zeros(instances, np.int32),
        queued_prompt_tokens=np.zeros(instances, np.int64),
        placed_tokens=np.zeros(instances, np.int64),
        memory_tokens=np.zeros(instances, np.int64),
        profile=np.zeros((instances, COEFFICIENTS)),
        ahead_limit=np.zeros(instances, np.int32),
        ahead_open=np.zeros(instances, np.int32),
        round_trips=np.zeros((instances, TRIP_COLUMNS)),
        cached_share=np.zeros(instances),
        look_ahead=np.tile(np.array(astuple(LookAheadRule()), np.float64), (instances, 1)),
    )


def allocate_endpoints(endpoints: int, instances: int) -> EndpointArrays:
    """Arrays for *endpoints* without members, over a fleet of *instances* slots."""
    return EndpointArrays(
        cursor=np.full(endpoints, EMPTY, np.int64),
        asked_work_s=np.zeros(endpoints),
        asked_at_s=np.zeros(endpoints),
        clear_at_s=np.zeros(endpoints),
        first=np.zeros(endpoints + 1, np.int32),
        members=np.zeros(instances, np.int32),
    )


def grow_fleet(fleet: FleetArrays, instances: int) -> FleetArrays:
    """A copy with room for *instances* slots; the new ones are empty. Grow the endpoints to the same number."""
    if instances < fleet.endpoint.size:
        raise ValueError(f"a fleet of {fleet.endpoint.size} slots cannot grow to {instances}")
    grown = allocate_fleet(instances)
    for name in FleetArrays._fields:
        old: NDArray[np.generic] = getattr(fleet, name)
        getattr(grown, name)[: old.shape[0]] = old
    return grown


def grow_endpoints(fleet: FleetArrays, endpoints: EndpointArrays, count: int) -> EndpointArrays:
    """A copy for *count* endpoints over *fleet*, with members read from it; the new ones have none."""
    if count < endpoints.cursor.size:
        raise ValueError(f"{endpoints.cursor.size} endpoints cannot grow to {count}")
    grown = allocate_endpoints(count, fleet.endpoint.size)
    for name in ("cursor", "asked_work_s", "asked_at_s", "clear_at_s"):
        getattr(grown, name)[: endpoints.cursor.size] = getattr(endpoints, name)
    index_members(fleet, grown)
    return grown


@compiled
def memory_tokens(fleet: FleetArrays, instance: int) -> int:
    """KV tokens that *instance* can hold at once; 0 while unknown."""
    held = fleet.memory_tokens[instance]
    return int(held if held > 0 else fleet.kv_capacity_tokens[instance])


@compiled
def index_members(fleet: FleetArrays, endpoints: EndpointArrays) -> None:
    """Rebuild `members` and `first` from `fleet.endpoint`, after that was written in bulk. O(instances + endpoints)."""
    first, members = endpoints.first, endpoints.members
    count = first.size - 1
    first[:] = 0
    for instance in range(fleet.endpoint.size):
        if fleet.endpoint[instance] >= 0:
            first[fleet.endpoint[instance] + 1] += 1
    for endpoint in range(count):
        first[endpoint + 1] += first[endpoint]
    # `first[e]` serves as the write position of e, and ends one place too far right; shifted back below.
    for instance in range(fleet.endpoint.size):
        endpoint = fleet.endpoint[instance]
        if endpoint >= 0:
            members[first[endpoint]] = instance
            first[endpoint] += 1
    for endpoint in range(count, 0, -1):
        first[endpoint] = first[endpoint - 1]
    first[0] = 0


@compiled
def assign_endpoint(fleet: FleetArrays, endpoints: EndpointArrays, instance: int, endpoint: int) -> None:
    """Make *instance* serve *endpoint* (-1: none, the slot is empty). O(instances)."""
    if endpoint >= endpoints.cursor.size:
        raise ValueError("no such endpoint; grow the endpoints first")
    fleet.endpoint[instance] = endpoint
    index_members(fleet, endpoints)
