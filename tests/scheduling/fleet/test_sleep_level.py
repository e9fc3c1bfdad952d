"""Whose weights stay in CPU memory, over sequences of swaps."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.compiled import uncompiled
from scheduling.fleet.sleep_level import IN_MEMORY, Member, count_swap, sleep_level
from scheduling.simulation.cluster.world import LIFE


class Group:
    """Members of which one is awake, as a live fleet has them and as LIFE records, which the compiled kernel reads."""

    def __init__(self, weights_bytes, memory_bytes):
        self.members = [Member(float(each)) for each in weights_bytes]
        self.records = np.zeros(len(weights_bytes) + 1, LIFE).view(np.recarray)
        self.records["weights_bytes"][:-1], self.records["weights_bytes"][-1] = weights_bytes, 1000.0
        self.records["swap_group"][-1], self.records["in_memory"][-1], self.records["swaps"][-1] = 1, 1, 1e6
        self.memory_bytes, self.awake = float(memory_bytes), 0

    def swap_to(self, target):
        """Return whether the target came from CPU memory."""
        level = uncompiled(sleep_level)(self.members, self.awake, self.memory_bytes)
        assert level == sleep_level(self.records, self.awake, self.memory_bytes)
        warm, self.members[self.awake].in_memory = self.members[target].in_memory, level == IN_MEMORY
        assert sum(each.in_memory * each.weights_bytes for each in self.members) <= self.memory_bytes
        self.members[target].in_memory, self.awake = False, target
        uncompiled(count_swap)(self.members, target)
        self.records["swaps"][:-1] = [each.swaps for each in self.members]
        self.records["in_memory"][:-1] = [each.in_memory for each in self.members]
        return warm


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(0, 30), st.lists(st.integers(0, 4), max_size=40)
)
def test_memory_is_never_exceeded_and_holds_all_that_fit(weights_bytes, memory_bytes, targets):
    group, been = Group(weights_bytes, memory_bytes), {0}
    for target in targets:
        if (target := target % len(weights_bytes)) != group.awake:
            warm = group.swap_to(target)
            assert warm <= (target in been)
            assert warm or target not in been or sum(weights_bytes) > memory_bytes
            been.add(target)


def test_the_one_that_is_needed_most_gets_the_memory_that_another_had_first():
    group = Group([1.0, 1.0, 1.0], 1.0)
    group.swap_to(1)
    assert group.members[0].in_memory, "who falls asleep first has it while no other is needed more"
    came = [group.swap_to(target) for target in [2, 1] * 6 + [0, 1] + [2, 1] * 6]
    assert came == [False] * 12 + [True, False] + [False, True] * 6, "it has it until it wakes, then one of the others"
