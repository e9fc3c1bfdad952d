"""Every move of the state machine, legal and illegal, through the service that makes them."""

import itertools

import pytest

from controlplane.events.models import Event, Severity
from controlplane.fleet.lifecycle.states import MOVES, IllegalMove, InstanceState
from controlplane.fleet.models import Instance
from controlplane.fleet.services import move

S = InstanceState
# Written out by hand, so that a change of MOVES has to be meant.
LEGAL = {
    "provisioning": "loading failed stopped",
    "loading": "ready failed stopped",
    "ready": "draining sleeping failed stopped",
    "draining": "ready donated sleeping failed stopped",
    "donated": "reclaiming draining failed stopped",
    "reclaiming": "ready draining failed stopped",
    "sleeping": "loading failed stopped",
    "stopped": "provisioning",
    "failed": "provisioning loading stopped",
}


@pytest.mark.django_db
def test_every_move(make_instance):
    assert {before: set(after.split()) for before, after in LEGAL.items()} == MOVES
    instance = make_instance()
    for before, after in itertools.product(S, S):
        events = Event.objects.count()
        Instance.objects.update(state=before, state_reason="", failures=0)
        instance.refresh_from_db()
        if after in LEGAL[before].split():
            move(instance, after, actor="test", reason="because")
            assert instance.state == after
            instance.refresh_from_db()
            assert (instance.state, instance.state_reason) == (after, "because")
            event = Event.objects.latest("pk")
            assert Event.objects.count() == events + 1
            assert (event.before, event.after) == ({"state": before}, {"state": after})
            assert event.severity == (Severity.CRITICAL if after == S.FAILED else Severity.INFO)
        else:
            with pytest.raises(IllegalMove, match=f"is {before} and cannot become {after}"):
                move(instance, after, actor="test", reason="because")
            instance.refresh_from_db()
            assert instance.state == before
            assert Event.objects.count() == events


@pytest.mark.sql
@pytest.mark.django_db
def test_a_move_judges_the_row_not_the_object(make_instance):
    stale = make_instance(state=S.READY)
    move(stale._meta.model.objects.get(pk=stale.pk), S.STOPPED, actor="test", reason="x")
    with pytest.raises(IllegalMove):
        move(stale, S.DRAINING, actor="test", reason="x")
