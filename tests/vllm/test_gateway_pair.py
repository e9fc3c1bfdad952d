"""Two real vLLM servers behind the gateway, of which one leaves. The last test kills it."""

import asyncio
import time

import pytest
from channels.db import database_sync_to_async
from django.conf import settings

from controlplane.events.models import Event
from controlplane.fleet.models import Instance
from tests.gateway.conftest import until
from tests.vllm.conftest import MODEL, VllmFleet, finish
from tests.vllm.gateway import gateway_before
from tests.vllm.test_gateway_live import client, exactly, frozen  # noqa: F401

pytestmark = pytest.mark.vllm
NAMES = ("pair-a", "pair-b")
SEQUENCES = 2  # that each server runs at a time


@pytest.fixture
async def served(transactional_db, vllm_fleet, monkeypatch):
    monkeypatch.setattr(settings, "FLEET_REFRESH_S", 0.3)
    urls = [vllm_fleet.start(name, max_num_seqs=SEQUENCES) for name in NAMES]  # both load at the same time
    for name, url in zip(NAMES, urls, strict=True):
        vllm_fleet.wait(name, url)
    async with gateway_before(dict(zip(NAMES, urls, strict=True)), SEQUENCES) as served:
        yield served


async def test_a_killed_instance_is_noticed_and_its_requests_go_to_the_other(served, client, vllm_fleet: VllmFleet):  # noqa: F811
    """Both servers are frozen while requests are dispatched to them; then one is killed, and the other resumes."""
    with frozen(vllm_fleet, *NAMES):
        asked = [
            asyncio.create_task(client.completions.create(model=MODEL, prompt=[index + 1], **exactly(20)))
            for index in range(2 * SEQUENCES + 6)
        ]
        await until(lambda: len(served.gateway.dispatching.dispatcher.queue) == 6)
        assert served.gateway.dispatching.topology.fleet.running.sum() == 2 * SEQUENCES
        await asyncio.to_thread(finish, vllm_fleet.launcher.stop(NAMES[1], grace_s=0))
        killed_s = time.monotonic()

    def failed() -> bool:
        return Instance.objects.get(name=NAMES[1]).state == "failed"

    async with asyncio.timeout(10):
        while not await database_sync_to_async(failed)():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert time.monotonic() - killed_s < 5.0
    event = await database_sync_to_async(Event.objects.filter(kind="instance.moved").latest)("id")
    assert (event.subject, event.after["state"]) == (NAMES[1], "failed")
    answers = await asyncio.gather(*asked)
    assert [answer.usage.completion_tokens for answer in answers] == [20] * len(asked)
    rows = (await served.rows())[-len(asked) :]
    assert {(row.instance, row.outcome) for row in rows} == {(NAMES[0], "done")}
    assert sorted(row.attempts for row in rows) == [1] * (SEQUENCES + 6) + [2] * SEQUENCES
