"""Routing kernels, which choose an instance of an endpoint for a request, and the bookkeeping of their loads.

Every policy has one signature, `(fleet, endpoints, endpoint, prompt_tokens, output_tokens) -> int`: the slot of the
chosen instance, or -1 if none has room. A kernel only reads; `place`, `advance` and `release` update the load. Ties go
to the lowest slot. Cost: one pass over the endpoint's instances.
"""

import math
from collections.abc import Callable
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, at_once
from scheduling.fleet.carried import note_given

Router = Callable[[FleetArrays, EndpointArrays, int, int, int], int]
Seen = TypeVar("Seen")
Asked = tuple[FleetArrays, EndpointArrays, int, int]
"""Live knowledge: the fleet, and the prompt and output tokens of the request."""

ROUND_ROBIN: Final = 0
LEAST_REQUEST: Final = 1
MINIMUM_USE: Final = 2
JOIN_SHORTEST_QUEUE: Final = 3
PRESERVE: Final = 4
LEAST_DELAY: Final = 5
LOOK_AHEAD: Final = (PRESERVE, LEAST_DELAY)
"""Policies that predict loads (`predictive`)."""


@compiled
def has_room(fleet: FleetArrays, instance: int, prompt_tokens: int, output_tokens: int) -> bool:
    """Whether *instance* accepts work, has a free sequence, and KV memory for the prompt and the predicted output.

    Or, if an allowance is open (`allowance.open_ahead`), whether it holds no more requests ahead than that, including
    this one. A request that it could never hold never has room.
    """
    if fleet.accepting[instance] == 0 or fleet.passed_over[instance] != 0:
        return False
    running, allowed = fleet.running[instance], fleet.ahead_open[instance]
    tokens, capacity = prompt_tokens + output_tokens, fleet.kv_capacity_tokens[instance]
    if running >= at_once(fleet, instance) + allowed or tokens > capacity:
        return False
    held = fleet.kv_tokens[instance] + tokens
    if allowed == 0 or held <= capacity:
        return bool(held <= capacity)
    # `requests_ahead` including this one, at most *allowed*, without a division.
    return bool((held - capacity) * (running + 1) <= allowed * held)


@compiled
def round_robin(
    fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int, prompt_tokens: int, output_tokens: int
) -> int:
    """Return the next instance with room, in slot order, after the last one chosen."""
    lowest = -1
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        if has_room(fleet, instance, prompt_tokens, output_tokens):
            if instance > endpoints.cursor[endpoint]:
                return int(instance)
            if lowest < 0:
                lowest = instance
    return int(lowest)


@compiled
def least_request(
    fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int, prompt_tokens: int, output_tokens: int
) -> int:
    """Return the instance with room that runs the fewest requests."""
    best, fewest = -1, np.iinfo(np.int64).max
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        if fleet.running[instance] < fewest and has_room(fleet, instance, prompt_tokens, output_tokens):
            best, fewest = instance, fleet.running[instance]
    return int(best)


@compiled
def minimum_use(
    fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int, prompt_tokens: int, output_tokens: int
) -> int:
    """Return the instance with room whose KV cache is least used, as a share of its capacity (PreServe 3.2.2: MU)."""
    # Shares are compared by cross-multiplication: exact, so that ties are ties, and without a division per instance.
    best, least_tokens, least_capacity = -1, 1, 0
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        tokens, capacity = fleet.kv_tokens[instance], fleet.kv_capacity_tokens[instance]
        if tokens * least_capacity < least_tokens * capacity and has_room(
            fleet, instance, prompt_tokens, output_tokens
        ):
            best, least_tokens, least_capacity = instance, tokens, capacity
    return int(best)


@compiled_inline
def shortest_queue(
    first: int,
    last: int,
    most_left: Callable[[Seen, int, float], float],
    may_have: Callable[[Seen, int, float], bool],
    tokens_left: Callable[[Seen, int], int],
    seen: Seen,
) -> int:
    """Return the first of the places *first* to *last* - 1 with room and the fewest tokens left
    to compute; -1 if none has room.

    All functions get *seen*, the clock's knowledge: live tokens are counted, in a simulation they are bounded first.
    *most_left* is an upper bound on a place's tokens left, infinity without room or if it exceeds the fewest so far;
    *may_have* is whether it has room and possibly no more left than that; only then *tokens_left* is called.
    """
    fewest = math.inf
    for at in range(first, last):
        fewest = min(fewest, most_left(seen, at, fewest))
    best, fewest_tokens = -1, 0
    if fewest < math.inf:
        for at in range(first, last):
            if may_have(seen, at, fewest):
                tokens = tokens_left(seen, at)
                if best < 0 or tokens < fewest_tokens:
                    best, fewest_tokens = at, tokens
    return best


@compiled_inline
def _tokens_left(seen: Asked, at: int) -> int:
    fleet, endpoints, _, _ = seen
    return int(fleet.remaining_tokens[endpoints.members[at]])


@compiled_inline
def _may_have(seen: Asked, at: int, fewest: float) -> bool:
    fleet, endpoints, prompt_tokens, output_tokens = seen
    return _tokens_left(seen, at) <= fewest and has_room(fleet, endpoints.members[at], prompt_tokens, output_tokens)


@compiled_inline
def _most_left(seen: Asked, at: int, fewest: float) -> float:
    return float(_tokens_left(seen, at)) if _may_have(seen, at, fewest) else math.inf


@compiled
def join_shortest_queue(
    fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int, prompt_tokens: int, output_tokens: int
) -> int:
    """Return the instance with room that has the fewest tokens left to compute."""
    first, last, asked = (
        endpoints.first[endpoint],
        endpoints.first[endpoint + 1],
        (fleet, endpoints, prompt_tokens, output_tokens),
    )
    at = shortest_queue(first, last, _most_left, _may_have, _tokens_left, asked)
    return int(endpoints.members[at]) if at >= 0 else -1


POLICIES: Final[dict[str, Router]] = {
    "round_robin": round_robin,
    "least_request": least_request,
    "minimum_use": minimum_use,
    "join_shortest_queue": join_shortest_queue,
}
"""Routers that read only loads, by their name in deployments and scenarios."""

POLICY_CODES: Final[dict[str, int]] = {
    "round_robin": ROUND_ROBIN,
    "least_request": LEAST_REQUEST,
    "minimum_use": MINIMUM_USE,
    "join_shortest_queue": JOIN_SHORTEST_QUEUE,
    "preserve": PRESERVE,
    "least_delay": LEAST_DELAY,
}
"""Codes of all policies for compiled callers: `predictive.route_ahead` takes those of LOOK_AHEAD, `route` the others.
"""


@compiled
def route(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    policy: int,
    endpoint: int,
    prompt_tokens: int,
    output_tokens: int,
) -> int:
    """Return the decision of policy code *policy*. Raise ValueError for an unknown code, or one that looks ahead."""
    if policy == ROUND_ROBIN:
        return round_robin(fleet, endpoints, endpoint, prompt_tokens, output_tokens)
    if policy == LEAST_REQUEST:
        return least_request(fleet, endpoints, endpoint, prompt_tokens, output_tokens)
    if policy == MINIMUM_USE:
        return minimum_use(fleet, endpoints, endpoint, prompt_tokens, output_tokens)
    if policy == JOIN_SHORTEST_QUEUE:
        return join_shortest_queue(fleet, endpoints, endpoint, prompt_tokens, output_tokens)
    raise ValueError("unknown routing policy")


@compiled
def place(fleet: FleetArrays, endpoints: EndpointArrays, instance: int, prompt_tokens: int, output_tokens: int) -> None:
    """Give *instance* a request: one more running, with KV and work reserved for the prompt and predicted output."""
    tokens = prompt_tokens + output_tokens
    fleet.running[instance] += 1
    fleet.kv_tokens[instance] += tokens
    fleet.remaining_tokens[instance] += tokens
    fleet.queued_prompt_tokens[instance] += prompt_tokens
    fleet.placed_tokens[instance] += tokens
    endpoints.cursor[fleet.endpoint[instance]] = instance
    note_given(fleet, instance, prompt_tokens, output_tokens)


@compiled
def advance(fleet: FleetArrays, instance: int, expected_tokens: int, done_tokens: int, tokens: int) -> None:
    """Record that a request on *instance* computed *tokens* more.

    *expected_tokens* is what `place` reserved (prompt + predicted output); *done_tokens* the tokens computed
    before this call, including the prompt. Up to the expectation the work shrinks; beyond it the request
    holds more KV than was reserved.
    """
    within = min(tokens, max(expected_tokens - done_tokens, 0))
    fleet.remaining_tokens[instance] -= within
    fleet.kv_tokens[instance] += tokens - within


@compiled
def advance_many(
    fleet: FleetArrays,
    instances: NDArray[np.int64],
    expected_tokens: NDArray[np.int64],
    done_tokens: NDArray[np.int64],
    tokens: NDArray[np.int64],
) -> None:
    """Call `advance` for many requests: four arrays of one length, one element per request."""
    for index in range(instances.size):
        advance(fleet, instances[index], expected_tokens[index], done_tokens[index], tokens[index])


@compiled
def prefilled(fleet: FleetArrays, instance: int, prompt_tokens: int) -> None:
    """Record that a request's first token was emitted, or that it left before: its prompt is no longer queued."""
    fleet.queued_prompt_tokens[instance] -= prompt_tokens


@compiled
def release(fleet: FleetArrays, instance: int, expected_tokens: int, done_tokens: int) -> None:
    """Record that a request left *instance* (done, aborted, lost) after *done_tokens*: undo its `place` and `advance`s.

    Before its first token, also call `prefilled`.
    """
    fleet.running[instance] -= 1
    fleet.kv_tokens[instance] -= max(expected_tokens, done_tokens)
    fleet.remaining_tokens[instance] -= max(expected_tokens - done_tokens, 0)
