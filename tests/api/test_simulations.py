"""`/api/what-ifs` of a scenario: it is checked, run by a worker as a what-if of one future, and cancelled."""

import tomllib
from typing import Any

import pytest

from controlplane.events.models import Event
from controlplane.simulation.whatif import services, working
from controlplane.simulation.whatif.models import FutureSeed, WhatIf
from tests.scheduling.simulation.test_scenario import RIGHT

pytestmark = pytest.mark.django_db


def scenario(**tables: Any) -> dict[str, Any]:
    return tomllib.loads(RIGHT) | {"title": "By REST", "seed": 3_000_000_000} | tables


def test_a_scenario_runs_and_its_result_is_fetched(sign_in, operator):
    caller = sign_in("operator")
    answer = caller.post("what-ifs", scenario=scenario())
    assert answer.status_code == 202
    asked = answer.json()
    assert (asked["state"], asked["progress"]["done"], asked["requested_by"]) == (
        "queued",
        0.0,
        operator.get_username(),
    )
    assert FutureSeed.objects.get().seed == 3_000_000_000
    working.work()
    done = caller.get(f"what-ifs/{asked['id']}").json()
    assert (done["state"], done["progress"]["done"]) == ("done", 1.0)
    assert done["result"]["strategy"] == "reactive"
    assert done["result"]["requests"] > 100
    assert {row["measure"] for row in done["result"]["measures"]} >= {"ttft_s", "slo_attainment"}
    kinds = Event.objects.filter(subject_type="whatif").values_list("kind", flat=True)
    assert set(kinds) == {"what_if.requested", "what_if.done"}
    assert working.work() is None
    listed = caller.get("what-ifs", state="done").json()["items"]
    assert [row["id"] for row in listed] == [asked["id"]]
    assert "result" not in listed[0]
    compared = caller.get(f"what-ifs/{asked['id']}/comparison").json()
    assert compared["futures"][0]["requests"]["mean"] == done["result"]["requests"]


def test_runs_of_applications_are_in_the_result(sign_in, operator):
    caller = sign_in("operator")
    runs = {"suite": "EV", "model": "m", "slo_class": "iw", "runs": 5, "deadline_factor": [9.0]}
    alone = scenario(applications=[runs], demand={"duration_h": 0.02, "too_long": "clip"})
    del alone["clients"]
    pk = caller.post("what-ifs", scenario=alone).json()["id"]
    working.work()
    rows = caller.get(f"what-ifs/{pk}").json()["result"]["runs"]
    assert [(row["application"], row["runs"], row["ended"], row["due"]) for row in rows] == [
        ("all", 5, 5, 5), ("EV", 5, 5, 5),
    ]  # fmt: skip
    assert rows[1]["p95_s"] > 0
    compared = caller.get(f"what-ifs/{pk}/comparison").json()["futures"][0]["runs"]
    assert [row["application"] for row in compared] == ["all", "EV"]
    assert compared[1]["in_time"] == rows[1]["in_time"]


@pytest.mark.parametrize(
    ("tables", "field", "message"),
    [
        ({"sede": 3}, "sede", "is not a key here; there is title"),
        ({"regions": {"east": {}}}, "fleet[0].regions", "there is no region 'west'; there is east"),
        ({"scaling": {"strategy": "hope"}}, "scaling", "there is no strategy 'hope'"),
        ({"clients": [], "trace": {"file": "/etc/hostname", "format": "azure"}}, "trace.file", "simulate` alone"),
        ({"demand": {"duration_h": 10_000}}, "clients", "36,000,000 requests; 5,000,000 are the most"),
        (
            {"applications": [{"graph": "g.json", "model": "m", "slo_class": "iw", "runs": 1}]},
            "applications[0].graph",
            "reads a file",
        ),
        (
            {"applications": [{"suite": "MRS", "model": "m", "slo_class": "iw", "runs": 100_000}]},
            "clients",
            "requests; 5,000,000 are the most",
        ),
        ({"title": "x" * 300_000}, "scenario", "262,144 are the most"),
    ],
)
def test_what_is_wrong_is_named(sign_in, operator, tables, field, message):
    answer = sign_in("operator").post("what-ifs", scenario=scenario(**tables))
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["field"] == field
    assert message in error["message"]
    assert not WhatIf.objects.exists()


def test_files_of_lengths_are_not_read(sign_in, operator):
    client = scenario()["clients"][0]
    for name in ("prompt", "output"):
        client.pop(name)
    client["lengths"] = {"file": "/etc/passwd", "format": "azure"}
    error = sign_in("operator").post("what-ifs", scenario=scenario(clients=[client])).json()["error"]
    assert error["field"] == "clients[0].lengths.file"


def test_one_that_waits_is_cancelled(sign_in, operator):
    caller = sign_in("operator")
    pk = caller.post("what-ifs", scenario=scenario()).json()["id"]
    assert caller.patch(f"what-ifs/{pk}", state="cancelled", reason="a mistake").json()["state"] == "cancelled"
    assert working.work() is None
    assert caller.patch(f"what-ifs/{pk}", state="cancelled").status_code == 409


def test_one_that_fails_says_why(sign_in, operator):
    caller = sign_in("operator")
    text = scenario()
    text["clients"][0]["prompt"] = {"median": 900, "p95": 3000}
    pk = caller.post("what-ifs", scenario=text).json()["id"]
    working.work()
    row = caller.get(f"what-ifs/{pk}").json()
    assert row["state"] == "failed"
    assert "set demand.too_long" in row["progress"]["futures"][0]["error"]
    assert FutureSeed.objects.get().state == "failed"


def test_too_many_at_once_are_refused(sign_in, operator, monkeypatch):
    monkeypatch.setattr(services, "MAX_OPEN", 2)
    caller = sign_in("operator")
    assert [caller.post("what-ifs", scenario=scenario()).status_code for _ in range(3)] == [202, 202, 409]
    assert WhatIf.objects.count() == 2
