"""The global scheduler on the dispatcher's queues: on the event loop and in a thread."""

import asyncio
import threading
from collections import Counter

import pytest

from controlplane import background
from controlplane.console.live.state import rows_of
from controlplane.dispatch import reordering
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, InstanceSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.port import Advanced, Asked, Evict, Finished, Left, Placed, Refused
from controlplane.dispatch.queues.view import QueuesView
from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.planning.execution import rows
from scheduling.policy import EndpointPolicy
from scheduling.queueing.global_scheduler import solve
from tests.gateway.conftest import until


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


async def test_many_groups_are_ordered_in_a_thread_while_requests_come_and_go(late, monkeypatch):
    monkeypatch.setattr(reordering, "AT_ONCE_GROUPS", 1)
    searching, release, calls = threading.Event(), threading.Event(), []

    def search(seen, budget_s):
        calls.append(threading.current_thread())
        searching.set()
        release.wait(10.0)
        return solve(seen, moves=5_000)

    monkeypatch.setattr(reordering, "solve", search)
    scheduler = late.dispatcher.reordering
    scheduler.background = reordering.in_thread
    late.dispatcher.sweep()
    await asyncio.to_thread(searching.wait, 10.0)
    late.dispatcher.sweep()
    late.finish()  # meanwhile who is due first is served
    release.set()
    await until(lambda: scheduler.control.reordered)
    assert [thread is threading.main_thread() for thread in calls] == [False]  # one at a time
    assert scheduler.changes[-1].after_late_s < scheduler.changes[-1].before_late_s
    assert sorted([1, *late.drain()]) == list(range(1, 25))  # the first was done before
    assert not late.refused


async def test_a_search_that_fails_is_followed_by_another(late, monkeypatch, caplog):
    monkeypatch.setattr(reordering, "AT_ONCE_GROUPS", 1)
    calls = []

    def search(seen, budget_s):
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return solve(seen, moves=5_000)

    monkeypatch.setattr(reordering, "solve", search)
    monkeypatch.setattr(background, "dead", Counter())
    late.dispatcher.reordering.background = reordering.in_thread
    late.dispatcher.sweep()
    await until(lambda: background.dead)
    assert background.dead == {"reorder queues": 1}
    late.dispatcher.sweep()
    await until(lambda: late.dispatcher.reordering.control.reordered)


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
