"""When something happens next: a tournament over nodes, each with one time. Infinity means never.

Ties go to the lowest node, so that the order of events at one moment does not hang on what happened before.

A tree whose leaves are the nodes' times, and in which every place above holds the earlier of the two below it: a change
goes up from one leaf, over as many places every time. In a heap a node that gets a later time (nearly all do) sinks a way
that no processor can predict.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, index
from scheduling.struct_of_arrays import struct_of_arrays


@struct_of_arrays
class EventTree(NamedTuple):
    """Twice as many places as there are leaves, a power of two: place 1 is what happens next, p is over 2p and 2p + 1."""

    time_s: NDArray[np.float64]
    node: NDArray[np.int32]


def allocate_events(nodes: int) -> EventTree:
    """*nodes* that never happen."""
    leaves = 1 << (nodes - 1).bit_length()
    node = np.zeros(2 * leaves, np.int32)
    node[leaves:] = np.arange(leaves)
    return EventTree(np.full(2 * leaves, np.inf), node)


def _set_time(events: EventTree, node: int, time_s: float) -> None:
    """Let *node* happen at *time_s* instead. O(log nodes)."""
    times, nodes = events.time_s, events.node
    at = index((times.size >> 1) + node)
    times[at] = time_s
    while at > 1:
        other = index(at ^ 1)
        other_s, other_node = times[other], nodes[other]
        # Nothing here is a branch, for no processor could predict it: a minimum, and one number or the other.
        before = (other_s < time_s) | ((other_s <= time_s) & (other < at))
        node = other_node if before else node
        time_s = min(time_s, other_s)
        at = index(at >> 1)
        times[at], nodes[at] = time_s, node


set_time = compiled_inline(_set_time)
reset_time = compiled(_set_time)
"""The same, for callers in Python."""
