"""Moving a run first and stopping it: the rows, the events, the page, and REST."""

import pytest

from controlplane.applications import reporting
from controlplane.dispatch.queues.commands import GatewaySilent
from controlplane.dispatch.queues.operations import RunAction
from controlplane.events.models import Event

pytestmark = pytest.mark.django_db


@pytest.fixture
def asked(monkeypatch):
    """Return what the gateway was asked to do; each run has four open calls."""
    actions = []

    def answer(tenant_id, application, run, action):
        actions.append((application, run, action))
        return 4

    monkeypatch.setattr(reporting, "ask_of_run", answer)
    return actions


def test_a_run_is_stopped_on_its_page(client, operator, running, asked):
    client.force_login(operator)
    page = f"/applications/runs/{running.pk}/"
    assert "Its open calls end" in client.get(page).content.decode()
    answer = client.post(f"/operations/runs/{running.pk}/stop/", {"reason": "a loop", "next": page}, follow=True)
    assert "Run now is stopped: 4 open calls ended, and later ones are refused." in answer.content.decode()
    running.refresh_from_db()
    assert (running.state, running.in_time) == ("stopped", None)
    event = Event.objects.get(kind="run.stopped")
    assert (event.reason, event.inputs, event.subject) == ("a loop", {"run": "now", "open_calls": 4}, "review")
    assert asked == [("review", "now", RunAction.STOP)]


def test_a_run_is_moved_first_by_rest(client, operator, running, asked):
    client.force_login(operator)
    body = {"reason": "it is urgent"}
    answer = client.post(f"/api/runs/{running.pk}/first", body, content_type="application/json").json()
    assert answer["message"] == "Run now goes first: its calls overtake waiting requests of others."
    assert Event.objects.get(kind="run.moved_first").inputs["run"] == "now"
    running.refresh_from_db()
    assert running.state == "running"


def test_a_run_that_has_ended_is_left_alone(client, operator, application, asked):
    client.force_login(operator)
    run = application.runs.first()
    for action in ("first", "stop"):
        answer = client.post(f"/api/runs/{run.pk}/{action}", {"reason": "late"}, content_type="application/json")
        assert (answer.status_code, "has ended" in answer.json()["error"]["message"]) == (409, True)
    assert not asked


def test_without_a_gateway_nothing_changes(client, operator, running, monkeypatch):
    def silent(*_):
        raise GatewaySilent("No gateway answers; nothing was done")

    monkeypatch.setattr(reporting, "ask_of_run", silent)
    client.force_login(operator)
    answer = client.post(f"/api/runs/{running.pk}/stop", {"reason": "a test"}, content_type="application/json")
    assert answer.status_code == 503
    running.refresh_from_db()
    assert running.state == "running"
    assert not Event.objects.filter(kind__startswith="run.").exists()
