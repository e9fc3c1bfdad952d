"""`/api/what-ifs`: asked, watched, compared, cancelled, handed out; and the same on the live connection's topic."""

from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from controlplane.console.live import what_ifs as live
from controlplane.console.live.fragments import is_topic
from controlplane.fleet.models import Model
from controlplane.simulation.whatif import services, working
from controlplane.simulation.whatif.models import FutureSeed, TraceFile, WhatIf
from tests.simulation.whatif import rows

pytestmark = pytest.mark.django_db
REACTIVE = {"preset": "qlm"}
ASKING = rows.start()["scenario"]["clients"][0]
CLIENT = {name: value for name, value in ASKING.items() if name not in ("prompt", "output")}
BOUNDS = {"name": "More", "changes": [{"kind": "bounds", "model": "m", "max_instances": 3}]}


@pytest.fixture(autouse=True)
def sent(monkeypatch) -> list[str]:
    """Tasks that workers were sent."""
    tasks: list[str] = []
    monkeypatch.setattr(working, "send_task", lambda task, **_: tasks.append(task) or True)
    return tasks


def body(**values: Any) -> dict[str, Any]:
    begin = {"kind": "synthetic", "scenario": rows.start()["scenario"]}
    return {"title": "By REST", "begin": begin, "horizon_s": 900, "seeds": 2, "futures": [REACTIVE, BOUNDS]} | values


def test_it_runs_and_is_compared(sign_in, operator):
    caller = sign_in("operator")
    answer = caller.post("what-ifs", **body(seeds=1))
    assert answer.status_code == 202, answer.json()
    asked = answer.json()
    assert [each["letter"] for each in asked["futures"]] == ["A", "B", "C"]
    assert asked["futures"][1]["words"] == ["policy to QLM, m"]
    assert asked["progress"]["runs"] == 3
    rows.run_all(WhatIf.objects.get())
    done = caller.get(f"what-ifs/{asked['id']}").json()
    assert (done["state"], done["progress"]["done"]) == ("done", 1.0)
    made = caller.get(f"what-ifs/{asked['id']}/comparison", slo_class="iw").json()
    assert [each["seeds_done"] for each in made["futures"]] == [1, 1, 1]
    assert set(made["curves"]) == {"A", "B", "C"}
    assert [row["id"] for row in caller.get("what-ifs", state="done").json()["items"]] == [asked["id"]]


def test_what_is_wrong_is_named(sign_in, operator):
    caller = sign_in("operator")
    wrong = [{"kind": "bounds", "model": "n", "max_instances": 3}]
    error = caller.post("what-ifs", **body(futures=[{"name": "x", "changes": wrong}])).json()["error"]
    assert (error["field"], error["message"]) == ("B.changes[0].model", "there is no model 'n'; there is m")
    assert not WhatIf.objects.exists()
    assert caller.post("what-ifs", **body(futures=[{"preset": "hope"}])).json()["error"]["field"] == "preset"
    assert caller.post("what-ifs", **body(futures=[{}] * 7)).json()["error"]["field"] == "futures"
    assert caller.post("what-ifs", **body(horizon_s=5)).json()["error"]["field"] == "horizon_s"


@pytest.mark.parametrize(
    ("tables", "field", "message"),
    [
        ({"sede": 3}, "A.changes", "sede: is not a key here; there is title"),
        ({"clients": [], "trace": {"file": "/etc/hostname", "format": "azure"}}, "start", "simulate` alone"),
        (
            {"clients": [ASKING | {"requests_per_s": 1e6}]},
            "A.changes",
            "requests; 5,000,000 are the most",
        ),
        ({"clients": [CLIENT | {"lengths": {"file": "/etc/passwd", "format": "azure"}}]}, "start", "upload a trace"),
        (
            {"applications": [{"graph": "g.json", "model": "m", "slo_class": "iw", "runs": 1}]},
            "A.changes",
            "reads a file",
        ),
    ],
)
def test_a_scenario_that_reads_files_or_is_too_large_is_refused(sign_in, operator, tables, field, message):
    begin = {"kind": "synthetic", "scenario": rows.start(**tables)["scenario"]}
    answer = sign_in("operator").post("what-ifs", **body(begin=begin, futures=[]))
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, field), answer.content
    assert message in answer.json()["error"]["message"]
    assert not WhatIf.objects.exists()


def test_too_many_at_once_are_refused(sign_in, operator, monkeypatch):
    monkeypatch.setattr(services, "MAX_OPEN", 2)
    caller = sign_in("operator")
    assert [caller.post("what-ifs", **body()).status_code for _ in range(3)] == [202, 202, 409]
    assert WhatIf.objects.count() == 2


def test_a_future_that_breaks_its_promises_becomes_the_plan_only_anyway(sign_in, operator, deployment):
    caller = sign_in("operator")
    pk = caller.post("what-ifs", **body(seeds=1, futures=[REACTIVE])).json()["id"]
    rows.run_all(WhatIf.objects.get())
    for run in FutureSeed.objects.all():
        for columns in run.result["columns"].values():
            columns["slo_met"] = 0.1
        run.save()
    Model.objects.update(name="m")
    plan = {"future": "B", "reason": "to try it"}
    refused = caller.post(f"what-ifs/{pk}/plan", **plan)
    assert refused.status_code == 409
    assert "keeps its promises in 0 of 1 repetitions" in refused.json()["error"]["message"]
    assert caller.post(f"what-ifs/{pk}/plan", **plan, anyway=True).json()["plan"]["letter"] == "B"


def test_it_is_cancelled_resumed_narrowed_and_deleted(sign_in, operator):
    caller = sign_in("operator")
    address = f"what-ifs/{caller.post('what-ifs', **body()).json()['id']}"
    for change, expected in (
        ({"state": "queued"}, 409), ({"state": "cancelled"}, "cancelled"), ({"state": "cancelled"}, 409),
        ({"state": "queued"}, "queued"), ({"seeds": 3}, "queued"),
    ):  # fmt: skip
        answer = caller.patch(address, **change)
        assert expected in (answer.status_code, answer.json().get("state")), change
    assert answer.json()["progress"]["runs"] == 9
    assert caller.send("DELETE", address, {}).status_code == 409
    assert caller.patch(address, state="cancelled").json()["state"] == "cancelled"
    assert caller.send("DELETE", address, {}).status_code == 204


def test_a_trace_is_uploaded(acting):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,100,20\n2023-11-16 18:15:48,90,10\n"
    for content, status in ((text, 201), ("TIMESTAMP\n1", 409)):
        file = SimpleUploadedFile("azure.csv", content.encode())
        answer = acting.post("/api/what-if-traces", {"file": file, "format": "azure"})
        assert answer.status_code == status, answer.content
    row = TraceFile.objects.get()
    assert (row.requests, row.span_s) == (2, 2.0)
    assert [each["id"] for each in acting.get("/api/what-if-traces").json()["items"]] == [row.pk]


def test_the_live_topic_follows_its_progress(operator):
    row = services.submit(rows.draft(operator, BOUNDS, horizon_s=600.0), operator)
    assert is_topic(f"what-if:{row.pk}")
    assert not is_topic("what-if:x")
    before = live.read(row.pk)
    assert [one["state"] for one in before["futures"]] == ["queued", "queued"]
    working.work()
    after = live.read(row.pk)
    assert [one["seeds_done"] for one in after["futures"]] == [1, 0]
    assert live.drawn(before) != live.drawn(after)
    assert live.read(row.pk + 1) is None
