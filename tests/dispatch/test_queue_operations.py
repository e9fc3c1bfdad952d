"""What operators see of the queues and do to a group: prices, actions, their way back, and commands from elsewhere."""

import math
from unittest.mock import Mock

import pytest

from controlplane.dispatch.queues.commands import Commands
from controlplane.dispatch.queues.operations import GroupAction, QueueOperations
from controlplane.dispatch.queues.view import UNDO_S, QueuesView
from controlplane.dispatch.wire import GROUP_COLUMNS
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.jobs.record import Job
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
    assert tuple(groups) == GROUP_COLUMNS
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
    assert tables["groups"]["number"] == []
    assert tables["lanes"]["order"] == ["fcfs"]
    assert tables["lanes"]["waiting"] == [None]
    assert tables["queues"]["waiting"] == [3]
    assert tables["queues"]["attainment_ratio"] == [None]


def test_a_price_changes_nothing(served):
    operations = QueueOperations(served.dispatcher)
    before = order(served)
    for number, _ in before:
        for action in operations.possible(number):
            operations.price(number, action, 60.0)
    assert order(served) == before
    groups = served.dispatcher.queue.arrays.groups.groups
    assert not groups["pinned"].any()
    assert not (groups["hold_until_s"] > 0).any()


def test_a_bump_stays_first_and_its_price_is_the_outcome(served):
    operations = QueueOperations(served.dispatcher)
    first, second, last = order(served)
    price = operations.price(last[0], GroupAction.BUMP)
    assert price.later_groups == 2
    assert price.before.start_s > price.after.start_s == 1.0  # what runs ends first
    done = operations.act(last[0], GroupAction.BUMP, "olga")
    assert done["price"]["after"]["start_s"] == 1.0
    assert order(served) == [last, first, second]
    served.ask(1.0)  # due before all others
    served.dispatcher.sweep()
    assert order(served)[0] == last
    change = served.dispatcher.reordering.changes[-1]
    assert (change.by, change.undo) == ("olga", last[0])
    assert served.drain()[1:5] == [7, 8, 9, 10]


def test_a_held_group_lets_others_go_first_and_begins_again_by_itself(served):
    operations = QueueOperations(served.dispatcher)
    first, *_ = order(served)
    price = operations.price(first[0], GroupAction.HOLD, 600.0)
    assert price.after.start_s >= 600.0
    assert price.later_groups == 0
    operations.act(first[0], GroupAction.HOLD, "olga", 600.0)
    served.finish()
    assert served.placed[-1].number == 4
    with pytest.raises(ActionError, match="cannot be held"):
        operations.act(first[0], GroupAction.HOLD, "olga", 60.0)
    operations.act(first[0], GroupAction.RELEASE, "olga")
    served.finish()
    assert served.placed[-1].number == 2


def test_a_hold_has_an_end(served):
    operations = QueueOperations(served.dispatcher)
    for hold_s in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ActionError, match="held for up to 60 min"):
            operations.act(order(served)[0][0], GroupAction.HOLD, "olga", hold_s)


def test_undo_sets_a_group_back_for_half_a_minute(served):
    operations = QueueOperations(served.dispatcher)
    before = order(served)
    operations.act(before[2][0], GroupAction.BUMP, "olga")
    operations.act(before[2][0], GroupAction.UNDO, "olga")
    assert order(served) == before
    assert [change.undo for change in served.dispatcher.reordering.changes] == [None, None]
    with pytest.raises(ActionError, match="Nothing was done"):
        operations.act(before[2][0], GroupAction.UNDO, "olga")
    operations.act(before[1][0], GroupAction.PIN, "olga")
    served.now_s += UNDO_S + 1
    with pytest.raises(ActionError, match="Nothing was done"):
        operations.act(before[1][0], GroupAction.UNDO, "olga")


def test_evicting_removes_the_groups_running_requests_and_puts_it_last(served):
    operations = QueueOperations(served.dispatcher)
    first = order(served)[0]
    assert GroupAction.EVICT not in operations.possible(first[0])
    served.finish()  # one of the first group runs now
    assert GroupAction.EVICT in operations.possible(first[0])
    evicted = []
    served.dispatcher.evict = evicted.append
    done = operations.act(first[0], GroupAction.EVICT, "olga")
    assert done["price"]["evicted"] == 1
    assert evicted == [2]
    assert order(served)[-1][0] == first[0]


def test_a_group_that_left_is_refused_in_words(served):
    with pytest.raises(ActionError, match="has left the queue"):
        QueueOperations(served.dispatcher).act(12345, GroupAction.PIN, "olga")


def test_a_detail_says_whose_requests_wait_and_what_each_action_costs(served):
    operations = QueueOperations(served.dispatcher)
    detail = operations.detail(order(served)[1][0])
    assert detail["tenants"] == [[1, 3]]
    assert (detail["place"], detail["of"]) == (2, 3)
    assert set(detail["prices"]) == {"pin", "bump", "hold"}


def test_a_command_is_answered_or_refused_in_words(served):
    commands = Commands(
        "redis://127.0.0.1:1/0", QueueOperations(served.dispatcher), lambda: True, Job("j", "gateway", 1.0), Mock()
    )
    number = order(served)[2][0]
    values = {"number": number, "action": "pin", "operator": "olga"}
    assert commands.answer({"command": "act", "values": values}).answer["group"]["number"] == number
    assert "cannot be pinned" in commands.answer({"command": "act", "values": values}).refused
    assert commands.answer({"command": "detail", "values": {"number": number}}).answer["pinned"]
    assert "could not do it" in commands.answer({"command": "act", "values": {}}).refused
