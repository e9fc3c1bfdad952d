"""What the owner of the queues says of itself, for a fork."""

import orjson
import pytest

from controlplane.dispatch.floor import Observation
from controlplane.dispatch.live_fleet.topology import Ended
from controlplane.dispatch.queues.commands import Commands
from controlplane.dispatch.queues.operations import GroupAction, QueueOperations
from controlplane.dispatch.snapshot import Snapshot
from controlplane.jobs.record import Job
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
    return Snapshot(dispatcher, observation, dict)


def test_all_that_runs_and_waits_is_there_with_its_age(served, snapshot):
    seen = snapshot()
    (running,) = seen["running"]
    assert running["instance"] == 0
    assert (running["arrival_s"], running["placed_s"]) == (-5.0, -5.0)
    assert running["expected_tokens"] > running["expected_prompt"] > 0
    assert len(seen["waiting"]) == 9
    assert {row["arrival_s"] for row in seen["waiting"]} == {-5.0}
    assert [row["expected_output"] for row in seen["waiting"]] == [400] * 9


def test_groups_stand_as_they_do(served, snapshot):
    operations = QueueOperations(served.dispatcher)
    first = snapshot()["groups"]["groups"]
    ranked = sorted(first, key=lambda row: row["rank"])
    assert [len(row["members"]) for row in ranked] == [2, 3, 4]
    assert {row["instance"] for row in ranked} == {0}
    operations.act(ranked[2]["number"], GroupAction.BUMP, "olga")
    again = sorted(snapshot()["groups"]["groups"], key=lambda row: row["rank"])
    assert [len(row["members"]) for row in again] == [4, 2, 3]
    assert [row["pinned"] for row in again] == [True, False, False]


def test_an_iteration_ended_when_a_stream_was_heard_of_or_a_request_ended(served, snapshot):
    (replica,) = served.dispatcher.topology.replicas.values()
    (request,) = replica.requests
    assert snapshot()["instances"][0]["iteration_s"] is None
    snapshot.report = lambda: {request.asked.number: served.now_s - 0.25, -1: served.now_s}
    assert snapshot()["instances"][0]["iteration_s"] == -0.25
    replica.ended.append(Ended(served.now_s - 1.0, served.now_s - 0.125, 10, 5))
    assert snapshot()["instances"][0]["iteration_s"] == -0.125


def test_another_process_is_answered_with_it(served, snapshot):
    commands = Commands(
        "redis://127.0.0.1:1/0", QueueOperations(served.dispatcher), lambda: True, Job("j", "gateway", 1.0), snapshot
    )
    answer = orjson.loads(orjson.dumps(commands.answer({"command": "snapshot", "values": {}})))["answer"]
    assert {"at", "instances", "running", "waiting", "endpoints", "groups", "swept_s"} == set(answer)
    assert answer["endpoints"][0]["ordering"] == "qlm"
