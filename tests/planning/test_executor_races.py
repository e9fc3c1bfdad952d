"""Two that move the fleet at once: whoever comes second counts what the first has done.

SQLite lets only one write anyway; `tests/test_postgres.py` runs this where nothing but locked rows keeps them apart.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from controlplane.fleet.models import Deployment, Instance, Model, Node, PerformanceProfile
from controlplane.fleet.states import PRESENT, InstanceState
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


def at_once(*places: tuple[str, str]) -> list[str]:
    """`add` at all *places*, each in a thread and with a connection of its own."""
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(in_a_thread(add), places))


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
