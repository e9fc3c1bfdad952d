"""Work in progress of an instance: a sequence's tokens per step, ends of iterations, updates of the fleet arrays.

While no sequence joins or leaves, k iterations of a batch that decodes take L*k + A*k^2 seconds, for the context grows by
one token per sequence each time.
"""

import math
from typing import Any

from scheduling.compiled import compiled_inline, compiled_internal
from scheduling.fleet.arrays import FleetArrays
from scheduling.fleet.profile import step_time_s
from scheduling.simulation.engine.kv_room import blocks, place_in_block
from scheduling.simulation.engine.lookahead import follow
from scheduling.simulation.engine.sequences import append_joining, append_running, push_due
from scheduling.simulation.engine.state import NONE, STEP, EngineArrays


@compiled_inline
def ends_s(engines: EngineArrays, instance: int, steps: int) -> float:
    """Return the end of the *steps*-th iteration in progress. Computed here only, so that ties stay exact."""
    engine = engines.instances[instance]
    count = float(steps)
    return float(engine.started_s + (engine.linear_s * count + engine.quadratic_s * count * count))


@compiled_inline
def ended_iterations(engines: EngineArrays, instance: int, now_s: float, at_now: bool) -> int:
    """Return how many iterations of the current segment ended before *now_s*; with *at_now*, up to and at it."""
    engine = engines.instances[instance]
    passed_s = now_s - engine.started_s
    linear, quadratic = engine.linear_s, engine.quadratic_s
    count = int(2.0 * passed_s / (linear + math.sqrt(linear * linear + 4.0 * quadratic * passed_s)))
    count = max(min(count, engine.steps), 0)
    # The square root may be off by one at a boundary.
    while count < engine.steps:
        end_s = ends_s(engines, instance, count + 1)
        if end_s < now_s or (at_now and end_s == now_s):
            count += 1
        else:
            break
    while count > 0:
        end_s = ends_s(engines, instance, count)
        if end_s > now_s or (end_s == now_s and not at_now):
            count -= 1
        else:
            break
    return int(count)


@compiled_inline
def count_tokens(fleet: FleetArrays, engines: EngineArrays, instance: int, iterations: int) -> None:
    """Add to the fleet arrays the tokens of the first *iterations* of the work in progress."""
    engine = engines.instances[instance]
    added = iterations - engine.counted
    if added > 0:
        engine.counted = iterations
        fleet.remaining_tokens[instance] -= engine.step_within * added
        fleet.kv_tokens[instance] += (engine.step_decodes - engine.step_within) * added
        if engines.ahead.clock.size > 0:
            follow(engines, instance)


@compiled_inline
def observe(fleet: FleetArrays, engines: EngineArrays, instance: int, now_s: float, at_now: bool) -> None:
    """Update the fleet arrays of *instance* to *now_s*, counting every token emitted."""
    engine = engines.instances[instance]
    if engine.next_s <= now_s:
        ended = ended_iterations(engines, instance, now_s, at_now)
        count_tokens(fleet, engines, instance, ended)
        engine.next_s = ends_s(engines, instance, ended + 1) if ended < engine.steps else math.inf


@compiled_inline
def milestone(engines: EngineArrays, sequence: int, produced_tokens: int) -> int:
    """Return the output tokens at which *sequence* is next examined: when it has all, or all that were expected."""
    this = engines.sequences[sequence]
    expected_output = this.expected_tokens - this.prompt_tokens
    if produced_tokens < expected_output < this.output_tokens:
        return int(expected_output)
    return int(this.output_tokens)


@compiled_inline
def join(engines: EngineArrays, instance: int, sequence: int) -> None:
    """Let *sequence*, which has a token to continue from, decode from the next iteration on."""
    engine, this = engines.instances[instance], engines.sequences[sequence]
    produced = this.produced_tokens
    this.decoding = 1
    this.offset = produced - engine.iteration
    engines.residues[instance, place_in_block(engine, this.prompt_tokens + this.offset - 1)] += 1
    push_due(engines, instance, engine.decoding, sequence, milestone(engines, sequence, produced) - this.offset)
    engine.decoding += 1
    engine.context_tokens += this.prompt_tokens + produced
    if this.prompt_tokens + produced < this.expected_tokens:
        engine.within += 1


@compiled_internal
def resume(engines: EngineArrays, instance: int, sequence: int) -> None:
    """Let *sequence* decode on *instance*, which had it already: its KV but that of its last token is there."""
    this = engines.sequences[sequence]
    append_running(engines, instance, sequence)
    join(engines, instance, sequence)
    engine = engines.instances[instance]
    engine.free_blocks -= blocks(engine, int(this.prompt_tokens + this.produced_tokens - 1))


@compiled_inline
def compute(engines: EngineArrays, instance: int, sequence: int, tokens: int) -> bool:
    """Compute *tokens* more of *sequence*, whose blocks are held; return whether they cost the same as a decode step."""
    engine, this = engines.instances[instance], engines.sequences[sequence]
    total = this.prompt_tokens + this.produced_tokens
    # The last token that a preempted request recomputes is a decode step like any other.
    as_decode = bool(this.produced_tokens > 0 and this.computed_tokens == total - 1)
    this.computed_tokens += tokens
    if this.computed_tokens == total:
        if engine.partial == sequence:
            engine.partial = NONE
        append_joining(engines, instance, sequence)
    else:
        engine.partial = sequence
    return as_decode


@compiled_inline
def reads_in(engine: Any, duration_s: float, tokens: int) -> int:
    """Return the requests that the front end reads in an iteration that emits *tokens* (`FrontEnd.reads`)."""
    return max(1, int((duration_s - tokens / engine.tokens_per_s) * engine.requests_per_s))


@compiled_inline
def start_step(
    engines: EngineArrays,
    instance: int,
    now_s: float,
    prefill: int,
    decodes: int,
    context: int,
    load_s: float,
) -> float:
    """Start one iteration that loads adapters for *load_s*; return its end."""
    engine = engines.instances[instance]
    engine.phase = STEP
    engine.started_s = now_s
    engine.linear_s = step_time_s(
        engine.prefill_t0_s,
        engine.prefill_a_s,
        engine.prefill_b_s_per_token,
        engine.prefill_c_s_per_token2,
        engine.decode_a_s,
        engine.decode_b_s_per_sequence,
        engine.decode_c_s_per_token,
        prefill,
        decodes,
        context,
    )
    tokens = 0
    if engine.tokens_per_s < math.inf or engine.requests_per_s < math.inf:
        tokens, sequence = int(engine.step_decodes), int(engine.joining)
        while sequence != NONE:
            tokens += 1
            sequence = int(engines.sequences[sequence].next_joining)
        unread = 1.0 if engine.first_unread != NONE else 0.0
        engine.linear_s = max(engine.linear_s, tokens / engine.tokens_per_s + unread / engine.requests_per_s)
    engine.linear_s += load_s
    if engine.requests_per_s < math.inf:
        engine.reads = reads_in(engine, engine.linear_s, tokens)
    engine.quadratic_s = 0.0
    engine.steps, engine.counted = 1, 0
    engine.next_s = math.inf
    return ends_s(engines, instance, 1)
