"""Load of an endpoint's instances in their next iterations (PreServe 4.3.2), computed alike under both clocks.

Decoding requests are projected: from the look-ahead map live (`maps.project`), from the sequences in a simulation.
Requests that have not started to decode are queued and add their prompt tokens to every iteration: those that the
instance has not prefilled, and its share of those that wait for the endpoint. (PreServe dispatches requests at once;
Pilothouse holds the queue, and a long queue is an overload too.) The predicted output of queued requests is left out:
little of it would be produced by then.
"""

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled
from scheduling.fleet.arrays import FleetArrays, memory_tokens
from scheduling.lookahead.rule import OVERLOAD_ABOVE, OVERLOAD_SHARE
from scheduling.queueing.waiting_set import WaitingArrays


@compiled
def waiting_tokens(waiting: WaitingArrays, endpoint: int) -> int:
    """Return the tokens of the prompts that wait for *endpoint*."""
    tokens = 0
    for at in range(waiting.size[endpoint]):
        tokens += waiting.prompt_tokens[waiting.heap[endpoint, at]]
    return int(tokens)


@compiled
def look(fleet: FleetArrays, instance: int, tokens: NDArray[np.int64], waits: float) -> tuple[bool, float]:
    """Return (whether *instance* is potentially overloaded, its peak KV use) in the iterations of *tokens*.

    There are as many of these as its `LookAheadRule` says. *waits* are the tokens that wait for its endpoint, divided
    by the instances that accept work.
    """
    capacity = memory_tokens(fleet, instance)
    if capacity == 0:
        return False, 0.0  # unknown so far
    queued = fleet.queued_prompt_tokens[instance] + waits
    above, peak, limit = 0, 0.0, fleet.look_ahead[instance, OVERLOAD_ABOVE] * capacity
    for at in range(tokens.size):
        held = tokens[at] + queued
        above += held > limit
        peak = max(peak, held)
    return above > fleet.look_ahead[instance, OVERLOAD_SHARE] * tokens.size, peak / capacity
