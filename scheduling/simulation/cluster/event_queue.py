"""Next event: a tournament over nodes, each with one time. Infinity means never.

Ties go to the lowest node, so that the order of simultaneous events does not depend on earlier ones.

The leaves of the tree are the nodes' times, and every inner place holds the earlier of its two children: a change moves up
from one leaf, always over the same number of places. In a heap, a node whose time increases (nearly all do) sinks along a
path that no processor can predict.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import compiled, compiled_inline, index
from scheduling.struct_of_arrays import struct_of_arrays


@struct_of_arrays
class EventTree(NamedTuple):
    """Twice as many places as leaves, a power of two: place 1 is the next event, the children of p are 2p and 2p + 1."""

    time_s: NDArray[np.float64]
    node: NDArray[np.int32]


def allocate_events(nodes: int) -> EventTree:
    """Return a queue in which *nodes* have no event."""
    leaves = 1 << (nodes - 1).bit_length()
    node = np.zeros(2 * leaves, np.int32)
    node[leaves:] = np.arange(leaves)
    return EventTree(np.full(2 * leaves, np.inf), node)


def _set_time(events: EventTree, node: int, time_s: float) -> None:
    """Set the time of *node*. O(log nodes)."""
    times, nodes = events.time_s, events.node
    at = index((times.size >> 1) + node)
    times[at] = time_s
    while at > 1:
        other = index(at ^ 1)
        other_s, other_node = times[other], nodes[other]
        # Branch-free, for no processor could predict the branches: a minimum, and a selection.
        before = (other_s < time_s) | ((other_s <= time_s) & (other < at))
        node = other_node if before else node
        time_s = min(time_s, other_s)
        at = index(at >> 1)
        times[at], nodes[at] = time_s, node


set_time = compiled_inline(_set_time)
reset_time = compiled(_set_time)
"""The same, for callers in Python."""
