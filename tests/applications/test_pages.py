"""Pages and REST of applications."""

import json
import re
from datetime import timedelta

import numpy as np
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection
from django.utils import timezone

from controlplane.applications.models import Application, ApplicationRun
from controlplane.applications.selectors import demand_by, graph_of, predictions
from controlplane.applications.services import APPLICATION, calls_of, follow_runs, prune_runs
from controlplane.applications.spans import rates_of
from controlplane.console.live.state import LiveState, tables_of
from controlplane.console.pages.applications import views
from controlplane.events.models import Event
from controlplane.fleet.models import Deployment
from controlplane.tuning import selectors as tuning
from controlplane.usage.run_terms import used
from scheduling.applications.demand_graph import step_service_s
from tests.applications.conftest import learned
from tests.console.conftest import ledger_row

pytestmark = pytest.mark.django_db


def test_the_list_shows_runs_and_completion_times(client, operator, application, running):
    client.force_login(operator)
    page = client.get("/applications/").content.decode()
    assert f'href="/applications/{application.pk}/"' in page
    rows = client.get("/applications/?format=csv").getvalue().decode().splitlines()
    assert rows[0].startswith("Application,Tenant,Running,")
    assert rows[1].startswith("review,acme,1,40,")


def test_the_list_is_narrowed_to_a_region_and_a_range(client, operator, application):
    for run, region in (("run-1", "east"), ("run-2", "west")):
        application.runs.filter(run=run).update(region=region, ended_at=timezone.now())
    client.force_login(operator)
    for query, ended in (("", 40), ("hours=1", 2), ("hours=1&region=west", 1), ("region=nowhere", 0)):
        (row,) = client.get(f"/api/applications?{query}").json()["items"]
        assert row["ended"] == ended, query
    assert "last hour" in client.get("/applications/?hours=1&region=west").content.decode()
    (run, *_) = [row for row in client.get("/api/runs").json()["items"] if row["run"] == "run-1"]
    assert run["region"] == "east"
    for hours, ended in (("24", 40), ("1", 2)):
        page = client.get(f"/applications/{application.pk}/?hours={hours}").content.decode()
        assert f"running, {ended} ended" in page


def test_the_order_in_which_its_models_serve_is_in_the_list(client, operator, application, make_instance):
    deployment = make_instance().deployment
    Deployment.objects.filter(pk=deployment.pk).update(ordering_policy="hermes")
    Application.objects.filter(pk=application.pk).update(
        units={"write": {"kind": "llm", "name": deployment.model.name}}
    )
    client.force_login(operator)
    (row,) = client.get("/api/applications").json()["items"]
    assert row["order"] == "hermes"
    assert (
        "Lowest Gittins rank of the application run first (Hermes): " in client.get("/applications/").content.decode()
    )


def test_what_runs_were_predicted_to_need_is_compared_with_what_came(client, operator, acme):
    """Of two runs alike, what is left was expected to be 9 s and 1 s of service."""
    at, expected = timezone.now() - timedelta(hours=1), {"write": (0.0, 9.0), "review": (10.0, 1.0)}
    for number in range(2):
        for unit, output_tokens in (("write", 500), ("review", 100)):
            attained_s, remaining_s = expected[unit]
            standing = {"rank_s": 1.0, "attained_s": attained_s, "remaining_s": remaining_s, "worst_s": 20.0}
            ledger_row(
                acme, arrived_at=at, application="review", run=f"run-{number}", unit=unit, prompt_tokens=0,
                output_tokens=output_tokens, e2e_ms=1000.0, trace=[{"run": standing}],
            )  # fmt: skip
            at += timedelta(seconds=1.01)
        follow_runs(timezone.now())
    first, second = ApplicationRun.objects.order_by("began_at")
    whole_s = second.service_s
    assert second.expected_calls == 2
    assert second.needed_s == pytest.approx(whole_s + whole_s - 10.0)
    assert second.error_s == pytest.approx(whole_s - 9.0 + whole_s - 11.0)
    client.force_login(operator)
    (row,) = client.get("/api/applications").json()["items"]
    assert row["demand_error"] == pytest.approx((first.error_s + second.error_s) / (first.needed_s + second.needed_s))
    assert f"±{row['demand_error']:.0%}" in client.get("/applications/").content.decode()


def test_the_empty_list_says_how_to_begin(client, operator, db):
    client.force_login(operator)
    assert "X-Application" in client.get("/applications/").content.decode()


def test_a_page_shows_graph_units_and_ranks(client, operator, application, running):
    client.force_login(operator)
    page = client.get(f"/applications/{application.pk}/").content.decode()
    assert '<svg class="demand-graph short"' in page
    assert "1 running run, with write as the last ended call" in page
    assert f'href="/applications/runs/{running.pk}/"' in page
    exported = client.get(f"/applications/{application.pk}/graph.json")
    assert json.loads(exported.content)["application"] == "review"


def test_a_run_is_a_waterfall_of_its_calls(client, operator, application):
    client.force_login(operator)
    run = application.runs.order_by("calls").last()
    page = client.get(f"/applications/runs/{run.pk}/").content.decode()
    assert page.count('<svg viewBox="0 0 1000 14"') == run.calls
    assert "it had no deadline" in page
    assert '<text x="0.0%" y="11" data-x="0.0">0 s</text>' in page
    assert page.count(", critical") == run.calls  # each waited for the one before


def test_an_application_without_records_has_a_page(client, operator, acme):
    client.force_login(operator)
    empty = Application.objects.create(tenant=acme, name="new")
    assert "No run has ended yet" in client.get(f"/applications/{empty.pk}/").content.decode()


def test_the_verdict_names_applications_that_finish_too_late(client, operator, application):
    application.runs.update(deadline_s=0.5)
    client.force_login(operator)
    page = client.get("/applications/").content.decode()
    assert "1 application finishes too late" in page
    assert "0 of 40</span>" in page
    assert "no deadline" not in page
    run = application.runs.first()
    assert f"Late by {run.duration_s - 0.5:.1f} s" in client.get(f"/applications/runs/{run.pk}/").content.decode()


@pytest.mark.parametrize(
    ("deadline_s", "word"), [(3600.0, "In time so far"), (0.1, "will be late"), (None, "no deadline")]
)
def test_running_runs_have_slack(client, operator, application, running, deadline_s, word):
    application.runs.filter(pk=running.pk).update(deadline_s=deadline_s)
    client.force_login(operator)
    pages = [client.get(path).content.decode() for path in ("/applications/", f"/applications/runs/{running.pk}/")]
    assert f'/applications/runs/{running.pk}/#stop-runs-{running.pk}"' in pages[0]
    assert f'<dialog id="stop-runs-{running.pk}"' in pages[1]
    assert ('class="deadline" x1=' in pages[0]) == (deadline_s is not None)
    assert any(word in page for page in pages)


def test_an_application_that_learns_says_how_many_runs_are_missing(client, operator, acme):
    learned(acme, runs=5)
    client.force_login(operator)
    assert "learned from 5 runs" in client.get("/applications/").content.decode()


def test_calls_of_a_run_are_found_by_an_index(application):
    plan = calls_of(application.tenant_id, "review", "run-1").order_by("arrived_at").explain()
    assert connection.vendor != "sqlite" or "ledger_application_run" in plan


def test_a_run_with_its_calls_comes_by_rest(client, operator, application):
    client.force_login(operator)
    run = application.runs.first()
    answer = client.get(f"/api/runs/{run.pk}").json()
    assert (answer["run"]["run"], len(answer["calls"])) == (run.run, run.calls)
    assert answer["calls"][0]["unit"] == "write"
    assert client.get("/api/runs/999999").status_code == 404


def test_a_file_is_exported_and_imported_by_page(client, operator, application):
    client.force_login(operator)
    text = client.get(f"/applications/{application.pk}/graph.json").content
    assert client.get(f"/api/applications/{application.pk}/graph").content == text
    values = {"tenant": "acme", "application": "copy", "file": SimpleUploadedFile("graph.json", text)}
    for _ in range(2):  # again: its records replace those that were imported
        values["file"].seek(0)
        answer = client.post("/applications/import/", values)
        copy = Application.objects.get(name="copy")
        assert answer.url == f"/applications/{copy.pk}/"
        assert graph_of(copy).records == graph_of(application).records
    assert Event.objects.filter(kind="application.imported").count() == 2


NAMED = b'{"version":1,"application":"%b","units":{"u":{"kind":"llm","name":"m"}}}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "input data was truncated"),
        (b"[]", "version: must be 1"),
        (b"[" * 50_000, "it is nested too deeply"),
        (b'{"version":1,"application":"a","units":{}}', "units: the graph has none"),
        (NAMED % b"a\\u0000", "application: a name has 1 to 80 characters"),
        (NAMED % (b"a" * 81), "application: a name has 1 to 80 characters"),
    ],
)
def test_a_wrong_file_changes_nothing_and_says_why(client, operator, application, text, words):
    client.force_login(operator)
    values = {"tenant": "acme", "file": SimpleUploadedFile("graph.json", text)}
    page = client.post("/applications/import/", values, follow=True).content.decode().lower()
    assert "nothing was imported" in page
    assert words in page
    assert Application.objects.count() == 1


def test_a_tenants_viewer_imports_nothing(client, make_user, application):
    client.force_login(make_user("vera", application.tenant))
    assert client.get(f"/applications/{application.pk}/").status_code == 200
    assert client.post("/applications/import/", {"tenant": "acme"}).status_code == 404


def test_one_line_says_what_was_warmed_early(client, operator, application, monkeypatch):
    tables = tables_of({"prewarmed": {"adapter": [12, 9]}})
    monkeypatch.setattr(views.feed, "state", lambda: LiveState(tables=tables))
    client.force_login(operator)
    assert "12 LoRA adapters (9 used)" in client.get("/applications/").content.decode()


def test_an_operator_of_the_tenant_limits_runs(client, operator, viewer, application):
    """On the page, by REST and with the inventory; what is left out stays, and what is empty ends."""
    client.force_login(operator)
    page = f"/applications/{application.pk}/"
    form = {"run_deadline_s": "90", "run_max_tokens": "120000", "run_max_usd": "", "reason": "agents run away"}
    said = client.post(f"{page}limits/", form, follow=True).content.decode()
    assert "The limits of review&#x27;s runs are changed" in said
    assert re.search(r"Limits of a run: deadline 1:30.min, tokens 120.*k, dollars .<", said)
    assert Event.objects.latest("pk").reason == "agents run away"
    rest = f"/api/applications/{application.pk}"
    changed = client.patch(rest, {"run_max_usd": 0.5, "run_deadline_s": None}, content_type="application/json")
    assert [changed.json()[name] for name in APPLICATION.fields] == [None, 120_000, 0.5]
    assert (
        "greater than or equal to 1"
        in client.post(f"{page}limits/", form | {"run_max_tokens": "0"}, follow=True).content.decode()
    )
    client.force_login(viewer)
    refused = (
        client.patch(rest, {"run_max_usd": 9}, content_type="application/json"),
        client.post(f"{page}limits/", form),
    )
    assert [each.status_code for each in refused] == [404, 404]


def test_an_application_with_limits_is_kept_without_runs(acme):
    old = timezone.now() - timedelta(days=60)
    for name, most in (("bare", None), ("limited", 10)):
        Application.objects.create(tenant=acme, name=name, created_at=old, run_max_tokens=most)
    prune_runs(timezone.now())
    assert [each.name for each in Application.objects.all()] == ["limited"]


def test_what_runs_have_used_is_read_from_the_ledger_after_a_takeover(acme):
    """Those followed, those not yet followed, and none that ended long ago."""
    now = timezone.now()
    for run, minutes, model in (("one", 9, "m"), ("one", 8, "n"), ("ended", 600, "m"), ("old", 3_000, "m")):
        ledger_row(
            acme, arrived_at=now - timedelta(minutes=minutes), application="review", run=run, model=model,
            prompt_tokens=30, output_tokens=12, e2e_ms=1000.0,
        )  # fmt: skip
    follow_runs(now)
    ledger_row(acme, arrived_at=now, application="review", run="new", model="m", prompt_tokens=5, output_tokens=2)
    key = acme.pk, "review"
    assert used(now) == {(*key, "one"): {"m": 42, "n": 42}, (*key, "ended"): {"m": 42}, (*key, "new"): {"m": 7}}


def test_work_left_is_predicted_by_what_orders_runs(application, running, settings):
    """By recorded runs at the same moment or by walks of the graph, as the models of its units say."""
    graph, left = graph_of(application), {}
    for by in ("table", "graph"):
        settings.RUN_DEMAND = by
        tuning.latest.forget()
        assert demand_by(graph) == by
        (left[by],) = predictions(graph, [running])
    assert left["table"].mean_s != left["graph"].mean_s
    rates, steps = rates_of(graph.units), [record.steps for record in graph.records]
    service_s = [[step_service_s(each, graph.units[each.unit], rates[each.unit]) for each in of] for of in steps]
    assert left["table"].mean_s == pytest.approx(np.mean([sum(each[1:]) for each in service_s]), rel=0.05)
