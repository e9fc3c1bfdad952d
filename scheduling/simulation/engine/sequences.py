"""Lists and heap of an engine's sequences: running, waiting, joining, and due."""

from scheduling.compiled import compiled_inline, index
from scheduling.simulation.engine.state import FREE_SEQUENCES, NONE, EngineArrays


@compiled_inline
def take_sequence(engines: EngineArrays) -> int:
    """Return a record for another request. There is always one: a fleet holds no more than its limits allow."""
    free = index(engines.counters[FREE_SEQUENCES] - 1)
    engines.counters[FREE_SEQUENCES] = free
    return index(engines.free_sequences[free])


@compiled_inline
def free_sequence(engines: EngineArrays, sequence: int) -> None:
    free = index(engines.counters[FREE_SEQUENCES])
    engines.free_sequences[free] = sequence
    engines.counters[FREE_SEQUENCES] = free + 1


@compiled_inline
def append_running(engines: EngineArrays, instance: int, sequence: int) -> None:
    """Admit *sequence*: it runs, last in the order of admission."""
    engine, this = engines.instances[instance], engines.sequences[sequence]
    last = engine.last_running
    this.previous, this.next = last, NONE
    if last == NONE:
        engine.first_running = sequence
    else:
        engines.sequences[index(last)].next = sequence
    engine.last_running = sequence
    engine.running += 1
    this.admission = engine.admissions
    engine.admissions += 1


@compiled_inline
def remove_running(engines: EngineArrays, instance: int, sequence: int) -> None:
    engine, this = engines.instances[instance], engines.sequences[sequence]
    before, after = this.previous, this.next
    if before == NONE:
        engine.first_running = after
    else:
        engines.sequences[index(before)].next = after
    if after == NONE:
        engine.last_running = before
    else:
        engines.sequences[index(after)].previous = before
    engine.running -= 1


@compiled_inline
def _key_before(engines: EngineArrays, one: int, other: int) -> bool:
    """Whether *one* comes before *other* by priority."""
    a, b = engines.sequences[one], engines.sequences[other]
    if a.priority != b.priority:
        return bool(a.priority < b.priority)
    return bool(a.number < b.number)


@compiled_inline
def push_waiting(engines: EngineArrays, instance: int, sequence: int, again: bool) -> None:
    """Queue *sequence* in the engine, before those that the front end has not read; *again* after a preemption, which
    puts it first unless priority decides.
    """
    engine, this = engines.instances[instance], engines.sequences[sequence]
    before, after = int(engine.last_waiting), int(engine.first_unread)
    if after != NONE:
        before = int(engines.sequences[index(after)].previous)
    if engine.by_priority != 0:
        while before != NONE and _key_before(engines, sequence, before):
            after = before
            before = int(engines.sequences[before].previous)
    elif again:
        before, after = NONE, int(engine.first_waiting)
    this.previous, this.next = before, after
    if before == NONE:
        engine.first_waiting = sequence
    else:
        engines.sequences[index(before)].next = sequence
    if after == NONE:
        engine.last_waiting = sequence
    else:
        engines.sequences[index(after)].previous = sequence
    engine.waiting += 1


@compiled_inline
def push_unread(engines: EngineArrays, instance: int, sequence: int) -> None:
    """Queue *sequence* in the front end, last."""
    engine, this = engines.instances[instance], engines.sequences[sequence]
    this.previous, this.next = engine.last_waiting, NONE
    if engine.last_waiting == NONE:
        engine.first_waiting = sequence
    else:
        engines.sequences[index(engine.last_waiting)].next = sequence
    engine.last_waiting = sequence
    engine.waiting += 1
    if engine.first_unread == NONE:
        engine.first_unread = sequence


@compiled_inline
def pop_waiting(engines: EngineArrays, instance: int) -> int:
    """Remove and return the first; the queue must not be empty."""
    engine = engines.instances[instance]
    sequence = index(engine.first_waiting)
    after = engines.sequences[sequence].next
    engine.first_waiting = after
    if after == NONE:
        engine.last_waiting = NONE
    else:
        engines.sequences[index(after)].previous = NONE
    engine.waiting -= 1
    return sequence


@compiled_inline
def remove_waiting(engines: EngineArrays, instance: int, sequence: int) -> None:
    """Remove *sequence* from any position of the queue."""
    engine, this = engines.instances[instance], engines.sequences[sequence]
    before, after = this.previous, this.next
    if engine.first_unread == sequence:
        engine.first_unread = after
    if before == NONE:
        engine.first_waiting = after
    else:
        engines.sequences[index(before)].next = after
    if after == NONE:
        engine.last_waiting = before
    else:
        engines.sequences[index(after)].previous = before
    engine.waiting -= 1


@compiled_inline
def read(engines: EngineArrays, instance: int, most: int) -> None:
    """Move up to *most* requests, in order of arrival, from the front end to the engine's queue."""
    engine = engines.instances[instance]
    while most > 0 and engine.first_unread != NONE:
        sequence = index(engine.first_unread)
        if engine.by_priority != 0:
            remove_waiting(engines, instance, sequence)
            push_waiting(engines, instance, sequence, False)
        else:
            engine.first_unread = engines.sequences[sequence].next
        most -= 1


@compiled_inline
def append_joining(engines: EngineArrays, instance: int, sequence: int) -> None:
    """Add *sequence* to those that get a token at the end of this step, and decode from then on."""
    engine = engines.instances[instance]
    engines.sequences[sequence].next_joining = NONE
    if engine.joining == NONE:
        engine.joining = sequence
    else:
        engines.sequences[index(engine.last_joining)].next_joining = sequence
    engine.last_joining = sequence


@compiled_inline
def push_due(engines: EngineArrays, instance: int, at: int, sequence: int, iteration: int) -> None:
    """Add *sequence* to the heap of those due, which has *at* entries without it."""
    due, sequences = engines.due[instance], engines.due_sequence[instance]
    while at > 0:
        parent = index((at - 1) >> 1)
        if due[parent] <= iteration:
            break
        due[at], sequences[at] = due[parent], sequences[parent]
        at = parent
    due[at], sequences[at] = iteration, sequence


@compiled_inline
def replace_first_due(engines: EngineArrays, instance: int, size: int, sequence: int, iteration: int) -> None:
    """Replace the first entry of a heap of *size* by (*iteration*, *sequence*)."""
    due, sequences = engines.due[instance], engines.due_sequence[instance]
    at = 0
    while True:
        child = index(2 * at + 1)
        if child >= size:
            break
        if child + 1 < size and due[index(child + 1)] < due[child]:
            child = index(child + 1)
        if due[child] >= iteration:
            break
        due[at], sequences[at] = due[child], sequences[child]
        at = child
    due[at], sequences[at] = iteration, sequence


@compiled_inline
def victim(engines: EngineArrays, instance: int) -> int:
    """Return the sequence that loses its blocks: the last admitted, or by priority the one with the last queue key."""
    engine = engines.instances[instance]
    last = int(engine.last_running)
    if engine.by_priority != 0:
        other = int(engines.sequences[last].previous)
        while other != NONE:
            if _key_before(engines, last, other):
                last = other
            other = int(engines.sequences[other].previous)
    return last


@compiled_inline
def sort_by_admission(engines: EngineArrays, count: int) -> None:
    """Sort the first *count* of `engines.done` by admission, the order in which tokens come out."""
    done = engines.done
    for at in range(1, count):
        sequence = done[at]
        admission = engines.sequences[sequence].admission
        while at > 0 and engines.sequences[done[at - 1]].admission > admission:
            done[at] = done[at - 1]
            at -= 1  # noqa: PLW2901
        done[at] = sequence
