"""Every move of the state machine, legal and illegal, through the service that makes them."""

import itertools

import pytest

from controlplane.events.models import Event, Severity
from controlplane.fleet.lifecycle.states import (
    ACTION_STATES,
    MOVES,
    Action,
    ActionError,
    IllegalMove,
    InstanceState,
    check_action,
)
from controlplane.fleet.models import Instance
from controlplane.fleet.services import move

S = InstanceState
# Written out by hand, so that a change of MOVES has to be meant.
LEGAL = {
    (S.PROVISIONING, S.LOADING),
    (S.PROVISIONING, S.FAILED),
    (S.PROVISIONING, S.STOPPED),
    (S.LOADING, S.READY),
    (S.LOADING, S.FAILED),
    (S.LOADING, S.STOPPED),
    (S.READY, S.DRAINING),
    (S.READY, S.SLEEPING),
    (S.READY, S.FAILED),
    (S.READY, S.STOPPED),
    (S.DRAINING, S.READY),
    (S.DRAINING, S.DONATED),
    (S.DONATED, S.RECLAIMING),
    (S.DONATED, S.DRAINING),
    (S.DONATED, S.STOPPED),
    (S.DONATED, S.FAILED),
    (S.RECLAIMING, S.READY),
    (S.RECLAIMING, S.DRAINING),
    (S.RECLAIMING, S.STOPPED),
    (S.RECLAIMING, S.FAILED),
    (S.DRAINING, S.SLEEPING),
    (S.DRAINING, S.STOPPED),
    (S.DRAINING, S.FAILED),
    (S.SLEEPING, S.LOADING),
    (S.SLEEPING, S.STOPPED),
    (S.SLEEPING, S.FAILED),
    (S.STOPPED, S.PROVISIONING),
    (S.FAILED, S.PROVISIONING),
    (S.FAILED, S.LOADING),
    (S.FAILED, S.STOPPED),
}


@pytest.mark.django_db
def test_every_move(make_instance):
    instance = make_instance()
    for before, after in itertools.product(S, S):
        events = Event.objects.count()
        Instance.objects.update(state=before, state_reason="", failures=0)
        instance.refresh_from_db()
        if (before, after) in LEGAL:
            move(instance, after, actor="test", reason="because")
            assert instance.state == after
            instance.refresh_from_db()
            assert (instance.state, instance.state_reason) == (after, "because")
            event = Event.objects.latest("pk")
            assert Event.objects.count() == events + 1
            assert (event.before, event.after) == ({"state": before}, {"state": after})
            assert event.severity == (Severity.CRITICAL if after == S.FAILED else Severity.INFO)
        else:
            with pytest.raises(IllegalMove) as caught:
                move(instance, after, actor="test", reason="because")
            assert before in str(caught.value)
            assert after in str(caught.value)
            instance.refresh_from_db()
            assert instance.state == before
            assert Event.objects.count() == events


def test_the_table_is_the_machine():
    assert {(before, after) for before, afters in MOVES.items() for after in afters} == LEGAL


def test_every_state_can_be_left_and_reached():
    assert all(MOVES[state] for state in S)
    assert {after for afters in MOVES.values() for after in afters} == set(S)


@pytest.mark.sql
@pytest.mark.django_db
def test_a_move_judges_the_row_not_the_object(make_instance):
    stale = make_instance(state=S.READY)
    move(stale._meta.model.objects.get(pk=stale.pk), S.STOPPED, actor="test", reason="x")
    with pytest.raises(IllegalMove):
        move(stale, S.DRAINING, actor="test", reason="x")


def test_actions_are_refused_in_words():
    for action, state in itertools.product(Action, S):
        if state in ACTION_STATES[action]:
            check_action("x-1", action, state)
        else:
            with pytest.raises(ActionError, match=f"x-1 is {state}: {action} is for an instance that is "):
                check_action("x-1", action, state)
