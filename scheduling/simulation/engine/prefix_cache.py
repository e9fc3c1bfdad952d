"""Prefix caches of the compiled engines: the behaviour of `BlockPool`, in arrays, in constant time per block.

A block that can be found by its content has a record: the blocks of a prompt that others may share, once they are full, and
the further blocks of a preempted request, which itself finds them again. All other full blocks a request merely counts. When
it ends, these can no longer be found, but in the order of reuse they still precede the blocks that it shares: one record
represents them all.

Records of blocks without a holder are in a list, freed longest ago first. Blank blocks are not listed: they are the free
ones beyond those in the list. So `settle`, given the number of free blocks, forgets the oldest excess ones. No block is
looked up while a batch decodes, so the blocks of many iterations can be taken at once.

Copies of one content are in a ring, oldest first; the open-addressed table knows the oldest.

Where an engine offloads KV, the blocks that a request leaves are copied to its CPU memory, which is a cache of the same kind
without holders: vLLM copies them as they are computed, and again counts them as used when the request ends.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, compiled_internal
from scheduling.fleet.kv_cost import regain_s
from scheduling.simulation.engine.kv_room import blocks_of_steps
from scheduling.simulation.engine.state import (
    IDLE,
    NONE,
    PREFIX_HIT_TOKENS,
    PREFIX_QUERIED_TOKENS,
    RESTORED_TOKENS,
    SEGMENT,
    EngineArrays,
)

SHARED: Final = -1
"""Owner of a block that any request can find."""


@compiled_inline
def _first_place(mask: int, owner: int, number: int) -> int:
    """Return the first probe for the content (*owner*, *number*) in a table of *mask* + 1 places."""
    mixed = number + owner * 0x1E3779B97F4A7C15
    mixed ^= mixed >> 29
    mixed *= 0x3F58476D1CE4E5B9
    mixed ^= mixed >> 32
    return int(mixed & mask)


@compiled_internal
def _place(engines: EngineArrays, instance: int, owner: int, number: int) -> int:
    """Return the table place of (*owner*, *number*), or the empty one where it belongs."""
    cache = engines.cache
    mask = cache.table.shape[1] - 1
    at = _first_place(mask, owner, number)
    while True:
        record = cache.table[instance, at] - 1
        if record == NONE:
            return at
        block = cache.blocks[instance, record]
        if block.number == number and block.owner == owner:
            return at
        at = (at + 1) & mask


@compiled_inline
def _take_record(engines: EngineArrays, instance: int) -> int:
    engine, blocks = engines.instances[instance], engines.cache.blocks
    record = int(engine.spare_record)
    if record == NONE:
        record = int(engine.used_records)
        engine.used_records += 1
    else:
        engine.spare_record = blocks[instance, record].newer
    return record


@compiled_inline
def _drop_record(engines: EngineArrays, instance: int, at: int) -> None:
    engine = engines.instances[instance]
    engines.cache.blocks[instance, at].newer = engine.spare_record
    engine.spare_record = at


@compiled_internal
def _publish(engines: EngineArrays, instance: int, owner: int, number: int) -> int:
    """Return a record for one more held block with the content (*owner*, *number*)."""
    cache = engines.cache
    at = _take_record(engines, instance)
    this = cache.blocks[instance, at]
    this.owner, this.number = owner, number
    this.holders = this.count = 1
    place = _place(engines, instance, owner, number)
    first = cache.table[instance, place] - 1
    if first == NONE:
        cache.table[instance, place] = at + 1
        this.copy_after = this.copy_before = at
    else:
        last = cache.blocks[instance, first].copy_before
        this.copy_after, this.copy_before = first, last
        cache.blocks[instance, first].copy_before = at
        cache.blocks[instance, last].copy_after = at
    return at


@compiled_internal
def _forget(engines: EngineArrays, instance: int, at: int) -> None:
    """Make the record *at* impossible to find."""
    table, blocks = engines.cache.table, engines.cache.blocks
    this = blocks[instance, at]
    hole = _place(engines, instance, int(this.owner), int(this.number))
    if this.copy_after != at:
        if table[instance, hole] - 1 == at:
            table[instance, hole] = this.copy_after + 1
        blocks[instance, this.copy_before].copy_after = this.copy_after
        blocks[instance, this.copy_after].copy_before = this.copy_before
        return
    # Close the gap: later entries must stay reachable from their first probe.
    mask = table.shape[1] - 1
    behind = (hole + 1) & mask
    while table[instance, behind] != 0:
        other = blocks[instance, table[instance, behind] - 1]
        first_place = _first_place(mask, int(other.owner), int(other.number))
        if ((behind - first_place) & mask) >= ((behind - hole) & mask):
            table[instance, hole] = table[instance, behind]
            hole = behind
        behind = (behind + 1) & mask
    table[instance, hole] = 0


@compiled_inline
def _append_idle(engines: EngineArrays, instance: int, at: int) -> None:
    """Append the record *at*, which lost its last holder, to the reuse list."""
    engine, blocks = engines.instances[instance], engines.cache.blocks
    last = engine.newest_idle
    blocks[instance, at].older, blocks[instance, at].newer = last, NONE
    if last == NONE:
        engine.oldest_idle = at
    else:
        blocks[instance, last].newer = at
    engine.newest_idle = at
    engine.idle_blocks += blocks[instance, at].count


@compiled_inline
def _pick_up(engines: EngineArrays, instance: int, at: int) -> None:
    """Remove the record *at* from those without a holder."""
    engine, blocks = engines.instances[instance], engines.cache.blocks
    this = blocks[instance, at]
    older, newer = this.older, this.newer
    if older == NONE:
        engine.oldest_idle = newer
    else:
        blocks[instance, older].newer = newer
    if newer == NONE:
        engine.newest_idle = older
    else:
        blocks[instance, newer].older = older
    engine.idle_blocks -= this.count


@compiled_internal
def settle(engines: EngineArrays, instance: int, free_blocks: int) -> None:
    """Forget the oldest blocks that were reused, after blocks were taken and *free_blocks* are left."""
    engine, blocks = engines.instances[instance], engines.cache.blocks
    while engine.idle_blocks > free_blocks:
        at = int(engine.oldest_idle)
        this = blocks[instance, at]
        excess = engine.idle_blocks - free_blocks
        if this.count > excess:
            this.count -= excess
            engine.idle_blocks -= excess
            return
        _pick_up(engines, instance, at)
        if this.holders == 0:
            _forget(engines, instance, at)
        _drop_record(engines, instance, at)


@compiled_internal
def settle_iteration(engines: EngineArrays, instance: int) -> int:
    """Forget blocks reused up to this iteration, as `observe` counted; return how many are free."""
    engine = engines.instances[instance]
    free = int(engine.free_blocks)
    if engine.phase == SEGMENT:
        free -= blocks_of_steps(engines, instance, int(min(engine.counted + 1, engine.steps)))
        settle(engines, instance, free)
    return free


@compiled_internal
def publish(engines: EngineArrays, instance: int, sequence: int, tokens: int) -> None:
    """Make the full, shared blocks of the first *tokens* of *sequence* findable by others."""
    this, cache = engines.sequences[sequence], engines.cache
    if cache.first.size == 1:
        return
    first = cache.first[this.request]
    shared = min(cache.first[this.request + 1] - first, tokens // engines.instances[instance].block_size_tokens)
    for index in range(this.published, shared):
        cache.held[sequence, index] = _publish(engines, instance, SHARED, int(cache.hashes[first + index]))
    this.published = max(this.published, shared)


@compiled_inline
def _shared(engines: EngineArrays, sequence: int) -> tuple[int, int]:
    """Return the first hash of the blocks of *sequence* that others may share, and their number."""
    cache, request = engines.cache, engines.sequences[sequence].request
    if cache.first.size == 1:
        return 0, 0
    return int(cache.first[request]), int(cache.first[request + 1] - cache.first[request])


@compiled_inline
def _findable(engines: EngineArrays, instance: int, sequence: int) -> int:
    """Return how many leading blocks of *sequence* may be cached: not its last token, nor what it cannot have left here."""
    this = engines.sequences[sequence]
    most = int((this.prompt_tokens + this.produced_tokens - 1) // engines.instances[instance].block_size_tokens)
    return most if this.again != 0 else min(most, _shared(engines, sequence)[1])


@compiled_inline
def _find(engines: EngineArrays, cache: int, sequence: int, at: int) -> int:
    """Return the record in *cache*, of an instance or its CPU memory, of block *at* of *sequence*; NONE without."""
    first, shared = _shared(engines, sequence)
    if at < shared:
        place = _place(engines, cache, SHARED, int(engines.cache.hashes[first + at]))
    else:
        place = _place(engines, cache, int(engines.sequences[sequence].request), at)
    return int(engines.cache.table[cache, place] - 1)


@compiled_inline
def _in_memory(engines: EngineArrays, instance: int) -> int:
    """Return the row of the CPU memory of *instance*."""
    return instance + engines.exceeding.size


@compiled_internal
def _offload(engines: EngineArrays, instance: int, owner: int, number: int) -> None:
    """Have the block (*owner*, *number*) in the CPU memory of *instance*, as the last to leave it."""
    memory, cache = _in_memory(engines, instance), engines.cache
    at = int(cache.table[memory, _place(engines, memory, owner, number)] - 1)
    if at == NONE:
        at = _publish(engines, memory, owner, number)
        cache.blocks[memory, at].holders = 0
    else:
        _pick_up(engines, memory, at)
    _append_idle(engines, memory, at)
    settle(engines, memory, int(engines.instances[instance].offload_blocks))


@compiled_internal
def _offload_all(engines: EngineArrays, instance: int, sequence: int, full: int, returns: bool) -> None:
    """Have the *full* blocks that *sequence* leaves in CPU memory, the first of them as the last to leave it."""
    this, cache, memory = engines.sequences[sequence], engines.cache, _in_memory(engines, instance)
    if returns or this.again != 0:
        for index in range(full - 1, this.published - 1, -1):
            _offload(engines, instance, int(this.request), index)
    elif full > this.published:  # nothing finds these again
        at = _take_record(engines, memory)
        cache.blocks[memory, at].count, cache.blocks[memory, at].holders = full - this.published, NONE
        _append_idle(engines, memory, at)
        settle(engines, memory, int(engines.instances[instance].offload_blocks))
    for index in range(this.published - 1, -1, -1):
        block = cache.blocks[instance, cache.held[sequence, index]]
        _offload(engines, instance, int(block.owner), int(block.number))


@compiled_inline
def _restored(engine: Any, tokens: int, offloaded: int) -> tuple[int, float]:
    """Return how many of *tokens* an engine restores, of which *offloaded* are in its CPU memory, and the time of that."""
    a_s, b_s, c_s = engine.prefill_a_s, engine.prefill_b_s_per_token, engine.prefill_c_s_per_token2
    base_s, token_s = engine.restore_s, engine.restore_s_per_token
    _, restored = regain_s(engine.prefill_t0_s, a_s, b_s, c_s, base_s, token_s, float(tokens), float(offloaded))
    return int(restored), base_s + token_s * restored if restored > 0.0 else 0.0


@compiled_internal
def restore(engines: EngineArrays, instance: int, sequence: int) -> None:
    """Let *sequence*, just admitted, continue from its blocks in CPU memory, unless it is faster to compute them."""
    engine, this, memory = engines.instances[instance], engines.sequences[sequence], _in_memory(engines, instance)
    first, most = int(this.published), _findable(engines, instance, sequence)
    at = first
    while at < most and _find(engines, memory, sequence, at) != NONE:
        at += 1
    missing = int(this.prompt_tokens + this.produced_tokens - this.computed_tokens)
    restored, seconds = _restored(engine, missing, (at - first) * int(engine.block_size_tokens))
    this.load_s += seconds
    this.computed_tokens += restored
    engines.counters[RESTORED_TOKENS] += restored


@compiled_internal
def look_up(engines: EngineArrays, instance: int, sequence: int) -> tuple[int, int]:
    """Return how many leading blocks of the waiting *sequence* are cached, and how many of these have a holder.

    Never all of them, for its last token must be computed. They are noted in its row of `held`.
    """
    cache, most = engines.cache, _findable(engines, instance, sequence)
    cached_blocks = in_use = 0
    while cached_blocks < most:
        at = _find(engines, instance, sequence, cached_blocks)
        if at == NONE:
            break
        cache.held[sequence, cached_blocks] = at
        if cache.blocks[instance, at].holders > 0:
            in_use += 1
        cached_blocks += 1
    return cached_blocks, in_use


@compiled_internal
def share(engines: EngineArrays, instance: int, sequence: int, cached_blocks: int) -> None:
    """Let *sequence* hold the *cached_blocks* blocks that `look_up` noted, and continue from there."""
    this, cache = engines.sequences[sequence], engines.cache
    for index in range(cached_blocks):
        at = int(cache.held[sequence, index])
        if cache.blocks[instance, at].holders == 0:
            _pick_up(engines, instance, at)
        cache.blocks[instance, at].holders += 1
    this.published = cached_blocks
    this.computed_tokens = cached_blocks * engines.instances[instance].block_size_tokens
    engines.counters[PREFIX_QUERIED_TOKENS] += this.prompt_tokens + this.produced_tokens
    engines.counters[PREFIX_HIT_TOKENS] += this.computed_tokens


@compiled_internal
def give_back(engines: EngineArrays, instance: int, sequence: int, tokens: int, returns: bool) -> int:
    """Release the blocks of *sequence*, which hold its first *tokens*; return how many become free, cached ones included.

    It *returns* after a preemption, and then finds its own blocks again. Its last block will be reused first.
    """
    this, cache = engines.sequences[sequence], engines.cache
    block_size = engines.instances[instance].block_size_tokens
    full = tokens // block_size
    freed = (tokens + block_size - 1) // block_size - this.published
    own = full - this.published
    if engines.instances[instance].offload_blocks > 0:
        _offload_all(engines, instance, sequence, int(full), returns)
    if returns:
        this.again |= 1
        for index in range(full - 1, this.published - 1, -1):
            at = _publish(engines, instance, int(this.request), index)
            cache.blocks[instance, at].holders = 0
            _append_idle(engines, instance, at)
    elif own > 0:
        at = _take_record(engines, instance)
        cache.blocks[instance, at].count = own
        cache.blocks[instance, at].holders = NONE  # in no table
        _append_idle(engines, instance, at)
    for index in range(this.published - 1, -1, -1):
        at = int(cache.held[sequence, index])
        cache.blocks[instance, at].holders -= 1
        if cache.blocks[instance, at].holders == 0:
            _append_idle(engines, instance, at)
            freed += 1
    this.published = 0
    return int(freed)


@compiled_internal
def _leading(engines: EngineArrays, instance: int, hashes: NDArray[np.int64], first: int, count: int) -> int:
    for index in range(count):
        if engines.cache.table[instance, _place(engines, instance, SHARED, int(hashes[first + index]))] == 0:
            return index
    return count


@compiled
def cached_blocks(engines: EngineArrays, instance: int, first: int, count: int) -> int:
    """Return how many of the *count* shared blocks whose hashes begin at *first* are cached, up to the first missing one."""
    return _leading(engines, instance, engines.cache.hashes, first, count)


@compiled
def warm_prefix(engines: EngineArrays, instance: int, hashes: NDArray[np.int64], first: int, count: int) -> int:
    """Compute or restore the *count* shared blocks from `hashes[first]` on, as a request of one token that ends at once.

    Return how many were missing, -1 if there are not as many free blocks, and one for the token. All are the last to be
    reused then. The time makes the next step of a busy *instance* longer.
    """
    engine, cache = engines.instances[instance], engines.cache
    free = settle_iteration(engines, instance)
    if count >= free:
        return -1
    cached = _leading(engines, instance, hashes, first, count)
    for index in range(cached):
        at = int(cache.table[instance, _place(engines, instance, SHARED, int(hashes[first + index]))] - 1)
        if cache.blocks[instance, at].holders == 0:
            _pick_up(engines, instance, at)
            free -= 1
    offloaded = 0
    if engine.offload_blocks > 0:
        offloaded = _leading(engines, _in_memory(engines, instance), hashes, first + cached, count - cached)
        for index in range(count - 1, -1, -1):
            _offload(engines, instance, SHARED, int(hashes[first + index]))
    if cached < count:
        settle(engines, instance, free - (count - cached) - 1)
    for index in range(count - 1, -1, -1):  # its last block is reused first
        number = int(hashes[first + index])
        if index >= cached:
            at = _publish(engines, instance, SHARED, number)
            cache.blocks[instance, at].holders = 0
        else:
            at = int(cache.table[instance, _place(engines, instance, SHARED, number)] - 1)
        if cache.blocks[instance, at].holders == 0:
            _append_idle(engines, instance, at)
    if engine.phase != IDLE:
        missing, size = count - cached, int(engine.block_size_tokens)
        restored, seconds = _restored(engine, missing * size, offloaded * size)
        tokens = float(missing * size - restored)
        engine.prewarm_s += engine.prefill_b_s_per_token * tokens + engine.prefill_c_s_per_token2 * tokens * tokens
        engine.prewarm_s += seconds
        engines.counters[RESTORED_TOKENS] += restored
    return int(count - cached)


def clear_cache(engines: EngineArrays, instance: int) -> None:
    """Clear the caches of *instance*, which holds no requests. O(its table)."""
    for at in range(instance, engines.instances.size, engines.exceeding.size):  # and that in its CPU memory
        engine: Any = engines.instances[at]
        if engine.used_records > 0:
            engines.cache.table[at, :] = 0
        engine.idle_blocks = engine.used_records = 0
        engine.oldest_idle = engine.newest_idle = engine.spare_record = NONE


empty_cache = compiled_internal(clear_cache)
"""The same, for compiled callers."""
