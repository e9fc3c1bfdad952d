"""The compiled engine of one instance: the iterations of `ReferenceEngine`, many at a time.

While no sequence joins or leaves, k iterations of a batch that decodes take L·k + A·k² seconds, for the context grows by one
token per sequence each time. So the next event of an instance has a closed form. A *segment* is a run of such iterations; it
ends at the first sequence that has all its tokens (or exceeds those expected of it, which changes the dispatcher's view), at
the iteration for which the free blocks no longer suffice, or at the boundary after the arrival of a request that could be
admitted. An iteration with any prefill, or with only a part of the batch, is a *step* by itself.

At most one sequence is ever half prefilled, and it is the last admitted: none is admitted after the token budget is used up,
and max_num_seqs, which bounds the decode tokens of an iteration, never exceeds that budget.
"""

import math

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled_internal, index
from scheduling.fleet.arrays import FleetArrays
from scheduling.routing.routers import advance, prefilled
from scheduling.simulation.engine.eviction import take_evicted
from scheduling.simulation.engine.kv_room import blocks, free_steps, place_in_block, take_blocks
from scheduling.simulation.engine.lookahead import join_map
from scheduling.simulation.engine.preemption import rebuild, schedule_short, step_of_a_part
from scheduling.simulation.engine.prefix_cache import give_back, look_up, publish, restore, settle, share
from scheduling.simulation.engine.progress import compute, count_tokens, ends_s, join, observe, reads_in, start_step
from scheduling.simulation.engine.sequences import (
    append_running,
    pop_waiting,
    push_unread,
    push_waiting,
    read,
    remove_running,
    replace_first_due,
    sort_by_admission,
)
from scheduling.simulation.engine.state import IDLE, ITERATIONS, NONE, SEGMENT, EngineArrays


@compiled_internal
def _admit_cached(
    engines: EngineArrays, instance: int, sequence: int, free: int, budget: int, outcomes: NDArray[np.void]
) -> int:
    """Admit *sequence*, the first that waits, with its cached prefix; return how many tokens it computes now.

    0 if its blocks do not fit into the *free* ones; otherwise `free_blocks` is updated.
    """
    engine, this = engines.instances[instance], engines.sequences[sequence]
    total = this.prompt_tokens + this.produced_tokens
    cached_blocks, in_use = look_up(engines, instance, sequence)
    if blocks(engine, total) - in_use > free:
        return 0
    pop_waiting(engines, instance)
    append_running(engines, instance, sequence)
    share(engines, instance, sequence, cached_blocks)
    if engine.offload_blocks > 0:
        restore(engines, instance, sequence)
    if this.again & 1 == 0:
        outcomes[this.request].cached_tokens = this.computed_tokens
    tokens = min(total - this.computed_tokens, budget)
    held = this.computed_tokens + tokens
    engine.free_blocks = free - (blocks(engine, held) - in_use)
    settle(engines, instance, int(engine.free_blocks))
    publish(engines, instance, sequence, int(held))
    return int(tokens)


@compiled_internal
def begin(engines: EngineArrays, instance: int, now_s: float, outcomes: NDArray[np.void]) -> float:
    """Start the next iterations of *instance* at *now_s*; return their end, infinity if there is nothing to do."""
    engine = engines.instances[instance]
    if engine.first_unread != NONE:
        reads = int(engine.waiting)  # an idle server reads all at once
        if engine.running > 0:
            reads = int(engine.reads)
            if engine.phase == SEGMENT:
                last_s = engine.linear_s + engine.quadratic_s * (2 * engine.steps - 1)
                reads = reads_in(engine, last_s, int(engine.step_decodes))
        read(engines, instance, reads)
    while True:
        if engine.running == 0 and engine.waiting == 0:
            engine.phase = IDLE
            engine.next_s = math.inf
            return math.inf
        need = int(engines.residues[instance, place_in_block(engine, -engine.iteration)])
        chunk = 0
        if engine.partial != NONE:
            part = engines.sequences[index(engine.partial)]
            chunk = min(
                part.prompt_tokens + part.produced_tokens - part.computed_tokens,
                engine.budget_tokens - engine.decoding,
            )
            need += blocks(engine, part.computed_tokens + chunk) - blocks(engine, part.computed_tokens)
        if need <= engine.free_blocks:
            break
        if schedule_short(engines, instance, outcomes) > 0:
            return step_of_a_part(engines, instance, now_s)
        rebuild(engines, instance, False)
    budget = engine.budget_tokens - engine.decoding
    free = engine.free_blocks - need
    prefill, decodes, context = 0, engine.decoding, engine.context_tokens
    if engine.prefix_caching != 0:
        settle(engines, instance, int(free))
    if chunk > 0:
        part = engines.sequences[index(engine.partial)]
        total = part.prompt_tokens + part.produced_tokens
        if engine.prefix_caching != 0:
            publish(engines, instance, int(engine.partial), int(part.computed_tokens + chunk))
        if compute(engines, instance, index(engine.partial), chunk):
            decodes += 1
            context += total
        else:
            prefill += chunk
        budget -= chunk
    admitted, load_s = 0, 0.0
    while budget > 0 and engine.first_waiting != engine.first_unread and engine.running < engine.max_num_seqs:
        sequence = index(engine.first_waiting)
        this = engines.sequences[sequence]
        total = this.prompt_tokens + this.produced_tokens
        if engine.prefix_caching != 0:
            tokens = _admit_cached(engines, instance, sequence, int(free), int(budget), outcomes)
            if tokens == 0:
                break
            free = engine.free_blocks
        else:
            if blocks(engine, total) > free:
                break
            pop_waiting(engines, instance)
            append_running(engines, instance, sequence)
            tokens = min(total, budget)
            free -= blocks(engine, tokens)
        if compute(engines, instance, sequence, tokens):
            decodes += 1
            context += total
        else:
            prefill += tokens
        budget -= tokens
        admitted += 1
        load_s += this.load_s
        this.load_s = 0.0
    engine.step_decodes, engine.step_within = engine.decoding, engine.within
    if chunk > 0 or admitted > 0:
        engine.free_blocks = free
        load_s += engine.prewarm_s
        engine.prewarm_s = 0.0
        return start_step(engines, instance, now_s, prefill, decodes, context, load_s)
    batch = engine.decoding
    engine.phase = SEGMENT
    engines.exceeding[instance] = engine.step_within < engine.step_decodes
    engine.started_s = now_s
    engine.quadratic_s = 0.5 * engine.decode_c_s_per_token * batch
    engine.linear_s = (
        engine.decode_a_s + engine.decode_b_s_per_sequence * batch + engine.decode_c_s_per_token * context
    ) - engine.quadratic_s
    steps = int(engines.due[instance, 0] - engine.iteration)
    unread = 1.0 if engine.first_unread != NONE else 0.0
    first_s = engine.linear_s + engine.quadratic_s
    floor_s = batch / engine.tokens_per_s + unread / engine.requests_per_s
    if engine.first_unread != NONE:  # one more may be admitted after each iteration
        steps = 1
    if first_s < floor_s:
        # The front end is slower; the segment ends where the growing context makes the engine slower than it.
        if engine.quadratic_s > 0.0:
            steps = int(min(float(steps), math.ceil((floor_s - first_s) / (2.0 * engine.quadratic_s))))
        engine.linear_s, engine.quadratic_s = floor_s, 0.0
    engine.steps = free_steps(engines, instance, steps)
    engine.counted = 0
    engine.next_s = ends_s(engines, instance, 1)
    engine.most_per_s = 1.0 / engine.linear_s
    engine.least_per_s = 1.0 / (engine.linear_s + engine.quadratic_s * engine.steps)
    return ends_s(engines, instance, engine.steps)


@compiled_internal
def end(fleet: FleetArrays, engines: EngineArrays, instance: int, now_s: float, outcomes: NDArray[np.void]) -> int:
    """End the work in progress of *instance* at *now_s*; return how many sequences are done or evicted.

    They are the first of `engines.done`. Their blocks and places are free again; the caller clears their records and the
    dispatcher's view of them.
    """
    engine = engines.instances[instance]
    steps = engine.steps
    count_tokens(fleet, engines, instance, steps)
    engine.next_s = math.inf
    engines.exceeding[instance] = 0
    if engine.phase == SEGMENT:
        take_blocks(engines, instance, steps)
        if engine.prefix_caching != 0:
            settle(engines, instance, int(engine.free_blocks))
        engine.context_tokens += engine.decoding * steps
    else:
        engine.context_tokens += engine.step_decodes
    engine.iteration += steps
    engines.counters[ITERATIONS] += steps
    done = 0
    while engine.decoding > 0 and engines.due[instance, 0] <= engine.iteration:
        sequence = index(engines.due_sequence[instance, 0])
        this = engines.sequences[sequence]
        produced = engine.iteration + this.offset
        if produced < this.output_tokens:  # it continues beyond the expected length
            engine.within -= 1
            replace_first_due(engines, instance, engine.decoding, sequence, this.output_tokens - this.offset)
            continue
        last = index(engine.decoding - 1)
        replace_first_due(
            engines, instance, last, int(engines.due_sequence[instance, last]), int(engines.due[instance, last])
        )
        engine.decoding = last
        engine.context_tokens -= this.prompt_tokens + produced
        if this.expected_tokens - this.prompt_tokens >= this.output_tokens:
            engine.within -= 1
        engines.residues[instance, place_in_block(engine, this.prompt_tokens + this.offset - 1)] -= 1
        if engine.prefix_caching == 0:
            engine.free_blocks += blocks(engine, this.prompt_tokens + produced - 1)
        this.produced_tokens = produced
        this.decoding = 0
        remove_running(engines, instance, sequence)
        engines.done[done] = sequence
        done += 1
    if engines.ahead.clock.size > 0:
        join_map(engines, instance)
    sequence = int(engine.joining)
    engine.joining = NONE
    while sequence != NONE:
        sequence = index(sequence)
        this = engines.sequences[sequence]
        following = int(this.next_joining)
        if this.streaming == 0:
            this.streaming = 1
            advance(fleet, instance, int(this.expected_tokens), 0, this.prompt_tokens + 1)
            prefilled(fleet, instance, int(this.expected_prompt))
            outcome = outcomes[index(this.request)]
            if math.isnan(outcome.ttft_s):  # no first token on an earlier instance
                outcome.ttft_s = now_s - this.origin_s
        else:
            advance(fleet, instance, int(this.expected_tokens), this.prompt_tokens + this.produced_tokens, 1)
        this.produced_tokens += 1
        if this.produced_tokens == this.output_tokens:
            if engine.prefix_caching == 0:
                engine.free_blocks += blocks(engine, int(this.computed_tokens))
            remove_running(engines, instance, sequence)
            engines.done[done] = sequence
            done += 1
        else:
            join(engines, instance, sequence)
        sequence = following
    if done > 1:
        sort_by_admission(engines, done)
    if engine.prefix_caching != 0:
        for at in range(done):
            this = engines.sequences[engines.done[at]]
            tokens = int(this.prompt_tokens + this.produced_tokens - 1)
            engine.free_blocks += give_back(engines, instance, int(engines.done[at]), tokens, False)
    if engine.leaving > 0:
        done = take_evicted(engines, instance, done)
    return done


@compiled_internal
def give(fleet: FleetArrays, engines: EngineArrays, instance: int, sequence: int, now_s: float, at_now: bool) -> float:
    """Queue *sequence* at *instance* from *now_s* on; return the instance's next event, -1 if unchanged.

    A segment is cut at its next boundary if the request might be read or admitted there, or must leave (evicted in
    transit).
    *at_now*: boundaries at *now_s* are over.
    """
    engine, this = engines.instances[instance], engines.sequences[sequence]
    limited = engine.requests_per_s < math.inf
    if limited:
        push_unread(engines, instance, sequence)
    else:
        push_waiting(engines, instance, sequence, False)
    if engine.phase == IDLE:
        return now_s
    if engine.phase != SEGMENT:
        return -1.0
    if this.evicted == 0 and not limited:
        if engine.first_waiting != sequence or engine.running >= engine.max_num_seqs:
            return -1.0
        missing = blocks(engine, this.prompt_tokens + this.produced_tokens)
        if engine.prefix_caching != 0:
            _, in_use = look_up(engines, instance, sequence)
            missing -= in_use
        if missing > engine.free_blocks:
            return -1.0
    observe(fleet, engines, instance, now_s, at_now)
    steps = engine.counted + 1
    if steps >= engine.steps:
        return -1.0
    engine.steps = steps
    return ends_s(engines, instance, steps)
