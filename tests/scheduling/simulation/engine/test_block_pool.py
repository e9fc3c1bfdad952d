from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduling.simulation.engine.block_pool import BlockPool


def test_two_copies_of_one_content_are_forgotten_one_by_one():
    pool = BlockPool(2)
    pool.take(2)
    copies = [pool.publish("x"), pool.publish("x")]
    pool.release(copies)
    pool.take(1)
    assert pool.find(["x"]) == [copies[0]]
    pool.take(1)
    assert pool.find(["x"]) == []


class Conservation(RuleBasedStateMachine):
    """Blocks are never made or lost."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(8)
        self.held = 0
        self.tables = []

    @rule(count=st.integers(0, 5))
    def take(self, count):
        free = self.pool.free
        assert self.pool.take(count) == (count <= free)
        if count <= free:
            self.held += count

    @precondition(lambda self: self.held)
    @rule(content=st.integers(0, 3))
    def publish(self, content):
        self.held -= 1
        self.tables.append([self.pool.publish(content)])

    @precondition(lambda self: self.held)
    @rule()
    def give_back(self):
        self.held -= 1
        self.pool.give_back(1)

    @rule(contents=st.lists(st.integers(0, 3), max_size=3))
    def share(self, contents):
        shared = self.pool.find(contents)
        assert [block.content for block in shared] == contents[: len(shared)]
        self.pool.share(shared)
        self.tables.append(shared)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @invariant()
    def nothing_is_lost(self):
        shared = {block for table in self.tables for block in table}
        assert self.pool.free + self.held + len(shared) == self.pool.capacity


TestConservation = Conservation.TestCase
