"""Plans that an operator approved, carried out: to the targets, in several passes if need be, and to an end."""

from copy import copy
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.events.models import Event, Severity
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import CommandState, Deployment, Instance, InstanceCommand, Node, PerformanceProfile
from controlplane.planning import services
from controlplane.planning.execution import plan_rollout
from controlplane.planning.models import MoveSource, PlanStatus, ScalingMove, ScalingPlan

pytestmark = pytest.mark.django_db
S = InstanceState


@pytest.fixture
def approved(language_model, operator):
    """`approved(3, present=1)`: return a plan for that many, approved by the operator."""

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
    return plan_rollout.apply_plans(timezone.now() + after)


@pytest.mark.parametrize(
    ("planned", "target", "ready", "deltas"),
    [(1, 3, 1, [1, 1]), (3, 1, 3, [-1, -1]), (1, 2, 2, [])],  # the last: others moved meanwhile
)
def test_instances_are_moved_to_the_target(approved, make_instance, planned, target, ready, deltas):
    for _ in range(ready):
        make_instance()
    plan = approved(target, present=planned)
    moves = apply()
    assert [move.delta for move in moves] == deltas
    assert {(move.source, move.plan, move.reason) for move in moves} <= {(MoveSource.PLAN, plan, "a peak")}
    plan.refresh_from_db()
    assert plan.status == PlanStatus.CARRIED_OUT
    assert plan.carried_out_at is not None
    assert Event.objects.get(kind="plan.carried_out").after == {"status": "carried_out", "moves": len(deltas)}
    assert Instance.objects.filter(state=S.DRAINING).count() == deltas.count(-1)
    assert apply() == []  # once


def test_a_full_node_is_waited_for(approved, make_instance, node):
    Node.objects.update(gpu_count=4)
    make_instance(node=node)
    leaving = make_instance(node=node, state=S.DRAINING)
    plan = approved(2)
    assert apply() == []
    plan.refresh_from_db()
    assert (plan.status, plan.targets[0]["left"]) == (PlanStatus.IN_PROGRESS, 1)
    assert "no node has 2 free GPUs" in Event.objects.get(kind="scaling.refused").reason
    Instance.objects.filter(pk=leaving.pk).update(state=S.FAILED, node=None)
    assert [move.delta for move in apply()] == [1]
    plan.refresh_from_db()
    assert plan.status == PlanStatus.CARRIED_OUT


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
    assert (plan.status, plan.carried_out_at) == (PlanStatus.EXPIRED, None)
    assert plan.note.startswith("1 instance not added in us-east: a100-80gb: no node has 2 free GPUs")
    event = Event.objects.get(kind="plan.expired")
    assert (event.severity, event.after["moves"]) == (Severity.WARNING, 1)


def test_what_cannot_be_taken_away_is_not_carried_out_either(approved, make_instance):
    """All but one are still loading: nothing can drain, and the plan does not count as carried out."""
    make_instance()
    loading = [make_instance(state=S.LOADING) for _ in range(2)]
    plan = approved(1, present=3)
    assert [move.delta for move in apply()] == [-1]
    plan.refresh_from_db()
    assert (plan.status, plan.targets[0]["left"]) == (PlanStatus.IN_PROGRESS, -1)
    assert "none is ready" in plan.targets[0]["obstacle"]
    Instance.objects.filter(pk=loading[0].pk).update(state=S.READY)
    assert [move.delta for move in apply()] == [-1]
    plan.refresh_from_db()
    assert plan.status == PlanStatus.CARRIED_OUT


def test_advice_and_plans_in_force_expire(make_instance, language_model, operator):
    make_instance()
    row = {"region": "us-east", "gpu_type": "a100-80gb", "present": 1, "target": 3}
    values = {"model": language_model, "strategy": "lt_ua", "valid_until": timezone.now(), "targets": [row]}
    advice = ScalingPlan.objects.create(status=PlanStatus.ADVICE, note="as forecast", **values)
    followed = ScalingPlan.objects.create(status=PlanStatus.IN_FORCE, **values)
    assert apply(timedelta(seconds=1)) == []
    advice.refresh_from_db()
    followed.refresh_from_db()
    assert (advice.status, advice.note) == (PlanStatus.EXPIRED, "No operator decided about it in time. as forecast")
    assert followed.status == PlanStatus.EXPIRED
    assert followed.note == ("0 of 2 moves made; LT-UA adds only while use is above 70%, and takes away only below 30%")
    make_instance(), make_instance()
    reached = ScalingPlan.objects.create(status=PlanStatus.IN_FORCE, **values)
    apply(timedelta(seconds=1))
    reached.refresh_from_db()
    assert (reached.status, reached.note) == (PlanStatus.CARRIED_OUT, "")


@pytest.mark.sql
def test_a_pass_that_is_cut_off_leaves_nothing_half_done(approved, make_instance, monkeypatch):
    make_instance()
    plan = approved(3)
    real, calls = plan_rollout.executor.add, []

    def add(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError("the worker is killed")
        return real(*args, **options)

    monkeypatch.setattr(plan_rollout.executor, "add", add)
    with pytest.raises(MemoryError):
        apply()
    plan.refresh_from_db()
    assert plan.status == PlanStatus.APPROVED
    assert (Instance.objects.count(), ScalingMove.objects.count()) == (1, 0)
    assert len(apply()) == 2
    assert Instance.objects.count() == 3


def test_unapproved_plans_are_left_alone(make_instance, language_model):
    make_instance()
    row = {"region": "us-east", "gpu_type": "a100-80gb", "present": 1, "target": 3}
    for status in set(PlanStatus) - set(plan_rollout.TO_CARRY_OUT):
        ScalingPlan.objects.create(
            model=language_model, strategy="x", status=status, valid_until=timezone.now(), targets=[row]
        )
    assert apply() == []
    assert Instance.objects.count() == 1


class TestTwoModelsAtTheGpuLimit:
    """16 GPUs: A has three instances of four, B one. The load is reversed, and again while the first move still drains."""

    GPUS, EACH = 16, 4

    @pytest.fixture
    def models(self, deployment, make_instance, node):
        Node.objects.update(gpu_count=self.GPUS)
        profile = PerformanceProfile.objects.get()
        other = copy(deployment.model)
        other.pk, other.name = None, "other"
        other.save()
        second = copy(deployment)
        second.pk, second.model = None, other
        second.save()
        Deployment.objects.update(tensor_parallel=self.EACH, min_instances=1, max_instances=4)
        PerformanceProfile.objects.update(tensor_parallel=self.EACH)
        profile.pk, profile.model, profile.tensor_parallel = None, other, self.EACH
        profile.save()
        deployments = {"A": Deployment.objects.get(pk=deployment.pk), "B": Deployment.objects.get(pk=second.pk)}
        for name, count in (("A", 3), ("B", 1)):
            for _ in range(count):
                make_instance(deployment=deployments[name], node=node)
        return deployments

    def reversed(self, models, operator, **targets):
        for name, target in targets.items():
            present = models[name].instances.present().count()
            row = {
                "region": "us-east",
                "gpu_type": "a100-80gb",
                "present": present,
                "target": target,
                "reason": "a reversal",
            }
            plan = ScalingPlan.objects.create(
                model=models[name].model,
                strategy="lt_i",
                valid_until=timezone.now() + timedelta(hours=3),
                targets=[row],
            )
            services.approve(plan, operator)

    def look(self, models):
        """What must hold at any time."""
        rows = Instance.objects.exclude(state__in=[S.STOPPED, S.FAILED])
        assert rows.count() * self.EACH <= self.GPUS
        for each in models.values():
            assert each.instances.filter(state=S.READY).exists()

    def pass_by(self, models, *, drained: bool, started: bool):
        """Let time pass: drains end (streams of ten minutes), commands are carried out, servers answer."""
        apply()
        self.look(models)
        for command in InstanceCommand.objects.open().filter(verb="stop"):
            Instance.objects.filter(pk=command.instance_id).update(state=S.STOPPED)
        if drained:
            Instance.objects.filter(state=S.DRAINING).update(state=S.STOPPED)
        if started:
            Instance.objects.filter(state=S.PROVISIONING).update(state=S.READY)
        InstanceCommand.objects.open().update(state=CommandState.DONE)
        self.look(models)

    @pytest.mark.parametrize("changes_after", range(5))
    @pytest.mark.parametrize("started", [True, False])
    def test_it_ends_in_the_newest_plan(self, models, operator, changes_after, started):
        self.reversed(models, operator, A=1, B=3)
        for at in range(changes_after):
            self.pass_by(models, drained=at == 2, started=started)
        self.reversed(models, operator, A=3, B=1)
        for at in range(6):
            self.pass_by(models, drained=at >= 2, started=True)
        assert {name: each.instances.filter(state=S.READY).count() for name, each in models.items()} == {"A": 3, "B": 1}
        assert not ScalingPlan.objects.filter(status__in=plan_rollout.TO_CARRY_OUT).exists()
        assert not Instance.objects.filter(state__in=[S.DRAINING, S.PROVISIONING]).exists()
