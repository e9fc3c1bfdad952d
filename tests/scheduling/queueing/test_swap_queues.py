"""The virtual queue that instances have together which share their GPUs: who stands where, and what is swapped to."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.control.fleet import SwapGroup
from scheduling.control.reordering import Reordering
from scheduling.control.swaps import Swaps, has_groups, slack_s
from scheduling.fleet.arrays import allocate_endpoints, allocate_fleet, index_members
from scheduling.queueing.groups import NONE, put_before, put_first
from scheduling.queueing.reordering.problem import broken_rules
from scheduling.queueing.snapshot import snapshot
from scheduling.queueing.swapping.keeping import kept_queues
from scheduling.queueing.swapping.service import batch_of, drain_s, group_s
from scheduling.queueing.swapping.sharing import COMES, LEAVES, STAYS, WAITS, Swap, note_phase, share_queues
from scheduling.queueing.swapping.timeline import having, place_in_shared
from scheduling.queueing.virtual_queues import insert_loose, may_balance, pull, reassign
from scheduling.queueing.waiting_set import allocate_waiting, enqueue
from scheduling.queueing.waits.waiting_in_queues import ahead_in_queue
from scheduling.queueing.waits.waiting_time import EXPECTED_COLUMNS
from tests.examples import costly
from tests.kernels import from_python
from tests.oracles.swap_queues import PlainGpus, PlainGroup, others_before, place, until_up
from tests.scheduling.queueing.still import Still
from tests.scheduling.queueing.test_groups import living, queue_of

place_in_shared = from_python(place_in_shared)

MODELS = 3
SLEEP_S = {0: 0.5, 1: 1.0, 2: 1.5}
LOAD_S = {0: 1.5, 1: 2.0, 2: 3.5}
SWAP_S = {0: 2.0, 1: 2.5, 2: 4.0}
"""From the first model."""
SHARED = {model: Swap(SLEEP_S[model], LOAD_S[model]) for model in range(MODELS)}
BUSY = SwapGroup("gpus", SWAP_S, awake=0, is_ready=True, ready_s=5.0, in_progress=False, target=NONE)


class Shared:
    """Three models on the same GPUs, the instance of each having its number; the instance 3 serves the first one too."""

    def __init__(self, awake=0, alone=False):
        count = MODELS + alone
        self.fleet, self.endpoints = allocate_fleet(count), allocate_endpoints(MODELS, count)
        self.fleet.endpoint[:] = [0, 1, 2, 0][:count]
        self.fleet.max_num_seqs[:], self.fleet.kv_capacity_tokens[:] = 1, 10_000
        self.fleet.profile[:] = (0.02, 0.0, 1e-4, 0.0, 0.02, 1e-4, 0.0)
        self.wake(awake)
        self.fleet.accepting[MODELS:] = 1
        index_members(self.fleet, self.endpoints)
        self.waiting = allocate_waiting(MODELS, 64, count)
        self.arrays = self.waiting.groups
        self.arrays.limit[:] = 1
        share_queues(self.arrays, [SHARED])

    def wake(self, model):
        self.fleet.accepting[:MODELS] = 0
        if model != NONE:
            self.fleet.accepting[model] = 1

    def ask(self, model, due_s, output=50):
        """Return a group of one request, in no queue yet."""
        slot = enqueue(self.waiting, model, due_s, 0.0, due_s, 0, 10, output, -1, -1, -1, -1)
        return int(self.arrays.members[slot].group)

    def put(self, model, due_s, output=50, pinned=False):
        """Return the same at the end of the queue."""
        group = self.ask(model, due_s, output)
        self.arrays.groups[group].pinned = pinned
        put_before(self.arrays, group, 0, NONE)
        return group

    def swap(self, target, leaves=NONE, up_s=0.0):
        """Start a swap to *target*: *leaves* runs its last requests, or *target* has the GPUs and is up at *up_s*."""
        self.wake(NONE)
        note_phase(self.arrays, target, COMES if leaves == NONE else WAITS, up_s)
        if leaves != NONE:
            note_phase(self.arrays, leaves, LEAVES, 0.0)

    def gpus(self, now_s):
        """Return the state in the plain twin's form."""
        fleet, arrays, models = self.fleet, self.arrays, range(MODELS)
        up = [model for model in models if fleet.accepting[model]]
        coming = [model for model in models if arrays.phase[model] in (WAITS, COMES)]
        leaving = [model for model in models if arrays.phase[model] == LEAVES]
        ready_s = 0.0
        if not up and leaving:
            ready_s = self.drain_s(leaving[0], fleet.running[leaving[0]]) + SLEEP_S[leaving[0]] + LOAD_S[coming[0]]
        elif not up and coming:
            ready_s = max(0.0, arrays.up_s[coming[0]] - now_s)
        return PlainGpus(
            SLEEP_S, LOAD_S, {model: batch_of(fleet, arrays, model) for model in models}, self.drain_s,
            (up or coming or [NONE])[0], ready_s, float(fleet.running[up[0]]) if up else 0.0, not up,
        )  # fmt: skip

    def drain_s(self, model, requests):
        return drain_s(self.fleet, self.arrays, model, float(requests))

    def plain(self, group):
        this = self.arrays.groups[group]
        of, due_s = int(this["endpoint"]), float(self.waiting.key[this["first"]])
        service_s = group_s(self.fleet, self.arrays, group, of)
        return PlainGroup(of, due_s, service_s, int(this["count"]), bool(this["pinned"]))

    def models(self, queue=0):
        return [int(self.arrays.groups[group].endpoint) for group in queue_of(self.waiting, queue)]

    def swap_to(self, now_s=0.0, runs=1, **group):
        """Return what is swapped to while the one that is awake runs a request, and has been ready for 5 s."""
        group = BUSY._replace(**group)
        self.fleet.running[group.awake] = runs
        return next(Swaps(Still(self.fleet, self.endpoints, self.waiting, now_s, [group])).wanted(), None)


drawn_groups = st.lists(
    st.tuples(st.integers(0, MODELS - 1), st.integers(1, 60), st.sampled_from([10, 100, 400]), st.booleans()),
    max_size=9,
)


states = st.tuples(
    st.sampled_from(["up", "leaves", "comes", "nobody"]), st.permutations(range(MODELS)), st.integers(0, 4)
)


def shared_in(state):
    """Return three models on the same GPUs, in that state."""
    phase, (first, second, _), running = state
    shared = Shared(first if phase == "up" else NONE)
    shared.fleet.max_num_seqs[:] = (1, 2, 4)
    if phase == "leaves":
        shared.swap(second, leaves=first)
    elif phase == "comes":
        shared.swap(second, up_s=float(running))
    if phase in ("up", "leaves"):
        shared.fleet.running[first] = running
    return shared


@costly(25, many=300)
@given(drawn_groups, states, st.integers(0, MODELS - 1), st.integers(1, 60))
def test_a_group_goes_where_the_plain_rule_has_it(drawn, state, model, due_s):
    shared = shared_in(state)
    groups = [shared.put(of, due, output, pinned and at < 2) for at, (of, due, output, pinned) in enumerate(drawn)]
    new = shared.ask(model, due_s)

    wait_s, behind, after = place_in_shared(shared.fleet, shared.endpoints, shared.waiting, new, 0, model)
    expected_s, plain_behind, at = place([*map(shared.plain, groups)], shared.plain(new), shared.gpus(0.0))
    assert (groups.index(after) if after != NONE else len(groups)) == at
    assert wait_s == pytest.approx(expected_s)
    assert behind == plain_behind


@costly(50, many=300)
@given(drawn_groups, states, st.integers(0, 9), st.integers(0, MODELS - 1), st.integers(0, 9))
def test_the_work_ahead_of_a_request_follows_the_plain_rule(drawn, state, own, model, now_s):
    shared = shared_in(state)
    groups = [shared.put(of, due, output) for of, due, output, _ in drawn]
    slot = NONE
    if own < len(groups):
        this = shared.arrays.groups[groups[own]]
        slot, model = int(this["first"]), int(this["endpoint"])
    end = own
    if slot == NONE:
        end = max(
            (at + 1 for at, group in enumerate(groups) if shared.plain(group).model == model), default=len(groups)
        )
    before = groups[:end]
    expected = np.random.default_rng(len(drawn)).uniform(1.0, 100.0, (64, EXPECTED_COLUMNS))

    gpus = shared.gpus(float(now_s))
    requests, *tokens, others_s, others_s2, others = ahead_in_queue(
        shared.fleet, shared.endpoints, shared.waiting, expected, slot, model, float(now_s)
    )
    plain = [*map(shared.plain, before)]
    since_s = shared.arrays.up_s[gpus.model] - now_s if gpus.model >= 0 and not gpus.comes else gpus.ready_s
    theirs = [group for group, each in zip(before, plain, strict=True) if each.model == model]
    expected_s, expected_others = others_before(plain, model, gpus, float(since_s))
    assert (requests, others) == (len(theirs), expected_others), "each group has one request"
    np.testing.assert_allclose(tokens, expected[shared.arrays.groups["first"][theirs]].sum(axis=0))
    assert others_s == pytest.approx(expected_s)
    assert (others_s2 > 0.0) == (expected_s > gpus.ready_s), "a swap is not known to the second"


def test_the_holder_of_the_gpus_is_up_at_its_time():
    shared = Shared()
    shared.swap(1, up_s=9.0)
    note_phase(shared.arrays, 1, COMES, 20.0)
    assert having(shared.fleet, shared.arrays, 0, 7.0) == (1, 2.0, 0.0), "it is not put off by being looked at again"
    assert having(shared.fleet, shared.arrays, 0, 12.0) == (1, 0.0, 0.0)
    note_phase(shared.arrays, 1, STAYS, 0.0)
    assert having(shared.fleet, shared.arrays, 0, 12.0) == (NONE, 0.0, 0.0)


def test_a_drain_is_longer_the_more_runs_and_nothing_where_nothing_does():
    shared = Shared()
    shared.fleet.max_num_seqs[:] = 16
    shared.put(0, 60.0, output=50)
    drains_s = [shared.drain_s(0, requests) for requests in (0, 1, 2, 8, 16, 99)]
    assert drains_s[0] == 0.0
    assert drains_s == sorted(drains_s)
    assert drains_s[-1] == drains_s[-2], "no more than a batch runs"
    # 50 tokens of 20.1 ms a step on average, and the prefill of ten.
    assert drains_s[1] == pytest.approx(2.0 * 50 * 0.5 * 0.0201 + 0.02)
    assert until_up([], 1, shared.gpus(0.0)) == 2.5, "nothing runs"


@costly(25, many=100)
@given(drawn_groups, st.integers(0, MODELS - 1))
def test_the_groups_of_one_model_are_put_first(drawn, model):
    shared = Shared()
    groups = [shared.put(of, due, output, pinned) for of, due, output, pinned in drawn]

    expected, run = [], []
    for at, group in enumerate(groups):
        run.append(group)
        if drawn[at][3] or at == len(groups) - 1:
            fixed = [run.pop()] if drawn[at][3] else []
            run.sort(key=lambda one: shared.arrays.groups[one].endpoint != model)
            expected, run = [*expected, *run, *fixed], []
    moved = put_first(shared.arrays, 0, model)
    assert queue_of(shared.waiting, 0) == expected
    assert (moved > 0) == (expected != groups)


@costly(25, many=60)
@given(drawn_groups, st.integers(NONE, MODELS - 1), st.integers(0, 30))
def test_the_solver_counts_swaps_and_loses_no_request(drawn, awake, now_s):
    shared = Shared(awake, alone=True)
    for model, due_s, output, _ in drawn:
        shared.ask(model, due_s, output)
        insert_loose(shared.fleet, shared.endpoints, shared.waiting, model)
    groups = living(shared.waiting)
    seen = snapshot(shared.fleet, shared.endpoints, shared.waiting, float(now_s))
    assert (seen is None) == (not groups)
    if seen is None:
        return
    assert not broken_rules(seen.problem, seen.previous)
    kind = int(seen.problem.queue_type[list(seen.queues).index(0)]) if 0 in seen.queues else None
    if kind is not None:
        assert seen.problem.swap_s[kind].tolist() == list(LOAD_S.values())
    Reordering(Still(shared.fleet, shared.endpoints, shared.waiting, float(now_s)), moves=2_000).act()
    stand = [*queue_of(shared.waiting, 0), *queue_of(shared.waiting, MODELS)]
    assert sorted(stand) == groups
    assert set(shared.models(MODELS)) <= {0}, "the other instance serves the first model alone"
    before = list(stand)
    reassign(shared.fleet, shared.endpoints, shared.waiting)
    assert [*queue_of(shared.waiting, 0), *queue_of(shared.waiting, MODELS)] == before


def test_the_awake_instance_pulls_its_model_and_otherwise_waits_for_the_swap():
    shared = Shared(awake=0)
    shared.put(1, 5.0)
    own = shared.put(0, 60.0)
    assert pull(shared.fleet, shared.endpoints, shared.waiting, 0, 0.0) == (-1, -1)
    assert not may_balance(shared.fleet, shared.endpoints, shared.waiting, 0)
    assert shared.swap_to() is None, "it is busy and was ready 5 s ago: ten times the swap are not over"
    assert queue_of(shared.waiting, 0)[0] == own
    shared.fleet.running[0] = 0
    assert pull(shared.fleet, shared.endpoints, shared.waiting, 0, 0.0)[1] == 0
    shared.wake(1)
    put_first(shared.arrays, 0, 1)
    assert pull(shared.fleet, shared.endpoints, shared.waiting, 1, 0.0)[1] == 1


@pytest.mark.parametrize(
    ("queue", "given", "wanted", "served"),
    [
        ([], {}, None, []),
        ([(0, 5.0)], {}, None, [0]),  # it serves what is first
        ([(2, 5.0)], {"runs": 0, "ready_s": 0.0}, (2, "1 requests wait for m2, and a is idle."), [2]),
        ([(1, 5.0), (0, 60.0)], {"ready_s": 31.0}, (1, ""), [1, 0]),  # past its time, it is given nothing more
        ([(1, 5.0)], {"awake": NONE}, (1, "1 requests wait for m1, and nothing has the GPUs."), [1]),
        ([(1, 5.0), (2, 60.0)], {"awake": 2, "is_ready": False}, None, [2, 1]),  # what starts is served first
        ([(1, 5.0), (0, 60.0)], {"ready_s": 99.0, "at_rest": {2: SWAP_S[2]}}, None, [0, 1]),  # none serves it: put back
        ([(1, 5.0, 50, True), (0, 60.0)], {}, (1, "An operator wants group 0 of m1 served first."), [1, 0]),
    ],
)
def test_what_is_swapped_to(queue, given, wanted, served):
    shared = Shared(0 if given.get("is_ready", True) and given.get("awake", 0) == 0 else NONE)
    for group in queue:
        shared.put(*group)
    made = shared.swap_to(**given)
    assert (made and made[0]) == (wanted and wanted[0])
    assert not wanted or made[1].startswith(wanted[1])
    assert shared.models() == served


def test_a_busy_model_stays_while_the_others_have_time_for_one_more_stay():
    shared = Shared()
    shared.put(1, 60.0)
    shared.put(1, 60.0)  # each takes a second, the swap 2.5, a stay 25
    last_s = slack_s(Still(shared.fleet, shared.endpoints, shared.waiting), 0, 0) - 25.0
    runs_s = shared.drain_s(0, 1)
    assert last_s == pytest.approx(60.0 - 2 * 1.02 - 2.5 - 25.0, abs=0.1)
    assert shared.swap_to(last_s - runs_s - 0.01, ready_s=99.0) is None
    assert shared.swap_to(last_s - runs_s + 0.01, ready_s=99.0)[0] == 1


def test_one_that_failed_leaves_the_queue_and_its_groups_with_it():
    shared = Shared(awake=0)
    shared.put(1, 5.0)
    shared.put(0, 60.0)
    assert share_queues(shared.arrays, [{0: Swap(1.0, 1.0), 2: Swap(0.0, 5.0)}])
    assert not share_queues(shared.arrays, [{0: Swap(1.0, 1.5), 2: Swap(0.0, 5.0)}]), "other seconds move nobody"
    reassign(shared.fleet, shared.endpoints, shared.waiting)
    assert (shared.models(0), shared.models(1)) == ([0], [1])
    assert has_groups(shared.arrays, 1, 1)
    assert share_queues(shared.arrays, [])
    assert shared.arrays.queue_of.tolist() == [0, 1, 2]
    assert np.isinf(shared.arrays.swap_s).all()


def test_while_a_swap_is_in_progress_time_counts_from_its_end():
    shared = Shared(NONE)
    shared.put(1, 60.0)
    shared.put(0, 60.0)
    shared.swap(1, up_s=1.2)
    seen = snapshot(shared.fleet, shared.endpoints, shared.waiting, 0.0)
    assert (seen.problem.loaded.tolist(), seen.problem.free_s.tolist()) == ([1], [1.2])
    shared.wake(1)
    seen = snapshot(shared.fleet, shared.endpoints, shared.waiting, 0.0)
    assert (seen.problem.loaded.tolist(), seen.problem.free_s.tolist()) == ([1], [0.0])
    assert seen.problem.drain_s[0][:2].tolist() == [shared.drain_s(model, 1) + SLEEP_S[model] for model in (0, 1)]
    assert math.isfinite(seen.problem.service_s.max())


class Pair:
    """Two pairs of GPUs, each with an instance of the quick model 0 (awake) and of the slow model 1, and one of model 1
    alone, for which a request waits."""

    def __init__(self, running, waits=True):
        self.fleet, self.endpoints = allocate_fleet(5), allocate_endpoints(2, 5)
        self.fleet.endpoint[:] = [0, 1, 0, 1, 1]
        self.fleet.accepting[:] = [1, 0, 1, 0, 1]
        self.fleet.max_num_seqs[:], self.fleet.kv_capacity_tokens[:] = 8, 10_000
        self.fleet.profile[:] = (0.0, 0.0, 0.0, 0.0, 0.02, 0.0, 0.0)
        self.fleet.profile[[1, 3, 4], 4] = 0.04
        self.fleet.running[[0, 2]] = running
        index_members(self.fleet, self.endpoints)
        self.waiting = allocate_waiting(2, 64, 5)
        self.arrays = self.waiting.groups
        self.arrays.limit[:], self.arrays.mean_tokens[:], self.arrays.mean_output[:] = 1, 60.0, 50.0
        swaps = Swap(0.5, 2.0)
        share_queues(self.arrays, [{0: swaps, 1: swaps}, {2: swaps, 3: swaps}])
        if waits:
            self.ask(1)

    def ask(self, model, due_s=1.0, queue=None):
        slot = enqueue(self.waiting, model, 0.0, 0.0, due_s, 0, 10, 50, -1, -1, -1, -1)
        if queue is not None:
            put_before(self.arrays, int(self.arrays.members[slot].group), queue, NONE)

    def kept(self):
        return kept_queues(self.fleet, self.waiting)


def test_gpus_stay_with_a_model_as_long_as_they_end_more_requests_of_it_than_of_any_that_waits():
    # By Little's law: n requests run where n / (50 steps of 0.02 s) come a second; the slow model has 4 a second of 8.
    assert Pair((3, 1)).kept() == frozenset()  # 4 a second of both together
    assert Pair((3, 2)).kept() == {0}  # 5, which one of them can serve
    assert Pair((2, 3)).kept() == {2}
    assert Pair((8, 4)).kept() == {0}  # 12, of which one serves 8, and 4 are no more than the other model would have
    assert Pair((8, 5)).kept() == {0, 2}


def test_gpus_are_kept_only_from_a_model_that_waits_and_has_some_itself():
    assert Pair((8, 8), waits=False).kept() == frozenset()
    pair = Pair((8, 8))
    pair.ask(0)
    assert pair.kept() == frozenset(), "what waits of the model itself is seen by any order"
    pair = Pair((8, 8))
    pair.fleet.accepting[4] = 0
    assert pair.kept() == frozenset(), "the other one has no GPUs, and would never have any"
    note_phase(pair.arrays, 4, COMES, 1.0)
    assert pair.kept() == frozenset()
    note_phase(pair.arrays, 1, COMES, 1.0)
    assert pair.kept() == {0, 2}


def test_kept_gpus_are_given_away_by_neither_an_order_nor_a_swap():
    pair = Pair((8, 2), waits=False)
    pair.ask(1, 60.0, queue=0)
    assert pair.kept() == {0}
    seen = snapshot(pair.fleet, pair.endpoints, pair.waiting, 0.0)
    assert broken_rules(seen.problem, seen.previous), "it stands where it would not be served"

    still = Still(pair.fleet, pair.endpoints, pair.waiting, 59.0, [BUSY._replace(at_rest={1: 2.5}, ready_s=99.0)])
    assert not list(Swaps(still).wanted())
    pair.fleet.running[0] = 2
    assert pair.kept() == frozenset()
    assert list(Swaps(still).wanted())
    pair.fleet.running[0] = 8
    reordering = Reordering(Still(pair.fleet, pair.endpoints, pair.waiting))
    reordering.act()
    assert reordering.reordered == 1, "though nobody was late"
    assert not queue_of(pair.waiting, 0)
