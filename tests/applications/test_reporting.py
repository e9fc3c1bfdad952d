"""`/v1/runs`: runs opened and closed, units reported, and what the demand graph learns of them."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.accounts.services import create_api_key
from controlplane.applications import reporting, services
from controlplane.applications.models import ApplicationRun, RunOutcome, UnitReport
from controlplane.applications.selectors import graph_of
from controlplane.dispatch.runs import MAX_UNIT_S
from tests.console.conftest import ledger_row

pytestmark = pytest.mark.django_db


@pytest.fixture
def post(client, acme):
    _, secret = create_api_key(acme, "of runs", "test")

    def of(path="", method="POST", key=secret, **body):
        body = json.dumps({"application": "review"} | body)
        headers = {"Authorization": f"Bearer {key}"}
        answer = client.generic(method, f"/v1/runs{path}", body, content_type="application/json", headers=headers)
        return answer.status_code, answer.json()

    return of


def called(acme, began_at, unit="write", run="one", **values):
    return ledger_row(acme, arrived_at=began_at, application="review", run=run, unit=unit, e2e_ms=1000.0, **values)


def test_a_graph_has_the_durations_of_reported_units(post, acme):
    """write (1 s), then tests in a container (7.5 s), then write again."""
    began_at = timezone.now() - timedelta(seconds=60)
    called(acme, began_at)
    services.follow_runs(timezone.now())
    UnitReport.objects.all().delete()
    post("/one/units", id="t1", unit="tests", kind="container", backend="python:3.11", duration_s=7.5)
    UnitReport.objects.update(began_at=began_at + timedelta(seconds=1.1), ended_at=began_at + timedelta(seconds=8.6))
    called(acme, began_at + timedelta(seconds=9))
    services.follow_runs(timezone.now())
    assert post("/one/close")[1]["state"] == "done"
    assert services.follow_runs(timezone.now()) == 0  # its last calls may still come
    assert services.follow_runs(timezone.now() + services.SETTLED * 2) == 1
    graph = graph_of(ApplicationRun.objects.get().application)
    (record,) = graph.records
    assert [(step.unit, step.parent, step.duration_s) for step in record.steps] == [
        ("write", -1, 0.0), ("tests", 0, 7.5), ("write", 1, 0.0),
    ]  # fmt: skip
    assert (graph.units["tests"].kind, graph.units["tests"].name) == ("container", "python:3.11")


def test_reporting_is_idempotent(post):
    assert post(run="one", deadline_s=90)[1] == post(run="one", deadline_s=5)[1]  # the first deadline stands
    first = post("/one/units", id="t1", unit="tests", state="running")[1]
    assert first["state"] == "running"
    assert post("/one/units", id="t1", unit="tests", state="running")[1] == first
    ended = post("/one/units", id="t1", unit="tests", duration_s=2)[1]
    assert ended == {**first, "state": "done", "duration_s": 2.0}
    assert post("/one/units", id="t1", unit="tests", state="failed", duration_s=9)[1] == ended
    closed = post("/one/close", outcome="failed")[1]
    assert closed["state"] == "failed"
    assert post("/one/close")[1] == closed
    shown = post("/one?application=review", "GET")[1]
    assert (shown, len(shown["units"])) == (closed, 1)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("", {"application": None}, 400, "application"),
        ("", {"application": "a b"}, 400, "application"),
        ("", {"run": "~one"}, 400, "run"),
        ("", {"deadline_s": 0}, 400, "deadline_s"),
        ("", {"deadline_s": "soon"}, 400, "deadline_s"),
        ("", {"deadline_s": 1e12}, 400, "deadline_s"),
        ("/one/units", {"unit": "tests", "duration_s": 1}, 400, "id"),
        ("/one/units", {"id": "t", "duration_s": 1}, 400, "unit"),
        ("/one/units", {"id": "t", "unit": "tests"}, 400, "duration_s"),
        ("/one/units", {"id": "t", "unit": "tests", "duration_s": -1}, 400, "duration_s"),
        ("/one/units", {"id": "t", "unit": "tests", "kind": "gpu"}, 400, "kind"),
        ("/one/units", {"id": "t", "unit": "tests", "state": ["done"]}, 400, "state"),
        ("/one/close", {}, 404, "run"),
    ],
)
def test_what_is_wrong_is_named(post, path, body, status, param):
    answered, answer = post(path, **body)
    assert (answered, answer["error"]["param"]) == (status, param)
    assert not UnitReport.objects.exists()


def test_what_is_no_json_is_refused(client, post, acme):
    _, secret = create_api_key(acme, "another", "test")
    for body in (b"{", b"[]", b"\xff"):
        answer = client.generic(
            "POST", "/v1/runs", body, content_type="application/json", headers={"Authorization": f"Bearer {secret}"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_a_tenant_finds_its_own_runs_alone(post, globex):
    _, secret = create_api_key(globex, "of another", "test")
    post(run="one")
    assert post("/one/close", key=secret)[0] == 404
    assert post("/one?application=review", "GET", key=secret)[0] == 404
    assert post("/one?application=review", "GET", key="ph_wrong")[0] == 401


def test_limits(post, monkeypatch):
    monkeypatch.setattr(reporting, "MAX_REPORTS", 1)
    monkeypatch.setattr(reporting, "MAX_RUNNING", 1)
    post("/one/units", id="t1", unit="tests", duration_s=1)
    assert post("/one/units", id="t2", unit="tests", duration_s=1)[1]["error"]["code"] == "too_many_units"
    assert post(run="two")[1]["error"]["code"] == "too_many_runs"
    post("/one/close")
    assert post(run="one")[1]["error"]["code"] == "run_closed"
    assert post("/one/units", id="t3", unit="tests", duration_s=1)[1]["error"]["code"] == "run_closed"


def test_a_run_that_is_opened_and_never_closed_is_abandoned_and_teaches_nothing(post, acme):
    post(run="one")
    called(acme, timezone.now() - timedelta(seconds=5))
    services.follow_runs(timezone.now())
    assert services.follow_runs(timezone.now() + timedelta(minutes=5)) == 1
    run = ApplicationRun.objects.get()
    assert (run.outcome, run.steps, run.calls) == (RunOutcome.ABANDONED, [], 1)


def test_a_run_whose_last_call_failed_is_abandoned(acme):
    began_at = timezone.now() - timedelta(minutes=9)
    called(acme, began_at)
    called(acme, began_at + timedelta(seconds=3), outcome="cancelled")
    services.follow_runs(timezone.now())
    run = ApplicationRun.objects.get()
    assert (run.outcome, run.steps, run.in_time) == (RunOutcome.ABANDONED, [], None)


def test_a_unit_that_runs_keeps_its_run_open_for_an_hour_at_most(post):
    post("/one/units", id="t1", unit="tests", kind="container", state="running")
    now = timezone.now()
    assert services.follow_runs(now + timedelta(minutes=30)) == 0
    assert services.follow_runs(now + timedelta(seconds=MAX_UNIT_S + 60)) == 1
    assert ApplicationRun.objects.get().outcome == RunOutcome.ABANDONED


def test_a_failed_unit_teaches_nothing(post, acme):
    called(acme, timezone.now() - timedelta(seconds=9))
    services.follow_runs(timezone.now())
    post("/one/units", id="t1", unit="tests", state="failed", duration_s=1)
    post("/one/close")
    services.follow_runs(timezone.now() + services.SETTLED * 2)
    assert [step["unit"] for step in ApplicationRun.objects.get().steps] == ["write"]


def test_a_call_after_the_end_opens_the_run_again(post, acme):
    called(acme, timezone.now() - timedelta(seconds=9))
    services.follow_runs(timezone.now())
    post("/one/close")
    services.follow_runs(timezone.now() + services.SETTLED * 2)
    called(acme, timezone.now() + timedelta(seconds=20))
    services.follow_runs(timezone.now() + timedelta(seconds=30))
    run = ApplicationRun.objects.get()
    assert (run.closed_at, run.outcome, run.state, run.calls) == (None, "", "running", 2)


@pytest.mark.parametrize(
    ("deadline_s", "outcome", "in_time", "late_s"),
    [(None, "done", None, None), (5.0, "done", True, -1.0), (3.0, "done", False, 1.0), (5.0, "failed", False, -1.0)],
)
def test_a_run_is_in_time_by_its_deadline(deadline_s, outcome, in_time, late_s):
    now = timezone.now()
    run = ApplicationRun(began_at=now, ended_at=now + timedelta(seconds=4), deadline_s=deadline_s, outcome=outcome)
    assert (run.in_time, run.late_s) == (in_time, late_s)


def test_the_deadline_is_that_of_the_first_call(acme):
    began_at = timezone.now() - timedelta(seconds=9)
    called(acme, began_at, run_due_s=30.0)
    called(acme, began_at + timedelta(seconds=2), run_due_s=99.0)
    services.follow_runs(timezone.now())
    assert ApplicationRun.objects.get().deadline_s == 30.0
