"""The global scheduler on the dispatcher's queues: in this process, by a worker, late, and not at all."""

import asyncio

import msgspec
import numpy as np
import pytest

from controlplane.console.live.state import rows_of
from controlplane.dispatch import reordering, solving
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, InstanceSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.port import Advanced, Asked, Evict, Finished, Left, Placed, Refused
from controlplane.dispatch.queues.view import QueuesView
from controlplane.dispatch.solving import CelerySolver, pack_problem, read_order, unpack_problem
from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.planning.execution import rows
from scheduling.control.reordering import AGAIN_S
from scheduling.policy import EndpointPolicy
from scheduling.queueing.global_scheduler import solve
from scheduling.queueing.reordering.rules import PROGRAMME, SEARCH
from scheduling.queueing.reordering.scheduler import reorder
from scheduling.queueing.snapshot import snapshot


class Served:
    """One model on two instances of one sequence each, and a clock that is set."""

    def __init__(self, ordering="qlm", instances=(1, 2), model="m", region="east", epoch_s=0.0):
        self.model, self.region, self.epoch_s = model, region, epoch_s
        self.now_s = 0.0
        self.placed, self.evicted, self.refused = [], [], []
        self.topology = Topology()
        self.dispatcher = Dispatcher(self.topology, lambda: self.now_s, deliver=self.take)
        self.number = 0
        self.apply(ordering, instances)

    def apply(self, ordering, instances=(1, 2), **knobs):
        policy = EndpointPolicy(ordering=ordering, queue_bound=1000, requests_ahead_limit=0, **knobs)
        self.dispatcher.apply_inventory(
            Inventory(
                models={self.model: ModelSpec(self.model, 4096, 0)},
                endpoints=(
                    EndpointSpec(self.model, self.region, policy),
                ),
                instances=tuple(
                    InstanceSpec(number, f"i{number}", f"http://127.0.0.1:1/{number}", InstanceState.READY, 0.0,
                                 self.model, self.region, "", 1, 4096)
                    for number in instances
                ),
            )
        )  # fmt: skip
        self.dispatcher.pump_all()

    def take(self, record):
        if isinstance(record, Placed):
            self.placed.append(record)
        elif isinstance(record, Evict):
            self.evicted.append(record.number)
        elif isinstance(record, Refused):
            self.refused.append(record.number)

    def ask(self, due_s, output=50):
        self.number += 1
        self.dispatcher.take(
            Asked(self.number, str(self.number), self.model, self.region, 1, 0, due_s, self.epoch_s + self.now_s,
                   self.now_s, 10, output, output, 1, True, slo_class="interactive" if due_s < 60.0 else "standard",
                   evictable=True)
        )  # fmt: skip
        return self.number

    def finish(self):
        """The instance that got work first completes it."""
        self.dispatcher.take(Finished(self.placed.pop(0).number))

    def drain(self):
        order = []
        while self.placed:
            order.append(self.placed[0].number)
            self.finish()
        return order

    def seen(self):
        topology = self.topology
        return snapshot(topology.fleet, topology.arrays, self.dispatcher.queue.arrays, self.now_s)


def served_late():
    """Long answers are due shortly before many short ones: sorted by due time all would be late."""
    served = Served()
    for _ in range(8):
        served.ask(10.0, output=400)
    for _ in range(16):
        served.ask(11.0, output=20)
    return served


@pytest.fixture
def late():
    return served_late()


def test_requests_go_by_groups_and_the_trace_says_so():
    served = Served(instances=(1,))
    served.ask(60.0)
    relaxed, urgent = served.ask(60.0), served.ask(1.0)
    served.finish()
    assert served.placed[-1].number == urgent
    assert served.placed[-1].why.pulled.groups == 2
    served.finish()
    assert served.placed[-1].number == relaxed


def test_another_order_applies_at_once_to_waiting_requests():
    served = Served("fcfs", instances=(1,))
    served.ask(60.0)
    relaxed, urgent = served.ask(60.0), served.ask(1.0)
    served.apply("qlm", instances=(1,))
    served.finish()
    assert served.placed[-1].number == urgent
    late = served.ask(0.5)
    served.apply("fcfs", instances=(1,))
    assert served.dispatcher.queue.group_count == 0
    served.finish()
    assert served.placed[-1].number == relaxed
    assert served.drain()[-1] == late


def test_requests_that_waited_when_the_order_changed_know_their_group():
    served = Served("fcfs", instances=(1,))
    for _ in range(3):
        served.ask(60.0)
    served.apply("qlm", instances=(1,))
    (endpoint,) = served.topology.endpoints
    assert {request.group for request in served.dispatcher.queue.of(endpoint)} == {0}


def test_many_groups_go_to_a_worker_whose_answer_may_be_late_or_missing(late, monkeypatch):
    monkeypatch.setattr(reordering, "IN_PROCESS_GROUPS", 1)
    asked = []
    late.dispatcher.reordering.ask = lambda seen, by, answered: asked.append((seen, answered))
    late.dispatcher.sweep()
    late.dispatcher.sweep()
    assert len(asked) == 1  # one at a time
    seen, answered = asked[0]
    late.finish()
    answered(solve(seen, moves=5_000))
    assert late.dispatcher.reordering.control.reordered
    assert late.dispatcher.reordering.pending_s is None

    late.now_s += AGAIN_S
    late.dispatcher.sweep()
    late.now_s += reordering.PATIENCE_S + 1
    late.dispatcher.sweep()
    assert late.dispatcher.reordering.fallbacks == 1
    late_answer = solve(asked[1][0], moves=100)
    count = late.dispatcher.reordering.control.reordered
    asked[1][1](late_answer)
    assert late.dispatcher.reordering.control.reordered == count
    assert sorted([1, *late.drain()]) == list(range(1, 25))  # the first was done before
    assert not late.refused


def test_what_goes_to_a_worker_comes_back_as_it_was(late):
    seen = late.seen()
    problem, previous = unpack_problem(pack_problem(seen.problem, seen.previous))
    for mine, theirs in zip((*seen.problem, *seen.previous), (*problem, *previous), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    answer = reorder(problem, previous, moves=5_000)
    judged = read_order(msgspec.json.encode(answer.order.queues()), seen)
    for mine, theirs in ((answer.before, judged.before), (answer.after, judged.after)):
        assert (mine.objective, mine.attainment) == (theirs.objective, theirs.attainment)
    assert (judged.changed, judged.shortage.seconds) == (answer.changed, answer.shortage.seconds)


async def test_a_broker_that_is_away_is_an_answer_that_does_not_come(late, monkeypatch):
    monkeypatch.setattr(solving, "send_task", lambda *args, **options: False)
    solver, answered = CelerySolver("redis://127.0.0.1:1/0"), asyncio.get_running_loop().create_future()
    solver.ask(late.seen(), SEARCH, answered.set_result)
    assert await answered is None
    await solver.stop()


def test_what_would_be_late_has_what_can_wait_leave_and_says_at_what_price():
    served = Served(instances=(1,))
    served.apply("qlm", instances=(1,), eviction_limit=1)
    batch = served.ask(3600.0, output=2000)
    served.dispatcher.take(Advanced(((batch, 100),)))
    served.ask(2.0)
    served.now_s = 1.0
    served.dispatcher.sweep()
    assert served.evicted == [batch]
    (evicted,) = served.dispatcher.reordering.evicted
    assert (evicted.instance, evicted.requests, evicted.evicted_requests, evicted.lost_tokens) == ("i1", 1, 1, 110)
    assert evicted.gain_s > 30 > 1 > evicted.cost_s > 0
    change = served.dispatcher.reordering.changes[-1]
    assert change.why == "1 interactive of group 1 would be late behind what runs on i1"
    assert change.what.startswith("1 evicted: 3")
    served.now_s = 2.0
    served.dispatcher.sweep()
    assert len(served.evicted) == 1, "it is on its way out"
    served.dispatcher.take(Left(batch, again=True, evicted=True, kept_tokens=101))
    assert served.placed[-1].number == 2
    served.now_s += 4000.0  # longer than requests are held
    served.dispatcher.sweep()
    assert len(served.dispatcher.queue) == 1
    served.placed = served.placed[-1:]
    assert served.drain() == [2, batch]


@pytest.mark.django_db
def test_an_eviction_is_an_event_with_its_price():
    evicted = reordering.Evicted("m", "east", "i1", 7, "interactive", 2, 3, 4.5, 0.25, 900)
    rows.record_evictions.__wrapped__([evicted])
    event = Event.objects.get(kind="queue.evicted")
    assert event.reason == (
        "2 interactive of group 7 would be late behind what runs on i1. "
        "3 evicted: 4.5 s of lateness less, for 900 tokens (0.25 s) computed again."
    )
    assert (event.inputs["gain_s"], event.inputs["cost_s"]) == (4.5, 0.25)


def answering(late):
    """A worker's task answered at once by the worker's code, as text."""
    asked = []

    def ask(seen, by, answered):
        asked.append((seen, by))
        answer = reorder(*unpack_problem(pack_problem(seen.problem, seen.previous)), 0.05, by=by)
        answered(read_order(msgspec.json.encode(answer.order.queues()), seen))

    late.dispatcher.reordering.ask = ask
    return asked


def test_the_programme_in_place_of_the_search_is_solved_by_a_worker(late):
    late.topology.tuned = late.topology.tuned.model_copy(update={"REORDER_BY": "programme"})
    late.dispatcher.sweep()
    assert late.dispatcher.reordering.changes[-1].by == "in process"  # nobody to ask: the search
    late.now_s += AGAIN_S
    asked = answering(late)
    late.dispatcher.sweep()
    assert [by for _, by in asked] == [PROGRAMME]
    assert sorted(late.drain()) == list(range(1, 25))


def test_lost_requests_are_shown_as_late_despite_another_due_time():
    served = Served(instances=(1,))
    for _ in range(4):
        served.ask(5.0)
    served.now_s = 6.0
    served.dispatcher.pump_all()
    tables = QueuesView(served.dispatcher)()
    (group,) = rows_of(tables["groups"])
    assert (group["count"], group["risk"], group["slack_s"]) == (3, "late", -1.0)
    assert group["due_s"] > 0.0
    (row,) = rows_of(tables["queues"])
    assert (row["late_requests"], row["attainment_ratio"]) == (3, 0.0)
