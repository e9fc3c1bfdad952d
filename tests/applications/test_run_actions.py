"""Moving a run first and stopping it: the rows, the events, the page with its price, and REST."""

import pytest

from controlplane.applications import reporting
from controlplane.console.pages.applications import views
from controlplane.dispatch.queues.commands import GatewaySilent
from controlplane.dispatch.queues.runs import RunAction, RunPrice
from controlplane.events.models import Event

pytestmark = pytest.mark.django_db
PRICE = RunPrice(
    waiting=3, running=1, running_tokens=112, wait_s=8.4, overtaken=17, first=False, stopped=False, can_undo=False
)


@pytest.fixture
def asked(monkeypatch):
    """Return what the gateway was asked to do; it answers with the price."""
    actions = []

    def answer(tenant_id, application, run, action=None):
        actions.append((application, run, action))
        return PRICE

    for module in (reporting, views):
        monkeypatch.setattr(module, "ask_of_run", answer)
    monkeypatch.setattr("controlplane.api.routers.records.ask_of_run", answer)
    return actions


def test_the_page_says_the_price_and_stops_a_run_until_it_is_undone(client, operator, running, asked):
    client.force_login(operator)
    page = f"/applications/runs/{running.pk}/"
    html = client.get(page).content.decode()
    assert "would overtake 17 requests of others" in html
    assert "with 112 output tokens lost" in html
    answer = client.post(f"{page}stop/", {"reason": "a loop"}, follow=True)
    assert "Run now is stopped: 4 open calls ended, and later ones are refused." in answer.content.decode()
    running.refresh_from_db()
    assert (running.state, running.in_time) == ("stopped", None)
    event = Event.objects.get(kind="run.stopped")
    assert (event.reason, event.inputs["running"], event.subject) == ("a loop", 1, "review")
    client.post(f"{page}undo/", {"reason": "it was none"})
    running.refresh_from_db()
    assert (running.state, running.closed_at) == ("running", None)
    assert [action for _, _, action in asked if action] == [RunAction.STOP, RunAction.UNDO]


def test_runs_are_moved_first_by_rest(client, operator, running, asked):
    client.force_login(operator)
    assert client.get(f"/api/runs/{running.pk}").json()["price"]["overtaken"] == 17
    body = {"reason": "it is urgent"}
    answer = client.post(f"/api/runs/{running.pk}/first", body, content_type="application/json").json()
    assert "overtake 17 waiting requests of others" in answer["message"]
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

    for module in (reporting, views):
        monkeypatch.setattr(module, "ask_of_run", silent)
    client.force_login(operator)
    html = client.get(f"/applications/runs/{running.pk}/").content.decode()
    assert "Move first and Stop run are unavailable: No gateway answers" in html
    answer = client.post(f"/api/runs/{running.pk}/stop", {"reason": "a test"}, content_type="application/json")
    assert answer.status_code == 503
    running.refresh_from_db()
    assert running.state == "running"
    assert not Event.objects.filter(kind__startswith="run.").exists()
