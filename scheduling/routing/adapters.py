"""LoRA adapters of instances: where each is, and which instances are passed over for a request that uses one.

An instance holds adapters as vLLM does: *max_cpu_loras* in CPU memory, of which *max_loras* are on its GPUs. The least
recently used ones leave first, and those of running requests stay on the GPUs. The dispatcher keeps the same order of use,
so it knows where an adapter is without a call to the server.

An instance whose GPU slots are all in use by other adapters takes no request for a further one: vLLM would let it wait.
One where the adapter is farther away (memory, or not loaded) is passed over if an instance with room has it nearer and
would serve the request sooner: by the time to load it, and by what the running requests of both cost it and cost them.
Among the others the endpoint's router chooses.
"""

from typing import Final

import numpy as np

from scheduling.compiled import compiled, compiled_internal
from scheduling.fleet.adapter_memory import MOST_ADAPTERS
from scheduling.fleet.arrays import GPU_SLOTS, MEMORY_SLOTS, EndpointArrays, FleetArrays, index_members
from scheduling.routing.routers import has_room

NOT_LOADED: Final = 0
IN_MEMORY: Final = 1
ON_GPU: Final = 2
TIERS: Final = ("not loaded", "in CPU memory", "on the GPU")
"""Names of the tiers, by number."""


@compiled
def tier_of(fleet: FleetArrays, instance: int, adapter: int) -> int:
    """Return where *adapter* is at *instance*: ON_GPU, IN_MEMORY or NOT_LOADED."""
    before, is_held = 0, False
    for at in range(MOST_ADAPTERS):
        held = fleet.adapters[instance, at]
        if held == 0:
            break
        used = fleet.adapter_requests[instance, at] > 0
        if held == adapter + 1:
            if used:
                return ON_GPU
            is_held = True
        elif used or not is_held:  # those in use stay, however long ago that began
            before += 1
    if not is_held:
        return NOT_LOADED
    return ON_GPU if before < fleet.adapter_slots[instance, GPU_SLOTS] else IN_MEMORY


@compiled
def takes_adapter(fleet: FleetArrays, instance: int, adapter: int) -> bool:
    """Whether *instance* serves adapters, and *adapter* is in use there or one of its GPU slots is not."""
    used = 0
    for at in range(MOST_ADAPTERS):
        held = fleet.adapters[instance, at]
        if held == 0:
            break
        if fleet.adapter_requests[instance, at] > 0:
            if held == adapter + 1:
                return True
            used += 1
    return bool(used < fleet.adapter_slots[instance, GPU_SLOTS])


@compiled_internal
def _to_front(fleet: FleetArrays, instance: int, at: int, adapter: int, requests: int) -> None:
    """Make *adapter*, which is at position *at* or new there, the most recently used one."""
    while at > 0:
        fleet.adapters[instance, at] = fleet.adapters[instance, at - 1]
        fleet.adapter_requests[instance, at] = fleet.adapter_requests[instance, at - 1]
        at -= 1
    fleet.adapters[instance, 0], fleet.adapter_requests[instance, 0] = adapter + 1, requests


@compiled_internal
def _position(fleet: FleetArrays, instance: int, adapter: int) -> int:
    for at in range(MOST_ADAPTERS):
        held = fleet.adapters[instance, at]
        if held == adapter + 1:
            return at
        if held == 0:
            break
    return -1


@compiled
def drop_adapter(fleet: FleetArrays, instance: int, adapter: int) -> None:
    """Forget *adapter* at *instance*: it was unloaded, or never loaded."""
    at = _position(fleet, instance, adapter)
    while at >= 0 and at < MOST_ADAPTERS - 1 and fleet.adapters[instance, at] != 0:
        fleet.adapters[instance, at] = fleet.adapters[instance, at + 1]
        fleet.adapter_requests[instance, at] = fleet.adapter_requests[instance, at + 1]
        at += 1
    if at >= 0:
        fleet.adapters[instance, at] = fleet.adapter_requests[instance, at] = 0


@compiled
def use_adapter(fleet: FleetArrays, instance: int, adapter: int, requests: int) -> int:
    """Load *adapter* at *instance* as the most recently used one, with *requests* more that use it: 1, or 0 to prewarm.

    Return the adapter that leaves CPU memory for it, -1 for none.
    """
    at = _position(fleet, instance, adapter)
    if at >= 0:
        _to_front(fleet, instance, at, adapter, int(fleet.adapter_requests[instance, at]) + requests)
        return -1
    count, idle = 0, -1
    while count < MOST_ADAPTERS and fleet.adapters[instance, count] != 0:
        if fleet.adapter_requests[instance, count] == 0:
            idle = count
        count += 1
    leaves = -1
    most = min(int(fleet.adapter_slots[instance, MEMORY_SLOTS]), MOST_ADAPTERS)
    if count >= most and idle >= 0:
        leaves = int(fleet.adapters[instance, idle]) - 1
        drop_adapter(fleet, instance, leaves)
        count -= 1
    if count < MOST_ADAPTERS:
        _to_front(fleet, instance, count, adapter, requests)
    return leaves


@compiled
def end_use(fleet: FleetArrays, instance: int, adapter: int) -> None:
    """Record that a request with *adapter* left *instance*; until then it used it. Does nothing to one dropped meanwhile."""
    at = _position(fleet, instance, adapter)
    if at >= 0:
        _to_front(fleet, instance, at, adapter, max(int(fleet.adapter_requests[instance, at]) - 1, 0))


@compiled
def forget_adapters(fleet: FleetArrays, instance: int) -> None:
    """Forget all adapters of *instance*: its server is another, or slept."""
    for at in range(MOST_ADAPTERS):
        if fleet.adapters[instance, at] == 0:
            break
        fleet.adapters[instance, at] = fleet.adapter_requests[instance, at] = 0


@compiled
def load_s(fleet: FleetArrays, instance: int, tier: int) -> float:
    """Return the seconds to bring an adapter in *tier* onto the GPU of *instance*."""
    return 0.0 if tier == ON_GPU else float(fleet.adapter_load_s[instance, tier])


@compiled_internal
def _delay_s(fleet: FleetArrays, instance: int, tier: int, prompt_tokens: int, output_tokens: int) -> float:
    """Return the seconds that a request loses at *instance* by loading and by the running requests, and these by it.

    Each running request is counted as long as this one, so that only counts decide, which both clocks know exactly.
    """
    each_s = fleet.profile[instance, 5] + fleet.profile[instance, 6] * (prompt_tokens + 0.5 * output_tokens)
    return float(load_s(fleet, instance, tier) + 2.0 * output_tokens * each_s * fleet.running[instance])


@compiled_internal
def exclude_without_adapter(
    fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int, adapter: int, prompt_tokens: int, output_tokens: int
) -> None:
    """Exclude the instances of *endpoint* that cannot serve a request with *adapter*, until `filters.allow_all`."""
    on_gpu_s = in_memory_s = np.inf
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        fleet.passed_over[instance] = 0
        if not takes_adapter(fleet, instance, adapter):
            fleet.passed_over[instance] = 1
        elif has_room(fleet, instance, prompt_tokens, output_tokens):
            tier = tier_of(fleet, instance, adapter)
            delay_s = _delay_s(fleet, instance, tier, prompt_tokens, output_tokens)
            if tier == ON_GPU:
                on_gpu_s = min(on_gpu_s, delay_s)
            if tier != NOT_LOADED:
                in_memory_s = min(in_memory_s, delay_s)
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        tier = tier_of(fleet, instance, adapter)
        if fleet.passed_over[instance] == 0 and tier != ON_GPU:
            nearer_s = on_gpu_s if tier == IN_MEMORY else in_memory_s
            if nearer_s < _delay_s(fleet, instance, tier, prompt_tokens, output_tokens):
                fleet.passed_over[instance] = 1


def warm_up(fleet: FleetArrays, endpoints: EndpointArrays) -> None:
    """Load every kernel of this module that runs live from the cache, or compile it. Needs the members of endpoint 0."""
    index_members(fleet, endpoints)
    use_adapter(fleet, 0, 0, 1)
    tier_of(fleet, 0, 0)
    takes_adapter(fleet, 0, 0)
    end_use(fleet, 0, 0)
    drop_adapter(fleet, 0, 0)
    forget_adapters(fleet, 0)
