"""Pages and REST of applications."""

import json

import pytest

from controlplane.applications.models import Application
from controlplane.applications.selectors import graph_of

pytestmark = pytest.mark.django_db


def test_the_list_shows_runs_and_completion_times(client, operator, application, running):
    client.force_login(operator)
    page = client.get("/applications/").content.decode()
    assert f'href="/applications/{application.pk}/"' in page
    rows = client.get("/applications/?format=csv").getvalue().decode().splitlines()
    assert rows[0].startswith("Application,Tenant,Running,")
    assert rows[1].startswith("review,acme,1,40,")


def test_the_empty_list_says_how_to_begin(client, operator, db):
    client.force_login(operator)
    assert "X-Application" in client.get("/applications/").content.decode()


def test_a_page_shows_graph_units_ranks_and_correlations(client, operator, application, running):
    client.force_login(operator)
    page = client.get(f"/applications/{application.pk}/").content.decode()
    assert '<svg class="demand-graph"' in page
    assert "What refines what" in page
    assert f'href="/applications/runs/{running.pk}/"' in page
    exported = client.get(f"/applications/{application.pk}/graph.json")
    assert json.loads(exported.content)["application"] == "review"


def test_a_run_is_a_waterfall_of_its_calls(client, operator, application):
    client.force_login(operator)
    run = application.runs.order_by("calls").last()
    page = client.get(f"/applications/runs/{run.pk}/").content.decode()
    assert page.count('<svg viewBox="0 0 1000 14"') == run.calls


def test_an_application_without_records_has_a_page(client, operator, acme):
    client.force_login(operator)
    empty = Application.objects.create(tenant=acme, name="new")
    assert "No run has ended yet" in client.get(f"/applications/{empty.pk}/").content.decode()


def test_a_graph_goes_out_and_comes_in_by_rest(client, operator, application, acme):
    client.force_login(operator)
    graph = json.loads(client.get(f"/api/applications/{application.pk}/graph").content)
    graph["application"] = "copy"

    def imported(tenant="acme"):
        body = {"tenant": tenant, "graph": graph}
        return client.post("/api/applications/import", body, content_type="application/json")

    assert imported().json()["records"] == 40
    assert graph_of(Application.objects.get(name="copy")).records == graph_of(application).records
    graph["records"][3]["steps"][0]["unit"] = "nothing"
    answer = imported()
    assert (answer.status_code, "'nothing' is no unit" in answer.json()["error"]["message"]) == (422, True)
    assert imported("unknown").status_code == 403
