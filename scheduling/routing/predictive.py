"""Routers that look ahead: PreServe's, and ours, which scores in seconds.

They read more than `routing`'s do: the look-ahead maps, and the index of prompts' prefixes. Their signature is
`(fleet, endpoints, ahead, affinity, endpoint, slot, prompt_tokens, output_tokens) -> int`, where *slot* is that of the
request in the waiting set, -1 for none (its prefix is not known then). Like theirs, they choose only an instance with room,
-1 if there is none, and ties go to the lowest slot.

**preserve** (PreServe 4.3.3) adds tokens: prompts that wait to be prefilled with this one, output tokens to be generated
with those of this one, and beta times the tokens by which the KV cache is to pass T_mem (80 %) in one of the next 100
iterations if this request begins now; `LookAheadRule` has the three. The least wins. (The paper writes argmax, and means
the minimum: "the instance with the minimum estimated load".)

**least_delay** adds seconds, from each instance's own performance profile, so that different GPUs compare: until the first
token of this request, until its last, what those that run there or will come lose by it, and the same memory risk. Tokens
of the prompt that are thought to be in the prefix cache need no prefill; they are worth just that, so a busy instance is
passed by however much of the prompt it has. Where an instance with room has no profile, all are compared in tokens.

A map is walked only where it matters. The KV tokens of an instance cannot rise faster than one a request and iteration:
where not even that passes T_mem, there is no penalty to find out. And the penalty that is due already is a lower bound:
an instance that is beaten at its least is not walked either.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline
from scheduling.fleet.arrays import (
    EndpointArrays,
    FleetArrays,
    allocate_endpoints,
    allocate_fleet,
    index_members,
    memory_tokens,
)
from scheduling.lookahead import maps as lookahead
from scheduling.lookahead.maps import LookAhead, peak_tokens, tokens_now
from scheduling.lookahead.rule import BETA, ITERATIONS, MEMORY_ABOVE
from scheduling.queueing.waiting_set import WaitingArrays, allocate_waiting, enqueue, free_slot, peek, pop
from scheduling.routing.candidates import (
    CACHED,
    COLUMNS,
    DECODE,
    IN_SECONDS,
    INSTANCE,
    MEMORY,
    OTHERS,
    PEAK,
    PREFILL,
    SCORE,
    write_load,
)
from scheduling.routing.prefix_affinity import (
    Affinity,
    allocate_affinity,
    forget,
    learn,
    match,
    matched_tokens,
    note,
    unmatch,
)
from scheduling.routing.requests_ahead import close_ahead, open_ahead
from scheduling.routing.routers import LEAST_DELAY, PRESERVE, has_room, place, prefilled, release

# What loads weigh by which a request to come would suffer, for `least_delay`. Found by trial on ten minutes of lengths of
# the Azure conversation trace near saturation; docs/routing.md has what they change.
TO_PREFILL: Final = 10.0
"""Seconds of a second of prompts that wait."""
TO_GENERATE: Final = 0.5
"""Seconds of a second in which what was given out is generated."""
TO_HOLD: Final = 0.4
"""Seconds of a token beyond T_mem, in times that the instance takes for one token."""


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
) -> tuple[float, float, float, float]:
    """Seconds to the first token, from there to the last, and what the others lose; and of a token beyond T_mem."""
    profile = fleet.profile
    t0, a, b, c = profile[instance, 0], profile[instance, 1], profile[instance, 2], profile[instance, 3]
    fixed, by_sequence, by_token = profile[instance, 4], profile[instance, 5], profile[instance, 6]
    memory, held = float(memory_tokens(fleet, instance)), float(tokens_now(ahead, instance))
    queued = float(fleet.queued_prompt_tokens[instance])
    to_generate = float(fleet.remaining_tokens[instance]) - queued
    placed, active = float(fleet.running[instance]), float(ahead.active[instance])
    prompt, output = float(prompt_tokens), float(output_tokens)
    new = max(float(prompt_tokens - cached_tokens), 1.0)

    # The batch: all that was given to it, or the part of them that its memory holds.
    reserved = float(fleet.kv_tokens[instance]) + prompt + output
    batch = placed * min(1.0, memory / reserved) + 1.0
    context = min(held + queued + prompt + 0.5 * output, memory)
    step_s = fixed + by_sequence * batch + by_token * context

    # Until the first token: the step under way, room in memory, prompts before it, its own with those that decode.
    decoding_s = by_sequence * active + by_token * held
    wait_s = 0.5 * (fixed + decoding_s) if active > 0.0 else 0.0
    if reserved > memory:
        wait_s += (reserved - memory) / reserved * to_generate * step_s / batch
    queue_s = b * queued + c * queued * queued / max(placed - active, 1.0)
    own_s = max(t0, a + b * new + c * new * new)
    first_s = wait_s + queue_s + own_s + decoding_s

    # Until the last: its own steps, longer by the tokens that others get meanwhile. They lose as much by it.
    overlap = min(to_generate, placed * output)
    theirs_s = by_sequence + by_token * (held + queued + 0.5 * to_generate) / max(placed, 1.0)
    mine_s = by_sequence + by_token * (prompt + 0.5 * output)
    decode_s = output * (fixed + mine_s) + overlap * theirs_s
    others_s = active * max(own_s - fixed, b * new) + overlap * mine_s
    # And those to come: better that an instance with much to do is left to them less busy.
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
    """What *instance* has to prefill, to generate, and costs others; and what a token beyond T_mem weighs."""
    cached = matched_tokens(affinity, instance, slot, prompt_tokens)
    if in_seconds:
        return _delay(fleet, ahead, instance, prompt_tokens, output_tokens, cached)
    queued = fleet.queued_prompt_tokens[instance]
    prefill = queued + prompt_tokens - cached
    to_generate = fleet.remaining_tokens[instance] - queued + output_tokens
    return float(prefill), float(to_generate), 0.0, float(fleet.look_ahead[instance, BETA])


@compiled_inline
def _over(fleet: FleetArrays, instance: int, tokens: int) -> float:
    """By how much *tokens* are more than T_mem of what *instance* holds."""
    return float(max(0.0, tokens - fleet.look_ahead[instance, MEMORY_ABOVE] * memory_tokens(fleet, instance)))


@compiled_inline
def _excess(fleet: FleetArrays, ahead: LookAhead, instance: int, prompt_tokens: int, output_tokens: int) -> float:
    """Tokens by which the KV cache of *instance* will pass T_mem with one more request."""
    iterations = int(fleet.look_ahead[instance, ITERATIONS])
    most = tokens_now(ahead, instance) + prompt_tokens + (iterations - 1) * (ahead.active[instance] + 1)
    if _over(fleet, instance, most) == 0.0:
        return 0.0
    return _over(fleet, instance, peak_tokens(ahead, instance, iterations, prompt_tokens, output_tokens))


@compiled
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
    """Write *chosen* into the first of *rows*, and into the others the members with the lowest bounds of the decision.

    Those without room come last. Bounds in `weighed` are used up.
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
        weighed[instance, 0] = np.nan  # it is written
        write_load(fleet, instance, prompt_tokens, output_tokens, rows, at)
        iterations = int(fleet.look_ahead[instance, ITERATIONS])
        peak = peak_tokens(ahead, instance, iterations, prompt_tokens, output_tokens)
        rows[at, IN_SECONDS] = 1.0 if in_seconds else 0.0
        rows[at, CACHED], rows[at, PEAK] = matched_tokens(affinity, instance, slot, prompt_tokens), peak
        if in_seconds and not has_profile(fleet, instance):
            continue
        prefill, decode, others, weight = _parts(
            fleet, ahead, affinity, in_seconds, instance, slot, prompt_tokens, output_tokens
        )
        memory = weight * _over(fleet, instance, peak)
        rows[at, PREFILL], rows[at, DECODE], rows[at, OTHERS] = prefill, decode, others
        rows[at, MEMORY], rows[at, SCORE] = memory, prefill + decode + others + memory
    rows[count:, INSTANCE] = -1.0


@compiled
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
    rows: NDArray[np.float64] | None,
) -> int:
    """The instance with room that has the least score; what was weighed is written into *rows*, if they are given."""
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
    # Those that may still be better than the one with the lowest bound really is.
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
    if rows is not None:
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


@compiled
def preserve(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    ahead: LookAhead,
    affinity: Affinity,
    endpoint: int,
    slot: int,
    prompt_tokens: int,
    output_tokens: int,
    rows: NDArray[np.float64] | None = None,
) -> int:
    """The instance with room that has the least load, in tokens (PreServe 4.3.3). *slot* is not looked at."""
    return _least(fleet, endpoints, ahead, affinity, False, endpoint, -1, prompt_tokens, output_tokens, rows)


@compiled
def least_delay(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    ahead: LookAhead,
    affinity: Affinity,
    endpoint: int,
    slot: int,
    prompt_tokens: int,
    output_tokens: int,
    rows: NDArray[np.float64] | None = None,
) -> int:
    """The instance with room on which the request delays itself and others the least."""
    in_seconds = _in_seconds(fleet, endpoints, endpoint, prompt_tokens, output_tokens)
    touched = match(fleet, affinity, endpoint, slot) if slot >= 0 else 0
    instance = _least(fleet, endpoints, ahead, affinity, in_seconds, endpoint, slot, prompt_tokens, output_tokens, rows)
    unmatch(affinity, touched)
    return instance


@compiled
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
    rows: NDArray[np.float64] | None = None,
) -> int:
    """The decision of the policy with code *policy*, one that looks ahead; ValueError for another."""
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
    rows: NDArray[np.float64] | None = None,
) -> tuple[int, int]:
    """As `dispatch.dispatch`, by a policy that looks ahead. Call `prefix_affinity.learn` after one by `least_delay`."""
    slot = peek(waiting, endpoint)
    if slot < 0:
        return -1, -1
    prompt_tokens, output_tokens = waiting.prompt_tokens[slot], waiting.output_tokens[slot]
    instance = route_ahead(
        fleet, endpoints, ahead, affinity, policy, endpoint, int(slot), int(prompt_tokens), int(output_tokens), rows
    )
    if instance < 0 and open_ahead(fleet, endpoints, endpoint):
        instance = route_ahead(
            fleet, endpoints, ahead, affinity, policy, endpoint, int(slot), int(prompt_tokens), int(output_tokens), rows
        )
        close_ahead(fleet, endpoints, endpoint)
    if instance < 0:
        return -1, -1
    pop(waiting, endpoint)
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
        slot, instance = dispatch_ahead(fleet, endpoints, waiting, ahead, affinity, 0, policy, np.zeros((1, COLUMNS)))
        learn(fleet, affinity, 0, slot, instance)
        free_slot(waiting, slot)
        prefilled(fleet, instance, 2)
        release(fleet, instance, 3, 0)
    forget(fleet, 0)
