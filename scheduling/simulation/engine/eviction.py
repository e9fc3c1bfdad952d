"""Eviction: a sequence leaves its instance for the dispatcher's queue, where it waits again with what it has emitted.

vLLM aborts a request between two iterations, so one that is to leave gets the token of the iteration in progress, and its
blocks are free from the next one on. What it had computed is lost: the next instance computes prompt and output again.
"""

from scheduling.compiled import compiled_internal
from scheduling.simulation.engine.preemption import rebuild, take_blocks_of
from scheduling.simulation.engine.progress import ends_s
from scheduling.simulation.engine.sequences import remove_waiting
from scheduling.simulation.engine.state import LEAVING, NONE, SEGMENT, EngineArrays


@compiled_internal
def evict(engines: EngineArrays, instance: int, sequence: int) -> float:
    """Have *sequence* leave *instance* at the end of the iteration in progress: when the instance's next event is, -1 if
    that did not change.

    One that is on its way leaves at the end of the first iteration that ends with it there. The fleet arrays must be up to
    the moment.
    """
    engine = engines.instances[instance]
    engines.sequences[sequence].evicted = 1
    engine.leaving += 1
    engines.counters[LEAVING] += 1
    steps = engine.counted + 1
    if engine.phase != SEGMENT or steps >= engine.steps:
        return -1.0
    engine.steps = steps
    return ends_s(engines, instance, steps)


@compiled_internal
def take_evicted(engines: EngineArrays, instance: int, done: int) -> int:
    """Add those that are to leave now to the *done* sequences in `engines.done`: how many there are then.

    In order of admission, then of queue key. One that has come to its end is done rather than evicted.
    """
    engine, left = engines.instances[instance], done
    for at in range(done):
        this = engines.sequences[engines.done[at]]
        engine.leaving -= this.evicted
        engines.counters[LEAVING] -= this.evicted
        this.evicted = 0
    sequence = int(engine.first_running)
    while sequence != NONE:
        this = engines.sequences[sequence]
        following = int(this.next)
        if this.evicted != 0:
            this.step_tokens = 0
            take_blocks_of(engines, instance, sequence, False)
            engines.done[left] = sequence
            left += 1
        sequence = following
    if left > done:
        rebuild(engines, instance, False)
    sequence = int(engine.first_waiting)
    while sequence != NONE:
        this = engines.sequences[sequence]
        following = int(this.next)
        if this.evicted != 0:
            remove_waiting(engines, instance, sequence)
            engines.done[left] = sequence
            left += 1
        sequence = following
    engine.leaving -= left - done
    engines.counters[LEAVING] -= left - done
    return left
