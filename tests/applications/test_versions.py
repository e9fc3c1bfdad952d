"""Versions of demand graphs: kept, compared, restored, frozen, imported; by pages and REST."""

import json
from datetime import timedelta

import numpy as np
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.utils import timezone

from controlplane.applications import services, versions
from controlplane.applications.models import Application
from controlplane.applications.selectors import graph_of, known_graph
from controlplane.events.models import Event
from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord
from tests.applications.conftest import write_run

pytestmark = pytest.mark.django_db


def one_more_run(application, name="later", reviews=2):
    """A run that ends now."""
    now = timezone.now()
    write_run(application.tenant, name, now - timedelta(seconds=100), np.random.default_rng(3), reviews=reviews)
    services.follow_runs(now + timedelta(minutes=10))


def shorter(graph):
    """*graph* with runs that end after their first step, and a further unit."""
    units = {**graph.units, "deploy": Backend("container", "docker")}
    return DemandGraph(graph.application, units, [RunRecord(record.steps[:1]) for record in graph.records])


def test_a_restored_version_is_what_runs_are_predicted_by_and_learns_on(application, operator):
    now, before = timezone.now(), graph_of(application)
    version = versions.keep_version(application, shorter(before), "for a test", operator, now)
    kept = versions.restore(application, version, operator, "for a test", now - timedelta(minutes=2))
    restored = graph_of(application)
    assert {len(record.steps) for record in restored.records} == {1}
    assert "deploy" in restored.units
    assert known_graph(application).arrays.child.size == 0
    one_more_run(application)
    assert [len(record.steps) for record in graph_of(application).records[-2:]] == [1, 3]
    assert versions.version_graph(kept).records == before.records
    versions.restore(application, kept, operator, "back", timezone.now())
    assert graph_of(application).records == before.records
    assert Event.objects.filter(kind="application.restored").count() == 2


def test_a_frozen_application_records_and_learns_later(application, operator):
    assert versions.freeze(application, True, operator, "a test", timezone.now() - timedelta(minutes=2))
    assert not versions.freeze(application, True, operator, "again", timezone.now())
    one_more_run(application)
    assert (len(graph_of(application).records), application.runs.count()) == (40, 41)
    versions.freeze(application, False, operator, "a test", timezone.now())
    assert len(graph_of(application).records) == 41


def test_what_a_frozen_graph_needs_is_not_pruned(application, operator, monkeypatch):
    monkeypatch.setattr(services, "MOST_RECORDS", 40)
    versions.freeze(application, True, operator, "a test", timezone.now() - timedelta(minutes=2))
    one_more_run(application)
    services.prune_runs(timezone.now() + timedelta(days=services.KEPT_DAYS + 1))
    assert (len(graph_of(application).records), application.runs.count()) == (40, 40)


def test_the_last_versions_are_kept_and_one_a_day_if_it_learned(application, operator, monkeypatch):
    monkeypatch.setattr(versions, "KEPT", 3)
    now = timezone.now()
    assert (versions.keep_daily(now), versions.keep_daily(now)) == (1, 0)
    day = timedelta(hours=25)
    assert versions.keep_daily(now + day) == 0, "nothing ended since"
    one_more_run(application)
    application.runs.filter(run="later").update(ended_at=now + day)
    assert versions.keep_daily(now + day) == 1
    for number in range(3):
        versions.keep_version(application, graph_of(application), f"number {number}", operator, now)
    assert [each.number for each in application.versions.all()] == [5, 4, 3]
    assert application.versions.first().error is not None


def test_a_comparison_names_units_branches_and_errors(application):
    graph = graph_of(application)
    made = versions.compared(graph, shorter(graph))
    assert [(name, was is None, now is None) for name, was, now in made.units] == [
        ("write", False, False), ("review", False, False), ("deploy", True, False)
    ]  # fmt: skip
    assert (made.edges[0].before, made.edges[0].after, made.edges[0].was, made.edges[0].now) == (
        "write",
        "review",
        1.0,
        0.0,
    )
    assert made.records == (40, 40)
    assert made.service_s[0] > made.service_s[1] > 0
    same = versions.compared(graph, graph)
    assert (same.edges, same.changed_units) == ([], 0)


def test_a_file_is_compared_before_it_counts(client, operator, application):
    client.force_login(operator)
    text = shorter(graph_of(application)).to_json()
    values = {"tenant": "acme", "application": "review", "file": SimpleUploadedFile("graph.json", text)}
    answer = client.post("/applications/import/", values)
    assert answer.url == f"/applications/{application.pk}/compare/?after=1"
    page = client.get(answer.url).content.decode()
    assert "Make v1 active…" in page
    assert len(graph_of(application).records[0].steps) > 1, "not yet"
    client.post(f"/applications/{application.pk}/versions/1/", {"reason": "a test"})
    assert {len(record.steps) for record in graph_of(application).records} == {1}
    page = client.get(f"/applications/{application.pk}/?version=2").content.decode()
    assert "Before v1 was restored" in page
    exported = client.get(f"/applications/{application.pk}/graph.json?version=1")
    assert exported.content == text


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
    assert not application.versions.exists()
    assert Application.objects.count() == 1


def test_versions_by_rest(client, operator, application):
    client.force_login(operator)
    url, reason = f"/api/applications/{application.pk}", {"reason": "a test"}

    def post(path, **body):
        return client.post(f"{url}/{path}", reason | body, content_type="application/json")

    assert post("versions").json()["number"] == 1
    one_more_run(application)
    (row,) = client.get("/api/graph-versions?application=review").json()["items"]
    assert (row["records"], row["why"], row["made_by"]) == (40, "a test", "operator")
    compared = client.get(f"{url}/compare?before=1").json()
    assert compared["records"] == [40, 41]
    assert post("versions/1/restore").json()["records"] == 40
    assert post("versions/9/restore").status_code == 404
    assert len(json.loads(client.get(f"{url}/graph?version=2").content)["records"]) == 41
    assert post("freeze", frozen=True).status_code == 200
    application.refresh_from_db()
    assert application.frozen_at is not None


def test_a_tenants_viewer_changes_nothing(client, make_user, application):
    client.force_login(make_user("vera", application.tenant))
    assert client.get(f"/applications/{application.pk}/").status_code == 200
    assert client.post(f"/applications/{application.pk}/freeze/freeze/", {"reason": "no"}).status_code == 404
    assert client.post("/applications/import/", {"tenant": "acme"}).status_code == 404
