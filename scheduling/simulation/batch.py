"""The compiled engine of one instance: the same iterations as `ReferenceEngine`, taken many at a time.

While nobody joins or leaves, k iterations of a batch that decodes take L·k + A·k² seconds, for the context grows by one
token a sequence each time. So the next event of an instance is found in closed form. A *segment* is a run of such
iterations; it ends at the first sequence that has all its tokens (or exceeds those expected of it, which changes what the
dispatcher sees), at the iteration that the free blocks no longer suffice for, or at the boundary after a request came that
could be admitted. An iteration with any prefill, or with only a part of the batch, is a *step* of its own.

At most one sequence is ever half prefilled, and it is the last admitted: nobody is admitted after the token budget is
used up, and max_num_seqs, which bounds the decode tokens of an iteration, is never more than that budget.
"""

import math

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled_aside, compiled_part
from scheduling.fleet import FleetArrays
from scheduling.profile import step_time_s
from scheduling.routing import advance, prefilled
from scheduling.simulation.ahead import follow, join_map
from scheduling.simulation.prefixes import give_back, look_up, publish, settle, share
from scheduling.simulation.sequences import (
    append_joining,
    append_running,
    pop_waiting,
    push_due,
    push_waiting,
    remove_running,
    replace_first_due,
    sort_by_admission,
    victim,
)
from scheduling.simulation.state import IDLE, ITERATIONS, NONE, PREEMPTIONS, SEGMENT, STEP, EngineArrays


@compiled_part
def _blocks(tokens: int, block_size: int) -> int:
    return (tokens + block_size - 1) // block_size


@compiled_part
def _end_s(engines: EngineArrays, instance: int, steps: int) -> float:
    """When the *steps*-th iteration of the work in progress ends. The only place that says so: ties must be ties."""
    engine = engines.instances[instance]
    count = float(steps)
    return float(engine.started_s + (engine.linear_s * count + engine.quadratic_s * count * count))


@compiled_part
def ended_iterations(engines: EngineArrays, instance: int, now_s: float, at_now: bool) -> int:
    """How many iterations of the segment in progress ended before *now_s*, or *at_now*: up to and at it."""
    engine = engines.instances[instance]
    passed_s = now_s - engine.started_s
    linear, quadratic = engine.linear_s, engine.quadratic_s
    count = int(2.0 * passed_s / (linear + math.sqrt(linear * linear + 4.0 * quadratic * passed_s)))
    count = max(min(count, engine.steps), 0)
    # The square root may be off by one at a boundary.
    while count < engine.steps:
        end_s = _end_s(engines, instance, count + 1)
        if end_s < now_s or (at_now and end_s == now_s):
            count += 1
        else:
            break
    while count > 0:
        end_s = _end_s(engines, instance, count)
        if end_s > now_s or (end_s == now_s and not at_now):
            count -= 1
        else:
            break
    return int(count)


@compiled_part
def _count(fleet: FleetArrays, engines: EngineArrays, instance: int, iterations: int) -> None:
    """Tell the fleet arrays of the tokens of the first *iterations* of the work in progress."""
    engine = engines.instances[instance]
    added = iterations - engine.counted
    if added > 0:
        engine.counted = iterations
        fleet.remaining_tokens[instance] -= engine.step_within * added
        fleet.kv_tokens[instance] += (engine.step_decodes - engine.step_within) * added
        if engines.ahead.clock.size > 0:
            follow(engines, instance)


@compiled_part
def observe(fleet: FleetArrays, engines: EngineArrays, instance: int, now_s: float, at_now: bool) -> None:
    """Bring the fleet arrays of *instance* up to *now_s*: every token that has come out is counted."""
    if engines.instances[instance].phase == SEGMENT:
        _count(fleet, engines, instance, ended_iterations(engines, instance, now_s, at_now))


@compiled_part
def _milestone(engines: EngineArrays, sequence: int, produced_tokens: int) -> int:
    """After how many output tokens *sequence* is looked at next: when it has all, or all that were expected."""
    this = engines.sequences[sequence]
    expected_output = this.expected_tokens - this.prompt_tokens
    if produced_tokens < expected_output < this.output_tokens:
        return int(expected_output)
    return int(this.output_tokens)


@compiled_part
def _join(engines: EngineArrays, instance: int, sequence: int) -> None:
    """*sequence*, which has a token to go on from, decodes from the next iteration on."""
    engine, this = engines.instances[instance], engines.sequences[sequence]
    produced = this.produced_tokens
    this.decoding = 1
    this.offset = produced - engine.iteration
    engines.residues[instance, (this.prompt_tokens + this.offset - 1) % engine.block_size_tokens] += 1
    push_due(engines, instance, engine.decoding, sequence, _milestone(engines, sequence, produced) - this.offset)
    engine.decoding += 1
    engine.context_tokens += this.prompt_tokens + produced
    if this.prompt_tokens + produced < this.expected_tokens:
        engine.within += 1


@compiled_aside
def _rebuild(engines: EngineArrays, instance: int, stall: bool) -> None:
    """Set up anew what is kept of the decoding sequences; with *stall*, those without `step_tokens` miss an iteration."""
    engine = engines.instances[instance]
    engines.residues[instance, :] = 0
    engine.decoding = engine.within = engine.context_tokens = 0
    sequence = int(engine.first_running)
    while sequence != NONE:
        this = engines.sequences[sequence]
        if this.decoding != 0:
            produced = engine.iteration + this.offset
            if stall and this.step_tokens == 0:
                this.offset -= 1
            engines.residues[instance, (this.prompt_tokens + this.offset - 1) % engine.block_size_tokens] += 1
            push_due(
                engines, instance, engine.decoding, sequence, _milestone(engines, sequence, produced) - this.offset
            )
            engine.decoding += 1
            engine.context_tokens += this.prompt_tokens + produced
            if this.prompt_tokens + produced < this.expected_tokens:
                engine.within += 1
        sequence = int(this.next)


@compiled_aside
def _preempt(engines: EngineArrays, instance: int, sequence: int) -> None:
    """Take its blocks from *sequence*, which waits again and computes all its tokens anew."""
    engine, this = engines.instances[instance], engines.sequences[sequence]
    computed = int(this.computed_tokens)
    if this.decoding != 0:
        this.produced_tokens = engine.iteration + this.offset
        computed = this.prompt_tokens + this.produced_tokens - 1
        this.decoding = 0
    if engine.prefix_caching != 0:
        engine.free_blocks += give_back(engines, instance, sequence, int(computed + this.step_tokens), True)
    else:
        engine.free_blocks += _blocks(computed + this.step_tokens, engine.block_size_tokens)
    this.step_tokens = this.computed_tokens = 0
    if engine.partial == sequence:
        engine.partial = NONE
    remove_running(engines, instance, sequence)
    push_waiting(engines, instance, sequence, True)
    engines.counters[PREEMPTIONS] += 1


@compiled_aside
def _schedule_short(engines: EngineArrays, instance: int, outcomes: NDArray[np.void]) -> int:
    """Schedule an iteration that needs more blocks than are free: how many sequences got to run.

    Sequences in order of admission, each with a `step_tokens`; one that lacks blocks takes them from victims, and if it is
    itself the victim, those after it get nothing.
    """
    engine = engines.instances[instance]
    block_size = engine.block_size_tokens
    sequence = int(engine.first_running)
    while sequence != NONE:
        engines.sequences[sequence].step_tokens = 0
        sequence = int(engines.sequences[sequence].next)
    budget = engine.budget_tokens
    sequence = int(engine.first_running)
    while sequence != NONE and budget > 0:
        this = engines.sequences[sequence]
        if this.decoding != 0:
            computed, tokens = this.prompt_tokens + engine.iteration + this.offset - 1, 1
        else:
            computed = int(this.computed_tokens)
            tokens = min(this.prompt_tokens + this.produced_tokens - computed, budget)
        missing = _blocks(computed + tokens, block_size) - _blocks(computed, block_size)
        lost = False
        while missing > engine.free_blocks and not lost:
            loser = victim(engines, instance)
            budget += engines.sequences[loser].step_tokens
            outcomes[engines.sequences[loser].request].preemptions += 1
            _preempt(engines, instance, loser)
            lost = loser == sequence
        if lost:
            break
        engine.free_blocks -= missing
        if engine.prefix_caching != 0:
            settle(engines, instance, int(engine.free_blocks))
            publish(engines, instance, sequence, int(computed + tokens))
        this.step_tokens = tokens
        budget -= tokens
        sequence = int(this.next)
    scheduled = 0
    sequence = int(engine.first_running)
    while sequence != NONE:
        if engines.sequences[sequence].step_tokens > 0:
            scheduled += 1
        sequence = int(engines.sequences[sequence].next)
    return scheduled


@compiled_part
def _prefill(engines: EngineArrays, instance: int, sequence: int, tokens: int) -> bool:
    """Compute *tokens* more of *sequence*, whose blocks are held; whether they cost what a decode step costs."""
    engine, this = engines.instances[instance], engines.sequences[sequence]
    total = this.prompt_tokens + this.produced_tokens
    # The last token of what a preempted request computes again is a decode step like any other.
    as_decode = bool(this.produced_tokens > 0 and this.computed_tokens == total - 1)
    this.computed_tokens += tokens
    if this.computed_tokens == total:
        if engine.partial == sequence:
            engine.partial = NONE
        append_joining(engines, instance, sequence)
    else:
        engine.partial = sequence
    return as_decode


@compiled_part
def _start_step(engines: EngineArrays, instance: int, now_s: float, prefill: int, decodes: int, context: int) -> float:
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
    engine.quadratic_s = 0.0
    engine.steps, engine.counted = 1, 0
    return _end_s(engines, instance, 1)


@compiled_aside
def _step_of_a_part(engines: EngineArrays, instance: int, now_s: float) -> float:
    """Start the iteration that `_schedule_short` made up; when it ends."""
    engine = engines.instances[instance]
    prefill = decodes = context = 0
    engine.step_decodes = engine.step_within = 0
    sequence = int(engine.first_running)
    while sequence != NONE:
        this = engines.sequences[sequence]
        following = int(this.next)
        if this.step_tokens > 0:
            if this.decoding != 0:
                total = this.prompt_tokens + engine.iteration + this.offset
                decodes += 1
                context += total
                engine.step_decodes += 1
                if total < this.expected_tokens:
                    engine.step_within += 1
            else:
                total = this.prompt_tokens + this.produced_tokens
                if _prefill(engines, instance, sequence, int(this.step_tokens)):
                    decodes += 1
                    context += total
                else:
                    prefill += this.step_tokens
        sequence = following
    _rebuild(engines, instance, True)
    return _start_step(engines, instance, now_s, prefill, decodes, context)


@compiled_part
def _free_steps(engines: EngineArrays, instance: int, most: int) -> int:
    """How many iterations, at most *most*, the decoding sequences can take before the blocks run out."""
    engine = engines.instances[instance]
    block_size, free, batch = engine.block_size_tokens, engine.free_blocks, engine.decoding
    if batch * _blocks(most, block_size) <= free:
        return most
    cycles = free // batch  # in each cycle every sequence needs one block
    steps, free = cycles * block_size, free - cycles * batch
    at = -engine.iteration % block_size
    while steps < most and engines.residues[instance, at] <= free:
        free -= engines.residues[instance, at]
        steps += 1
        at = block_size - 1 if at == 0 else at - 1
    return int(min(steps, most))


@compiled_part
def _take_blocks(engines: EngineArrays, instance: int, steps: int) -> None:
    """Take the blocks that *steps* iterations of the decoding sequences need."""
    engine = engines.instances[instance]
    block_size = engine.block_size_tokens
    taken = (steps // block_size) * engine.decoding
    at = -engine.iteration % block_size
    for _ in range(steps % block_size):
        taken += engines.residues[instance, at]
        at = block_size - 1 if at == 0 else at - 1
    engine.free_blocks -= taken


@compiled_aside
def _admit_cached(
    engines: EngineArrays, instance: int, sequence: int, free: int, budget: int, outcomes: NDArray[np.void]
) -> int:
    """Admit *sequence*, the first that waits, with what the prefix cache has of it: how many tokens it computes now.

    0 if its blocks do not fit into the *free* ones, which are `free_blocks` afterwards if they do.
    """
    engine, this = engines.instances[instance], engines.sequences[sequence]
    total = this.prompt_tokens + this.produced_tokens
    found, in_use = look_up(engines, instance, sequence)
    if _blocks(total, engine.block_size_tokens) - in_use > free:
        return 0
    pop_waiting(engines, instance)
    append_running(engines, instance, sequence)
    share(engines, instance, sequence, found)
    if this.again == 0:
        outcomes[this.request].cached_tokens = this.computed_tokens
    tokens = min(total - this.computed_tokens, budget)
    held = this.computed_tokens + tokens
    engine.free_blocks = free - (_blocks(held, engine.block_size_tokens) - in_use)
    settle(engines, instance, int(engine.free_blocks))
    publish(engines, instance, sequence, int(held))
    return int(tokens)


@compiled_part
def begin(engines: EngineArrays, instance: int, now_s: float, outcomes: NDArray[np.void]) -> float:
    """Start the next iterations of *instance* at *now_s*; when they end, infinity if there is nothing to do."""
    engine = engines.instances[instance]
    block_size = engine.block_size_tokens
    while True:
        if engine.running == 0 and engine.waiting == 0:
            engine.phase = IDLE
            return math.inf
        need = int(engines.residues[instance, -engine.iteration % block_size])
        chunk = 0
        if engine.partial != NONE:
            part = engines.sequences[engine.partial]
            chunk = min(
                part.prompt_tokens + part.produced_tokens - part.computed_tokens,
                engine.budget_tokens - engine.decoding,
            )
            need += _blocks(part.computed_tokens + chunk, block_size) - _blocks(part.computed_tokens, block_size)
        if need <= engine.free_blocks:
            break
        if _schedule_short(engines, instance, outcomes) > 0:
            return _step_of_a_part(engines, instance, now_s)
        _rebuild(engines, instance, False)
    budget = engine.budget_tokens - engine.decoding
    free = engine.free_blocks - need
    prefill, decodes, context = 0, engine.decoding, engine.context_tokens
    if engine.prefix_caching != 0:
        settle(engines, instance, int(free))
    if chunk > 0:
        part = engines.sequences[engine.partial]
        total = part.prompt_tokens + part.produced_tokens
        if engine.prefix_caching != 0:
            publish(engines, instance, int(engine.partial), int(part.computed_tokens + chunk))
        if _prefill(engines, instance, int(engine.partial), chunk):
            decodes += 1
            context += total
        else:
            prefill += chunk
        budget -= chunk
    admitted = 0
    while budget > 0 and engine.waiting > 0 and engine.running < engine.max_num_seqs:
        sequence = int(engine.first_waiting)
        this = engines.sequences[sequence]
        total = this.prompt_tokens + this.produced_tokens
        if engine.prefix_caching != 0:
            tokens = _admit_cached(engines, instance, sequence, int(free), int(budget), outcomes)
            if tokens == 0:
                break
            free = engine.free_blocks
        else:
            if _blocks(total, block_size) > free:
                break
            pop_waiting(engines, instance)
            append_running(engines, instance, sequence)
            tokens = min(total, budget)
            free -= _blocks(tokens, block_size)
        if _prefill(engines, instance, sequence, tokens):
            decodes += 1
            context += total
        else:
            prefill += tokens
        budget -= tokens
        admitted += 1
    engine.step_decodes, engine.step_within = engine.decoding, engine.within
    if chunk > 0 or admitted > 0:
        engine.free_blocks = free
        return _start_step(engines, instance, now_s, prefill, decodes, context)
    batch = engine.decoding
    engine.phase = SEGMENT
    engines.exceeding[instance] = engine.step_within < engine.step_decodes
    engine.started_s = now_s
    engine.quadratic_s = 0.5 * engine.decode_c_s_per_token * batch
    engine.linear_s = (
        engine.decode_a_s + engine.decode_b_s_per_sequence * batch + engine.decode_c_s_per_token * context
    ) - engine.quadratic_s
    engine.steps = _free_steps(engines, instance, engines.due[instance, 0] - engine.iteration)
    engine.counted = 0
    return _end_s(engines, instance, engine.steps)


@compiled_part
def end(fleet: FleetArrays, engines: EngineArrays, instance: int, now_s: float, outcomes: NDArray[np.void]) -> int:
    """End the work in progress of *instance* at *now_s*; how many sequences are done, the first of `engines.done`.

    Blocks and places of those are free again; their records, and the dispatcher's view of them, are the caller's to clear.
    """
    engine = engines.instances[instance]
    steps = engine.steps
    _count(fleet, engines, instance, steps)
    engines.exceeding[instance] = 0
    if engine.phase == SEGMENT:
        _take_blocks(engines, instance, steps)
        if engine.prefix_caching != 0:
            settle(engines, instance, int(engine.free_blocks))
        engine.context_tokens += engine.decoding * steps
    else:
        engine.context_tokens += engine.step_decodes
    engine.iteration += steps
    engines.counters[ITERATIONS] += steps
    block_size = engine.block_size_tokens
    done = 0
    while engine.decoding > 0 and engines.due[instance, 0] <= engine.iteration:
        sequence = int(engines.due_sequence[instance, 0])
        this = engines.sequences[sequence]
        produced = engine.iteration + this.offset
        if produced < this.output_tokens:  # it goes on, beyond what was expected
            engine.within -= 1
            replace_first_due(engines, instance, engine.decoding, sequence, this.output_tokens - this.offset)
            continue
        last = engine.decoding - 1
        replace_first_due(
            engines, instance, last, int(engines.due_sequence[instance, last]), int(engines.due[instance, last])
        )
        engine.decoding = last
        engine.context_tokens -= this.prompt_tokens + produced
        if this.expected_tokens - this.prompt_tokens >= this.output_tokens:
            engine.within -= 1
        engines.residues[instance, (this.prompt_tokens + this.offset - 1) % block_size] -= 1
        if engine.prefix_caching == 0:
            engine.free_blocks += _blocks(this.prompt_tokens + produced - 1, block_size)
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
        this = engines.sequences[sequence]
        following = int(this.next_joining)
        if this.streaming == 0:
            this.streaming = 1
            advance(fleet, instance, int(this.expected_tokens), 0, this.prompt_tokens + 1)
            prefilled(fleet, instance, int(this.expected_prompt))
            outcomes[this.request].ttft_s = now_s - this.origin_s
        else:
            advance(fleet, instance, int(this.expected_tokens), this.prompt_tokens + this.produced_tokens, 1)
        this.produced_tokens += 1
        if this.produced_tokens == this.output_tokens:
            if engine.prefix_caching == 0:
                engine.free_blocks += _blocks(int(this.computed_tokens), block_size)
            remove_running(engines, instance, sequence)
            engines.done[done] = sequence
            done += 1
        else:
            _join(engines, instance, sequence)
        sequence = following
    if done > 1:
        sort_by_admission(engines, done)
    if engine.prefix_caching != 0:
        for at in range(done):
            this = engines.sequences[engines.done[at]]
            tokens = int(this.prompt_tokens + this.produced_tokens - 1)
            engine.free_blocks += give_back(engines, instance, int(engines.done[at]), tokens, False)
    return done


@compiled_part
def give(engines: EngineArrays, instance: int, sequence: int, now_s: float, at_now: bool) -> float:
    """Let *sequence* wait at *instance* from *now_s* on; when the instance's next event is, -1 if that did not change.

    A segment is cut at its next boundary if the request might be admitted there. *at_now*: boundaries at *now_s* are over.
    """
    engine = engines.instances[instance]
    push_waiting(engines, instance, sequence, False)
    if engine.phase == IDLE:
        return now_s
    if engine.phase != SEGMENT or engine.first_waiting != sequence or engine.running >= engine.max_num_seqs:
        return -1.0
    this = engines.sequences[sequence]
    missing = _blocks(this.prompt_tokens + this.produced_tokens, engine.block_size_tokens)
    if engine.prefix_caching != 0:
        _, in_use = look_up(engines, instance, sequence)
        missing -= in_use
    if missing > engine.free_blocks:
        return -1.0
    steps = ended_iterations(engines, instance, now_s, at_now) + 1
    if steps >= engine.steps:
        return -1.0
    engine.steps = steps
    return _end_s(engines, instance, steps)
