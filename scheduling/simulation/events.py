"""When something happens next: an indexed binary heap over nodes, each with one time. Infinity means never.

Ties go to the lowest node, so that the order of events at one moment does not hang on what happened before.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_part


class EventHeap(NamedTuple):
    """One element a node."""

    time_s: NDArray[np.float64]
    heap: NDArray[np.int32]
    """Nodes in heap order: `heap[0]` is next."""
    position: NDArray[np.int32]
    """Where a node stands in `heap`."""


def allocate_events(nodes: int) -> EventHeap:
    """*nodes* that never happen."""
    return EventHeap(np.full(nodes, np.inf), np.arange(nodes, dtype=np.int32), np.arange(nodes, dtype=np.int32))


def _set_time(events: EventHeap, node: int, time_s: float) -> None:
    """Let *node* happen at *time_s* instead. O(log nodes)."""
    times, heap, position = events.time_s, events.heap, events.position
    before_s = times[node]
    times[node] = time_s
    at = position[node]
    if time_s < before_s:
        while at > 0:
            parent = (at - 1) >> 1
            above = heap[parent]
            if times[above] < time_s or (times[above] == time_s and above < node):
                break
            heap[at] = above
            position[above] = at
            at = parent
    else:
        size = heap.size
        while True:
            child = 2 * at + 1
            if child >= size:
                break
            below = heap[child]
            if child + 1 < size:
                other = heap[child + 1]
                if times[other] < times[below] or (times[other] == times[below] and other < below):
                    child, below = child + 1, other
            if times[below] > time_s or (times[below] == time_s and below > node):
                break
            heap[at] = below
            position[below] = at
            at = child
    heap[at] = node
    position[node] = at


set_time = compiled_part(_set_time)
reset_time = compiled(_set_time)
"""The same, for callers in Python."""
