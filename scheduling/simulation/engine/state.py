"""State of the compiled engine: one record per instance, and one per request that an instance holds.

Records rather than one array per field: an event touches most fields of one instance and of one or two requests, so a
record is two or three cache lines where arrays would be thirty. (The numbers below are compiled into kernels: naming
@compiled here makes this file part of the digest that keeps their cache fresh.)
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import record
from scheduling.lookahead.maps import LookAhead
from scheduling.lookahead.maps import allocate as allocate_ahead
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.workload.requests import Requests
from scheduling.struct_of_arrays import struct_of_arrays

NONE: Final = -1

# States of an instance.
IDLE: Final = 0
STEP: Final = 1  # one iteration with prefill, or with only a part of the batch
SEGMENT: Final = 2  # iterations that decode the same batch

# Indices into EngineArrays.counters.
FREE_SEQUENCES: Final = 0
ITERATIONS: Final = 1
PREEMPTIONS: Final = 2
GIVEN: Final = 3
PREFIX_QUERIED_TOKENS: Final = 4
PREFIX_HIT_TOKENS: Final = 5
LEAVING: Final = 6  # sequences to leave at the end of an iteration
ADAPTERS: Final = 7  # requests with an adapter, by where it was: not loaded, in CPU memory, on the GPU
RESTORED_TOKENS: Final = 10
COUNTERS: Final = 11


INSTANCE = record(
    [
        # Read by decisions, in one cache line. The work in progress: k iterations end at started_s +
        # linear_s * k + quadratic_s * k * k.
        # started_s + linear_s * k + quadratic_s * k * k.
        ("next_s", np.float64),  # end of the first iteration not known to the fleet arrays; infinity in a step
        ("started_s", np.float64),
        ("most_per_s", np.float64),  # iterations per second: at most, as at the start of the segment,
        ("least_per_s", np.float64),  # and at least, as at its end
        ("steps", np.int64),  # iterations until the next event
        ("counted", np.int64),  # of those, the ones that the fleet arrays include
        ("step_decodes", np.int64),  # decoding sequences that get a token in each of these iterations
        ("step_within", np.int64),  # of those, the ones within their expected tokens
        ("linear_s", np.float64),
        ("quadratic_s", np.float64),
        ("phase", np.int8),
        # Its part of the sums of its endpoint.
        ("summed_running", np.int64),
        ("summed_kv_tokens", np.int64),
        ("summed_sequences", np.int64),
        ("summed_growth_per_s", np.int64),
        ("summed_growth", np.int64),
        # Settings, as in EngineConfig.
        ("max_num_seqs", np.int64),
        ("budget_tokens", np.int64),
        ("block_size_tokens", np.int64),
        ("block_shift", np.int64),  # exponent if that is a power of two, else -1
        ("kv_blocks", np.int64),
        ("by_priority", np.uint8),
        ("prefix_caching", np.uint8),
        ("prefill_t0_s", np.float64),
        ("prefill_a_s", np.float64),
        ("prefill_b_s_per_token", np.float64),
        ("prefill_c_s_per_token2", np.float64),
        ("decode_a_s", np.float64),
        ("decode_b_s_per_sequence", np.float64),
        ("decode_c_s_per_token", np.float64),
        ("requests_per_s", np.float64),  # of the front end, infinity for no limit
        ("tokens_per_s", np.float64),
        ("reads", np.int64),  # requests that the front end reads by the end of the step in progress
        # The batch.
        ("iteration", np.int64),  # iterations ended since the start
        ("decoding", np.int64),  # sequences that decode
        ("within", np.int64),  # of those, the ones within their expected tokens
        ("context_tokens", np.int64),  # prompt and output so far, summed over the decoding sequences
        ("free_blocks", np.int64),
        ("running", np.int64),
        ("waiting", np.int64),
        ("admissions", np.int64),
        ("leaving", np.int64),  # of those here or in transit, the ones to leave at the end of an iteration
        ("partial", np.int32),  # the one sequence in prefill, the last admitted; NONE
        ("joining", np.int32),  # first of those that get a token at the end of this step without being in `decoding`
        ("last_joining", np.int32),
        ("first_running", np.int32),  # in order of admission
        ("last_running", np.int32),
        ("first_waiting", np.int32),  # in order of queue key
        ("last_waiting", np.int32),
        ("first_unread", np.int32),  # of those, the first that the front end has not read; the rest is unread, too
        # The prefix cache.
        ("idle_blocks", np.int64),  # of the free blocks, those that still hold something
        ("oldest_idle", np.int32),  # first of their records in order of reuse
        ("newest_idle", np.int32),
        ("spare_record", np.int32),  # first of the records used before
        ("used_records", np.int32),  # records from here on are unused
        ("offload_blocks", np.int64),  # that fit into its CPU memory
        ("restore_s", np.float64),
        ("restore_s_per_token", np.float64),
        ("prewarm_s", np.float64),  # prefill of prewarmed prefixes, by which the next step that admits is longer
    ]
)
"""One engine, or in the second half of `EngineArrays.instances` the blocks of one in its CPU memory: a prefix cache whose
blocks have no holder.
"""

TOTAL = record(
    [
        ("kv_tokens", np.int64),
        ("kv_capacity_tokens", np.int64),
        ("running", np.int64),
        ("sequences", np.int64),
        # KV tokens since then that are not in `kv_tokens` are at most growth_per_s * now_s + growth, in 1/PARTS.
        ("growth_per_s", np.int64),
        ("growth", np.int64),
        ("open", np.int64),  # instances that accept work
    ]
)
"""Sums over the accepting instances of an endpoint: of the fleet arrays, and a bound. `totals` maintains them."""

BLOCK = record(
    [
        ("number", np.int64),  # hash of a shared block; index of another one in its request
        ("owner", np.int32),  # the only request that can find it, -1 for a shared one
        ("count", np.int32),  # number of blocks it represents: several only if they cannot be found
        ("holders", np.int32),  # -1 if it cannot be found
        ("older", np.int32),  # its neighbours among those without a holder
        ("newer", np.int32),
        ("copy_before", np.int32),  # in the ring of blocks with the same content
        ("copy_after", np.int32),
    ]
)
"""Full blocks of a prefix cache."""

SEQUENCE = record(
    [
        ("request", np.int32),
        ("prompt_tokens", np.int32),
        ("output_tokens", np.int32),
        ("expected_prompt", np.int32),  # prompt part of `expected_tokens`
        ("expected_tokens", np.int64),  # prompt and output as reserved by the dispatcher
        ("produced_tokens", np.int32),  # valid while it does not decode
        ("computed_tokens", np.int32),  # valid while it does not decode
        ("offset", np.int64),  # while it decodes: produced tokens less iterations of its instance
        ("origin_s", np.float64),  # arrival less the way back to the caller: latencies count from here
        ("previous", np.int32),  # in its list, of running or of waiting sequences
        ("next", np.int32),
        ("next_joining", np.int32),
        ("decoding", np.uint8),
        ("streaming", np.uint8),  # its first token was emitted
        ("again", np.uint8),  # it may have left blocks in the prefix cache: 1 if preempted, 2 if evicted and offloaded
        ("evicted", np.uint8),  # it leaves at the end of an iteration, or just has
        # End of the cache line; the rest decides between sequences, or is for sharing prefixes.
        ("instance", np.int32),
        ("published", np.int32),  # its leading blocks with records in the prefix cache
        ("admission", np.int64),  # order of admission on its instance
        ("priority", np.int64),
        ("number", np.int64),  # order of dispatch
        ("step_tokens", np.int32),  # scratch of a step that is short of blocks
        ("reaches_s", np.float64),  # its instance; set while it is in transit
        ("load_s", np.float64),  # of its adapter, until it is admitted
        ("counted_blocks", np.int32),  # of its prompt, that the dispatcher counts as cached on its instance
    ]
)
"""One request on an instance."""


@struct_of_arrays
class CacheArrays(NamedTuple):
    """Prefix caches of all instances; almost empty if no instance has one."""

    blocks: NDArray[np.void]
    """BLOCK records, as many rows as `EngineArrays.instances` x blocks."""
    table: NDArray[np.int32]
    """As many rows x places, a power of two: one more than the record found there, 0 for none."""
    held: NDArray[np.int32]
    """sequences x blocks: records of the `published` blocks of each."""
    first: NDArray[np.int64]
    """`hashes[first[r]:first[r + 1]]` are those of the leading full blocks of request r; one element if none share any.
    """
    hashes: NDArray[np.int64]


@struct_of_arrays
class EngineArrays(NamedTuple):
    """Every instance's engine."""

    instances: NDArray[np.void]
    """INSTANCE records, twice as many where any offloads KV."""
    totals: NDArray[np.void]
    """TOTAL records, by endpoint."""
    open: NDArray[np.int32]
    """Like `EndpointArrays.members`: the `open` accepting instances of each endpoint; the rest is unused."""
    sequences: NDArray[np.void]
    """SEQUENCE records; unused ones are in `free_sequences`."""
    due: NDArray[np.int64]
    """A heap for each instance, `decoding` high: the iteration at which a sequence ends or exceeds its expected tokens.
    """
    due_sequence: NDArray[np.int32]
    residues: NDArray[np.int32]
    """instances x block size: number of decoding sequences with (prompt + offset - 1) modulo the block size."""
    exceeding: NDArray[np.uint8]
    """By instance: whether the current segment has sequences beyond their expected tokens."""
    free_sequences: NDArray[np.int32]
    done: NDArray[np.int32]
    """Scratch: sequences that end or leave at the same time."""
    counters: NDArray[np.int64]
    cache: CacheArrays
    ahead: LookAhead
    """Look-ahead maps, with sequences as slots; empty if no router reads them."""


def _allocate_cache(
    configs: Sequence[EngineConfig], instances: int, sequences: int, longest_tokens: int, requests: Requests
) -> CacheArrays:
    caching = [config for config in configs if config.prefix_caching]
    if not caching:
        small, none = np.zeros((1, 1), np.int32), np.zeros(1, np.int64)
        return CacheArrays(np.zeros((1, 1), BLOCK), table=small, held=small, first=none, hashes=none)
    blocks = most = max(config.kv_blocks for config in caching)
    if any(config.offload_blocks for config in caching):
        instances, blocks = 2 * instances, max(most, *(config.offload_blocks + 1 for config in caching))
    row = min(most, -(-longest_tokens // min(config.block_size_tokens for config in caching)))
    hashes = requests.prefix_hashes if requests.prefix_hashes.size else np.zeros(1, np.int64)
    first = requests.prefix_first if requests.prefix_hashes.size else np.zeros(1, np.int64)
    # Zeros take no memory until written: a row is as long as its request needs.
    return CacheArrays(
        blocks=np.zeros((instances, blocks), BLOCK),
        table=np.zeros((instances, 1 << (2 * blocks - 1).bit_length()), np.int32),
        held=np.zeros((sequences, row), np.int32),
        first=np.require(first, requirements=["C", "W"]),
        hashes=np.require(hashes, requirements=["C", "W"]),
    )


def allocate_engines(
    configs: Sequence[EngineConfig],
    later: Sequence[EngineConfig],
    endpoints: int,
    sequences: int,
    requests: Requests,
    *,
    anticipate: bool = False,
) -> EngineArrays:
    """Return idle engines with the settings of *configs*, and room for *sequences* of *requests* over all of them.

    Each could take the settings of any of *configs* and *later*. *anticipate*: keep look-ahead maps.
    """
    count = len(configs)
    batch = min(max(config.max_num_seqs for config in (*configs, *later)), sequences)
    block_size = max(config.block_size_tokens for config in (*configs, *later))
    longest_tokens = max(config.max_model_len for config in (*configs, *later))
    offload = any(config.offload_blocks for config in (*configs, *later))
    arrays = EngineArrays(
        instances=np.zeros(count * (1 + offload), INSTANCE),
        totals=np.zeros(endpoints, TOTAL),
        open=np.zeros(count, np.int32),
        sequences=np.zeros(sequences, SEQUENCE),
        due=np.zeros((count, batch), np.int64),
        due_sequence=np.zeros((count, batch), np.int32),
        residues=np.zeros((count, block_size), np.int32),
        exceeding=np.zeros(count, np.uint8),
        free_sequences=np.arange(sequences - 1, -1, -1, dtype=np.int32),
        done=np.zeros(sequences, np.int32),
        counters=np.zeros(COUNTERS, np.int64),
        cache=_allocate_cache((*configs, *later), count, sequences, longest_tokens, requests),
        ahead=allocate_ahead(count, sequences) if anticipate else allocate_ahead(0, 0, 2),
    )
    arrays.counters[FREE_SEQUENCES] = sequences
    arrays.instances["next_s"] = np.inf
    for name in (
        "partial",
        "joining",
        "last_joining",
        "first_running",
        "last_running",
        "first_waiting",
        "last_waiting",
        "first_unread",
        "oldest_idle",
        "newest_idle",
        "spare_record",
    ):
        arrays.instances[name] = NONE
    for instance, config in enumerate(configs):
        configure(arrays, instance, config)
    return arrays


def configure(engines: EngineArrays, instance: int, config: EngineConfig) -> None:
    """Give an idle *instance* the settings of *config*."""
    record: Any = engines.instances[instance]
    record["max_num_seqs"] = config.max_num_seqs
    record["budget_tokens"] = config.max_num_batched_tokens
    record["block_size_tokens"] = config.block_size_tokens
    power = config.block_size_tokens.bit_length() - 1
    record["block_shift"] = power if 1 << power == config.block_size_tokens else -1
    record["kv_blocks"] = record["free_blocks"] = config.kv_blocks
    record["by_priority"] = config.policy == "priority"
    record["prefix_caching"] = config.prefix_caching
    for name in (
        "prefill_t0_s",
        "prefill_a_s",
        "prefill_b_s_per_token",
        "prefill_c_s_per_token2",
        "decode_a_s",
        "decode_b_s_per_sequence",
        "decode_c_s_per_token",
    ):
        record[name] = getattr(config.profile, name)
    record["requests_per_s"] = config.front_end.requests_per_s
    record["tokens_per_s"] = config.front_end.tokens_per_s
    for name in ("offload_blocks", "restore_s", "restore_s_per_token"):
        record[name] = getattr(config, name)
    record["prewarm_s"] = 0.0


def sequences_in_use(engines: EngineArrays) -> NDArray[np.int64]:
    """Return those of `sequences` that an instance holds, or that are in transit to one."""
    used = np.ones(engines.sequences.size, np.bool_)
    used[engines.free_sequences[: engines.counters[FREE_SEQUENCES]]] = False
    return np.flatnonzero(used)
