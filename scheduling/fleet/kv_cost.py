"""What it costs to have keys and values (KV) on a GPU again that left it. By this one cost running requests are evicted,
prompts are routed and prewarmed, and engines restore or recompute.

An instance with KV offloading (vLLM's --kv-offloading-size) copies full blocks to CPU memory as they are computed. They stay
there until the memory is full, and the least recently used leave first. They return at the speed of the link; what is not
there, or would take longer, is recomputed.
"""

from typing import Final

from scheduling.compiled import compiled, uncompiled
from scheduling.fleet.arrays import EndpointArrays, FleetArrays

OFFLOADED: Final = 0
"""Columns of a row of `FleetArrays.offload`: KV tokens that fit into CPU memory, 0 without offloading,"""
RESTORE_S: Final = 1
"""seconds of a restore whatever its size,"""
RESTORE_S_PER_TOKEN: Final = 2
"""and of each token."""
MAX_OFFLOAD_GIB: Final = 16_384.0
USUAL_RESTORE_S: Final = 0.002
"""Of a look-up, of allocating blocks and of the step after which the request continues."""
USUAL_PREFILL_S: Final = 1e-4
"""Per prompt token, without a profile."""


@compiled
def regain_s(
    prefill_t0_s: float,
    prefill_a_s: float,
    prefill_b_s_per_token: float,
    prefill_c_s_per_token2: float,
    restore_s: float,
    restore_s_per_token: float,
    tokens: float,
    offloaded: float,
) -> tuple[float, float]:
    """Return the least seconds until the KV of *tokens* is on the GPU, and how many of them are restored for that.

    The first *offloaded* of them are in CPU memory: all of these are restored, or none.
    """
    least_s = rest_s = 0.0
    if tokens > 0.0:
        computed_s = prefill_a_s + prefill_b_s_per_token * tokens + prefill_c_s_per_token2 * tokens * tokens
        least_s = max(prefill_t0_s, computed_s)
    if offloaded <= 0.0:
        return least_s, 0.0
    rest = tokens - offloaded
    if rest > 0.0:
        computed_s = prefill_a_s + prefill_b_s_per_token * rest + prefill_c_s_per_token2 * rest * rest
        rest_s = max(prefill_t0_s, computed_s)
    restored_s = restore_s + restore_s_per_token * offloaded + rest_s
    return (restored_s, offloaded) if restored_s < least_s else (least_s, 0.0)


@compiled
def cost_s(fleet: FleetArrays, instance: int, tokens: float, offloaded: float) -> tuple[float, float]:
    """Return `regain_s` of *tokens* at *instance*, by its profile and its link."""
    profile, offload = fleet.profile, fleet.offload
    t0_s, a_s, b_s, c_s = 0.0, 0.0, USUAL_PREFILL_S, 0.0
    if profile[instance, 4] > 0.0:
        t0_s, a_s, b_s, c_s = profile[instance, 0], profile[instance, 1], profile[instance, 2], profile[instance, 3]
    restore_s, per_token_s = offload[instance, RESTORE_S], offload[instance, RESTORE_S_PER_TOKEN]
    return regain_s(t0_s, a_s, b_s, c_s, restore_s, per_token_s, tokens, offloaded)


def plain_cost_s(fleet: FleetArrays, instance: int, tokens: float, *, restored: bool = False) -> tuple[float, float]:
    """Return `cost_s` without Numba, for one request; *restored*: all of it is in CPU memory."""
    (*prefill, step_s), link = fleet.profile[instance, :5].tolist(), fleet.offload[instance, RESTORE_S:].tolist()
    known = prefill if step_s > 0.0 else (0.0, 0.0, USUAL_PREFILL_S, 0.0)
    return uncompiled(regain_s)(*known, *link, float(tokens), float(tokens) * restored)  # type: ignore[call-arg]


@compiled
def prefill_s(fleet: FleetArrays, instance: int, tokens: float) -> float:
    """Return the prefill time of *tokens* at *instance*."""
    return cost_s(fleet, instance, tokens, 0.0)[0]


@compiled
def eviction_cost_s(fleet: FleetArrays, endpoints: EndpointArrays, instance: int, tokens: float) -> float:
    """Return the seconds that a request with the KV of *tokens* loses if it leaves *instance* and waits again: their restore
    or their recomputation.

    Only *instance* has its KV in CPU memory, and it returns to each of its endpoint with the same probability.
    """
    recompute_s, endpoint, serving = prefill_s(fleet, instance, tokens), int(fleet.endpoint[instance]), 0
    if fleet.offload[instance, OFFLOADED] < tokens:
        return recompute_s
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        serving += int(fleet.accepting[endpoints.members[at]])
    return float(recompute_s + (cost_s(fleet, instance, tokens, tokens)[0] - recompute_s) / max(serving, 1))
