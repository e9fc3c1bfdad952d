"""Plans that an operator approved, carried out: to the targets, in several passes if need be, and to an end."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.events.models import Event, Severity
from controlplane.fleet.models import Instance, Node
from controlplane.fleet.states import InstanceState
from controlplane.planning import live, rollout, services
from controlplane.planning.models import MoveSource, PlanStatus, ScalingMove, ScalingPlan

pytestmark = pytest.mark.django_db
S = InstanceState


@pytest.fixture(autouse=True)
def no_load(monkeypatch):
    monkeypatch.setattr(live, "read", lambda: None)
    monkeypatch.setattr(services, "hurry", lambda: True)


@pytest.fixture
def approved(language_model, operator):
    """`approved(3, present=1)`: a plan for that many, approved by the operator."""

    def make(target, present=1, minutes=60):
        row = {"region": "us-east", "gpu_type": "a100-80gb", "present": present, "target": target, "reason": "a peak"}
        plan = ScalingPlan.objects.create(
            model=language_model,
            strategy="lt_i",
            valid_until=timezone.now() + timedelta(minutes=minutes),
            targets=[row],
        )
        return services.approve(plan, operator)

    return make


def apply(after=timedelta()):
    return services.apply_plans(timezone.now() + after)


def test_instances_are_added_up_to_the_target(approved, make_instance):
    make_instance()
    plan = approved(3)
    moves = apply()
    assert [move.delta for move in moves] == [1, 1]
    assert {(move.source, move.plan, move.reason) for move in moves} == {(MoveSource.PLAN, plan, "a peak")}
    plan.refresh_from_db()
    assert plan.status == PlanStatus.APPLIED
    assert plan.applied_at is not None
    event = Event.objects.get(kind="plan.applied")
    assert event.after == {"status": "applied", "moves": 2, "left": 0}
    assert apply() == []  # once


def test_or_taken_away_down_to_it(approved, make_instance):
    make_instance(), make_instance(), make_instance()
    plan = approved(1, present=3)
    assert [move.delta for move in apply()] == [-1, -1]
    assert Instance.objects.filter(state=S.DRAINING).count() == 2
    plan.refresh_from_db()
    assert plan.status == PlanStatus.APPLIED


def test_what_others_moved_meanwhile_is_not_moved_again(approved, make_instance):
    make_instance()
    approved(2)
    make_instance()
    assert apply() == []
    assert ScalingPlan.objects.get().status == PlanStatus.APPLIED


def test_a_full_node_is_waited_for(approved, make_instance, node):
    Node.objects.update(gpu_count=4)
    make_instance(node=node)
    leaving = make_instance(node=node, state=S.DRAINING)
    plan = approved(2)
    assert apply() == []
    plan.refresh_from_db()
    assert (plan.status, plan.targets[0]["left"]) == (PlanStatus.APPROVED, 1)
    assert "no node has 2 free GPUs" in Event.objects.get(kind="scaling.refused").reason
    Instance.objects.filter(pk=leaving.pk).update(state=S.FAILED, node=None)
    assert [move.delta for move in apply()] == [1]
    plan.refresh_from_db()
    assert plan.status == PlanStatus.APPLIED


def test_while_it_waits_it_takes_nothing_away_that_others_added(approved, make_instance, node):
    Node.objects.update(gpu_count=2)
    make_instance(node=node)
    approved(2)
    apply()
    make_instance(), make_instance()
    assert apply() == []
    assert Instance.objects.filter(state=S.READY).count() == 3


def test_when_its_time_is_over_it_says_what_is_missing(approved, make_instance, node):
    Node.objects.update(gpu_count=4)
    make_instance(node=node)
    plan = approved(3)
    assert len(apply()) == 1
    apply(timedelta(hours=2))
    plan.refresh_from_db()
    assert plan.status == PlanStatus.APPLIED
    assert plan.note.startswith("1 instance could not be added in time.")
    assert Event.objects.get(kind="plan.applied").severity == Severity.WARNING


def test_one_of_which_nothing_could_be_done_has_failed(approved, make_instance, node):
    Node.objects.update(gpu_count=2)
    make_instance(node=node)
    plan = approved(2)
    apply()
    apply(timedelta(hours=2))
    plan.refresh_from_db()
    assert plan.status == PlanStatus.FAILED


def test_a_pass_that_is_cut_off_leaves_nothing_half_done(approved, make_instance, monkeypatch):
    make_instance()
    plan = approved(3)
    real, calls = rollout.executor.add, []

    def add(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("the worker is killed")
        return real(*args, **options)

    monkeypatch.setattr(rollout.executor, "add", add)
    with pytest.raises(MemoryError):
        apply()
    plan.refresh_from_db()
    assert plan.status == PlanStatus.APPROVED
    assert (Instance.objects.count(), ScalingMove.objects.count()) == (1, 0)
    assert len(apply()) == 2
    assert Instance.objects.count() == 3


def test_plans_that_nobody_approved_are_left_alone(make_instance, language_model):
    make_instance()
    row = {"region": "us-east", "gpu_type": "a100-80gb", "present": 1, "target": 3}
    for status in set(PlanStatus) - {PlanStatus.APPROVED}:
        ScalingPlan.objects.create(
            model=language_model, strategy="x", status=status, valid_until=timezone.now(), targets=[row]
        )
    assert apply() == []
    assert Instance.objects.count() == 1
