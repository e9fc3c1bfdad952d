"""Two that move the fleet at once: whoever comes second counts what the first has done.

SQLite lets only one write anyway; `tests/test_postgres.py` runs this where nothing but locked rows keeps them apart.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.fleet import services as fleet
from controlplane.fleet.models import Deployment, Instance, InstanceCommand, Launcher, Model, Node, PerformanceProfile
from controlplane.fleet.states import PRESENT, ActionError, InstanceState
from controlplane.planning import executor
from controlplane.planning.floor import in_a_thread
from controlplane.planning.models import MoveSource, ScalingMove

pytestmark = pytest.mark.django_db(transaction=True)
S = InstanceState
PLACE = ("llama-3.1-8b", "us-east")
OTHER = ("other", "us-east")
MEET_S = 0.5


def add(place: tuple[str, str]) -> str:
    """The instance that was added, or why none was."""
    try:
        return executor.add(*place, executor.Why(MoveSource.STRATEGY, "reactive", "a test asks for it")).instance
    except executor.Refused as refusal:
        return f"refused: {refusal}"


def start(instance: Instance) -> str:
    """Its name once an operator has started *instance*, or why it was not."""
    try:
        fleet.start(Instance.objects.get(pk=instance.pk), "an operator", "by hand")
    except ActionError as refusal:
        return f"refused: {refusal}"
    return instance.name


def all_at_once(*calls: Callable[[], object]) -> list[object]:
    """What *calls* return, each in a thread and with a connection of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(in_a_thread(call)) for call in calls]]


def at_once(*places: tuple[str, str]) -> list[object]:
    """`add` at all *places*."""
    return all_at_once(*(partial(add, place) for place in places))


def meeting(count: Callable[..., int]) -> Callable[..., int]:
    """*count*, but its callers wait for each other once they know: both have counted before one of them acts.

    Where the second waits for the first, the first waits here in vain and goes on.
    """
    barrier = threading.Barrier(2)

    def counted(*args: object, **options: object) -> int:
        found = count(*args, **options)
        with suppress(threading.BrokenBarrierError):
            barrier.wait(MEET_S)
        return found

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
    """Stopped ones would start again on their node; beside ones that failed a moment ago new ones are made."""
    Node.objects.update(gpu_count=2)  # room for one
    for row in (deployment, other):
        make_instance(state=state, deployment=row, node=node if state == S.STOPPED else None)
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
    """Each wants the node and the instance: taken in two orders they would wait for each other."""
    Node.objects.update(gpu_count=2)
    stopped = make_instance(state=S.STOPPED, node=node)
    monkeypatch.setattr(Node, "free_gpus", meeting(Node.free_gpus))
    assert stopped.name in all_at_once(partial(start, stopped), partial(add, PLACE))
    assert list(Instance.objects.values_list("name", "state")) == [(stopped.name, S.PROVISIONING)]
    assert InstanceCommand.objects.count() == 1


def test_two_admins_do_not_register_instances_for_the_same_gpus(deployment, node, fleet_admin, monkeypatch):
    """The second is told by the form: the row would be there before its start is refused."""
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
