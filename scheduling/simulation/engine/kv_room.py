"""KV blocks that tokens take, and iterations that the free blocks allow."""

from typing import Any

from scheduling.compiled import compiled_inline, index
from scheduling.simulation.engine.state import EngineArrays


@compiled_inline
def _full_blocks(engine: Any, tokens: int) -> int:
    """Return how many blocks of *engine*, an INSTANCE record, *tokens* fill."""
    # A shift takes a tenth of the time of a division.
    if engine.block_shift >= 0:
        return int(tokens >> engine.block_shift)
    return int(tokens // engine.block_size_tokens)


@compiled_inline
def blocks(engine: Any, tokens: int) -> int:
    """Return how many blocks of *engine*, an INSTANCE record, *tokens* occupy."""
    return _full_blocks(engine, tokens + engine.block_size_tokens - 1)


@compiled_inline
def place_in_block(engine: Any, number: int) -> int:
    """Return *number* modulo the block size of *engine*, an INSTANCE record."""
    return index(number - _full_blocks(engine, number) * engine.block_size_tokens)


@compiled_inline
def free_steps(engines: EngineArrays, instance: int, most: int) -> int:
    """Return how many iterations, at most *most*, the decoding sequences can run before the blocks are used up."""
    engine = engines.instances[instance]
    block_size, free, batch = engine.block_size_tokens, engine.free_blocks, engine.decoding
    if batch * blocks(engine, most) <= free:
        return most
    cycles = free // batch  # in each cycle every sequence needs one block
    steps, free = cycles * block_size, free - cycles * batch
    at = place_in_block(engine, -engine.iteration)
    while steps < most and engines.residues[instance, index(at)] <= free:
        free -= engines.residues[instance, index(at)]
        steps += 1
        at = block_size - 1 if at == 0 else at - 1
    return int(min(steps, most))


@compiled_inline
def blocks_of_steps(engines: EngineArrays, instance: int, steps: int) -> int:
    """Return the blocks that *steps* iterations of the decoding sequences need."""
    engine = engines.instances[instance]
    block_size = engine.block_size_tokens
    cycles = _full_blocks(engine, steps)
    taken = cycles * engine.decoding
    at = place_in_block(engine, -engine.iteration)
    for _ in range(steps - cycles * block_size):
        taken += engines.residues[instance, index(at)]
        at = block_size - 1 if at == 0 else at - 1
    return int(taken)


@compiled_inline
def take_blocks(engines: EngineArrays, instance: int, steps: int) -> None:
    """Take the blocks that *steps* iterations of the decoding sequences need."""
    engines.instances[instance].free_blocks -= blocks_of_steps(engines, instance, steps)
