"""What the owner of the queues says of itself, for a fork."""

import pytest
from msgspec import json

from controlplane.dispatch.observation import Observation
from controlplane.dispatch.queues.commands import Commands, Reply
from controlplane.dispatch.queues.operations import GroupAction, QueueOperations
from controlplane.dispatch.snapshot import Snapshot
from controlplane.jobs.record import Job
from scheduling.fleet.state import FleetState
from tests.dispatch.test_reordering import Served


@pytest.fixture
def served():
    """One instance that runs one request; three request groups wait for it."""
    served = Served(instances=(1,))
    served.ask(60.0)
    for due_s, count in ((100.0, 2), (200.0, 3), (4000.0, 4)):
        for _ in range(count):
            served.ask(due_s, output=400)
    served.now_s += 5.0
    return served


@pytest.fixture
def snapshot(served):
    dispatcher = served.dispatcher
    observation = Observation(
        dispatcher.topology, dispatcher.queue.count, dispatcher.outlook, dispatcher.clock, wall_clock=lambda: 0.0
    )
    return Snapshot(dispatcher, observation, dict, wall_clock=lambda: 0.0)


def test_requests_are_seen_with_their_age(served, snapshot):
    seen = snapshot()
    (running,) = seen.running
    assert running.instance == 0
    assert (running.arrival_s, running.placed_s) == (-5.0, -5.0)
    assert running.expected_tokens > running.expected_prompt > 0
    assert len(seen.waiting) == 9
    assert {one.arrival_s for one in seen.waiting} == {-5.0}
    assert [one.predicted_tokens for one in seen.waiting] == [400] * 9


def test_groups_stand_in_their_queues(served, snapshot):
    first = snapshot().groups.groups
    assert [len(one.members) for one in first] == [2, 3, 4]
    assert {one.instance for one in first} == {0}
    QueueOperations(served.dispatcher).act(first[2].number, GroupAction.BUMP, "olga")
    assert [len(one.members) for one in snapshot().groups.groups] == [4, 2, 3]
    assert [one.pinned for one in snapshot().groups.groups] == [True, False, False]


def test_an_iteration_ended_when_a_stream_was_heard_of_or_a_request_ended(served, snapshot):
    (replica,) = served.dispatcher.topology.replicas.values()
    (request,) = replica.requests
    assert snapshot().instances[0].iteration_s is None
    snapshot.report = lambda: {request.asked.number: served.now_s - 0.25, -1: served.now_s}
    assert snapshot().instances[0].iteration_s == -0.25
    replica.request_ended_s = served.now_s - 0.125
    assert snapshot().instances[0].iteration_s == -0.125


def test_another_process_reads_the_same_state(served, snapshot):
    commands = Commands(
        "redis://127.0.0.1:1/0", QueueOperations(served.dispatcher), lambda: True, Job("j", "gateway", 1.0), snapshot
    )
    sent = json.encode(commands.answer({"command": "snapshot", "values": {}}))
    answer = json.decode(sent, type=Reply[FleetState]).answer
    assert answer == snapshot()
    assert answer.endpoints[0].ordering == "qlm"
