"""The exact prefix index: which blocks of prompts an instance has in its KV cache, as its KV events say.

A block is known by a hash of all tokens up to its end (`chain`), which begins with what divides caches (`space`): a LoRA
adapter and a salt. For each instance and hash the table counts the copies: those that events reported as stored, and one for
each request that was placed there and has not ended, whose blocks are there or will be before another request can use
them. Blocks without a copy leave the table, so work per block is constant, and nothing is swept.

An instance without events has `block_tokens` 0, and its cache is estimated by `routing.prefix_affinity`.
"""

from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_internal
from scheduling.struct_of_arrays import struct_of_arrays

LEAST_PLACES: Final = 8
FULLEST: Final = 0.75
"""Use of the table above which nothing is added."""
# Index into `CachedBlocks.counters`.
USED: Final = 0


@struct_of_arrays
class CachedBlocks(NamedTuple):
    """An open-addressed table of (instance, hash) with the number of copies."""

    key: NDArray[np.int64]
    """By place, a power of two of them: `_key` of instance and hash; 0 for none."""
    copies: NDArray[np.int64]
    block_tokens: NDArray[np.int64]
    """By instance: tokens per block; 0 where its cache is not known."""
    counters: NDArray[np.int64]


def allocate_cached_blocks(instances: int, places: int = LEAST_PLACES) -> CachedBlocks:
    """Return an empty table of *places*, a power of two, for *instances*."""
    return CachedBlocks(
        key=np.zeros(places, np.int64),
        copies=np.zeros(places, np.int64),
        block_tokens=np.zeros(instances, np.int64),
        counters=np.zeros(1, np.int64),
    )


def with_room(blocks: CachedBlocks, more: int) -> CachedBlocks:
    """Return *blocks* with room for *more*, which is another table if this one would be too full."""
    needed, places = int(blocks.counters[USED]) + more, blocks.key.size
    if needed <= places // 2:
        return blocks
    while needed > places // 2:
        places *= 2
    grown = allocate_cached_blocks(0, places)
    copy(blocks, grown)
    return grown._replace(block_tokens=blocks.block_tokens)


def for_instances(blocks: CachedBlocks, instances: int) -> CachedBlocks:
    """Return the same table for *instances*, which may not be fewer."""
    grown = np.zeros(instances, np.int64)
    grown[: blocks.block_tokens.size] = blocks.block_tokens
    return blocks._replace(block_tokens=grown)


def space(adapter: str, salt: str) -> int:
    """Return the first hash of chains for *adapter* and *salt*, "" for none: prompts of different ones share no block."""
    if not adapter and not salt:
        return 0
    digest = blake2b(f"{adapter}\0{salt}".encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@compiled
def chain(hashes: NDArray[np.int64], token_ids: NDArray[np.int64], block_tokens: int, first: int) -> int:
    """Write the hash of each full block of *token_ids* into *hashes*, after a block of hash *first*; return their number."""
    count, value = min(token_ids.size // block_tokens, hashes.size), first
    for block in range(count):
        for at in range(block * block_tokens, (block + 1) * block_tokens):
            value = (value ^ (token_ids[at] + 1)) * 0x1E3779B97F4A7C15
            value ^= value >> 32
        value = (value ^ (value >> 29)) * 0x3F58476D1CE4E5B9
        hashes[block] = value
    return int(count)


@compiled_internal
def _key(instance: int, block: int) -> int:
    mixed = block ^ ((instance + 1) * 0x1E3779B97F4A7C15)
    mixed ^= mixed >> 29
    mixed *= 0x3F58476D1CE4E5B9
    mixed ^= mixed >> 32
    return 1 if mixed == 0 else mixed


@compiled_internal
def _place(blocks: CachedBlocks, key: int) -> int:
    """Return the place of *key*, or the empty one where it belongs."""
    mask = blocks.key.size - 1
    at = key & mask
    while blocks.key[at] != 0 and blocks.key[at] != key:
        at = (at + 1) & mask
    return int(at)


@compiled_internal
def _add(blocks: CachedBlocks, key: int, copies: int) -> None:
    at = _place(blocks, key)
    if blocks.key[at] == 0:
        if blocks.counters[USED] >= FULLEST * blocks.key.size:
            return
        blocks.key[at] = key
        blocks.copies[at] = 0
        blocks.counters[USED] += 1
    blocks.copies[at] += copies


@compiled_internal
def _remove(blocks: CachedBlocks, key: int) -> None:
    hole = _place(blocks, key)
    if blocks.key[hole] == 0:
        return
    blocks.copies[hole] -= 1
    if blocks.copies[hole] > 0:
        return
    # Close the gap: later entries must stay reachable from their first place.
    mask = blocks.key.size - 1
    behind = (hole + 1) & mask
    while blocks.key[behind] != 0:
        if ((behind - (blocks.key[behind] & mask)) & mask) >= ((behind - hole) & mask):
            blocks.key[hole], blocks.copies[hole] = blocks.key[behind], blocks.copies[behind]
            hole = behind
        behind = (behind + 1) & mask
    blocks.key[hole] = 0
    blocks.counters[USED] -= 1


@compiled
def copy(blocks: CachedBlocks, other: CachedBlocks) -> None:
    """Add all of *blocks* to *other*."""
    for at in range(blocks.key.size):
        if blocks.key[at] != 0:
            _add(other, int(blocks.key[at]), int(blocks.copies[at]))


@compiled
def hold(blocks: CachedBlocks, instance: int, hashes: NDArray[np.int64], first: int, last: int) -> None:
    """Record that *instance* has one more copy of each of the blocks `hashes[first:last]`."""
    for at in range(first, last):
        _add(blocks, _key(instance, hashes[at]), 1)


@compiled
def drop(blocks: CachedBlocks, instance: int, hashes: NDArray[np.int64], first: int, last: int) -> None:
    """Record that *instance* has one copy less of each of the blocks `hashes[first:last]`."""
    for at in range(first, last):
        _remove(blocks, _key(instance, hashes[at]))


@compiled
def holds(blocks: CachedBlocks, instance: int, block: int) -> bool:
    """Whether *instance* has the block of that hash."""
    return bool(blocks.key[_place(blocks, _key(instance, block))] != 0)


@compiled
def leading(blocks: CachedBlocks, instance: int, hashes: NDArray[np.int64], first: int, last: int) -> int:
    """Return how many leading blocks of `hashes[first:last]` *instance* has."""
    for at in range(first, last):
        if not holds(blocks, instance, hashes[at]):
            return int(at - first)
    return int(last - first)
