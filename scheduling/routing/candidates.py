"""What a decision saw of its candidates: rows that the kernels write while they decide, for a reader of the decision.

A caller that wants them gives an array of rows, of `COLUMNS` each; it is filled as far as there are candidates, and the
INSTANCE of what is left is -1. A caller that does not gives None, and the kernel that is compiled for it writes nothing.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.routing.requests_ahead import beyond_room
from scheduling.routing.routers import has_room

# Places in a row. Loads are those without the request that is decided on.
INSTANCE: Final = 0  # its slot
ROOM: Final = 1  # whether it could be chosen: 1 or 0
ACCEPTING: Final = 2  # 1 or 0
ALLOWED: Final = 3  # requests that it may have ahead, where none had room
AHEAD: Final = 4  # requests that it would have ahead, this one included
RUNNING: Final = 5
KV: Final = 6  # tokens
KV_CAPACITY: Final = 7  # tokens
REMAINING: Final = 8  # tokens
QUEUED: Final = 9  # tokens of prompts
# Of routers that look ahead.
IN_SECONDS: Final = 10  # whether the next five are seconds: 1 or 0
SCORE: Final = 11
PREFILL: Final = 12  # tokens to prefill, or seconds to the first token
DECODE: Final = 13  # tokens to generate, or seconds from the first token to the last
OTHERS: Final = 14  # seconds that those that run there lose
MEMORY: Final = 15  # what the tokens beyond `LookAheadRule.memory_above` count
PEAK: Final = 16  # KV tokens, at most, in the iterations to come
CACHED: Final = 17  # tokens of the prompt that are thought to be cached
COLUMNS: Final = 18


@compiled
def write_load(
    fleet: FleetArrays, instance: int, prompt_tokens: int, output_tokens: int, rows: NDArray[np.float64], at: int
) -> None:
    """Write the load of *instance* into row *at*, and zeros behind it."""
    running, kv_tokens = int(fleet.running[instance]), int(fleet.kv_tokens[instance])
    rows[at, :] = 0.0
    rows[at, INSTANCE] = instance
    rows[at, ROOM] = 1.0 if has_room(fleet, instance, prompt_tokens, output_tokens) else 0.0
    rows[at, ACCEPTING] = fleet.accepting[instance]
    rows[at, ALLOWED] = fleet.ahead_open[instance]
    rows[at, AHEAD] = beyond_room(fleet, instance, running + 1, kv_tokens + prompt_tokens + output_tokens)
    rows[at, RUNNING], rows[at, KV] = running, kv_tokens
    rows[at, KV_CAPACITY] = fleet.kv_capacity_tokens[instance]
    rows[at, REMAINING], rows[at, QUEUED] = fleet.remaining_tokens[instance], fleet.queued_prompt_tokens[instance]


@compiled
def write_loads(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    endpoint: int,
    prompt_tokens: int,
    output_tokens: int,
    chosen: int,
    rows: NDArray[np.float64],
) -> None:
    """Write the loads of the first members of *endpoint* into *rows*, with *chosen* among them, before it is placed."""
    first, last = endpoints.first[endpoint], endpoints.first[endpoint + 1]
    count = min(int(last - first), rows.shape[0])
    written = False
    for at in range(count):
        instance = int(endpoints.members[first + at])
        if at == count - 1 and not written:
            instance = chosen
        written = written or instance == chosen
        write_load(fleet, instance, prompt_tokens, output_tokens, rows, at)
    rows[count:, INSTANCE] = -1.0
