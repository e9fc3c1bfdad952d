"""Prefix affinity: which instances have recently received prompts with the same prefix, in bounded memory and time.

A prompt is cut into blocks, and the hash of each block stands for the prompt up to its end. For each hash the
index knows the few instances that last received a prompt with it. It is the router's own estimate of their prefix
caches; instances are not queried.

Only some blocks are recorded, at the same positions in every prompt: the first `STEADY` one by one, then `STEADY` of
every second, of every fourth, and so on; `MOST_NOTED` of them cover `covered(MOST_NOTED)` blocks. The index is an
open-addressed table in which a hash has `WINDOW` possible places; a new one takes an empty place or the least recently
used. So work per block is constant, without sweeps.

Unused blocks are evicted: what an instance received more than its KV memory ago, in tokens (`FleetArrays.placed_tokens`
is its clock), no longer counts, or if it offloads KV is in its CPU memory for as many tokens as fit there. `forget` clears
an instance whose cache is gone.

Where an instance publishes its KV events and the tokens of a prompt are known, `know` writes how much of it is cached there
(`routing.cached_blocks`), and that counts in place of the estimate.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, compiled_internal, uncompiled
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, memory_tokens
from scheduling.fleet.kv_cost import OFFLOADED
from scheduling.routing.cached_blocks import LEAST_PLACES, CachedBlocks, allocate_cached_blocks, for_instances, leading
from scheduling.struct_of_arrays import struct_of_arrays

NONE: Final = -1
UNKNOWN: Final = -1
STEADY: Final = 16
MOST_NOTED: Final = 64
HOLDERS: Final = 8
"""Instances remembered for a hash."""
WINDOW: Final = 8
FORGOTTEN_TOKENS: Final = 1 << 40
# Indices into `Affinity.counters`.
USES: Final = 0
BLOCK_TOKENS: Final = 1


@struct_of_arrays
class Affinity(NamedTuple):
    """The index, and the recorded blocks of waiting requests."""

    key: NDArray[np.int64]
    """By place in the table, a power of two: its hash; 0 for none."""
    used: NDArray[np.int64]
    """Time of the last use, by `counters[USES]`."""
    holder: NDArray[np.int32]
    """places x HOLDERS: instances that received it; NONE for none."""
    since: NDArray[np.int64]
    """places x HOLDERS: their `placed_tokens` at the time."""
    noted: NDArray[np.int64]
    """slots of the waiting set x MOST_NOTED: recorded hashes of the request in each."""
    noted_count: NDArray[np.int64]
    block_tokens: NDArray[np.int64]
    """Tokens per block."""
    matched: NDArray[np.int64]
    """By instance: leading recorded blocks of the current request that it is expected to have; 0 between decisions."""
    on_gpu: NDArray[np.int64]
    """Of these, the ones that are not in its CPU memory."""
    touched: NDArray[np.int32]
    """Instances whose `matched` is not 0."""
    weighed: NDArray[np.float64]
    """instances x 3: scratch of the current decision."""
    counters: NDArray[np.int64]
    """Number of uses of the table, and tokens per block if equal for all requests."""
    known: NDArray[np.int64]
    """By instance: tokens of the current prompt in its cache, by its KV events; UNKNOWN without, and between decisions."""
    blocks: CachedBlocks
    """What the instances have by their KV events."""


def allocate_affinity(instances: int, slots: int, places: int = 1 << 16, cached_places: int = LEAST_PLACES) -> Affinity:
    """Return an empty index of *places* for *instances*, with room for requests in *slots* of a waiting set.

    Raise ValueError unless *places* is a power of two of at least `WINDOW`.
    """
    if places < WINDOW or places & (places - 1):
        raise ValueError(f"places must be a power of two from {WINDOW} up, not {places}")
    return Affinity(
        key=np.zeros(places, np.int64),
        used=np.zeros(places, np.int64),
        holder=np.full((places, HOLDERS), NONE, np.int32),
        since=np.zeros((places, HOLDERS), np.int64),
        noted=np.zeros((slots, MOST_NOTED), np.int64),
        noted_count=np.zeros(slots, np.int64),
        block_tokens=np.zeros(slots, np.int64),
        matched=np.zeros(instances, np.int64),
        on_gpu=np.zeros(instances, np.int64),
        touched=np.zeros(HOLDERS, np.int32),
        weighed=np.zeros((instances, 3)),
        counters=np.zeros(2, np.int64),
        known=np.full(instances, UNKNOWN, np.int64),
        blocks=allocate_cached_blocks(instances, cached_places),
    )


def grow_affinity(affinity: Affinity, instances: int, slots: int) -> Affinity:
    """Return the same index for *instances* and *slots*, which may not shrink."""
    old = affinity.noted_count.size
    if instances < affinity.matched.size or slots < old:
        raise ValueError(
            f"an index of {affinity.matched.size} instances and {old} slots cannot grow to {instances} and {slots}"
        )
    grown = allocate_affinity(instances, slots, WINDOW)
    grown.noted[:old] = affinity.noted
    grown.noted_count[:old] = affinity.noted_count
    grown.block_tokens[:old] = affinity.block_tokens
    same = {name: getattr(affinity, name) for name in ("key", "used", "holder", "since", "counters")}
    return grown._replace(**same, blocks=for_instances(affinity.blocks, instances))


@compiled
def covered(count: int) -> int:
    """Return the number of blocks up to and including the *count*-th recorded one."""
    level, rest = count // STEADY, count % STEADY
    return STEADY * ((1 << level) - 1) + (rest << level)


PLACES: Final = tuple(uncompiled(covered)(number) for number in range(MOST_NOTED + 1))
"""Ends of the recorded blocks, in blocks; the first is 0."""


def recorded(hashes: NDArray[np.int64]) -> tuple[int, ...]:
    """Return those of a prompt's leading *hashes* that are recorded."""
    return tuple(int(hashes[end - 1]) for end in PLACES[1:] if end <= hashes.size)


@compiled
def note(affinity: Affinity, slot: int, hashes: NDArray[np.int64], first: int, last: int, block_tokens: int) -> None:
    """Record that the request in *slot* has the blocks `hashes[first:last]`, of *block_tokens* each, from the start."""
    count = 0
    while count < MOST_NOTED and first + covered(count + 1) <= last:
        affinity.noted[slot, count] = hashes[first + covered(count + 1) - 1]
        count += 1
    affinity.noted_count[slot] = count
    affinity.block_tokens[slot] = block_tokens


@compiled
def _key(endpoint: int, block: int) -> int:
    """Return the table's key of *block*: instances of different endpoints share nothing."""
    mixed = block + (endpoint + 1) * 0x1E3779B97F4A7C15
    mixed ^= mixed >> 29
    mixed *= 0x3F58476D1CE4E5B9
    mixed ^= mixed >> 32
    return 1 if mixed == 0 else mixed


@compiled
def _find(affinity: Affinity, key: int) -> int:
    """Return the place of *key*; NONE if it is missing."""
    mask = affinity.key.size - 1
    for step in range(WINDOW):
        at = (key + step) & mask
        if affinity.key[at] == key:
            return int(at)
    return NONE


@compiled_internal
def _make(affinity: Affinity, key: int) -> int:
    """Return a place for *key*, which is missing."""
    mask = affinity.key.size - 1
    place = key & mask
    for step in range(WINDOW):
        at = (key + step) & mask
        if affinity.key[at] == 0:
            place = at
            break
        if affinity.used[at] < affinity.used[place]:
            place = at
    affinity.key[place] = key
    affinity.holder[place, :] = NONE
    return int(place)


@compiled
def match(fleet: FleetArrays, affinity: Affinity, endpoint: int, slot: int) -> int:
    """Write into `matched` how many leading recorded blocks of the request in *slot* each instance has.

    Return the number of instances with any, the first entries of `touched`. `unmatch` clears it.
    """
    touched = 0
    for number in range(affinity.noted_count[slot]):
        at = _find(affinity, _key(endpoint, affinity.noted[slot, number]))
        if at == NONE:
            break
        going_on = False
        for entry in range(HOLDERS):
            instance = affinity.holder[at, entry]
            if instance == NONE or affinity.matched[instance] != number:
                continue
            age = fleet.placed_tokens[instance] - affinity.since[at, entry]
            memory = memory_tokens(fleet, instance)
            if 0 <= age < max(memory, fleet.offload[instance, OFFLOADED]):
                if number == 0:
                    affinity.touched[touched] = instance
                    touched += 1
                affinity.matched[instance] = number + 1
                affinity.on_gpu[instance] += age < memory and affinity.on_gpu[instance] == number
                going_on = True
        if not going_on:
            break
    return touched


def held(fleet: FleetArrays, affinity: Affinity, endpoint: int, slot: int) -> list[tuple[int, int, int]]:
    """Return the instances with the start of the prompt in *slot*, by the index: (instance, tokens, tokens given since)."""
    touched = match(fleet, affinity, endpoint, slot)
    holders = []
    for instance in affinity.touched[:touched].tolist():
        count = int(affinity.matched[instance])
        at = _find(affinity, _key(endpoint, int(affinity.noted[slot, count - 1])))
        since = int(affinity.since[at, affinity.holder[at] == instance].max())
        tokens = PLACES[count] * int(affinity.block_tokens[slot])
        holders.append((instance, tokens, int(fleet.placed_tokens[instance]) - since))
    unmatch(affinity, touched)
    return holders


def filled(recorded: NDArray[np.int64], block_tokens: int, size: int) -> NDArray[np.int64]:
    """Return hashes of the full blocks of *size* tokens of a prompt of which only *recorded* hashes are known.

    Between the ends of two recorded blocks each is derived from the later one: prompts that are alike up to a recorded block
    have the same hashes up to there.
    """
    ends = np.array(PLACES[: recorded.size + 1], np.int64) * block_tokens // size
    counts = np.diff(ends)
    within = np.arange(int(ends[-1])) - np.repeat(ends[:-1], counts)
    hashes: NDArray[np.int64] = (np.repeat(recorded, counts) ^ (within + 1)) * np.int64(0x1E3779B97F4A7C15)
    return hashes


@compiled
def unmatch(affinity: Affinity, touched: int) -> None:
    """Clear the output of `match`, which returned *touched*."""
    for at in range(touched):
        affinity.matched[affinity.touched[at]] = affinity.on_gpu[affinity.touched[at]] = 0


@compiled_inline
def _covered_tokens(affinity: Affinity, count: int, slot: int, prompt_tokens: int) -> int:
    if count == 0:
        return 0
    return int(max(min(covered(count) * affinity.block_tokens[slot], prompt_tokens - 1), 0))


@compiled_internal
def matched_tokens(affinity: Affinity, instance: int, slot: int, prompt_tokens: int) -> int:
    """Return how many of *prompt_tokens* are on the GPU by the last `match`; the last one is always computed."""
    if slot < 0:
        return 0
    if affinity.known[instance] != UNKNOWN:
        return int(max(min(affinity.known[instance], prompt_tokens - 1), 0))
    return _covered_tokens(affinity, int(affinity.on_gpu[instance]), slot, prompt_tokens)


@compiled_internal
def offloaded_tokens(fleet: FleetArrays, affinity: Affinity, instance: int, slot: int, prompt_tokens: int) -> int:
    """Return how many of *prompt_tokens* after those on the GPU are in CPU memory by the last `match`."""
    if slot < 0 or fleet.offload[instance, OFFLOADED] <= 0.0:
        return 0
    anywhere = _covered_tokens(affinity, int(affinity.matched[instance]), slot, prompt_tokens)
    return max(0, anywhere - matched_tokens(affinity, instance, slot, prompt_tokens))


@compiled
def know(
    endpoints: EndpointArrays,
    affinity: Affinity,
    endpoint: int,
    hashes: NDArray[np.int64],
    first: int,
    last: int,
    block_tokens: int,
) -> int:
    """Write into `known` how much of a prompt with the blocks `hashes[first:last]` the instances of *endpoint* have.

    Return for how many of them it is known. `forget_known` clears it.
    """
    blocks, count = affinity.blocks, 0
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = int(endpoints.members[at])
        if blocks.block_tokens[instance] == block_tokens:
            affinity.known[instance] = leading(blocks, instance, hashes, first, last) * block_tokens
            count += 1
    return count


@compiled
def forget_known(endpoints: EndpointArrays, affinity: Affinity, endpoint: int) -> None:
    """Clear the output of `know`."""
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        affinity.known[endpoints.members[at]] = UNKNOWN


@compiled
def learn(fleet: FleetArrays, affinity: Affinity, endpoint: int, slot: int, instance: int) -> None:
    """Record that *instance*, of *endpoint*, received the request in *slot* of the waiting set."""
    affinity.counters[USES] += 1
    for number in range(affinity.noted_count[slot]):
        key = _key(endpoint, affinity.noted[slot, number])
        at = _find(affinity, key)
        if at == NONE:
            at = _make(affinity, key)
        affinity.used[at] = affinity.counters[USES]
        chosen, oldest = 0, -1
        for entry in range(HOLDERS):
            other = affinity.holder[at, entry]
            if other == instance:
                chosen = entry
                break
            age = FORGOTTEN_TOKENS
            if other != NONE:
                age = min(fleet.placed_tokens[other] - affinity.since[at, entry], FORGOTTEN_TOKENS)
                if age < 0:
                    age = FORGOTTEN_TOKENS
            if age > oldest:
                chosen, oldest = entry, age
        affinity.holder[at, chosen] = instance
        affinity.since[at, chosen] = fleet.placed_tokens[instance]


@compiled
def forget(fleet: FleetArrays, instance: int) -> None:
    """Record that the cache of *instance* no longer holds anything."""
    fleet.placed_tokens[instance] += FORGOTTEN_TOKENS
