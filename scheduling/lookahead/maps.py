"""The look-ahead map (PreServe section 4.3.1): KV cache use of every instance in its next iterations.

A request with P prompt tokens and D predicted output tokens adds P + i tokens to iteration i of the D after its
prefill. One that ends early returns the rest; one that runs over is extended by 0.2 of what it has produced,
repeatedly. The paper moves up to D elements per request. Here a request is a straight line: its KV is `base + t` at
iteration t of its instance, with `base` = P less the iteration at which it was added. An instance keeps the sum of the
bases, the number of lines and, for each coming iteration, the requests whose line ends there. So adding, finishing and
an iteration take a few operations, however long the output, and reading l iterations takes l steps.

The clock of an instance counts its iterations. The simulator moves it with `advance`. Live, tokens arrive per request:
`token` moves the clock when the request that is furthest ahead gets one.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_internal
from scheduling.struct_of_arrays import struct_of_arrays

NONE: Final = -1
FREE: Final = 0


@struct_of_arrays
class LookAhead(NamedTuple):
    """The maps of all instances, and the requests in them by *slot*."""

    clock: NDArray[np.int64]
    """Iterations of each instance."""
    active: NDArray[np.int64]
    """Requests of each instance."""
    base_sum: NDArray[np.int64]
    """Sum of their bases."""
    ending: NDArray[np.int32]
    """instances x horizon: requests whose line ends at iteration t, at index t modulo the horizon."""
    ending_base: NDArray[np.int64]
    """Sum of their bases."""
    first_due: NDArray[np.int32]
    """First request to examine then, NONE for none: those whose line ends, and some whose line is longer."""
    instance: NDArray[np.int32]
    """Instance of the request in a slot; NONE for a free slot."""
    base: NDArray[np.int64]
    began: NDArray[np.int64]
    """Clock when it was added."""
    expected: NDArray[np.int64]
    """Clock when it is expected to end."""
    due: NDArray[np.int64]
    """Clock when it is examined next: the same, or earlier if that is beyond the horizon."""
    produced: NDArray[np.int64]
    """Tokens counted by `token`."""
    following: NDArray[np.int32]
    """Next and previous request due at the same iteration."""
    previous: NDArray[np.int32]
    free_slots: NDArray[np.int32]
    """Stack of free slots, `counters[FREE]` high."""
    counters: NDArray[np.int64]


def allocate(instances: int, requests: int, horizon: int = 4096) -> LookAhead:
    """Return empty maps of *horizon* iterations for *instances*, with slots for *requests* over all of them.

    The maps are exact for the next half of the *horizon*. Raise ValueError if it is below 2.
    """
    if horizon < 2:
        raise ValueError(f"the horizon must be at least 2 iterations, not {horizon}")
    return LookAhead(
        clock=np.zeros(instances, np.int64),
        active=np.zeros(instances, np.int64),
        base_sum=np.zeros(instances, np.int64),
        ending=np.zeros((instances, horizon), np.int32),
        ending_base=np.zeros((instances, horizon), np.int64),
        first_due=np.full((instances, horizon), NONE, np.int32),
        instance=np.full(requests, NONE, np.int32),
        base=np.zeros(requests, np.int64),
        began=np.zeros(requests, np.int64),
        expected=np.zeros(requests, np.int64),
        due=np.zeros(requests, np.int64),
        produced=np.zeros(requests, np.int64),
        following=np.full(requests, NONE, np.int32),
        previous=np.full(requests, NONE, np.int32),
        free_slots=np.arange(requests - 1, -1, -1, dtype=np.int32),
        counters=np.array([requests], np.int64),
    )


def grow(ahead: LookAhead, instances: int, requests: int) -> LookAhead:
    """Return a copy with room for *instances* and *requests*; every request keeps its slot."""
    old_instances, horizon = ahead.ending.shape
    old_requests = ahead.instance.size
    if instances < old_instances or requests < old_requests:
        raise ValueError(
            f"maps of {old_instances} instances and {old_requests} requests cannot grow to {instances} and {requests}"
        )
    grown = allocate(instances, requests, horizon)
    for name in set(LookAhead._fields) - {"free_slots", "counters"}:
        old: NDArray[np.generic] = getattr(ahead, name)
        getattr(grown, name)[: old.shape[0]] = old
    free, added = int(ahead.counters[FREE]), requests - old_requests
    grown.free_slots[:added] = np.arange(requests - 1, old_requests - 1, -1)
    grown.free_slots[added : added + free] = ahead.free_slots[:free]
    grown.counters[FREE] = free + added
    return grown


@compiled_internal
def _link(ahead: LookAhead, slot: int) -> None:
    """End the line of *slot* where it is expected to end; beyond the horizon, examine it again half way there."""
    instance, horizon = ahead.instance[slot], ahead.ending.shape[1]
    end = ahead.expected[slot]
    if end - ahead.clock[instance] >= horizon:
        end = ahead.clock[instance] + horizon // 2
    at = end % horizon
    if end == ahead.expected[slot]:
        ahead.ending[instance, at] += 1
        ahead.ending_base[instance, at] += ahead.base[slot]
    first = ahead.first_due[instance, at]
    ahead.due[slot] = end
    ahead.following[slot], ahead.previous[slot] = first, NONE
    if first != NONE:
        ahead.previous[first] = slot
    ahead.first_due[instance, at] = slot


@compiled_internal
def _unlink(ahead: LookAhead, slot: int) -> None:
    instance, at = ahead.instance[slot], ahead.due[slot] % ahead.ending.shape[1]
    before, after = ahead.previous[slot], ahead.following[slot]
    if before != NONE:
        ahead.following[before] = after
    else:
        ahead.first_due[instance, at] = after
    if after != NONE:
        ahead.previous[after] = before
    if ahead.due[slot] == ahead.expected[slot]:
        ahead.ending[instance, at] -= 1
        ahead.ending_base[instance, at] -= ahead.base[slot]


@compiled
def enter(
    ahead: LookAhead, slot: int, instance: int, prompt_tokens: int, predicted_tokens: int, produced_tokens: int
) -> None:
    """Enter a request in the free *slot* that decodes on *instance*, *produced_tokens* after its first token.

    For callers with their own slots; others use `add`.
    """
    now = ahead.clock[instance]
    ahead.instance[slot] = instance
    ahead.began[slot] = now - produced_tokens
    ahead.base[slot] = prompt_tokens - ahead.began[slot]
    ahead.expected[slot] = ahead.began[slot] + max(predicted_tokens, 1)
    while ahead.expected[slot] <= now:
        ahead.expected[slot] += (ahead.expected[slot] - ahead.began[slot] + 4) // 5
    ahead.produced[slot] = produced_tokens
    ahead.active[instance] += 1
    ahead.base_sum[instance] += ahead.base[slot]
    _link(ahead, slot)


@compiled
def leave(ahead: LookAhead, slot: int) -> None:
    """Undo `enter`; do nothing if the slot is free."""
    instance = ahead.instance[slot]
    if instance == NONE:
        return
    _unlink(ahead, slot)
    ahead.active[instance] -= 1
    ahead.base_sum[instance] -= ahead.base[slot]
    ahead.instance[slot] = NONE


@compiled
def add(ahead: LookAhead, instance: int, prompt_tokens: int, predicted_tokens: int, produced_tokens: int) -> int:
    """Enter a request in a free slot and return the slot, or NONE if all are taken (then `grow` and try again)."""
    if ahead.counters[FREE] == 0:
        return NONE
    ahead.counters[FREE] -= 1
    slot = int(ahead.free_slots[ahead.counters[FREE]])
    enter(ahead, slot, instance, prompt_tokens, predicted_tokens, produced_tokens)
    return slot


@compiled
def finish(ahead: LookAhead, slot: int) -> None:
    """Remove the request in *slot*, which has ended or left, with the rest of its line, and free the slot."""
    if ahead.instance[slot] == NONE:
        return
    leave(ahead, slot)
    ahead.free_slots[ahead.counters[FREE]] = slot
    ahead.counters[FREE] += 1


@compiled
def advance(ahead: LookAhead, instance: int, iterations: int) -> None:
    """Record that *instance* ran *iterations*: each of its requests got as many tokens."""
    if ahead.active[instance] == 0:
        ahead.clock[instance] += iterations
        return
    horizon = ahead.ending.shape[1]
    for _ in range(iterations):
        ahead.clock[instance] += 1
        now = ahead.clock[instance]
        slot = ahead.first_due[instance, now % horizon]
        while slot != NONE:
            following = ahead.following[slot]
            _unlink(ahead, slot)
            if ahead.expected[slot] <= now:  # it runs over: extend it by 0.2 of its tokens, rounded up
                ahead.expected[slot] = now + (now - ahead.began[slot] + 4) // 5
            _link(ahead, slot)
            slot = following


@compiled
def token(ahead: LookAhead, slot: int, tokens: int) -> None:
    """Record *tokens* more of the request in *slot*. Its instance's clock follows the request that is furthest ahead.

    The first token, with which the prefill ends, does not count: `add` stands for it.
    """
    instance = ahead.instance[slot]
    if instance == NONE:
        return
    ahead.produced[slot] += tokens
    behind = ahead.began[slot] + ahead.produced[slot] - ahead.clock[instance]
    if behind > 0:
        advance(ahead, instance, int(behind))


@compiled
def token_many(ahead: LookAhead, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
    """Call `token` for each of *slots* in one call."""
    for at in range(slots.size):
        token(ahead, slots[at], tokens[at])


@compiled_internal
def tokens_now(ahead: LookAhead, instance: int) -> int:
    """Return the KV tokens of *instance* in this iteration."""
    return int(ahead.base_sum[instance] + ahead.active[instance] * ahead.clock[instance])


@compiled_internal
def peak_tokens(ahead: LookAhead, instance: int, iterations: int, prompt_tokens: int, predicted_tokens: int) -> int:
    """Return the highest KV tokens of *instance* in its next *iterations* with one more request.

    Routers use this (PreServe 4.3.3).
    """
    horizon, at = ahead.ending.shape[1], ahead.clock[instance] % ahead.ending.shape[1]
    active, tokens, most = ahead.active[instance], tokens_now(ahead, instance), 0
    base = tokens - active * ahead.clock[instance]
    for i in range(iterations):
        if i > 0 and i < horizon:
            at = at + 1 if at + 1 < horizon else 0
            active -= ahead.ending[instance, at]
            base -= ahead.ending_base[instance, at]
        tokens = base + active * (ahead.clock[instance] + i)
        if i < predicted_tokens:
            tokens += prompt_tokens + i
        most = max(most, tokens)
    return int(most)


@compiled
def project(ahead: LookAhead, instance: int, tokens: NDArray[np.int64]) -> None:
    """Write the KV tokens of *instance* in this and the coming iterations into *tokens*."""
    horizon, now = ahead.ending.shape[1], ahead.clock[instance]
    active, base_sum = ahead.active[instance], ahead.base_sum[instance]
    for i in range(tokens.size):
        if i > 0 and i < horizon:
            at = (now + i) % horizon
            active -= ahead.ending[instance, at]
            base_sum -= ahead.ending_base[instance, at]
        tokens[i] = base_sum + active * (now + i)


def warm_up() -> None:
    """Load every kernel of this module that runs live from the cache, or compile it."""
    ahead = allocate(1, 1, 2)
    slot = add(ahead, 0, 1, 1, 0)
    token_many(ahead, np.array([slot]), np.array([1]))
    project(ahead, 0, np.zeros(1, np.int64))
    finish(ahead, slot)
