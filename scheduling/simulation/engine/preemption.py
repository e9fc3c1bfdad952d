"""Iterations that need more KV blocks than are free: sequences are preempted, or miss the iteration."""

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled_internal
from scheduling.simulation.engine.kv_room import blocks, place_in_block
from scheduling.simulation.engine.prefix_cache import give_back, publish, settle
from scheduling.simulation.engine.progress import compute, milestone, start_step
from scheduling.simulation.engine.sequences import push_due, push_waiting, remove_running, victim
from scheduling.simulation.engine.state import NONE, PREEMPTIONS, EngineArrays


@compiled_internal
def rebuild(engines: EngineArrays, instance: int, stall: bool) -> None:
    """Rebuild the bookkeeping of the decoding sequences; with *stall*, those without `step_tokens` miss an iteration."""
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
            engines.residues[instance, place_in_block(engine, this.prompt_tokens + this.offset - 1)] += 1
            push_due(engines, instance, engine.decoding, sequence, milestone(engines, sequence, produced) - this.offset)
            engine.decoding += 1
            engine.context_tokens += this.prompt_tokens + produced
            if this.prompt_tokens + produced < this.expected_tokens:
                engine.within += 1
        sequence = int(this.next)


@compiled_internal
def take_blocks_of(engines: EngineArrays, instance: int, sequence: int, returns: bool) -> None:
    """Take the blocks of *sequence*, which stops running; it *returns* if it waits here again."""
    engine, this = engines.instances[instance], engines.sequences[sequence]
    computed = int(this.computed_tokens)
    if this.decoding != 0:
        this.produced_tokens = engine.iteration + this.offset
        computed = this.prompt_tokens + this.produced_tokens - 1
        this.decoding = 0
    if engine.prefix_caching != 0:
        engine.free_blocks += give_back(engines, instance, sequence, int(computed + this.step_tokens), returns)
    else:
        engine.free_blocks += blocks(engine, computed + this.step_tokens)
    this.step_tokens = this.computed_tokens = 0
    if engine.partial == sequence:
        engine.partial = NONE
    remove_running(engines, instance, sequence)


@compiled_internal
def _preempt(engines: EngineArrays, instance: int, sequence: int) -> None:
    """Preempt *sequence*: take its blocks and let it wait and compute all its tokens again."""
    take_blocks_of(engines, instance, sequence, True)
    push_waiting(engines, instance, sequence, True)
    engines.counters[PREEMPTIONS] += 1


@compiled_internal
def schedule_short(engines: EngineArrays, instance: int, outcomes: NDArray[np.void]) -> int:
    """Schedule an iteration that needs more blocks than are free; return how many sequences run.

    Sequences in order of admission, each with a `step_tokens`; one that lacks blocks takes them from victims, and if it is
    itself the victim, those after it get nothing.
    """
    engine = engines.instances[instance]
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
        missing = blocks(engine, computed + tokens) - blocks(engine, computed)
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


@compiled_internal
def step_of_a_part(engines: EngineArrays, instance: int, now_s: float) -> float:
    """Start the iteration scheduled by `schedule_short`; return its end."""
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
                if compute(engines, instance, sequence, int(this.step_tokens)):
                    decodes += 1
                    context += total
                else:
                    prefill += this.step_tokens
        sequence = following
    rebuild(engines, instance, True)
    return start_step(engines, instance, now_s, prefill, decodes, context, 0.0)
