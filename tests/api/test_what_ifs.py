"""`/api/what-ifs`: asked, watched, compared, cancelled, handed out; and the same on the live connection's topic."""

import csv
import io
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from controlplane.console.live import what_ifs as live
from controlplane.console.live.fragments import is_topic
from controlplane.simulation.whatif import services, working
from controlplane.simulation.whatif.models import TraceFile, WhatIf
from tests.simulation.whatif import rows

pytestmark = pytest.mark.django_db
REACTIVE = {"preset": "qlm"}
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
    answer = caller.post(
        "what-ifs", **body(seeds=1, edits=[{"kind": "demand", "edit": "burst", "by": 3, "from_s": 300, "until_s": 600}])
    )
    assert answer.status_code == 202, answer.json()
    asked = answer.json()
    assert [each["letter"] for each in asked["futures"]] == ["A", "B", "C"]
    assert asked["futures"][1]["words"] == ["policy to QLM, m"]
    assert asked["progress"]["runs"] == 3
    rows.run_all(WhatIf.objects.get())
    done = caller.get(f"what-ifs/{asked['id']}").json()
    assert (done["state"], done["progress"]["done"]) == ("done", 1.0)
    made = caller.get(f"what-ifs/{asked['id']}/comparison", scope="all, edited").json()
    assert [each["seeds_done"] for each in made["futures"]] == [1, 1, 1]
    whole = caller.get(f"what-ifs/{asked['id']}/comparison").json()
    edited, all_of_it = (each["futures"][0]["requests"]["mean"] for each in (made, whole))
    assert 0.5 < edited / all_of_it < 0.7  # three times as many in a third of the time
    assert set(whole["curves"]) == {"A", "B", "C"}
    answer = caller.get(f"what-ifs/{asked['id']}/futures.csv")
    table = list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode())))
    assert [each["future"] for each in table] == ["A", "B", "C"]
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


def test_a_draft_is_kept_and_run_later(sign_in, operator):
    caller = sign_in("operator")
    draft = caller.post("what-ifs", **body(draft=True)).json()
    assert draft["state"] == "draft"
    address = f"what-ifs/{draft['id']}"

    def state(**change):
        return caller.patch(address, **change).json()["progress"]["futures"][1]["state"]

    assert [state(state="queued"), state(state="cancelled", future="B"), state(state="queued", future="B")] == [
        "queued", "cancelled", "queued",
    ]  # fmt: skip
    assert caller.patch(address, state="queued").status_code == 409
    assert len(caller.patch(address, seeds=3, chosen="B").json()["futures"]) == 3
    assert WhatIf.objects.get().chosen.letter == "B"
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
