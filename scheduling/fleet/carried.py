"""Requests that an instance carries at once, and the first token that they leave to one more.

A running request adds to each step of the engine a token, its context, and its share of the prefill (`sequence_s`). The API
process (`front_end`) writes that token, and reads its share of the request. While the process keeps up with the engine,
more requests at once give more tokens a second; beyond that they only share what the process writes, and each takes longer
for the same throughput. So an instance is given as many as the process keeps up with, times a margin (a knob of the
policy), and never more than its `max_num_seqs`.

Lengths are the smoothed ones of the requests that the instance was given. Without limits of the API process in its profile
(`front_end`), or before its first request, an instance is given `max_num_seqs`.
"""

import functools
import math
from dataclasses import astuple
from typing import Any, Final

from scheduling.compiled import compiled, compiled_internal, uncompiled
from scheduling.fleet.arrays import FleetArrays
from scheduling.fleet.front_end import FrontEnd
from scheduling.fleet.profile import Profile

# Columns of a row of `FleetArrays.front_end`.
REQUESTS_PER_S: Final = 0
TOKENS_PER_S: Final = 1  # 0 while unknown
MARGIN: Final = 2

PROMPT: Final = 0
OUTPUT: Final = 1
"""Columns of a row of `FleetArrays.given_tokens`."""
WEIGHT: Final = 1 / 128
"""Weight of the last request in `given_tokens`."""
STEPS_TO_START: Final = 1.5
"""Steps until the first token of a request that finds others running: half of the current one, and that of its prefill."""


@compiled
def sequence_s(
    prefill_t0_s: float,
    prefill_a_s: float,
    prefill_b_s_per_token: float,
    prefill_c_s_per_token2: float,
    decode_a_s: float,
    decode_b_s_per_sequence: float,
    decode_c_s_per_token: float,
    prompt_tokens: float,
    output_tokens: float,
) -> float:
    """Return the seconds that a running request of these lengths adds to each step of the engine in the mean."""
    prefill_s = prefill_a_s + prefill_b_s_per_token * prompt_tokens + prefill_c_s_per_token2 * prompt_tokens**2
    beyond_s = max(max(prefill_t0_s, prefill_s) - decode_a_s, 0.0)
    context_s = decode_c_s_per_token * (prompt_tokens + 0.5 * output_tokens)
    return decode_b_s_per_sequence + context_s + beyond_s / output_tokens


@compiled
def carried(fleet: FleetArrays, instance: int) -> int:
    """Return the most requests that *instance* carries at once; 0 where its `max_num_seqs` says it."""
    tokens_per_s, output_tokens = fleet.front_end[instance, TOKENS_PER_S], fleet.given_tokens[instance, OUTPUT]
    profile = fleet.profile
    if tokens_per_s <= 0.0 or output_tokens <= 0.0 or profile[instance, 4] <= 0.0:
        return 0
    engine_s = sequence_s(
        profile[instance, 0],
        profile[instance, 1],
        profile[instance, 2],
        profile[instance, 3],
        profile[instance, 4],
        profile[instance, 5],
        profile[instance, 6],
        fleet.given_tokens[instance, PROMPT],
        output_tokens,
    )
    process_s = 1.0 / tokens_per_s + 1.0 / (fleet.front_end[instance, REQUESTS_PER_S] * output_tokens)
    # n requests keep both equally busy where decode_a_s + n * engine_s = n * process_s.
    keeps_up = fleet.front_end[instance, MARGIN] * profile[instance, 4]
    if keeps_up >= fleet.max_num_seqs[instance] * (process_s - engine_s):
        return 0
    return max(1, int(keeps_up / (process_s - engine_s)))


@compiled_internal
def note_given(fleet: FleetArrays, instance: int, prompt_tokens: int, output_tokens: int) -> None:
    """Record the lengths of a request given to *instance*, and what it carries by them."""
    given = fleet.given_tokens
    weight = WEIGHT if given[instance, OUTPUT] > 0.0 else 1.0
    given[instance, PROMPT] += weight * (prompt_tokens - given[instance, PROMPT])
    given[instance, OUTPUT] += weight * (output_tokens - given[instance, OUTPUT])
    if fleet.front_end[instance, TOKENS_PER_S] > 0.0:
        fleet.carried[instance] = carried(fleet, instance)


def set_front_end(fleet: FleetArrays, instance: int, front_end: FrontEnd, margin: float) -> None:
    """Set the limits of the API process of *instance*, after its profile and `max_num_seqs`."""
    known = math.isfinite(front_end.tokens_per_s) or math.isfinite(front_end.requests_per_s)
    fleet.front_end[instance] = (front_end.requests_per_s, front_end.tokens_per_s, margin) if known else 0.0
    fleet.carried[instance] = carried(fleet, instance) if known else 0


@functools.lru_cache(1024)
def _coefficients(profile: Profile) -> Any:
    return astuple(profile)  # which copies deeply


def first_token_s(
    profile: Profile, front_end: FrontEnd, sequences: float, prompt_tokens: float, output_tokens: float
) -> float:
    """Return the expected time to the first token of a request that finds *sequences* like it; infinity if the API
    process does not keep up with these.

    It waits for the current step, is read by the process, which is busy with the others for a part of each step (the mean
    wait of an M/M/1 queue), and has its prefill computed.
    """
    added_s = uncompiled(sequence_s)(*(*_coefficients(profile), prompt_tokens, output_tokens))
    step_s = profile.decode_a_s + sequences * added_s
    busy = sequences * front_end.time_s(1, 1 / output_tokens) / step_s
    if busy >= 1.0:
        return math.inf
    prefill_s = max(profile.step_time_s(int(prompt_tokens), 0, 0) - profile.decode_a_s, 0.0)
    return STEPS_TO_START * step_s + prefill_s + front_end.time_s(0, 1) / (1.0 - busy)


@functools.lru_cache(4096)
def most_at_once(
    profile: Profile,
    front_end: FrontEnd,
    sequences: float,
    prompt_tokens: int,
    output_tokens: int,
    slowdown: float,
    most: int,
) -> int:
    """Return the most requests, up to *most*, with first tokens within *slowdown* times those with *sequences*."""
    low, high = math.ceil(sequences), most
    limit_s = slowdown * first_token_s(profile, front_end, sequences, prompt_tokens, output_tokens)
    if limit_s == math.inf:
        return low
    while low < high:
        middle = (low + high + 1) // 2
        if first_token_s(profile, front_end, middle, prompt_tokens, output_tokens) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low
