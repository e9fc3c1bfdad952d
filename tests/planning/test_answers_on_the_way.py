"""A drained instance is stopped when its last answer has been read whole, not when vLLM has written it."""

import time
from datetime import timedelta

import orjson
import pytest
from django.utils import timezone

from controlplane.fleet.models import Instance, InstanceCommand
from controlplane.planning.execution import executor, live_views
from controlplane.planning.models import MoveSource, ScalingMove
from workers.tasks import planning as tasks

pytestmark = pytest.mark.django_db


class Redis:
    """Has what a gateway published, if there is one."""

    def __init__(self) -> None:
        self.text: bytes | None = None

    def __enter__(self) -> "Redis":
        return self

    def __exit__(self, *error: object) -> None: ...

    def get(self, key: str) -> bytes | None:
        return self.text

    def publish(self, running: dict[str, int], age_s: float = 0.0, up_s: float = 1.0) -> None:
        self.text = orjson.dumps(
            {"ts": time.time() - age_s, "up_s": up_s, "endpoints": [], "running": running, "left_tokens": {}}
        )


@pytest.fixture
def gateway(monkeypatch) -> Redis:
    client = Redis()
    monkeypatch.setattr(live_views, "_redis", lambda: client)
    return client


@pytest.fixture
def drained(make_instance, monkeypatch) -> Instance:
    """An instance on which vLLM has finished all requests."""
    make_instance()
    make_instance()
    move = executor.remove("llama-3.1-8b", "us-east", executor.Why(MoveSource.STRATEGY, "reactive", "use is low"))
    long_ago = timezone.now() - timedelta(seconds=30)
    ScalingMove.objects.update(at=long_ago)
    Instance.objects.filter(name=move.instance).update(state_changed_at=long_ago)

    async def idle(urls: list[str]) -> dict[str, int]:
        return dict.fromkeys(urls, 0)

    monkeypatch.setattr(tasks, "_running", idle)
    return Instance.objects.get(name=move.instance)


def test_an_answer_that_is_still_read_is_waited_for(gateway, drained):
    gateway.publish({drained.name: 1})
    assert tasks.finish_drains() == 0
    gateway.publish({drained.name: 0})
    assert tasks.finish_drains() == 1
    assert InstanceCommand.objects.get().verb == "stop"


def test_a_gateway_that_is_gone_holds_up_nothing(gateway, drained):
    gateway.publish({drained.name: 1}, age_s=60.0)
    assert tasks.finish_drains() == 1


def test_running_requests_are_read_from_a_young_gateway_too_but_not_load(gateway):
    gateway.publish({"a": 3}, up_s=1.0)
    assert (live_views.read(), live_views.running()) == (None, {"a": 3})
    gateway.publish({"a": 3}, up_s=3600.0)
    assert live_views.read().running == {"a": 3}
    gateway.text = None
    assert (live_views.read(), live_views.running()) == (None, {})
