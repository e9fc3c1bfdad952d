"""Webhooks of backends of units that are no LLM: what they are sent, when, signed how, and what failures do."""

import hashlib
import hmac
from collections import Counter
from types import SimpleNamespace

import pytest
from channels.db import database_sync_to_async
from django.urls import reverse

from controlplane.applications.models import UnitBackend
from controlplane.applications.warming import UnitWarming
from controlplane.events.models import Event
from scheduling.applications.prewarming import LikelyCall, Warmable
from tests.receiver import receiver


class Prewarming:
    """As the dispatcher's, with the *likely* calls that a test sets."""

    def __init__(self):
        self.fleet, self.control, self.likely = SimpleNamespace(now_s=100.0, backends=()), self, []
        self.counts = {"container": Counter(), "dnn": Counter()}
        self.runs = SimpleNamespace(backends_in_use=set(), began=None)

    def due(self, *kinds):
        return [call for call in self.likely if call.target.kind in kinds]

    def run_of(self, call):
        return "review", f"run-{call.run}"


class Kept:
    """A backend of *values*, and what is likely for it."""

    def __init__(self, url, **values):
        self.row = UnitBackend(**{"name": "tests", "kind": "container", "url": url, "secret": "s3cret"} | values)
        self.prewarming = Prewarming()
        self.warming = UnitWarming(self.prewarming)
        self.warming._ticks = 1  # rows are given
        self.warming.apply([self.row])

    async def at(self, now_s, *executions, in_use=False):
        """Tick at *now_s* with a likely call of so many *executions* each, and let what is sent be answered."""
        self.warming._ticks = 1
        self.prewarming.fleet.now_s = now_s
        self.prewarming.runs.backends_in_use = {"tests"} if in_use else set()
        target = Warmable(self.row.kind, "tests")
        self.prewarming.likely = [LikelyCall(target, 0.0, run, "t", calls) for run, calls in enumerate(executions)]
        await self.warming.tick()
        if (sent := self.warming.known["tests"].call) is not None:
            await sent


def said(there):
    return [(one["event"], one["executions"], one["run"]) for one in there.taken]


async def test_it_is_warmed_once_for_each_execution_and_cooled_when_nothing_needs_it():
    async with receiver() as (there, url):
        kept = Kept(f"{url}/takes", keep_alive_s=60.0)
        await kept.at(0)
        await kept.at(1, 1)
        await kept.at(2, 1)
        await kept.at(3, 1, 2)
        assert said(there) == [("warm", 1, "run-0"), ("warm", 3, "run-0")]
        for _ in range(2):
            kept.prewarming.runs.began("tests")
        kept.prewarming.runs.began("another")
        await kept.at(60, in_use=True)
        await kept.at(119)
        assert len(there.taken) == 2, "it was used until then"
        await kept.at(120)
        await kept.at(999)
        await kept.at(1000, 2)
        assert said(there)[2:] == [("cool", 0, ""), ("warm", 2, "run-0")]
        assert kept.prewarming.counts["container"] == Counter(warmed=5, used=2)
        assert there.taken[0] == {
            "event": "warm", "backend": "tests", "application": "review", "run": "run-0", "executions": 1,
            "keep_alive_s": 60.0,
        }  # fmt: skip


async def test_it_is_warmed_again_once_a_receiver_may_have_cooled_it():
    async with receiver() as (there, url):
        kept = Kept(f"{url}/takes", keep_alive_s=60.0)
        for now_s in (0, 30, 59, 60, 61):
            await kept.at(now_s, 1)
        assert said(there) == [("warm", 1, "run-0")] * 2
        assert kept.prewarming.counts["container"] == Counter(warmed=1)


async def test_a_model_serves_any_number_of_calls():
    async with receiver() as (there, url):
        kept = Kept(f"{url}/takes", kind="dnn")
        await kept.at(1, 4, 4)
        await kept.at(2, 9)
        assert said(there) == [("warm", 1, "run-0")]


async def test_what_is_sent_is_signed():
    async with receiver() as (there, url):
        await Kept(f"{url}/takes", secret="s3cret").at(1, 1)
        ((body, headers),) = there.sent
        digest = hmac.new(b"s3cret", body, hashlib.sha256).hexdigest()
        assert headers["X-Pilothouse-Signature"] == f"sha256={digest}"
        assert headers["Content-Type"] == "application/json"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("fails", "answered 500"),
        ("redirects", "answered 302"),
        ("hangs", "did not answer within 0.2 s"),
        ("", "could not be reached: ClientConnector"),
    ],
)
async def test_failures_make_pauses_that_grow_and_one_event(path, error, monkeypatch):
    monkeypatch.setattr("controlplane.webhooks.CALL_S", 0.2)
    async with receiver() as (there, url):
        kept = Kept(f"{url}/{path}" if path else "http://127.0.0.1:9/")
        await database_sync_to_async(kept.row.save)()
        tries = []
        for now_s in range(0, 80, 5):
            before = kept.warming.known["tests"].failures
            await kept.at(now_s, 1)
            if kept.warming.known["tests"].failures > before:
                tries.append(now_s)
        assert tries == [0, 10, 30, 70], "pauses of 10, 20 and 40 s"
        event = await database_sync_to_async(Event.objects.get)(kind="backend.warm_failed")
        assert error in event.reason
        assert (event.subject, event.severity) == ("tests", "warning")
        assert there.taken == []
        assert kept.prewarming.counts["container"]["warmed"] == 0
        kept.row.url = f"{url}/takes"  # as an operator mends it, at the same place
        await kept.at(200, 1)
        assert (said(there), kept.warming.known["tests"].failures) == ([("warm", 1, "run-0")], 0)


async def test_a_slow_receiver_holds_up_nothing():
    async with receiver() as (_, url):
        kept = Kept(f"{url}/hangs")
        kept.prewarming.likely = [LikelyCall(Warmable("container", "tests"), 0.0, 0, "t")]
        await kept.warming.tick()
        pending = kept.warming.known["tests"].call
        await kept.warming.tick()
        assert kept.warming.known["tests"].call is pending, "no second call while one is open"
        assert not pending.done()
        pending.cancel()


@pytest.mark.django_db(transaction=True)
async def test_rows_are_read_by_the_owner_alone():
    row = await database_sync_to_async(UnitBackend.objects.create)(name="tests", url="http://a/", secret="s")
    await database_sync_to_async(UnitBackend.objects.create)(name="off", url="http://a/", secret="s", active=False)
    prewarming, owns = Prewarming(), [True]
    warming = UnitWarming(prewarming, lambda: owns[-1])
    await warming.tick()
    assert list(prewarming.fleet.backends) == ["tests"]
    warming.known["tests"].executions, warming._ticks = 3, 0
    row.keep_alive_s = 5.0
    await database_sync_to_async(row.save)()
    await warming.tick()
    known = warming.known["tests"]
    assert (known.executions, known.row.keep_alive_s) == (3, 5.0), "what was sent is kept"
    owns.append(False)
    warming._ticks = 0
    await warming.tick()
    assert not prewarming.fleet.backends


@pytest.mark.django_db
def test_the_admin_shows_no_secret_keeps_it_and_asks_for_the_first(client, fleet_admin):
    client.force_login(fleet_admin)
    values = {"name": "tests", "kind": "dnn", "url": "http://warmer/", "keep_alive_s": 9, "active": "on", "secret": ""}
    refused = client.post(reverse("admin:applications_unitbackend_add"), values)
    assert "secret" in refused.context["adminform"].form.errors
    assert client.post(reverse("admin:applications_unitbackend_add"), values | {"secret": "s3cret"}).status_code == 302
    row = UnitBackend.objects.get()
    page = reverse("admin:applications_unitbackend_change", args=[row.pk])
    shown = client.get(page)
    assert "s3cret" not in shown.content.decode()
    read_at = shown.context["adminform"].form.initial.get("read_at", "")
    assert client.post(page, values | {"url": "http://other/", "read_at": read_at}).status_code == 302
    row.refresh_from_db()
    assert (row.url, row.secret) == ("http://other/", "s3cret")
