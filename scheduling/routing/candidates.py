"""Inputs of a decision: rows that routing kernels write for readers of the decision.

A caller that wants them passes an array of rows with `COLUMNS` columns, and otherwise `NO_ROWS`. Rows beyond the candidates
have INSTANCE -1.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_internal
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.routing.requests_ahead import beyond_room
from scheduling.routing.routers import has_room

# Columns of a row. Loads exclude the request being decided.
INSTANCE: Final = 0  # slot
ROOM: Final = 1  # whether it could be chosen: 1 or 0
ACCEPTING: Final = 2  # 1 or 0
ALLOWED: Final = 3  # requests that it may hold ahead, if none had room
AHEAD: Final = 4  # requests that it would hold ahead, including this one
RUNNING: Final = 5
KV: Final = 6  # tokens
KV_CAPACITY: Final = 7  # tokens
REMAINING: Final = 8  # tokens
QUEUED: Final = 9  # prompt tokens
# Only for routers that look ahead:
IN_SECONDS: Final = 10  # whether the next five are seconds: 1 or 0
SCORE: Final = 11
PREFILL: Final = 12  # tokens to prefill, or seconds to the first token
DECODE: Final = 13  # tokens to generate, or seconds from the first token to the last
OTHERS: Final = 14  # seconds lost by its running requests
MEMORY: Final = 15  # cost of the tokens beyond `LookAheadRule.memory_above`
PEAK: Final = 16  # peak KV tokens in the coming iterations
CACHED: Final = 17  # prompt tokens expected in the cache
KNOWN: Final = 18  # whether that is by its KV events: 1 or 0
COLUMNS: Final = 19
NO_ROWS: Final = np.empty((0, COLUMNS))


@compiled_internal
def write_load(
    fleet: FleetArrays, instance: int, prompt_tokens: int, output_tokens: int, rows: NDArray[np.float64], at: int
) -> None:
    """Write the load of *instance* into row *at*, and zeros into its other columns."""
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
    """Write the loads of the first members of *endpoint* into *rows*, including *chosen*, before placement."""
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
