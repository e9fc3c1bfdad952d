"""Eviction: a sequence leaves its instance for the dispatcher's queue, where it waits again and keeps its output.

vLLM aborts a request between two iterations, so an evicted one still gets the token of the iteration in progress, and its
blocks are free from the next one on. Its computed state is lost: the next instance computes prompt and output again, unless
it is the same one, which offloads KV.
"""

from scheduling.compiled import compiled_internal
from scheduling.simulation.engine.preemption import rebuild, take_blocks_of
from scheduling.simulation.engine.progress import ends_s
from scheduling.simulation.engine.sequences import remove_waiting
from scheduling.simulation.engine.state import LEAVING, NONE, SEGMENT, EngineArrays


@compiled_internal
def evict(engines: EngineArrays, instance: int, sequence: int) -> float:
    """Evict *sequence* from *instance* at the end of the current iteration; return the instance's next event, -1 if
    unchanged.

    A sequence in transit leaves at the end of the first iteration that ends with it there. The fleet arrays must be up to
    date.
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
    """Add the sequences due to leave to the *done* ones in `engines.done`; return how many there are then.

    In order of admission, then of queue key. A sequence that has reached its end is done rather than evicted.
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
            take_blocks_of(engines, instance, sequence, engine.offload_blocks > 0)
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
