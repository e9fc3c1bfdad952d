"""Routers that look ahead: PreServe's, and ours, which scores in seconds.

They also read the look-ahead maps and the index of prompt prefixes. Their signature is `(fleet, endpoints, ahead,
affinity, endpoint, slot, prompt_tokens, output_tokens) -> int`, where *slot* is the request's in the waiting set, -1
for none (then its prefix is unknown). Like other routers, they choose only an instance with room, -1 if there is
none, and ties go to the lowest slot.

**preserve** (PreServe 4.3.3) adds tokens: prompts to prefill including this one, output to generate including this
one's, and beta times the tokens by which the KV cache would pass T_mem (80%) in one of the next 100 iterations if this
request started now; `LookAheadRule` has these three parameters. The minimum wins. (The paper writes argmax, but means
"the instance with the minimum estimated load".)

**least_delay** adds seconds, from each instance's performance profile, so that different GPUs compare: to this
request's first token, to its last, what running and future requests lose by it, and the same memory risk. Prompt tokens
expected in the prefix cache need no prefill, those in CPU memory their restore or recomputation (`fleet.kv_cost`), and they
are worth only that, so a busy instance is passed over however much of the prompt it has cached. If an instance with room
has no profile, all are compared in tokens.

A map is read only if it matters. The KV tokens of an instance rise by at most one per request and iteration: if
even that stays below T_mem, there is no penalty. The penalty already due is a lower bound: an instance whose
lower bound loses is not read either.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, compiled_internal
from scheduling.fleet.arrays import (
    EndpointArrays,
    FleetArrays,
    allocate_endpoints,
    allocate_fleet,
    index_members,
    memory_tokens,
)
from scheduling.fleet.kv_cost import cost_s
from scheduling.lookahead import maps as lookahead
from scheduling.lookahead.maps import LookAhead, peak_tokens, tokens_now
from scheduling.lookahead.rule import BETA, ITERATIONS, MEMORY_ABOVE
from scheduling.queueing.waiting_set import WaitingArrays, allocate_waiting, enqueue, free_slot, leave, peek
from scheduling.routing.cached_blocks import chain, drop, hold, leading
from scheduling.routing.candidates import (
    CACHED,
    COLUMNS,
    DECODE,
    IN_SECONDS,
    INSTANCE,
    KNOWN,
    MEMORY,
    OTHERS,
    PEAK,
    PREFILL,
    SCORE,
    write_load,
)
from scheduling.routing.filters import allow_all, exclude
from scheduling.routing.prefix_affinity import (
    UNKNOWN,
    Affinity,
    allocate_affinity,
    forget,
    forget_known,
    held,
    know,
    learn,
    match,
    matched_tokens,
    note,
    offloaded_tokens,
    unmatch,
)
from scheduling.routing.requests_ahead import close_ahead, open_ahead
from scheduling.routing.routers import LEAST_DELAY, PRESERVE, has_room, place, prefilled, release

# Weights of loads that delay future requests, for `least_delay`. Tuned on ten minutes of lengths of the Azure
# conversation trace near saturation; docs/papers/routing.md describes their effect.
# the Azure conversation trace near saturation; docs/papers/routing.md has what they change.
TO_PREFILL: Final = 10.0
"""Cost in seconds of a second of queued prompts."""
TO_GENERATE: Final = 0.5
"""Cost in seconds of a second of output to generate."""
TO_HOLD: Final = 0.4
"""Cost of a token beyond T_mem, in multiples of the instance's time per token."""


@compiled_inline
def has_profile(fleet: FleetArrays, instance: int) -> bool:
    """Whether the profile of *instance* is known: the fixed part of a decode step is never 0."""
    return bool(fleet.profile[instance, 4] > 0.0)


@compiled_inline
def _delay(
    fleet: FleetArrays,
    ahead: LookAhead,
    instance: int,
    prompt_tokens: int,
    output_tokens: int,
    cached_tokens: int,
    offloaded_tokens: int,
) -> tuple[float, float, float, float]:
    """Return seconds to the first token, from there to the last, lost by others, and per token beyond T_mem."""
    profile = fleet.profile
    b, c = profile[instance, 2], profile[instance, 3]
    fixed, by_sequence, by_token = profile[instance, 4], profile[instance, 5], profile[instance, 6]
    memory, held = float(memory_tokens(fleet, instance)), float(tokens_now(ahead, instance))
    queued = float(fleet.queued_prompt_tokens[instance])
    to_generate = float(fleet.remaining_tokens[instance]) - queued
    placed, active = float(fleet.running[instance]), float(ahead.active[instance])
    prompt, output = float(prompt_tokens), float(output_tokens)
    new = max(float(prompt_tokens - cached_tokens), 1.0)

    # The batch: all dispatched requests, or as many as fit in memory.
    reserved = float(fleet.kv_tokens[instance]) + prompt + output
    batch = placed * min(1.0, memory / reserved) + 1.0
    context = min(held + queued + prompt + 0.5 * output, memory)
    step_s = fixed + by_sequence * batch + by_token * context

    # To the first token: the current step, room in memory, queued prompts, its own prompt with the running decodes.
    decoding_s = by_sequence * active + by_token * held
    wait_s = 0.5 * (fixed + decoding_s) if active > 0.0 else 0.0
    if reserved > memory:
        wait_s += (reserved - memory) / reserved * to_generate * step_s / batch
    queue_s = b * queued + c * queued * queued / max(placed - active, 1.0)
    own_s, restored = cost_s(fleet, instance, new, float(offloaded_tokens))
    first_s = wait_s + queue_s + own_s + decoding_s

    # To the last token: its own steps, longer by the tokens of others meanwhile, which lose as much by it.
    overlap = min(to_generate, placed * output)
    theirs_s = by_sequence + by_token * (held + queued + 0.5 * to_generate) / max(placed, 1.0)
    mine_s = by_sequence + by_token * (prompt + 0.5 * output)
    decode_s = output * (fixed + mine_s) + overlap * theirs_s
    others_s = active * max(own_s - fixed, b * (new - restored)) + overlap * mine_s
    # Future requests: a busy instance is better left with less work.
    others_s += TO_PREFILL * queue_s + TO_GENERATE * to_generate * step_s / batch
    return float(first_s), float(decode_s), float(others_s), float(TO_HOLD * step_s / batch)


@compiled_inline
def _parts(
    fleet: FleetArrays,
    ahead: LookAhead,
    affinity: Affinity,
    in_seconds: bool,
    instance: int,
    slot: int,
    prompt_tokens: int,
    output_tokens: int,
) -> tuple[float, float, float, float]:
    """Return what *instance* has to prefill, to generate, costs others, and the weight of a token beyond T_mem."""
    cached = matched_tokens(affinity, instance, slot, prompt_tokens)
    if in_seconds:
        offloaded = offloaded_tokens(fleet, affinity, instance, slot, prompt_tokens)
        return _delay(fleet, ahead, instance, prompt_tokens, output_tokens, cached, offloaded)
    queued = fleet.queued_prompt_tokens[instance]
    prefill = queued + prompt_tokens - cached
    to_generate = fleet.remaining_tokens[instance] - queued + output_tokens
    return float(prefill), float(to_generate), 0.0, float(fleet.look_ahead[instance, BETA])


@compiled_inline
def _over(fleet: FleetArrays, instance: int, tokens: int) -> float:
    """Return by how much *tokens* exceed T_mem of the memory of *instance*."""
    return float(max(0.0, tokens - fleet.look_ahead[instance, MEMORY_ABOVE] * memory_tokens(fleet, instance)))


@compiled_inline
def _excess(fleet: FleetArrays, ahead: LookAhead, instance: int, prompt_tokens: int, output_tokens: int) -> float:
    """Return the tokens by which the KV cache of *instance* will pass T_mem with one more request."""
    iterations = int(fleet.look_ahead[instance, ITERATIONS])
    most = tokens_now(ahead, instance) + prompt_tokens + (iterations - 1) * (ahead.active[instance] + 1)
    if _over(fleet, instance, most) == 0.0:
        return 0.0
    return _over(fleet, instance, peak_tokens(ahead, instance, iterations, prompt_tokens, output_tokens))


@compiled_internal
def _write_candidates(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    ahead: LookAhead,
    affinity: Affinity,
    in_seconds: bool,
    endpoint: int,
    slot: int,
    prompt_tokens: int,
    output_tokens: int,
    chosen: int,
    rows: NDArray[np.float64],
) -> None:
    """Write *chosen* into the first of *rows*, and the members with the lowest bounds into the others.

    Members without room come last. Bounds in `weighed` are consumed.
    """
    first, last, weighed = endpoints.first[endpoint], endpoints.first[endpoint + 1], affinity.weighed
    count = min(int(last - first), rows.shape[0])
    instance = chosen
    for at in range(count):
        if at > 0:
            instance, lowest = -1, np.inf
            for member in range(first, last):
                other = int(endpoints.members[member])
                bound = weighed[other, 0]
                if not np.isnan(bound) and (instance < 0 or bound < lowest):
                    instance, lowest = other, bound
        weighed[instance, 0] = np.nan  # already written
        write_load(fleet, instance, prompt_tokens, output_tokens, rows, at)
        iterations = int(fleet.look_ahead[instance, ITERATIONS])
        peak = peak_tokens(ahead, instance, iterations, prompt_tokens, output_tokens)
        rows[at, IN_SECONDS] = 1.0 if in_seconds else 0.0
        rows[at, CACHED], rows[at, PEAK] = matched_tokens(affinity, instance, slot, prompt_tokens), peak
        rows[at, KNOWN] = 1.0 if slot >= 0 and affinity.known[instance] != UNKNOWN else 0.0
        if in_seconds and not has_profile(fleet, instance):
            continue
        prefill, decode, others, weight = _parts(
            fleet, ahead, affinity, in_seconds, instance, slot, prompt_tokens, output_tokens
        )
        memory = weight * _over(fleet, instance, peak)
        rows[at, PREFILL], rows[at, DECODE], rows[at, OTHERS] = prefill, decode, others
        rows[at, MEMORY], rows[at, SCORE] = memory, prefill + decode + others + memory
    rows[count:, INSTANCE] = -1.0


@compiled_internal
def _least(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    ahead: LookAhead,
    affinity: Affinity,
    in_seconds: bool,
    endpoint: int,
    slot: int,
    prompt_tokens: int,
    output_tokens: int,
    rows: NDArray[np.float64],
) -> int:
    """Return the instance with room and the lowest score; write the inputs into *rows*, if there are any."""
    first, last, weighed = endpoints.first[endpoint], endpoints.first[endpoint + 1], affinity.weighed
    best, lowest = -1, np.inf
    for at in range(first, last):
        instance = int(endpoints.members[at])
        weighed[instance, 0] = np.inf
        if not has_room(fleet, instance, prompt_tokens, output_tokens):
            continue
        prefill, decode, others, weight = _parts(
            fleet, ahead, affinity, in_seconds, instance, slot, prompt_tokens, output_tokens
        )
        score = prefill + decode + others
        bound = score + weight * _over(fleet, instance, tokens_now(ahead, instance) + prompt_tokens)
        weighed[instance, 0], weighed[instance, 1], weighed[instance, 2] = bound, score, weight
        if best < 0 or bound < lowest:
            best, lowest = instance, bound
    if best < 0:
        return -1
    # Instances that may still beat the actual score of the one with the lowest bound.
    least = weighed[best, 1] + weighed[best, 2] * _excess(fleet, ahead, best, prompt_tokens, output_tokens)
    for at in range(first, last):
        instance = int(endpoints.members[at])
        bound = weighed[instance, 0]
        if instance == best or bound > least or (bound == least and instance > best):
            continue
        score = weighed[instance, 1]
        score += weighed[instance, 2] * _excess(fleet, ahead, instance, prompt_tokens, output_tokens)
        if score < least or (score == least and instance < best):
            best, least = instance, score
    if rows.shape[0] > 0:
        _write_candidates(
            fleet, endpoints, ahead, affinity, in_seconds, endpoint, slot, prompt_tokens, output_tokens, best, rows
        )
    return best


@compiled_inline
def _in_seconds(
    fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int, prompt_tokens: int, output_tokens: int
) -> bool:
    """Whether all instances of *endpoint* with room have a profile."""
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = int(endpoints.members[at])
        if not has_profile(fleet, instance) and has_room(fleet, instance, prompt_tokens, output_tokens):
            return False
    return True


@compiled_internal
def preserve(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    ahead: LookAhead,
    affinity: Affinity,
    endpoint: int,
    slot: int,
    prompt_tokens: int,
    output_tokens: int,
    rows: NDArray[np.float64],
) -> int:
    """Return the instance with room and the lowest load in tokens (PreServe 4.3.3). *slot* is unused."""
    return _least(fleet, endpoints, ahead, affinity, False, endpoint, -1, prompt_tokens, output_tokens, rows)


@compiled_internal
def least_delay(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    ahead: LookAhead,
    affinity: Affinity,
    endpoint: int,
    slot: int,
    prompt_tokens: int,
    output_tokens: int,
    rows: NDArray[np.float64],
) -> int:
    """Return the instance with room on which the request delays itself and others the least."""
    in_seconds = _in_seconds(fleet, endpoints, endpoint, prompt_tokens, output_tokens)
    touched = match(fleet, affinity, endpoint, slot) if slot >= 0 else 0
    instance = _least(fleet, endpoints, ahead, affinity, in_seconds, endpoint, slot, prompt_tokens, output_tokens, rows)
    unmatch(affinity, touched)
    return instance


@compiled_internal
def route_ahead(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    ahead: LookAhead,
    affinity: Affinity,
    policy: int,
    endpoint: int,
    slot: int,
    prompt_tokens: int,
    output_tokens: int,
    rows: NDArray[np.float64],
) -> int:
    """Return the decision of the look-ahead policy with code *policy*. Raise ValueError for another."""
    if policy == PRESERVE:
        return preserve(fleet, endpoints, ahead, affinity, endpoint, slot, prompt_tokens, output_tokens, rows)
    if policy == LEAST_DELAY:
        return least_delay(fleet, endpoints, ahead, affinity, endpoint, slot, prompt_tokens, output_tokens, rows)
    raise ValueError("unknown routing policy")


@compiled
def dispatch_ahead(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    waiting: WaitingArrays,
    ahead: LookAhead,
    affinity: Affinity,
    endpoint: int,
    policy: int,
    rows: NDArray[np.float64],
) -> tuple[int, int]:
    """`dispatch.dispatch` with a policy that looks ahead. `prefix_affinity.learn` follows one by `least_delay`."""
    slot = peek(waiting, endpoint)
    if slot < 0:
        return -1, -1
    prompt_tokens, output_tokens = waiting.prompt_tokens[slot], waiting.output_tokens[slot]
    filtered = exclude(fleet, endpoints, waiting, endpoint, int(slot))
    instance = route_ahead(
        fleet, endpoints, ahead, affinity, policy, endpoint, int(slot), int(prompt_tokens), int(output_tokens), rows
    )
    if instance < 0 and open_ahead(fleet, endpoints, endpoint):
        exclude(fleet, endpoints, waiting, endpoint, int(slot))
        instance = route_ahead(
            fleet, endpoints, ahead, affinity, policy, endpoint, int(slot), int(prompt_tokens), int(output_tokens), rows
        )
        close_ahead(fleet, endpoints, endpoint)
    if filtered:
        allow_all(fleet, endpoints, endpoint)
    if instance < 0:
        return -1, -1
    leave(waiting, slot)
    waiting.instance[slot] = instance
    place(fleet, endpoints, instance, prompt_tokens, output_tokens)
    return slot, instance


def warm_up() -> None:
    """Load every kernel of this module that runs live from the cache, or compile it."""
    fleet, endpoints, waiting = allocate_fleet(1), allocate_endpoints(1, 1), allocate_waiting(1, 1)
    ahead, affinity = lookahead.allocate(1, 1, 2), allocate_affinity(1, 1, 8)
    fleet.endpoint[0], fleet.accepting[0], fleet.max_num_seqs[0], fleet.kv_capacity_tokens[0] = 0, 1, 9, 100
    index_members(fleet, endpoints)
    for policy in (PRESERVE, LEAST_DELAY):
        slot = enqueue(waiting, 0, 0.0, 0.0, 1.0, 0, 2, 1, -1, -1, -1, -1)
        note(affinity, slot, np.ones(1, np.int64), 0, 1, 1)
        know(endpoints, affinity, 0, np.ones(1, np.int64), 0, 1, 1)
        forget_known(endpoints, affinity, 0)
        slot, instance = dispatch_ahead(fleet, endpoints, waiting, ahead, affinity, 0, policy, np.zeros((1, COLUMNS)))
        learn(fleet, affinity, 0, slot, instance)
        held(fleet, affinity, 0, slot)
        free_slot(waiting, slot)
        prefilled(fleet, instance, 2)
        release(fleet, instance, 3, 0)
    forget(fleet, 0)
    hashes = np.zeros(1, np.int64)
    chain(hashes, np.zeros(1, np.int64), 1, 0)
    hold(affinity.blocks, 0, hashes, 0, 1)
    leading(affinity.blocks, 0, hashes, 0, 1)
    drop(affinity.blocks, 0, hashes, 0, 1)
