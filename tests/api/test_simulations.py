"""`/api/simulations`: a scenario is checked, run by a worker, watched, cancelled, and its result fetched."""

import tomllib
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.simulation import requested
from controlplane.simulation.models import SimulationRun
from tests.scheduling.simulation.test_scenario import RIGHT
from workers.tasks import simulation as tasks
from workers.tasks.planning import LONG_WORK, only_one

pytestmark = pytest.mark.django_db


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """Runs that workers were asked for."""
    numbers: list[int] = []

    def send(task: str, pk: int, **options: Any) -> bool:
        assert task == tasks.run_simulation.name
        numbers.append(pk)
        return True

    monkeypatch.setattr(requested, "send_task", send)
    return numbers


def scenario(**tables: Any) -> dict[str, Any]:
    return tomllib.loads(RIGHT) | {"title": "By REST"} | tables


def test_a_scenario_runs_and_its_result_is_fetched(sign_in, operator, sent):
    caller = sign_in("operator")
    answer = caller.post("simulations", scenario=scenario(), reason="what if")
    assert answer.status_code == 202
    asked = answer.json()
    assert (asked["state"], asked["progress"], asked["requested_by"]) == ("queued", 0.0, operator.get_username())
    assert sent == [asked["id"]]
    assert tasks.run_simulation(asked["id"]) == "done"
    done = caller.get(f"simulations/{asked['id']}").json()
    assert (done["state"], done["progress"], done["error"]) == ("done", 1.0, "")
    assert done["result"]["strategy"] == "reactive"
    assert done["result"]["requests"] > 100
    assert {row["measure"] for row in done["result"]["measures"]} >= {"ttft_s", "slo_attainment"}
    assert done["scenario"]["title"] == "By REST"
    kinds = Event.objects.filter(subject_type="simulationrun").values_list("kind", flat=True)
    assert set(kinds) == {"simulation.requested", "simulation.done"}
    # The same scenario and seed give the same, and it runs once.
    assert tasks.run_simulation(asked["id"]) == ""
    again = caller.post("simulations", scenario=scenario()).json()["id"]
    tasks.run_simulation(again)
    results = [SimulationRun.objects.get(pk=pk).result for pk in (asked["id"], again)]
    for result in results:
        result.pop("took_s")
    assert results[0] == results[1]
    listed = caller.get("simulations", state="done").json()["items"]
    assert [row["id"] for row in listed] == [again, asked["id"]]
    assert "result" not in listed[0]


@pytest.mark.parametrize(
    ("tables", "field", "message"),
    [
        ({"sede": 3}, "sede", "is not a key here; there is title"),
        ({"regions": {"east": {}}}, "fleet[0].regions", "there is no region 'west'; there is east"),
        ({"scaling": {"strategy": "hope"}}, "scaling", "there is no strategy 'hope'"),
        ({"clients": [], "trace": {"file": "/etc/hostname", "format": "azure"}}, "trace.file", "simulate` alone"),
        ({"demand": {"duration_h": 10_000}}, "clients", "36,000,000 requests; 2,000,000 are the most"),
        ({"title": "x" * 300_000}, "scenario", "262,144 are the most"),
    ],
)
def test_what_is_wrong_is_named(sign_in, operator, sent, tables, field, message):
    answer = sign_in("operator").post("simulations", scenario=scenario(**tables))
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["field"] == field
    assert message in error["message"]
    assert not sent
    assert not SimulationRun.objects.exists()


def test_files_of_lengths_are_not_read(sign_in, operator, sent):
    client = scenario()["clients"][0]
    for name in ("prompt", "output"):
        client.pop(name)
    client["lengths"] = {"file": "/etc/passwd", "format": "azure"}
    error = sign_in("operator").post("simulations", scenario=scenario(clients=[client])).json()["error"]
    assert error["field"] == "clients[0].lengths.file"


def test_viewers_read_and_do_not_run(sign_in, viewer, sent):
    caller = sign_in("viewer")
    assert caller.post("simulations", scenario=scenario()).status_code == 403
    assert caller.get("simulations").json()["items"] == []


def test_it_waits_for_other_long_work(sign_in, operator, sent):
    pk = sign_in("operator").post("simulations", scenario=scenario()).json()["id"]
    with only_one(LONG_WORK):
        assert tasks.run_simulation(pk) == ""
    assert SimulationRun.objects.get(pk=pk).state == "queued"
    assert tasks.run_simulation(pk) == "done"


def test_one_that_waits_is_cancelled(sign_in, operator, sent):
    caller = sign_in("operator")
    pk = caller.post("simulations", scenario=scenario()).json()["id"]
    assert caller.post(f"simulations/{pk}/cancel", reason="a mistake").json()["state"] == "cancelled"
    assert tasks.run_simulation(pk) == ""
    assert caller.post(f"simulations/{pk}/cancel").status_code == 409


def test_one_that_runs_stops_when_it_is_cancelled(sign_in, operator, sent, monkeypatch):
    caller = sign_in("operator")
    west = {"model": "m", "region": "west", "max_instances": 3}
    ticking = scenario(scaling={"strategy": "siloed", "min_instances": 1}, endpoints=[west])
    pk = caller.post("simulations", scenario=ticking).json()["id"]
    monkeypatch.setattr(requested, "LOOK_S", 0.0)
    seen = []

    def cancelled(row_pk, before, **values):
        if "progress" in values:
            seen.append(values["progress"])
            SimulationRun.objects.filter(pk=row_pk).update(state="cancelled")
        return advance(row_pk, before, **values)

    advance = requested._advance
    monkeypatch.setattr(requested, "_advance", cancelled)
    assert tasks.run_simulation(pk) == "cancelled"
    assert len(seen) == 1
    assert SimulationRun.objects.get(pk=pk).result is None


def test_one_that_fails_says_why(sign_in, operator, sent):
    caller = sign_in("operator")
    text = scenario()
    text["clients"][0]["prompt"] = {"median": 900, "p95": 3000}
    pk = caller.post("simulations", scenario=text).json()["id"]
    assert tasks.run_simulation(pk) == "failed"
    row = caller.get(f"simulations/{pk}").json()
    assert row["state"] == "failed"
    assert "set demand.too_long" in row["error"]
    assert Event.objects.filter(kind="simulation.failed", severity="warning").exists()


def test_too_many_at_once_are_refused_and_old_ones_go(sign_in, operator, sent, monkeypatch):
    monkeypatch.setattr(requested, "MOST_WAITING", 2)
    monkeypatch.setattr(requested, "MOST_KEPT", 1)
    caller = sign_in("operator")
    ended = [SimulationRun.objects.create(scenario={}, state="done").pk for _ in range(3)]
    assert [caller.post("simulations", scenario=scenario()).status_code for _ in range(3)] == [202, 202, 409]
    assert list(SimulationRun.objects.filter(state="done").values_list("pk", flat=True)) == [ended[-1]]


def test_what_was_left_behind_fails_and_what_waits_is_asked_for_again(sent):
    now = timezone.now()
    old = now - timedelta(hours=1)
    lost = SimulationRun.objects.create(scenario={}, state="running", requested_at=old, started_at=old)
    waiting = SimulationRun.objects.create(scenario={}, requested_at=old)
    SimulationRun.objects.create(scenario={})
    assert tasks.look_after_simulations() == 2
    lost.refresh_from_db()
    assert lost.state == "failed"
    assert "gone" in lost.error
    assert sent == [waiting.pk]
