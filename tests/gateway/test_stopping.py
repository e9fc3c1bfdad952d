"""An instance that is being stopped falls silent before it exits: that is no failure."""

import asyncio

import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet.models import CommandState, CommandVerb, InstanceCommand
from tests.gateway.conftest import ServedGateway, until

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.1)


async def command(served: ServedGateway, state: CommandState) -> InstanceCommand:
    return await database_sync_to_async(InstanceCommand.objects.create)(
        instance=await served.instance(), verb=CommandVerb.STOP, state=state, started_at=timezone.now(), actor="a test"
    )


def silent_for(served: ServedGateway, count: int) -> bool:
    (replica,) = served.gateway.dispatching.topology.replicas.values()
    return replica.silent_count >= count


async def failures() -> int:
    return await database_sync_to_async(Event.objects.filter(severity="critical").count)()


async def test_silence_while_it_is_stopped_is_no_failure(served):
    stop = await command(served, CommandState.RUNNING)
    served.backends[0].script.metrics = False
    await until(lambda: silent_for(served, 2 * settings.HEARTBEAT_FAILURES))
    assert served.gateway.dispatching.topology.fleet.accepting.sum() == 0
    assert ((await served.instance()).state, await failures()) == ("ready", 0)
    stop.state = CommandState.FAILED  # and now it is one
    await database_sync_to_async(stop.save)()
    async with asyncio.timeout(10):
        while (await served.instance()).state != "failed":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await failures() == 1


async def test_a_stop_that_has_not_begun_excuses_nothing(served):
    await command(served, CommandState.PENDING)
    served.backends[0].script.metrics = False
    async with asyncio.timeout(10):
        while (await served.instance()).state != "failed":  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_notification_in_the_moment_of_stopping_holds_nothing(served):
    """asyncio.wait_for of Python 3.11 swallows a cancellation that coincides with the awaited result."""
    for steps in range(6):
        loop = asyncio.create_task(served.gateway.dispatching._keep_inventory())
        await asyncio.sleep(0)
        served.gateway.dispatching.refresh_now()
        for _ in range(steps):
            await asyncio.sleep(0)
        loop.cancel()
        ended, _ = await asyncio.wait([loop], timeout=5)
        assert ended, f"the loop went on after {steps} steps"
