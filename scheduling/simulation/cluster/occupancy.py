"""What the instances that accept work have and hold, by endpoint and kind of class: the queue manager's signals."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline
from scheduling.fleet.arrays import at_once
from scheduling.simulation.cluster.choices import column
from scheduling.simulation.cluster.world import World
from scheduling.simulation.engine.state import FREE_SEQUENCES, SEGMENT

COLUMNS: Final = 10
CAPACITY_TOKENS: Final = 0
SEQUENCES: Final = 1
TOKENS: Final = 2
"""Expected KV tokens of requests that run or wait: of interactive classes, then of others; `REQUESTS` likewise."""
REQUESTS: Final = 4
INSTANCES: Final = 6
GIVEN: Final = 7
"""Of these, the ones that were given a request, and the smoothed lengths of what they were given, summed."""
PROMPT: Final = 8
OUTPUT: Final = 9


@compiled_inline
def _mark_free(world: World, free: NDArray[np.bool_]) -> None:
    engines = world.engines
    free[:] = False
    for at in range(engines.counters[FREE_SEQUENCES]):
        free[engines.free_sequences[at]] = True


@compiled
def running(world: World, free: NDArray[np.bool_], endpoint: int) -> tuple[int, int]:
    """Return the sequences of *endpoint*, and the output tokens that they have so far. *free* is scratch, by sequence.

    The fleet arrays must be up to date.
    """
    engines, count, produced = world.engines, 0, 0
    _mark_free(world, free)
    for sequence in range(engines.sequences.size):
        this = engines.sequences[sequence]
        if not free[sequence] and world.fleet.endpoint[this.instance] == endpoint:
            count += 1
            if this.decoding != 0:
                engine = engines.instances[this.instance]
                produced += engine.iteration + (engine.counted if engine.phase == SEGMENT else 0) + this.offset
            else:
                produced += this.produced_tokens
    return count, produced


@compiled
def occupancy(world: World, free: NDArray[np.bool_], rows: NDArray[np.int64]) -> None:
    """Write *rows* (endpoints x `COLUMNS`), `control.fleet.Fleet.occupancy`. *free* is scratch, by sequence."""
    fleet, waiting, engines = world.fleet, world.waiting, world.engines
    rows[:] = 0
    for instance in range(fleet.endpoint.size):
        if fleet.accepting[instance] != 0:
            rows[fleet.endpoint[instance], CAPACITY_TOKENS] += fleet.kv_capacity_tokens[instance]
            rows[fleet.endpoint[instance], SEQUENCES] += at_once(fleet, instance)
            rows[fleet.endpoint[instance], INSTANCES] += 1
            if fleet.given_tokens[instance, 1] > 0.0:
                rows[fleet.endpoint[instance], GIVEN] += 1
                rows[fleet.endpoint[instance], PROMPT] += int(fleet.given_tokens[instance, 0])
                rows[fleet.endpoint[instance], OUTPUT] += int(fleet.given_tokens[instance, 1])
    _mark_free(world, free)
    for sequence in range(engines.sequences.size):
        this = engines.sequences[sequence]
        if not free[sequence] and fleet.accepting[this.instance] != 0:
            endpoint, kind = fleet.endpoint[this.instance], int(column(world.arrivals.held, this.request) != 0)
            rows[endpoint, TOKENS + kind] += this.expected_tokens
            rows[endpoint, REQUESTS + kind] += 1
    for endpoint in range(rows.shape[0]):
        for at in range(waiting.size[endpoint]):
            slot = waiting.heap[endpoint, at]
            kind = int(column(world.arrivals.held, world.held[slot]) != 0)
            rows[endpoint, TOKENS + kind] += waiting.prompt_tokens[slot] + waiting.output_tokens[slot]
            rows[endpoint, REQUESTS + kind] += 1
