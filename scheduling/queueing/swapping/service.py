"""Service times of an instance: of a request, of a request group, and of the drain before it leaves its GPUs."""

from typing import Final

from scheduling.compiled import compiled, compiled_internal
from scheduling.fleet.arrays import FleetArrays, at_once, memory_tokens
from scheduling.fleet.kv_cost import USUAL_PREFILL_S
from scheduling.queueing.groups import GroupArrays
from scheduling.queueing.waiting_set import WaitingArrays

LONGEST: Final = 2.0
"""Longest output still to come among running requests, as a multiple of the usual one.

It is 1.5 for 16 requests whose outputs vary by half of their mean, and 2.4 if they vary by all of it, as in ShareGPT.
"""
USUAL_STEP_S: Final = 0.02
"""Per decode step, without a profile."""


@compiled_internal
def request_s(fleet: FleetArrays, instance: int, prompt_tokens: float, output_tokens: float) -> float:
    """Return the seconds of the busy *instance* that one request takes: W of QLM's equation 2 is their sum.

    Output over throughput, with as many sequences as its memory holds (equations 15 and 16), plus its prefill, during which
    the others wait.
    """
    profile = fleet.profile
    batch = float(at_once(fleet, instance))
    tokens = max(prompt_tokens + output_tokens, 1.0)
    memory = float(memory_tokens(fleet, instance))
    if memory > 0.0:
        batch = min(batch, memory / tokens)
    batch = max(batch, 1.0)
    if profile[instance, 4] <= 0.0:
        return output_tokens * USUAL_STEP_S / batch + USUAL_PREFILL_S * prompt_tokens
    context = batch * (prompt_tokens + 0.5 * output_tokens)
    step_s = profile[instance, 4] + profile[instance, 5] * batch + profile[instance, 6] * context
    prefill_s = profile[instance, 1] + profile[instance, 2] * prompt_tokens
    prefill_s = max(profile[instance, 0], prefill_s + profile[instance, 3] * prompt_tokens * prompt_tokens)
    return float(output_tokens * step_s / batch + prefill_s)


@compiled
def group_s(fleet: FleetArrays, arrays: GroupArrays, group: int, instance: int) -> float:
    """Return the seconds of the busy *instance* that the waiting requests of *group* take."""
    this = arrays.groups[group]
    count = max(float(this.count), 1.0)
    return count * request_s(fleet, instance, this.prompt_tokens / count, this.output_tokens / count)


@compiled
def due_at(waiting: WaitingArrays, group: int) -> float:
    """Return when the first of *group* is due: its queue key, since an endpoint with groups orders by deadline."""
    return float(waiting.key[waiting.groups.groups[group].first])


@compiled
def batch_of(fleet: FleetArrays, arrays: GroupArrays, instance: int) -> float:
    """Return the requests of the usual size that *instance* runs at once (QLM equation 16)."""
    batch, tokens = float(at_once(fleet, instance)), arrays.mean_tokens[fleet.endpoint[instance]]
    memory = float(memory_tokens(fleet, instance))
    if memory > 0.0 and tokens > 0.0:
        batch = min(batch, memory / tokens)
    return max(batch, 1.0)


@compiled
def drain_s(fleet: FleetArrays, arrays: GroupArrays, instance: int, requests: float) -> float:
    """Return seconds until the last of *requests* of the usual size, running on *instance*, has ended, if no more come.

    P + D of QLM's equation 4. They arrived one after another, so only a fraction of the last one's output is not left.
    """
    if requests <= 0.0:
        return 0.0
    endpoint, profile = int(fleet.endpoint[instance]), fleet.profile
    requests = min(requests, batch_of(fleet, arrays, instance))
    output = arrays.mean_output[endpoint]
    prompt = arrays.mean_tokens[endpoint] - output
    tokens = LONGEST * output * requests / (requests + 1.0)
    if profile[instance, 4] <= 0.0:
        return float(tokens * USUAL_STEP_S + USUAL_PREFILL_S * prompt)
    context = requests * (prompt + 0.5 * output)
    step_s = profile[instance, 4] + profile[instance, 5] * requests + profile[instance, 6] * context
    prefill_s = profile[instance, 1] + profile[instance, 2] * prompt + profile[instance, 3] * prompt * prompt
    return float(tokens * step_s + max(profile[instance, 0], prefill_s))
