"""Records of prewarming: fates in memory, rows, the panels of pages, and the rows of backends by REST."""

import json
import re
from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone

from controlplane.accounts.services import create_api_key
from controlplane.api.routers import system
from controlplane.applications import prewarming
from controlplane.applications.backends import Failure
from controlplane.applications.models import PrewarmRow, UnitBackend
from controlplane.applications.prewarming import prune_prewarms
from controlplane.dispatch import prewarming_log
from controlplane.dispatch.prewarming_log import CalledBy, PrewarmLog
from controlplane.events.models import Event
from scheduling.applications.prewarming import OPEN_S

ACME = CalledBy(1, "review", "one")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def log():
    return PrewarmLog(Clock())


def test_what_becomes_of_what_is_warmed(log):
    used, early, unused, broken = (log.begin("adapter", name, "east-1", "why", ACME) for name in "abcd")
    log.warm(used)
    log.warm(early)
    log.clock.now = 110.0
    assert log.use("adapter", "a", "east-1", 105.0) == "hit"
    assert log.use("adapter", "b", "east-1", 99.0) == "late"  # it came before
    assert log.use("adapter", "a", "east-1", 105.0) == ""  # once
    assert log.use("adapter", "a", "west-1", 105.0) == ""
    log.miss("adapter", "e", "east-1", "cold", ACME)
    log.settle(broken, "failed", "It did not answer.")
    log.settle(broken, "waste")  # it has failed
    log.clock.now = 100.0 + OPEN_S + 1
    log.sweep()
    assert (unused.fate, broken.why) == ("waste", "why It did not answer.")
    assert dict(log.counts) == {
        ("adapter", "warmed"): 4, ("adapter", "hit"): 1, ("adapter", "late"): 1, ("adapter", "miss"): 1,
        ("adapter", "failed"): 1, ("adapter", "waste"): 1,
    }  # fmt: skip
    assert not log.open("adapter")


def test_one_that_is_begun_again_is_waste_and_memory_is_bounded(log, monkeypatch):
    monkeypatch.setattr(prewarming_log, "MOST_OPEN", 2)
    first = log.begin("adapter", "a", "east-1", "why", ACME)
    log.begin("adapter", "a", "east-1", "why", ACME)
    assert first.fate == "waste"
    log.begin("adapter", "b", "east-1", "why", ACME)
    log.begin("adapter", "c", "east-1", "why", ACME)
    assert [one.backend for one in log.open("adapter")] == ["b", "c"]


@pytest.mark.django_db
class TestRows:
    def of(self, tenant, log, **values):
        return log.begin(
            "container", "python:3.11", "", "tests will probably follow.", CalledBy(tenant.pk, "review", "now")
        )

    def test_a_row_is_written_once_and_follows_what_becomes_of_it(self, acme, log):
        one = self.of(acme, log)
        prewarming._write(log.take(), [])
        log.warm(one, "127.0.0.1:1")
        log.use("container", "python:3.11", "127.0.0.1:1", 200.0)
        prewarming._write(log.take(), [])
        assert log.take() == []
        (row,) = PrewarmRow.objects.all()
        assert (row.tenant, row.run, row.place, row.fate) == (acme, "now", "127.0.0.1:1", "hit")
        assert (row.began_at.timestamp(), row.warm_at.timestamp()) == (100.0, 100.0)

    def test_those_of_a_tenant_that_is_gone_are_left_out(self, acme, log):
        log.begin("container", "x", "", "why", CalledBy(acme.pk + 1_000))
        prewarming._write(log.take(), [])
        assert not PrewarmRow.objects.exists()

    def test_a_failed_start_is_an_event_of_its_backend(self, log):
        row = UnitBackend.objects.create(name="py", image="py")
        prewarming._write(
            [], [Failure("py", "no such image.", 3, 300.0), Failure("", "Docker does not answer", 1, 0.0)]
        )
        failed, swept = Event.objects.filter(kind="backend.warm_failed").order_by("pk")
        assert (failed.subject, failed.subject_id, failed.severity) == ("py", str(row.pk), "warning")
        assert failed.reason == "no such image. It rests for 300 s. Units are served without it."
        assert swept.subject == ""

    def test_old_rows_are_deleted(self, acme, log, monkeypatch):
        monkeypatch.setattr(prewarming, "MOST_ROWS", 2)
        now = timezone.now()
        for hours in (24 * 8, 3, 2, 1):
            PrewarmRow.objects.create(
                tenant=acme, kind="adapter", backend=str(hours), began_at=now - timedelta(hours=hours)
            )
        assert prune_prewarms(now) == 2
        assert [row.backend for row in PrewarmRow.objects.order_by("pk")] == ["2", "1"]

    def test_pages_and_rest_show_them(self, client, operator, acme, running):
        now, application = timezone.now(), running.application
        for fate, warm_s in (("hit", 2), ("miss", None)):
            PrewarmRow.objects.create(
                tenant=acme, application=application.name, run=running.run, kind="container", backend="python:3.11",
                place="127.0.0.1:1", why="tests will probably follow.", began_at=running.began_at, fate=fate,
                warm_at=running.began_at + timedelta(seconds=warm_s) if warm_s else None, settled_at=now,
            )  # fmt: skip
        client.force_login(operator)
        page = client.get(f"/applications/runs/{running.pk}/").content.decode()
        assert page.count('data-part="ready" x=') == 1
        assert "miss: it was cold" in page
        page = client.get(f"/applications/{application.pk}/").content.decode()
        every = client.get("/applications/").content.decode()
        assert "Prewarm hits" in every
        assert "<b>50%</b>" in every
        assert 'data-fate="miss"' in every
        saved = re.search(r"Waiting saved: ([\d.]+) s; unused warming took ([\d.]+) s", every)
        assert [float(each) for each in saved.groups()] == [2.0, 0.0]
        assert "127.0.0.1:1" in page
        assert 'id="application-prewarming"' in page
        (row, _) = client.get(f"/api/prewarms?run={running.run}&kind=container").json()["items"]
        assert (row["backend"], row["fate"]) == ("python:3.11", "miss")

    def test_what_starts_next_comes_by_rest_to_whom_it_concerns(
        self, client, operator, acme, globex, monkeypatch, settings
    ):
        row = {
            "in_s": 2.0, "kind": "container", "backend": "python:3.11", "model": "m", "region": "east",
            "application": "review", "run": "r", "unit": "tests", "probability": 0.8, "k": 0.5,
            "why": "tests follows with 80%",
        }  # fmt: skip
        columns = {name: [value, value] for name, value in row.items()} | {"tenant_id": [acme.pk, globex.pk]}
        summary = json.dumps({"ts": 1.0, "next_to_warm": columns}).encode()
        monkeypatch.setattr(system, "read_published", lambda key: summary)
        client.force_login(operator)
        seen = client.get("/api/prewarms/next").json()["next"]
        assert [(one["tenant_id"], one["region"]) for one in seen] == [(acme.pk, "east"), (globex.pk, "east")]
        key = {"authorization": f"Bearer {create_api_key(acme, 'k', 'a test')[1]}"}
        (own,) = Client().get("/api/prewarms/next", headers=key).json()["next"]
        assert own == row | {"tenant_id": acme.pk, "region": ""}
        monkeypatch.undo()
        settings.REDIS_URL = "redis://127.0.0.1:1/0"
        assert client.get("/api/prewarms/next").status_code == 503
