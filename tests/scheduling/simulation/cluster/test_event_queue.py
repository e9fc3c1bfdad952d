import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scheduling.simulation.cluster.event_queue import allocate_events, reset_time

TIMES = st.sampled_from([0.0, 1.0, 1.5, 2.0, math.inf])


@given(
    nodes=st.integers(1, 20),
    changes=st.lists(st.tuples(st.integers(0, 19), TIMES), max_size=40),
)
def test_the_earliest_is_next_and_of_equals_the_lowest_node(nodes, changes):
    events, plain = allocate_events(nodes), [math.inf] * nodes
    for number, time_s in changes:
        node = number % nodes
        plain[node] = time_s
        reset_time(events, node, time_s)
        next_s = min(plain)
        assert events.time_s[1] == next_s
        if next_s < math.inf:
            assert events.node[1] == plain.index(next_s)


def test_nothing_happens_at_first():
    assert np.isinf(allocate_events(3).time_s).all()
