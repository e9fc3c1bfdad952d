"""Two that move the fleet at once: the second counts what the first has done.

SQLite lets only one write anyway; `tests/test_postgres.py` runs this where nothing but locked rows orders them.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.fleet import services as fleet
from controlplane.fleet.lifecycle.restarts import CRASH_LOOP
from controlplane.fleet.lifecycle.states import PRESENT, ActionError, InstanceState
from controlplane.fleet.models import (
    Deployment,
    GpuType,
    Instance,
    InstanceCommand,
    Launcher,
    Model,
    Node,
    PerformanceProfile,
)
from controlplane.planning.execution import executor, plan_rollout
from controlplane.planning.execution.rows import in_a_thread
from controlplane.planning.models import MoveSource, PlanStatus, ScalingMove, ScalingPlan

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.sql]
S = InstanceState
PLACE = ("llama-3.1-8b", "us-east")
OTHER = ("other", "us-east")
MEET_S = 0.5


def add(place: tuple[str, str]) -> str:
    """Return the instance that was added, or why none was."""
    try:
        return executor.add(*place, executor.Why(MoveSource.STRATEGY, "reactive", "a test asks for it")).instance
    except executor.Refused as refusal:
        return f"refused: {refusal}"


def start(instance: Instance) -> str:
    """Return its name once an operator has started *instance*, or why it was not."""
    try:
        fleet.start(Instance.objects.get(pk=instance.pk), "an operator", "by hand")
    except ActionError as refusal:
        return f"refused: {refusal}"
    return instance.name


def all_at_once(*calls: Callable[[], object]) -> list[object]:
    """Return the results of *calls*, each in a thread with a separate connection."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(in_a_thread(call)) for call in calls]]


def at_once(*places: tuple[str, str]) -> list[object]:
    """Call `add` at all *places*."""
    return all_at_once(*(partial(add, place) for place in places))


def meeting(count: Callable[..., int]) -> Callable[..., int]:
    """Return *count* with a barrier: both callers have counted before one of them acts."""
    barrier = threading.Barrier(2)

    def counted(*args: object, **options: object) -> int:
        instances = count(*args, **options)
        with suppress(threading.BrokenBarrierError):
            barrier.wait(MEET_S)
        return instances

    return counted


def test_two_do_not_pass_the_bound(make_instance, deployment, monkeypatch):
    Deployment.objects.update(max_instances=2)
    make_instance()
    monkeypatch.setattr(executor, "present_count", meeting(executor.present_count))
    answers = at_once(PLACE, PLACE)
    assert sorted(answer.startswith("refused") for answer in answers) == [False, True]
    assert "refused: a100-80gb: 2 instances are there, at most 2" in answers
    assert Instance.objects.filter(state__in=PRESENT).count() == 2
    assert ScalingMove.objects.count() == 1


@pytest.fixture
def other(deployment, language_model, profile):
    """A second model's deployment, for the same nodes."""
    model = Model.objects.get(pk=language_model.pk)
    model.pk, model.name = None, OTHER[0]
    model.save()
    measured = PerformanceProfile.objects.get(pk=profile.pk)
    measured.pk, measured.model = None, model
    measured.save()
    row = Deployment.objects.get(pk=deployment.pk)
    row.pk, row.model = None, model
    row.save()
    return row


@pytest.mark.parametrize("state", [S.STOPPED, S.FAILED], ids=["started again", "new"])
def test_two_models_do_not_get_the_same_gpus(state, make_instance, deployment, other, node, monkeypatch):
    """Stopped ones would start again on their node; next to ones in a crash loop new ones are created."""
    Node.objects.update(gpu_count=2)  # room for one
    for row in (deployment, other):
        make_instance(
            state=state,
            deployment=row,
            node=node if state == S.STOPPED else None,
            failures=CRASH_LOOP if state == S.FAILED else 0,
        )
    monkeypatch.setattr(Node, "free_gpus", meeting(Node.free_gpus))
    answers = at_once(PLACE, OTHER)
    assert sorted(answer.startswith("refused") for answer in answers) == [False, True]
    assert any("no node has 2 free GPUs, 0 at most" in answer for answer in answers)
    assert Instance.objects.filter(state__in=PRESENT).count() == 1
    assert Node.objects.get().free_gpus() == 0


def test_an_operator_and_a_strategy_do_not_get_the_same_gpus(make_instance, deployment, other, node, monkeypatch):
    Node.objects.update(gpu_count=2)
    by_hand = make_instance(state=S.STOPPED, node=node)
    make_instance(state=S.STOPPED, deployment=other, node=node)
    monkeypatch.setattr(Node, "free_gpus", meeting(Node.free_gpus))
    answers = all_at_once(partial(start, by_hand), partial(add, OTHER))
    assert sorted(answer.startswith("refused") for answer in answers) == [False, True]
    assert Instance.objects.filter(state__in=PRESENT).count() == 1
    assert Node.objects.get().free_gpus() == 0


def test_nor_do_two_operators(make_instance, deployment, node, monkeypatch):
    Node.objects.update(gpu_count=2)
    stopped = [make_instance(state=S.STOPPED, node=node) for _ in range(2)]
    monkeypatch.setattr(Node, "free_gpus", meeting(Node.free_gpus))
    answers = all_at_once(*(partial(start, row) for row in stopped))
    assert sorted(answer.startswith("refused") for answer in answers) == [False, True]
    assert any("node-1 has 2 GPUs, 0 of them free" in answer for answer in answers)
    assert Node.objects.get().free_gpus() == 0


def test_an_operator_and_a_strategy_start_the_same_instance_once(make_instance, deployment, node, monkeypatch):
    """Each needs the node and the instance: locking them in different orders would deadlock."""
    Node.objects.update(gpu_count=2)
    stopped = make_instance(state=S.STOPPED, node=node)
    monkeypatch.setattr(Node, "free_gpus", meeting(Node.free_gpus))
    assert stopped.name in all_at_once(partial(start, stopped), partial(add, PLACE))
    assert list(Instance.objects.values_list("name", "state")) == [(stopped.name, S.PROVISIONING)]
    assert InstanceCommand.objects.count() == 1


def test_two_admins_do_not_register_instances_for_the_same_gpus(deployment, node, fleet_admin, monkeypatch):
    """The form refuses the second: its row would exist before its start is refused."""
    Node.objects.update(gpu_count=2)
    monkeypatch.setattr(Node, "free_gpus", meeting(Node.free_gpus))

    def register(name: str) -> str:
        client = Client()
        client.force_login(fleet_admin)
        values = {"name": name, "deployment": deployment.pk, "node": node.pk, "launcher": Launcher.EMULATED}
        return client.post(reverse("admin:fleet_instance_add"), values, follow=True).content.decode()

    pages = all_at_once(partial(register, "one"), partial(register, "two"))
    assert sorted("has 2 GPUs, 0 of them free" in page for page in pages) == [False, True]
    assert Instance.objects.count() == 1


H100 = "h100-80gb"


@pytest.fixture
def second_type(deployment, profile, node):
    """The same endpoint on a second GPU type, with a separate node; stopped instances to start again."""
    gpu_type = GpuType.objects.create(name=H100, title="H100", memory_bytes=80 * 2**30, on_demand_usd_per_hour="3.40")
    measured = PerformanceProfile.objects.get(pk=profile.pk)
    measured.pk, measured.gpu_type = None, gpu_type
    measured.save()
    Node.objects.create(name="node-2", region=node.region, gpu_type=gpu_type, gpu_count=8)
    row = Deployment.objects.get(pk=deployment.pk)
    row.pk, row.gpu_type = None, gpu_type
    row.save()
    return row


def approved(model: Model, *gpu_types: str) -> ScalingPlan:
    """An approved plan: one instance more of each of *gpu_types*, in that order."""
    targets = [{"region": PLACE[1], "gpu_type": name, "present": 0, "target": 1, "reason": ""} for name in gpu_types]
    until = timezone.now() + timedelta(hours=1)
    return ScalingPlan.objects.create(
        model=model, strategy="lt_i", status=PlanStatus.APPROVED, valid_until=until, targets=targets
    )


def apply(plan: ScalingPlan) -> int:
    return len(plan_rollout.apply_plan(plan, timezone.now()))


def test_a_plan_over_two_gpu_types_and_the_floor_do_not_block_each_other(
    make_instance, deployment, second_type, language_model, monkeypatch
):
    """The plan moves the second deployment first; the floor, which may take either, tries the first one first."""
    make_instance(state=S.STOPPED), make_instance(state=S.STOPPED, deployment=second_type)
    plan = approved(language_model, H100, "a100-80gb")
    moved, moved_one = executor._moved, threading.Event()

    def move(*args: object) -> ScalingMove:
        made = moved(*args)
        if not moved_one.is_set():
            moved_one.set()
            time.sleep(MEET_S)  # the floor takes what it can in this time
        return made

    def floor() -> str:
        moved_one.wait(9)
        return add(PLACE)

    monkeypatch.setattr(executor, "_moved", move)
    count, added = all_at_once(partial(apply, plan), floor)
    assert count == 2
    assert not added.startswith("refused")
    assert Instance.objects.filter(state=S.PROVISIONING).count() == 3


def test_nor_do_two_plans_for_the_same_nodes(
    make_instance, deployment, second_type, other, language_model, profile, monkeypatch
):
    """Two models share both GPU types: one begins with the one type, one with the other."""
    model = other.model
    measured = PerformanceProfile.objects.get(gpu_type__name=H100)
    measured.pk, measured.model = None, model
    measured.save()
    row = Deployment.objects.get(pk=second_type.pk)
    row.pk, row.model = None, model
    row.save()
    for each in Deployment.objects.all():
        make_instance(state=S.STOPPED, deployment=each)
    plans = approved(language_model, "a100-80gb", H100), approved(model, H100, "a100-80gb")
    monkeypatch.setattr(executor, "_moved", meeting(executor._moved))
    assert all_at_once(*(partial(apply, plan) for plan in plans)) == [2, 2]
    assert Instance.objects.filter(state=S.PROVISIONING).count() == 4


def test_a_strategy_that_follows_a_plan_and_the_plan_do_not_block_each_other(
    make_instance, deployment, language_model, monkeypatch
):
    """The strategy's move refers to the plan, whose row is being executed and waits for the same places."""
    make_instance(state=S.STOPPED), make_instance(state=S.STOPPED)
    plan = approved(language_model, "a100-80gb")
    moved, begun = executor._moved, threading.Event()

    def move(*args: object) -> ScalingMove:
        made = moved(*args)
        begun.set()
        time.sleep(MEET_S)  # the plan locks its row and waits for the places
        return made

    def follow() -> str:
        why = executor.Why(MoveSource.STRATEGY, "lt_ua", "a test asks for it", plan=plan)
        return executor.add(*PLACE, why).instance

    def carry_out() -> int:
        begun.wait(9)
        return apply(plan)

    monkeypatch.setattr(executor, "_moved", move)
    _, count = all_at_once(follow, carry_out)
    assert count == 0  # the strategy has added what the plan asks for
    assert ScalingMove.objects.get().plan == plan
