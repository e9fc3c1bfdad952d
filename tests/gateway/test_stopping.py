"""An instance that is being stopped goes silent before it is gone: that is no failure."""

import asyncio

import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet.models import CommandState, CommandVerb, InstanceCommand
from tests.gateway.conftest import House, until

pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.1)


async def command(house: House, state: CommandState) -> InstanceCommand:
    return await database_sync_to_async(InstanceCommand.objects.create)(
        instance=await house.instance(), verb=CommandVerb.STOP, state=state, started_at=timezone.now(), actor="a test"
    )


def silent_for(house: House, count: int) -> bool:
    (replica,) = house.gateway.topology.replicas.values()
    return replica.silent_count >= count


async def failures() -> int:
    return await database_sync_to_async(Event.objects.filter(severity="critical").count)()


async def test_silence_while_it_is_stopped_is_no_failure(house):
    stop = await command(house, CommandState.RUNNING)
    house.backends[0].script.metrics = False
    await until(lambda: silent_for(house, 2 * settings.HEARTBEAT_FAILURES))
    assert house.gateway.topology.fleet.accepting.sum() == 0
    assert ((await house.instance()).state, await failures()) == ("ready", 0)
    stop.state = CommandState.FAILED  # and now it is one
    await database_sync_to_async(stop.save)()
    async with asyncio.timeout(10):
        while (await house.instance()).state != "failed":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await failures() == 1


async def test_a_stop_that_has_not_begun_excuses_nothing(house):
    await command(house, CommandState.PENDING)
    house.backends[0].script.metrics = False
    async with asyncio.timeout(10):
        while (await house.instance()).state != "failed":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
