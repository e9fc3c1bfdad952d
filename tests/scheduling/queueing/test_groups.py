import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet, index_members
from scheduling.queueing.groups import (
    BY_LENGTH,
    BY_RANK,
    CLASSES,
    FREE_GROUPS,
    GROUP,
    INPUT_EDGES,
    OUTPUT_EDGES,
    limit_of,
)
from scheduling.queueing.swapping.service import due_at, request_s
from scheduling.queueing.virtual_queues import (
    SECOND_DUE,
    defer_late,
    fit_groups,
    head,
    insert_loose,
    may_balance,
    pull,
    reassign,
)
from scheduling.queueing.waiting_set import (
    allocate_waiting,
    enqueue,
    free_slot,
    grow_waiting,
    pop,
    push,
    regroup,
    remove,
    rerank,
)
from tests.examples import costly
from tests.kernels import from_python
from tests.oracles.groups import PlainGroups

limit_of, request_s, defer_late = map(from_python, (limit_of, request_s, defer_late))

LIMIT = 3
TOKEN_S = (2.0**-10, 2.0**-6)
"""Of a prompt and of an output token, exact in sums."""
CLASSES_ASKED = ((0, 1.0), (0, 60.0), (5, np.inf))


def bucket(tokens, edges):
    return sum(tokens >= edge for edge in edges)


def members(waiting, group):
    slots, slot = [], int(waiting.groups.groups[group].first)
    while slot >= 0:
        slots.append(slot)
        slot = int(waiting.groups.members[slot].following)
    return slots


def queue_of(waiting, queue):
    groups, group = [], int(waiting.groups.queues[queue].first)
    while group >= 0:
        groups.append(group)
        group = int(waiting.groups.groups[group].following)
    return groups


def living(waiting):
    return [int(group) for group in np.flatnonzero(waiting.groups.groups["endpoint"] >= 0)]


def fleet_of(count, *, seqs=2, kv=1000):
    """Return *count* instances of one endpoint."""
    fleet, endpoints = allocate_fleet(count), allocate_endpoints(1, count)
    fleet.endpoint[:], fleet.accepting[:] = 0, 1
    fleet.max_num_seqs[:], fleet.kv_capacity_tokens[:] = seqs, kv
    fleet.profile[:] = (0.02, 0.0, 1e-4, 0.0, 0.02, 1e-4, 0.0)
    index_members(fleet, endpoints)
    return fleet, endpoints


def ask(waiting, due_s=60.0, arrival_s=0.0, prompt=10, output=10, priority=0):
    deadline_s = arrival_s + due_s
    key = min(deadline_s, arrival_s + 86_400.0)
    return enqueue(waiting, 0, key, arrival_s, deadline_s, priority, prompt, output, -1, -1, -1, -1)


class GroupsAgainstLists(RuleBasedStateMachine):
    """Whatever waits, leaves or comes back, the groups are those that plain lists have."""

    def __init__(self):
        super().__init__()
        self.waiting = allocate_waiting(1, 4, 2)
        self.waiting.groups.limit[0] = LIMIT
        self.waiting.groups.token_s[0] = TOKEN_S
        self.plain = self.no_groups()
        self.sequence, self.kinds, self.away = {}, {}, []
        self.arrivals = 0

    @rule(
        asked=st.sampled_from(CLASSES_ASKED),
        prompt=st.sampled_from([1, INPUT_EDGES[0], INPUT_EDGES[1] + 5]),
        output=st.sampled_from([1, OUTPUT_EDGES[0]]),
    )
    def arrive(self, asked, prompt, output):
        if self.waiting.counters[0] == 0:
            self.waiting = grow_waiting(self.waiting, self.waiting.key.size + 3)
        priority, due_s = asked
        slot = ask(self.waiting, due_s, float(self.arrivals), prompt, output, priority)
        kind = asked, bucket(prompt, INPUT_EDGES), bucket(output, OUTPUT_EDGES)
        self.sequence[slot], self.kinds[slot] = self.arrivals, kind
        self.plain.join(slot, kind, self.sequence)
        self.arrivals += 1

    def no_groups(self):
        return PlainGroups(LIMIT, self.takes_s, lambda kind: kind[0][1])

    def takes_s(self, slot):
        return self.waiting.prompt_tokens[slot] * TOKEN_S[0] + self.waiting.output_tokens[slot] * TOKEN_S[1]

    def here(self):
        return sorted(set(self.sequence) - set(self.away))

    @precondition(lambda self: self.here())
    @rule(data=st.data())
    def leave(self, data):
        slot = data.draw(st.sampled_from(self.here()))
        assert remove(self.waiting, slot)
        self.plain.leave(slot)
        self.away.append(slot)

    @precondition(lambda self: self.here())
    @rule()
    def first_leaves_for_good(self):
        slot = pop(self.waiting, 0)
        self.plain.leave(slot)
        free_slot(self.waiting, slot)
        del self.sequence[slot]

    @precondition(lambda self: self.away)
    @rule()
    def come_back(self):
        slot = self.away.pop(0)
        push(self.waiting, 0, slot, 1.0)
        self.plain.join(slot, self.kinds[slot], self.sequence)

    @rule()
    def rebuild(self):
        """Rebuild all groups from the waiting requests."""
        made = self.plain.made
        self.plain = self.no_groups()
        self.plain.made = made
        regroup(self.waiting, {0: LIMIT})
        for slot in sorted(self.here(), key=self.sequence.__getitem__):
            self.plain.join(slot, self.kinds[slot], self.sequence)

    @invariant()
    def groups_are_the_same(self):
        arrays = self.waiting.groups
        stands = {int(arrays.groups[group].number): members(self.waiting, group) for group in living(self.waiting)}
        assert stands == {group.number: group.slots for group in self.plain.groups}
        assert arrays.groups.size - arrays.counters[FREE_GROUPS] == len(self.plain.groups)
        for group in living(self.waiting):
            this, slots = arrays.groups[group], members(self.waiting, group)
            assert this.count == len(slots)
            assert this.prompt_tokens == self.waiting.prompt_tokens[slots].sum()
            assert this.output_tokens == self.waiting.output_tokens[slots].sum()


TestGroupsAgainstLists = GroupsAgainstLists.TestCase


def test_a_group_by_length_leaves_shortest_first():
    waiting = allocate_waiting(1, 5)
    waiting.groups.within[0] = BY_LENGTH
    regroup(waiting, {0: 10})
    slots = {output: ask(waiting, output=output) for output in (30, 10, 20)}
    assert members(waiting, living(waiting)[0]) == [slots[10], slots[20], slots[30]]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from([0.5, 60.0, np.inf]), st.sampled_from([10, 5000]), st.integers(1, 700)
        ),
        max_size=60,
    ),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 1), st.booleans()), min_size=3, max_size=3),
    st.integers(1, 2),
)
def test_rebuilt_groups_equal_those_of_requests_joining_one_by_one(requests, endpoints, times):
    """Compare field by field, for endpoints with different limits (0: none), orders within groups, and known times."""
    one, all_at_once = allocate_waiting(3, len(requests) + 1), allocate_waiting(3, len(requests) + 1)
    for at, (limit, within, timed) in enumerate(endpoints):
        one.groups.limit[at] = limit
        for waiting in (one, all_at_once):
            waiting.groups.within[at] = within
            waiting.groups.token_s[at] = (1e-4, 1e-3) if timed else 0.0
    for at, (endpoint, due_s, prompt, output) in enumerate(requests):
        for waiting in (one, all_at_once):
            enqueue(waiting, endpoint, at + due_s, float(at), at + due_s, 0, prompt, output, -1, -1, -1, -1)
    for _ in range(times):  # of what is in groups already, too
        regroup(all_at_once, {at: limit for at, (limit, _, _) in enumerate(endpoints)})
    stands = []
    for waiting in (one, all_at_once):
        fields = [name for name in GROUP.names if name not in ("first", "last", "number")]
        stands.append(
            [
                (members(waiting, group), waiting.groups.groups[fields][group].tolist())
                for group in sorted(living(waiting), key=lambda group: waiting.groups.groups[group].number)
            ]
        )
    assert stands[0] == stands[1]
    for name in ("mean_tokens", "mean_output", "moment_s") if times == 1 else ():
        assert getattr(one.groups, name).tolist() == getattr(all_at_once.groups, name).tolist()


def test_classes_beyond_those_that_are_kept_separate_share_the_last():
    waiting = allocate_waiting(1, CLASSES + 3)
    waiting.groups.limit[0] = 99
    for due in range(CLASSES + 2):
        ask(waiting, due_s=float(due + 1))
    assert len(living(waiting)) == CLASSES


def test_a_group_has_so_many_batches_as_memory_holds():
    fleet, endpoints = fleet_of(2, seqs=8, kv=100)
    waiting = allocate_waiting(1, 4, 2)
    assert limit_of(fleet, endpoints, waiting.groups, 0, 4.0) == 32  # nothing known of lengths
    waiting.groups.mean_tokens[0] = 20.0
    assert limit_of(fleet, endpoints, waiting.groups, 0, 4.0) == 20


def test_a_tight_class_has_smaller_groups():
    fleet, endpoints = fleet_of(2, seqs=64, kv=100_000)
    waiting = allocate_waiting(1, 1200, 2)
    waiting.groups.mean_tokens[0] = 200.0
    waiting.groups.limit[0] = fit_groups(fleet, endpoints, waiting.groups, 0, 4.0)
    each_s = request_s(fleet, 0, 100.0, 100.0)
    np.testing.assert_allclose(waiting.groups.token_s[0] @ (100.0, 100.0), each_s)
    sizes = {}
    for due_s in (0.001, 156 * each_s, 1e6, np.inf):
        before = set(living(waiting))
        for _ in range(300):
            ask(waiting, due_s, prompt=100, output=100)
        new = sorted(set(living(waiting)) - before, key=lambda group: waiting.groups.groups[group].number)
        sizes[due_s] = int(waiting.groups.groups[new[0]].count)
    # One that takes longer than its time; an eighth of what is served in the time; and what there is room for.
    assert list(sizes.values()) == [1, 20, 256, 256]


def test_new_groups_go_by_due_time_where_they_add_the_least_waiting():
    fleet, endpoints = fleet_of(2)
    waiting = allocate_waiting(1, 20, 2)
    waiting.groups.limit[0] = 4
    for due_s in (60.0, 60.0, 1.0, 600.0):
        for _ in range(4):
            ask(waiting, due_s=due_s)
        insert_loose(fleet, endpoints, waiting, 0)
    dues = [[due_at(waiting, group) for group in queue_of(waiting, queue)] for queue in (0, 1)]
    assert dues == [[1.0, 60.0], [60.0, 600.0]] or dues == [[60.0, 600.0], [1.0, 60.0]]


def test_instances_pull_from_their_own_queue_what_is_due_first():
    fleet, endpoints = fleet_of(2)
    waiting = allocate_waiting(1, 20, 2)
    waiting.groups.limit[0] = 1
    late, soon = ask(waiting, due_s=60.0), ask(waiting, due_s=1.0)
    insert_loose(fleet, endpoints, waiting, 0)
    slot, instance = pull(fleet, endpoints, waiting, 0, 0.0)
    assert slot == soon
    fleet.running[instance] = 2
    slot, other = pull(fleet, endpoints, waiting, 0, 0.0)
    assert (slot, other) == (late, 1 - instance)


def test_an_idle_instance_may_take_the_earliest_deadline_but_no_held_or_pinned_group():
    fleet, endpoints = fleet_of(2)
    waiting = allocate_waiting(1, 20, 2)
    waiting.groups.limit[0] = 1
    ask(waiting)
    assert may_balance(fleet, endpoints, waiting, 0, 0.0)
    insert_loose(fleet, endpoints, waiting, 0)
    group = waiting.groups.groups[living(waiting)[0]]
    assert may_balance(fleet, endpoints, waiting, 0, 0.0)
    group.pinned = 1
    assert not may_balance(fleet, endpoints, waiting, 0, 0.0)
    group.pinned, group.hold_until_s = 0, 5.0
    assert not may_balance(fleet, endpoints, waiting, 0, 0.0)
    assert pull(fleet, endpoints, waiting, 0, 0.0) == (-1, -1)
    assert head(waiting.groups, int(group.queue), 5.0) >= 0


def test_what_came_before_its_endpoint_had_groups_may_go_anywhere():
    fleet, endpoints = fleet_of(1)
    waiting = allocate_waiting(1, 1, 1)  # its one group is that which -1 would name
    ask(waiting)
    waiting.groups.groups[0].queue, waiting.groups.groups[0].pinned = 0, 1
    assert may_balance(fleet, endpoints, waiting, 0, 0.0)


def test_groups_of_an_instance_that_dies_go_to_the_others():
    fleet, endpoints = fleet_of(3)
    waiting = allocate_waiting(1, 30, 3)
    waiting.groups.limit[0] = 2
    for _ in range(12):
        ask(waiting)
        insert_loose(fleet, endpoints, waiting, 0)
    dead = queue_of(waiting, 1)
    assert dead
    fleet.accepting[1] = 0
    assert reassign(fleet, endpoints, waiting) == len(dead)
    assert not queue_of(waiting, 1)
    assert sorted(queue_of(waiting, 0) + queue_of(waiting, 2)) == living(waiting)
    assert reassign(fleet, endpoints, waiting) == 0


@costly(30)
@given(st.floats(10, 5000), st.floats(1, 1000), st.integers(1, 64))
def test_a_busy_instance_needs_less_for_a_request_than_an_idle_one(prompt, output, seqs):
    fleet, _ = fleet_of(1, seqs=seqs, kv=100_000)
    alone_s = request_s(fleet, 0, prompt, output)
    fleet.max_num_seqs[0] = 2 * seqs
    assert request_s(fleet, 0, prompt, output) <= alone_s


# What cannot be in time any more


def test_lost_requests_let_those_in_time_go_first():
    """An earlier late request of the same class does not make the next one late."""
    fleet, endpoints = fleet_of(1)
    waiting = allocate_waiting(1, 20, 1)
    waiting.groups.limit[0] = 4
    lost, saved = ask(waiting, due_s=1.0), ask(waiting, due_s=1.0, arrival_s=2.0)
    unpromised = ask(waiting, due_s=np.inf)
    insert_loose(fleet, endpoints, waiting, 0)
    order = []
    while True:
        slot, _ = pull(fleet, endpoints, waiting, 0, 2.5)
        if slot < 0:
            break
        order.append(slot)
        remove(waiting, slot)
    assert order == [saved, lost, unpromised]


def test_no_request_is_put_off_forever():
    """A promise that no instance can keep still precedes those that allow an hour."""
    fleet, endpoints = fleet_of(1)
    waiting = allocate_waiting(1, 20, 1)
    waiting.groups.limit[0] = 4
    hour, tight = ask(waiting, due_s=3600.0), ask(waiting, due_s=0.001)
    insert_loose(fleet, endpoints, waiting, 0)
    slot, _ = pull(fleet, endpoints, waiting, 0, 0.0)
    assert slot == tight
    assert waiting.key[tight] < 1.0
    pull(fleet, endpoints, waiting, 0, 300.0)
    assert waiting.key[tight] == 0.001 * SECOND_DUE**6
    assert waiting.key[hour] == 3600.0


@given(st.lists(st.tuples(st.floats(0.1, 50.0), st.sampled_from([0.5, 5.0, 60.0, np.inf])), min_size=1, max_size=20),
       st.floats(0.0, 200.0), st.integers(0, 19), st.booleans())  # fmt: skip
def test_waiting_requests_are_due_later_than_now_unless_held_or_pinned(rows, now_s, which, pinned):
    fleet, endpoints = fleet_of(2)
    waiting = allocate_waiting(1, 24, 2)
    waiting.groups.limit[0] = 3
    slots = []
    for arrival_s, due_s in sorted(rows):
        slots.append(ask(waiting, due_s, arrival_s))
        insert_loose(fleet, endpoints, waiting, 0)
    before = waiting.key[slots].copy()
    stays = -1
    if pinned:
        group = living(waiting)[which % len(living(waiting))]
        waiting.groups.groups[group].pinned, stays = 1, group
    kept = {slot for slot in slots if waiting.groups.members[slot].group == stays}
    defer_late(fleet, endpoints, waiting, 0, now_s)
    for slot, was in zip(slots, before.tolist(), strict=True):
        assert waiting.key[slot] >= was
        assert slot not in kept or waiting.key[slot] == was
        if not kept and waiting.deadline_s[slot] < np.inf:
            assert waiting.key[slot] >= now_s
    assert sorted(
        slot for queue in (0, 1) for group in queue_of(waiting, queue) for slot in members(waiting, group)
    ) == sorted(slots)


ranked = st.tuples(st.sampled_from([5.0, 20.0, 60.0]), st.sampled_from([1, INPUT_EDGES[0]]), st.integers(0, 9))


@given(
    st.lists(ranked, min_size=2, max_size=20), st.lists(st.tuples(st.integers(0, 19), st.integers(0, 9)), max_size=15)
)
def test_members_leave_by_rank_and_their_group_moves_forward_when_it_is_due_sooner(asked, changes):
    fleet, endpoints = fleet_of(1)
    waiting = allocate_waiting(1, 32, 1)
    waiting.groups.limit[0], waiting.groups.within[0] = LIMIT, BY_RANK
    slots = []
    for at, (due_s, prompt, _) in enumerate(asked):
        slots.append(ask(waiting, due_s, float(at), prompt))
        insert_loose(fleet, endpoints, waiting, 0)
    moves = [(at, rank) for at, (*_, rank) in enumerate(asked)] + [(at % len(asked), rank) for at, rank in changes]
    for at, rank in moves:
        slot = slots[at]
        group = int(waiting.groups.members[slot]["group"])
        before_s = due_at(waiting, group)
        queue = queue_of(waiting, 0)
        rerank(waiting, slot, float(rank))
        after = queue_of(waiting, 0)
        assert sorted(after) == sorted(queue) == sorted(living(waiting))
        assert [one for one in after if one != group] == [one for one in queue if one != group]
        if due_at(waiting, group) >= before_s:
            assert after == queue
        elif (place := after.index(group)) > 0:
            assert due_at(waiting, after[place - 1]) <= due_at(waiting, group)
    for group in living(waiting):
        slots_here = members(waiting, group)
        assert slots_here == sorted(slots_here, key=lambda slot: (waiting.rank[slot], waiting.sequence[slot]))
