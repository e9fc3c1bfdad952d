"""The fleet as a structure of arrays, held by the live gateway and the simulator, and read by every kernel.

Numba takes a `NamedTuple` of arrays as one argument. All arrays of `FleetArrays` have one element, or one row,
per instance slot. An endpoint is all instances of one model in one region. The caller that allocates the
arrays numbers slots and endpoints.
"""

from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from scheduling.compiled import compiled
from scheduling.fleet.adapter_memory import MOST_ADAPTERS
from scheduling.lookahead.rule import LookAheadRule
from scheduling.struct_of_arrays import struct_of_arrays

EMPTY = -1
COEFFICIENTS: Final = 7
"""Coefficients of a performance profile, in the order of the fields of `profile.Profile`."""
TRIP_COLUMNS: Final = 5
"""Columns of a row of `round_trips`; see `allowance`."""
GPU_SLOTS: Final = 0
MEMORY_SLOTS: Final = 1
"""Columns of a row of `adapter_slots`."""


@struct_of_arrays
class FleetArrays(NamedTuple):
    """Live load and limits by instance slot."""

    accepting: NDArray[np.uint8]
    """1 while the instance accepts work."""
    endpoint: NDArray[np.int32]
    """Its endpoint, -1 for an empty slot. Write it with `assign_endpoint`, which keeps `members` consistent."""
    model: NDArray[np.int32]
    region: NDArray[np.int32]
    running: NDArray[np.int32]
    """Requests dispatched to it and not finished."""
    max_num_seqs: NDArray[np.int32]
    """Most requests that it runs at once (vLLM's --max-num-seqs)."""
    carried: NDArray[np.int32]
    """Most requests that it is given at once where its API process carries fewer (`carried`); 0: `max_num_seqs`."""
    kv_tokens: NDArray[np.int64]
    """KV tokens held by or reserved for its requests."""
    kv_capacity_tokens: NDArray[np.int64]
    """KV tokens that fit; 0 while unknown."""
    remaining_tokens: NDArray[np.int64]
    """Prompt tokens not yet prefilled + predicted output tokens not yet produced, over its requests."""
    observed_waiting: NDArray[np.int32]
    """Requests in the instance's own queue, by its last metrics."""
    queued_prompt_tokens: NDArray[np.int64]
    """Of `remaining_tokens`, the prompts without a first token."""
    placed_tokens: NDArray[np.int64]
    """All tokens ever given to it: the clock of its prefix cache (`affinity`)."""
    memory_tokens: NDArray[np.int64]
    """KV tokens that it can hold if it may get more, to wait in its own queue; 0: `kv_capacity_tokens`."""
    profile: NDArray[np.float64]
    """instances x COEFFICIENTS: its step time; all 0 while unknown."""
    front_end: NDArray[np.float64]
    """instances x 3: limits of its API process, and the margin above them (`carried`); all 0 while unknown."""
    given_tokens: NDArray[np.float64]
    """instances x 2: smoothed prompt and predicted output tokens of the requests given to it."""
    ahead_limit: NDArray[np.int32]
    """Most requests that it may get beyond its room (`allowance`); 0: none, -1: as many as measured."""
    ahead_open: NDArray[np.int32]
    """Of those, what the current decision may use; 0 except within `dispatch`."""
    round_trips: NDArray[np.float64]
    """instances x TRIP_COLUMNS: time to replace a request that ends there, and how many end in that time."""
    cached_share: NDArray[np.float64]
    """Share of its recent prompt tokens that were in its prefix cache."""
    look_ahead: NDArray[np.float64]
    """instances x fields of `LookAheadRule`: the look-ahead horizon, and the limits within it."""
    adapters: NDArray[np.int32]
    """instances x MOST_ADAPTERS: LoRA adapters, numbers plus one, most recently used first; 0 ends them."""
    adapter_requests: NDArray[np.int32]
    """Of the same shape: running requests that use each."""
    adapter_slots: NDArray[np.int32]
    """instances x 2: adapters that fit on the GPU (vLLM's --max-loras), and in CPU memory (--max-cpu-loras); 0: none."""
    adapter_load_s: NDArray[np.float64]
    """instances x 2: seconds to bring an adapter onto the GPU, by tier: from storage, and from CPU memory."""
    offload: NDArray[np.float64]
    """instances x 3: KV tokens that fit into its CPU memory, and the time of a restore (`kv_cost`); all 0 without."""
    passed_over: NDArray[np.uint8]
    """1 for an instance that may not take the request being decided, for its adapter; 0 except within `dispatch`."""


@struct_of_arrays
class EndpointArrays(NamedTuple):
    """Instances of each endpoint, and the state of its router."""

    cursor: NDArray[np.int64]
    """Instance that last got work, after which round robin continues. -1 at first."""
    asked_work_s: NDArray[np.float64]
    """Engine seconds that dispatched requests need, decayed by age; as of `asked_at_s` (`routing.use`)."""
    asked_at_s: NDArray[np.float64]
    clear_at_s: NDArray[np.float64]
    """When all dispatched work will be computed, if the instances share it evenly."""
    first: NDArray[np.int32]
    """One element more than endpoints: `members[first[e]:first[e + 1]]` are the instances of endpoint e, ascending."""
    members: NDArray[np.int32]
    """Instance slots grouped by endpoint; as long as the fleet."""


def allocate_fleet(instances: int) -> FleetArrays:
    """Return arrays for *instances* empty slots."""
    return FleetArrays(
        accepting=np.zeros(instances, np.uint8),
        endpoint=np.full(instances, EMPTY, np.int32),
        model=np.full(instances, EMPTY, np.int32),
        region=np.full(instances, EMPTY, np.int32),
        running=np.zeros(instances, np.int32),
        max_num_seqs=np.zeros(instances, np.int32),
        carried=np.zeros(instances, np.int32),
        kv_tokens=np.zeros(instances, np.int64),
        kv_capacity_tokens=np.zeros(instances, np.int64),
        remaining_tokens=np.zeros(instances, np.int64),
        observed_waiting=np.zeros(instances, np.int32),
        queued_prompt_tokens=np.zeros(instances, np.int64),
        placed_tokens=np.zeros(instances, np.int64),
        memory_tokens=np.zeros(instances, np.int64),
        profile=np.zeros((instances, COEFFICIENTS)),
        front_end=np.zeros((instances, 3)),
        given_tokens=np.zeros((instances, 2)),
        ahead_limit=np.zeros(instances, np.int32),
        ahead_open=np.zeros(instances, np.int32),
        round_trips=np.zeros((instances, TRIP_COLUMNS)),
        cached_share=np.zeros(instances),
        look_ahead=np.tile(np.array(astuple(LookAheadRule()), np.float64), (instances, 1)),
        adapters=np.zeros((instances, MOST_ADAPTERS), np.int32),
        adapter_requests=np.zeros((instances, MOST_ADAPTERS), np.int32),
        adapter_slots=np.zeros((instances, 2), np.int32),
        adapter_load_s=np.zeros((instances, 2)),
        offload=np.zeros((instances, 3)),
        passed_over=np.zeros(instances, np.uint8),
    )


def allocate_endpoints(endpoints: int, instances: int) -> EndpointArrays:
    """Return arrays for *endpoints* without members, over a fleet of *instances* slots."""
    return EndpointArrays(
        cursor=np.full(endpoints, EMPTY, np.int64),
        asked_work_s=np.zeros(endpoints),
        asked_at_s=np.zeros(endpoints),
        clear_at_s=np.zeros(endpoints),
        first=np.zeros(endpoints + 1, np.int32),
        members=np.zeros(instances, np.int32),
    )


def grow_fleet(fleet: FleetArrays, instances: int) -> FleetArrays:
    """Return a copy with room for *instances* slots; the new ones are empty. Grow the endpoints to the same number."""
    if instances < fleet.endpoint.size:
        raise ValueError(f"a fleet of {fleet.endpoint.size} slots cannot grow to {instances}")
    grown = allocate_fleet(instances)
    for name in FleetArrays._fields:
        old: NDArray[np.generic] = getattr(fleet, name)
        getattr(grown, name)[: old.shape[0]] = old
    return grown


def grow_endpoints(fleet: FleetArrays, endpoints: EndpointArrays, count: int) -> EndpointArrays:
    """Return a copy for *count* endpoints over *fleet*, with members read from it; the new ones have none."""
    if count < endpoints.cursor.size:
        raise ValueError(f"{endpoints.cursor.size} endpoints cannot grow to {count}")
    grown = allocate_endpoints(count, fleet.endpoint.size)
    for name in ("cursor", "asked_work_s", "asked_at_s", "clear_at_s"):
        getattr(grown, name)[: endpoints.cursor.size] = getattr(endpoints, name)
    index_members(fleet, grown)
    return grown


@compiled
def memory_tokens(fleet: FleetArrays, instance: int) -> int:
    """Return the KV tokens that *instance* can hold at once; 0 while unknown."""
    held = fleet.memory_tokens[instance]
    return int(held if held > 0 else fleet.kv_capacity_tokens[instance])


@compiled
def at_once(fleet: FleetArrays, instance: int) -> int:
    """Return the most requests that *instance* is given at once."""
    carried = fleet.carried[instance]
    return int(carried if carried > 0 else fleet.max_num_seqs[instance])


@compiled
def index_members(fleet: FleetArrays, endpoints: EndpointArrays) -> None:
    """Rebuild `members` and `first` from `fleet.endpoint` after a bulk write. O(instances + endpoints)."""
    first, members = endpoints.first, endpoints.members
    count = first.size - 1
    first[:] = 0
    for instance in range(fleet.endpoint.size):
        if fleet.endpoint[instance] >= 0:
            first[fleet.endpoint[instance] + 1] += 1
    for endpoint in range(count):
        first[endpoint + 1] += first[endpoint]
    # `first[e]` serves as the write position of e and ends one place too far right; it is shifted back below.
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
