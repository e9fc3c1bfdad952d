"""The global router: which region, and so which endpoint, gets a request (SageServe section 6.2, "global routing").

SageServe takes the first region, in order of preference, whose memory use is below a threshold, else the least
used one. Because Pilothouse holds the queue, an endpoint can be full with its memory half empty
(`max_num_seqs`, or long prompts with short answers) or with requests waiting. So endpoints are compared by
*pressure*, the measure of use that strategies, floor and pages share: the largest of KV use, sequence use and
compute use, plus waiting requests per sequence.

Compute use is the engine time requested recently, as a share of the time available, or the part not yet computed as a
share of `BACKLOG_S` if that is more (not for scaling: `filled`). A request's engine time is what it adds to iterations
that run anyway: its prompt, and for each output token the time of one more sequence and its context. All requests in an
iteration share its fixed part. So no batch, however large, keeps up with more than 1.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, compiled_internal
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, at_once

Seen = TypeVar("Seen")
Live = tuple[FleetArrays, EndpointArrays, NDArray[np.int64], float]
SWEEP_S: Final = 1.0
"""Period of the check of waiting requests: held too long, or better off in another region."""
COMPUTE_S: Final = 30.0
"""Time constant of the exponential mean of compute use."""
BACKLOG_S: Final = 1.5
"""Backlog of engine time at which an instance is full, whatever the mean: so bursts spill at once."""
CACHED_WEIGHT: Final = 0.05
"""Weight of the newest prompt in `FleetArrays.cached_share`."""
UNKNOWN_MS: Final = 50.0
"""One-way latency between regions without a known one: the usual latency in SageServe (section 3)."""


def latency_ms(
    given: Mapping[tuple[str, str], float], origin: str, target: str, unknown_ms: float = UNKNOWN_MS
) -> float:
    """Return the one-way latency: as *given*, else of the way back, else *unknown_ms*; 0 within a region."""
    if (origin, target) in given:
        return given[origin, target]
    return 0.0 if origin == target else given.get((target, origin), unknown_ms)


def by_preference(origin: str, regions: Iterable[str], latency: Callable[[str], float]) -> list[str]:
    """Return *regions* in the preference of a caller in *origin*: its own, then the nearest by *latency*, ties by name."""
    return sorted(regions, key=lambda region: (region != origin, latency(region), region))


@compiled
def asked_work_s(endpoints: EndpointArrays, endpoint: int, now_s: float) -> float:
    """Return the engine seconds requested of *endpoint*, decayed by age."""
    return float(endpoints.asked_work_s[endpoint] * math.exp((endpoints.asked_at_s[endpoint] - now_s) / COMPUTE_S))


@compiled
def add_prefill(
    fleet: FleetArrays, endpoints: EndpointArrays, instance: int, prompt_tokens: int, output_tokens: int, now_s: float
) -> None:
    """Count the engine time of a request given to *instance*; none if its profile is unknown."""
    profile, endpoint = fleet.profile, fleet.endpoint[instance]
    new, output = float(prompt_tokens) * (1.0 - fleet.cached_share[instance]), float(output_tokens)
    prefill_s = (profile[instance, 2] + profile[instance, 3] * new) * new
    decode_s = (profile[instance, 5] + profile[instance, 6] * (float(prompt_tokens) + 0.5 * output)) * output
    endpoints.asked_work_s[endpoint] = asked_work_s(endpoints, endpoint, now_s) + prefill_s + decode_s
    endpoints.asked_at_s[endpoint] = now_s
    accepting = 0
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        accepting += fleet.accepting[endpoints.members[at]]
    clear_at_s = max(endpoints.clear_at_s[endpoint], now_s)
    endpoints.clear_at_s[endpoint] = clear_at_s + (prefill_s + decode_s) / max(accepting, 1)


@compiled
def backlog_s(endpoints: EndpointArrays, endpoint: int, now_s: float) -> float:
    """Return engine seconds per instance of *endpoint* that were dispatched and not computed yet."""
    return float(max(endpoints.clear_at_s[endpoint] - now_s, 0.0))


@compiled_internal
def note_cached(fleet: FleetArrays, instance: int, cached_tokens: int, prompt_tokens: int) -> None:
    """Record that *cached_tokens* of *prompt_tokens* were in the prefix cache of *instance*."""
    fleet.cached_share[instance] += CACHED_WEIGHT * (cached_tokens / prompt_tokens - fleet.cached_share[instance])


@compiled_internal
def fullness(
    kv_tokens: int,
    kv_capacity: int,
    running: int,
    sequences: int,
    waiting: int,
    accepting: int,
    work_s: float,
    left_s: float,
) -> float:
    """Return `pressure` from the sums over the accepting instances, `asked_work_s` and `backlog_s`."""
    if sequences == 0 or kv_capacity == 0:
        return np.inf
    compute = max(work_s / (COMPUTE_S * accepting), left_s / BACKLOG_S)
    return float(max(kv_tokens / kv_capacity, running / sequences, compute) + waiting / sequences)


@compiled
def pressure(fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int, waiting: int, now_s: float) -> float:
    """Return how full *endpoint* is: 0 idle, 1 full, above 1 with requests waiting; infinity if no instance accepts work."""
    return filled(fleet, endpoints, endpoint, waiting, backlog_s(endpoints, endpoint, now_s), now_s)


@compiled
def filled(
    fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int, waiting: int, left_s: float, now_s: float
) -> float:
    """Return `pressure` with a backlog of *left_s*: scaling passes none, as it clears before an instance starts."""
    kv_tokens, kv_capacity, running, sequences, accepting = 0, 0, 0, 0, 0
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        if fleet.accepting[instance] != 0:
            kv_tokens += fleet.kv_tokens[instance]
            kv_capacity += fleet.kv_capacity_tokens[instance]
            running += fleet.running[instance]
            sequences += at_once(fleet, instance)
            accepting += 1
    work_s = asked_work_s(endpoints, endpoint, now_s)
    return fullness(kv_tokens, kv_capacity, running, sequences, waiting, accepting, work_s, left_s)


@compiled_inline
def first_choice(
    candidates: NDArray[np.int32],
    threshold: float,
    is_below: Callable[[Seen, int, float], bool],
    use_of: Callable[[Seen, int], float],
    seen: Seen,
) -> int:
    """Return the first of *candidates* that *is_below* the *threshold*, else the one with the least *use_of*, else -1.

    The first of equally used ones; none whose use is infinite. Both functions get *seen*, the clock's knowledge: live
    everything is counted, in a simulation bounds usually decide.
    """
    for at in range(candidates.size):
        if is_below(seen, int(candidates[at]), threshold):
            return int(candidates[at])
    best, least = -1, np.inf
    for at in range(candidates.size):
        use = use_of(seen, int(candidates[at]))
        if use < least:
            best, least = int(candidates[at]), use
    return best


@compiled_inline
def _use(seen: Live, endpoint: int) -> float:
    fleet, endpoints, waiting, now_s = seen
    return pressure(fleet, endpoints, endpoint, waiting[endpoint], now_s)


@compiled_inline
def _is_below(seen: Live, endpoint: int, threshold: float) -> bool:
    return _use(seen, endpoint) < threshold


@compiled_internal
def takes_work(fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int) -> bool:
    """Whether the `pressure` of *endpoint* is finite."""
    sequences, kv_capacity = 0, 0
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        if fleet.accepting[instance] != 0:
            sequences += at_once(fleet, instance)
            kv_capacity += fleet.kv_capacity_tokens[instance]
            if sequences > 0 and kv_capacity > 0:
                return True
    return False


@compiled
def choose_region(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    candidates: NDArray[np.int32],
    waiting: NDArray[np.int64],
    threshold: float,
    now_s: float,
) -> int:
    """Return the endpoint for a request whose model is served by *candidates*, in order of preference.

    *waiting* has one element per endpoint: requests held for it. The first candidate below *threshold*, else the one
    under the least pressure (ties: the preferred one), else -1 if none accepts work.
    """
    if candidates.size == 1:  # its pressure, a sum over all its instances, decides nothing
        return int(candidates[0]) if takes_work(fleet, endpoints, int(candidates[0])) else -1
    return first_choice(candidates, threshold, _is_below, _use, (fleet, endpoints, waiting, now_s))


@compiled
def first_with_room(
    fleet: FleetArrays, endpoints: EndpointArrays, lent: NDArray[np.int32], waiting: NDArray[np.int64]
) -> int:
    """Return the first of *lent*, endpoints of donated instances, where one accepts work and no request waits; -1 for none.

    *waiting* is as in `choose_region`.
    """
    for at in range(lent.size):
        endpoint = int(lent[at])
        if waiting[endpoint] == 0:
            for member in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
                if fleet.accepting[endpoints.members[member]] != 0:
                    return endpoint
    return -1


@compiled
def better_home(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    candidates: NDArray[np.int32],
    waiting: NDArray[np.int64],
    endpoint: int,
    threshold: float,
    now_s: float,
) -> int:
    """Return the better endpoint for the first request that waits for *endpoint*, one of *candidates*, or *endpoint*.

    Like `choose_region`, but the request stays where something serves it while the other endpoint is full too.
    -1 if no candidate accepts work.
    """
    chosen = choose_region(fleet, endpoints, candidates, waiting, threshold, now_s)
    if chosen < 0 or chosen == endpoint:
        return chosen
    here = pressure(fleet, endpoints, endpoint, waiting[endpoint], now_s)
    if here < np.inf and pressure(fleet, endpoints, chosen, waiting[chosen], now_s) >= 1.0:
        return endpoint
    return chosen
