"""What operators see of the queues and do to a group, and their commands from elsewhere."""

from contextlib import nullcontext

import pytest
from msgspec import json

from controlplane.dispatch.observation import Observation
from controlplane.dispatch.queues import commands as module
from controlplane.dispatch.queues.commands import Commands, GatewaySilent, Reply
from controlplane.dispatch.queues.operations import GroupAction, QueueOperations, RunAction
from controlplane.dispatch.queues.view import QueuesView
from controlplane.dispatch.snapshot import Snapshot
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Owner
from controlplane.jobs.record import Job
from scheduling.fleet.state import FleetState, Holder, PromptState, joined
from tests.dispatch.test_reordering import Served


@pytest.fixture
def served():
    """One instance that runs one request; groups of three kinds wait for it, the first due first."""
    served = Served(instances=(1,))
    served.ask(60.0)
    for due_s, count in ((100.0, 2), (200.0, 3), (4000.0, 4)):
        for _ in range(count):
            served.ask(due_s, output=400)
    return served


def order(served):
    table = QueuesView(served.dispatcher)()["groups"]
    return list(zip(table["number"], table["count"], strict=True))


def test_groups_are_listed_in_order_with_start_service_and_slack(served):
    tables = QueuesView(served.dispatcher)()
    groups = tables["groups"]
    assert groups["count"] == [2, 3, 4]
    assert groups["place"] == [1, 2, 3]
    assert groups["instance"] == ["i1"] * 3
    first_s = groups["start_s"][0]
    assert 0.0 < first_s <= 2.0  # what runs ends first
    assert groups["start_s"][1] == pytest.approx(first_s + groups["service_s"][0], abs=0.2)
    assert groups["due_s"] == [100.0, 200.0, 4000.0]
    (queues,) = zip(*tables["queues"].values(), strict=True)
    assert dict(zip(tables["queues"], queues, strict=True))["waiting"] == 9
    assert tables["lanes"]["running"] == [1]
    assert tables["lanes"]["waiting"] == [9]


def test_what_will_be_late_is_marked():
    served = Served(instances=(1,))
    for due_s in (60.0, 6.0, 0.0, 3000.0):
        served.ask(due_s, output=100)
    served.now_s = 1.0
    groups = QueuesView(served.dispatcher)()["groups"]
    assert dict(zip(groups["due_s"], groups["risk"], strict=True)) == {-1.0: "late", 5.0: "risk", 2999.0: ""}


def test_another_order_has_counts_and_no_groups():
    served = Served("fcfs", instances=(1,))
    for _ in range(4):
        served.ask(60.0)
    tables = QueuesView(served.dispatcher)()
    assert tables["groups"] == {}
    assert tables["lanes"]["order"] == ["fcfs"]
    assert tables["lanes"]["waiting"] == [None]
    assert tables["queues"]["waiting"] == [3]
    assert tables["queues"]["attainment_ratio"] == [None]


def test_a_bump_stays_first_until_it_is_unpinned(served):
    operations = QueueOperations(served.dispatcher)
    first, second, last = order(served)
    row = operations.act(last[0], GroupAction.BUMP, "olga")
    assert (row["number"], row["place"], row["pinned"]) == (last[0], 3, False)
    assert order(served) == [last, first, second]
    served.ask(1.0)  # due before all others
    served.dispatcher.sweep()
    assert order(served)[0] == last
    change = served.dispatcher.reordering.changes[-1]
    assert (change.by, change.what) == ("olga", f"Bumped group {last[0]}: 4 standard of m")
    operations.act(last[0], GroupAction.UNPIN, "olga")
    assert not QueuesView(served.dispatcher)()["groups"]["pinned"][0]
    assert served.drain()[1:5] == [7, 8, 9, 10]


def test_a_group_that_left_is_refused_in_words(served):
    with pytest.raises(ActionError, match="has left the queue"):
        QueueOperations(served.dispatcher).act(12345, GroupAction.PIN, "olga")


def commands(served, snapshot=None):
    operations, job = QueueOperations(served.dispatcher), Job("j", "gateway", 1.0)
    return Commands("redis://127.0.0.1:1/0", lambda: "", operations, lambda: True, job, snapshot)


def test_a_command_is_answered_or_refused_in_words(served):
    number = order(served)[2][0]
    values = {"number": number, "action": "pin", "operator": "olga"}
    assert commands(served).answer({"command": "act", "values": values}).answer["number"] == number
    assert QueuesView(served.dispatcher)()["groups"]["pinned"] == [False, False, True]
    assert (
        "has left the queue" in commands(served).answer({"command": "act", "values": values | {"number": 99}}).refused
    )
    assert "could not do it" in commands(served).answer({"command": "act", "values": {}}).refused


def test_another_process_reads_the_state_for_a_fork(served):
    """Groups as they stand, and what is pinned; the ages of requests, and when an iteration ended."""
    dispatcher = served.dispatcher
    served.now_s += 5.0
    QueueOperations(dispatcher).act(order(served)[2][0], GroupAction.BUMP, "olga")
    (replica,) = dispatcher.topology.replicas.values()
    replica.request_ended_s = served.now_s - 0.125
    observation = Observation(
        dispatcher.topology, dispatcher.queue.count, dispatcher.outlook, dispatcher.clock, wall_clock=lambda: 0.0
    )
    snapshot = Snapshot(dispatcher, observation, dict, wall_clock=lambda: 0.0)
    sent = json.encode(commands(served, snapshot).answer({"command": "snapshot", "values": {}}))
    seen = json.decode(sent, type=Reply[FleetState]).answer
    assert seen == snapshot()
    assert [(len(one.members), one.pinned) for one in seen.groups.groups] == [(4, True), (2, False), (3, False)]
    assert {one.arrival_s for one in (*seen.running, *seen.waiting)} == {-5.0}
    assert (seen.instances[0].iteration_s, seen.endpoints[0].ordering) == (-0.125, "qlm")


@pytest.mark.parametrize("grouped", [0, 1])
def test_states_of_shards_are_that_of_the_whole_fleet(served, grouped):
    """Whatever refers to an instance, an endpoint or a waiting request by its index refers to the same one."""
    other = Served("fcfs", instances=(1, 2))
    for number in range(5):
        other.ask(60.0, output=10 * number + 10)
    parts = []
    for each, name in ((served, "m"), (other, "n")):
        dispatcher = each.dispatcher
        observation = Observation(
            dispatcher.topology, dispatcher.queue.count, dispatcher.outlook, dispatcher.clock, wall_clock=lambda: 0.0
        )
        state = Snapshot(dispatcher, observation, dict, wall_clock=lambda: 0.0)()
        for one in (*state.instances, *state.endpoints, *state.requests):
            one.model = name
        parts.append(state)
    if grouped == 1:
        parts.reverse()
    parts[1].prompts = [PromptState(b"", 16, holders=[Holder(0, 16, 0)])]
    parts[1].running[0].prompt = 0
    parts[0].prompts = [PromptState(b"x", 16)]
    whole = joined(parts)
    for field in ("instances", "running", "waiting", "endpoints", "held"):
        assert len(getattr(whole, field)) == sum(len(getattr(one, field)) for one in parts)
    assert all(whole.instances[one.instance].model == one.model for one in whole.running)
    assert [one.arrival_s for one in whole.running] == sorted(one.arrival_s for one in whole.running)
    assert [one.model for one in whole.requests if one.prompt is not None and one.prompt == 1] == [
        parts[1].endpoints[0].model
    ]
    assert [whole.instances[each.instance].model for each in whole.prompts[1].holders] == [parts[1].endpoints[0].model]
    assert len(whole.groups.groups) == 3
    for group in whole.groups.groups:
        assert whole.endpoints[group.endpoint].model == whole.instances[group.instance].model == "m"
        assert {whole.waiting[each].model for each in group.members} == {"m"}


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("answering", "error"), [(2, None), (1, "Not every gateway answers"), (0, "No gateway answers")]
)
def test_a_run_is_stopped_where_all_owners_say_so(monkeypatch, answering, error):
    for at in range(2):
        Owner.objects.update_or_create(role=f"shard {at + 1}", defaults={"name": f"web:{at}"})

    def exchange(owner, *_):
        if int(owner[-1]) >= answering:
            raise GatewaySilent("No gateway answers; nothing was done")
        return Reply(3)

    monkeypatch.setattr(module, "_exchange", exchange)
    with pytest.raises(GatewaySilent, match=error) if error else nullcontext():
        assert module.ask_of_run(1, "app", "run", RunAction.STOP) == 6
