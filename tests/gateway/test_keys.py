"""Keys that end, in every relay process: each has its own cache of the one database, which it reads by its own clock."""

import asyncio
import threading
from datetime import timedelta

import pytest
from channels.db import database_sync_to_async
from django.core.management import call_command
from django.utils import timezone
from msgspec import structs

from controlplane.accounts.models import ApiKey, Tenant
from controlplane.accounts.services import revoke_api_key
from controlplane.gateway.admission import keys as keys_module
from controlplane.gateway.admission.entries import Entries
from controlplane.gateway.admission.keys import DATABASE_DOWN_GRACE_S, Keys
from controlplane.gateway.errors import ApiError
from controlplane.gateway.progress import Interrupt, Progress
from tests import settings as defaults
from tests.gateway.rows import SECRET, make_rows
from tests.gateway.test_open_requests import GatewaySide

WITHIN_S = 2.0
KEY = f"Bearer {SECRET}".encode()
ENDS = {
    "service": lambda: revoke_api_key(ApiKey.objects.get(), "test", "leaked"),
    "command": lambda: call_command("keys", "--revoke", SECRET[:11], "--reason", "leaked"),
    "deleted": lambda: ApiKey.objects.all().delete(),
    "expired": lambda: ApiKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1)),
    "tenant off": lambda: Tenant.objects.update(active=False),
}


class RelaySide(GatewaySide):
    """A relay process with an open stream of the key, and a request that waits to enter at a takeover.

    It reads keys first at *reads_s*, as `Gateway` does.
    """

    def __init__(self, clock, reads_s):
        super().__init__()
        self.keys, self.reads_s = Keys(clock), reads_s
        self.entries = Entries(self.records.append, self.requests.next_number)

    async def open(self):
        self.stream = self.request()
        self.stream.grant = await self.keys.check(KEY)
        self.stream.task = asyncio.ensure_future(asyncio.Event().wait())
        asked = structs.replace(
            self.stream.asked, number=self.requests.next_number(), api_key_id=self.stream.grant.key_id
        )
        waits = Progress(asked=asked, grant=self.stream.grant, terms=None, call=self.stream.call)
        self.entering = asyncio.ensure_future(self.entries.enter(waits))

    async def run_until(self, now_s):
        while self.reads_s <= now_s:
            ended = await self.keys.refresh(self.requests.key_ids() | self.entries.key_ids())
            self.requests.end_keys(ended)
            self.entries.end_keys(ended)
            self.reads_s += defaults.KEY_CACHE_S


@pytest.fixture
def rows(transactional_db):
    make_rows([], regions=[], max_num_seqs=1, queue_bound=1)


@pytest.fixture
async def relays(rows):
    made = [RelaySide(lambda: 0.0, reads_s) for reads_s in (0.5, 0.999)]
    for relay in made:
        await relay.open()
    yield made
    for relay in made:
        relay.stream.task.cancel()
        relay.entering.cancel()
        await relay.keys.stop()


@pytest.mark.parametrize("how", ENDS)
async def test_a_key_that_ends_stops_in_every_relay(relays, how):
    """New requests, those that wait to enter, and open streams. Redis has no part in it: there is none here."""
    for relay in relays:
        await relay.run_until(1.0)
        assert (await relay.keys.check(KEY)).tenant == "acme"
        assert relay.stream.interrupted is None
        assert not relay.entering.done()
    await database_sync_to_async(ENDS[how])()  # at 1.0
    for relay in relays:
        await relay.run_until(1.0 + WITHIN_S)
        assert relay.stream.interrupted is Interrupt.KEY_ENDED
        for ends in (relay.keys.check(KEY), relay.entering):
            with pytest.raises(ApiError) as refused:
                await ends
            assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")


async def test_no_other_work_with_the_database_delays_the_end_of_a_key(relays):
    """A write waits for its lock, or a page reads for long, in the thread that all others share."""
    relay, done = relays[0], threading.Event()
    await database_sync_to_async(ENDS["service"])()
    other = asyncio.ensure_future(database_sync_to_async(done.wait)(30))
    async with asyncio.timeout(10):
        await relay.run_until(1.0)
    assert relay.stream.interrupted is Interrupt.KEY_ENDED
    assert not other.done()
    done.set()
    await other


async def test_a_database_that_never_answers_is_one_that_is_away(rows, monkeypatch):
    """Known keys work for a while, and then none does."""
    now_s, done = [0.0], threading.Event()
    keys = Keys(lambda: now_s[0])
    await keys.check(KEY)
    keys._read.answer_s = 0.01
    monkeypatch.setattr(keys_module, "_load", lambda *_: done.wait(30))
    for now_s[0], works in ((DATABASE_DOWN_GRACE_S - 1, True), (DATABASE_DOWN_GRACE_S + 1, False)):
        with pytest.raises(TimeoutError):
            await keys.refresh()
        if works:
            await keys.check(KEY)
    with pytest.raises(ApiError) as refused:
        await keys.check(KEY)
    assert (refused.value.status, refused.value.code) == (503, "keys_unavailable")
    done.set()
    await keys.stop()
