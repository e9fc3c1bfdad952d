"""`ETag` and `If-Match` of `/api`: nobody overwrites unseen what another changed."""

import pytest

from controlplane.fleet.inventory.kinds import ADAPTER, DEPLOYMENT, REGION, WEIGHTED_TARGET
from controlplane.fleet.inventory.services import change, create, delete
from controlplane.planning import services as planning
from controlplane.tuning import services as tuning

pytestmark = pytest.mark.django_db

UNCONDITIONAL = {"cancel_rollout", "change_what_if", "delete_what_if"}
"""They act on a state, and answer 409 where it has gone."""


@pytest.fixture
def admin(sign_in):
    return sign_in("fleet_admin")


def tag(caller, path):
    return caller.get(path)["ETag"]


def test_a_change_is_refused_with_what_another_changed_since_its_etag(admin, region):
    read = tag(admin, "regions/us-east")
    change(REGION, region, {"title": "Theirs"}, "alice")
    refused = admin.patch("regions/us-east", if_match=read, title="Mine")
    assert (refused.status_code, refused.json()["error"]["code"]) == (412, "precondition_failed")
    said = "Nothing was saved: since this was read, alice changed title from US East to Theirs at "
    assert refused.json()["error"]["message"].startswith(said)
    assert admin.send("DELETE", "regions/us-east", None, if_match=read).status_code == 412
    assert (admin.get("regions/us-east").json()["title"], "ETag" in refused) == ("Theirs", False)

    assert admin.patch("regions/us-east", if_match=read, active=False).status_code == 200, "of another field"
    assert admin.patch("regions/us-east", if_match=tag(admin, "regions/us-east"), title="Mine").status_code == 200
    change(REGION, region, {"title": "Theirs"}, "alice")
    assert admin.patch("regions/us-east", title="Last").json()["title"] == "Last", "without a condition"


@pytest.mark.parametrize(
    ("if_match", "status"), [("*", 200), ('W/"{}"', 200), ('"{}"', 200), ("{}", 412), ('"x"', 412), ('"1", "2"', 412)]
)
def test_what_an_etag_may_be(admin, region, if_match, status):
    number = tag(admin, "regions/us-east").strip('"')
    answer = admin.patch("regions/us-east", if_match=if_match.format(number), title="Mine")
    assert answer.status_code == status, answer.content


def test_every_change_of_a_row_takes_a_condition_and_no_other_call_ignores_one(admin, client, region):
    paths = client.get("/api/openapi.json").json()["paths"]
    taking = {
        one["operationId"]: path
        for path, operations in paths.items()
        for one in operations.values()
        if any(each.get("name") == "If-Match" for each in one.get("parameters", ()))
    }
    changes = {
        one["operationId"]
        for path, operations in paths.items()
        for method, one in operations.items()
        if path.startswith("/api/") and method in ("put", "patch", "delete")
    }
    assert set(taking) == changes - UNCONDITIONAL
    for path in set(taking.values()) - {"/api/keys/{key_id}/allowed-models"}:
        assert "ETag" in paths[path]["get"]["responses"]["200"]["headers"], path
    refused = admin.send("POST", "regions/us-east/cordon", {"reason": "a test"}, if_match='"1"')
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "If-Match")
    region.refresh_from_db()
    assert not region.cordoned


def switch_bundle(deployment):
    planning.switch_bundle(deployment.model, "qlm", "bob")


def set_forecaster(deployment):
    tuning.change("FORECASTER", "seasonal_naive", "bob", model=deployment.model)


def change_router(deployment):
    change(DEPLOYMENT, deployment, {"routing_policy": "round_robin"}, "bob")


def set_policy(deployment):
    planning.set_policy(deployment.model, "reactive", "off", {}, "bob")


def add_target(deployment):
    create(ADAPTER, {"name": "sql", "base": deployment.model.name, "source": "acme/sql"}, "bob")
    create(WEIGHTED_TARGET, {"name": "chat", "target": "sql", "weight": 1.0}, "bob")


def end_target(deployment):
    delete(WEIGHTED_TARGET, WEIGHTED_TARGET.model.objects.get(), "bob")


@pytest.mark.parametrize(
    ("path", "body", "others", "field"),
    [
        ("deployments/{pk}", {"ordering_policy": "fcfs"}, switch_bundle, "ordering_policy"),
        ("settings/FORECASTER?model={model}", {"value": "arima"}, switch_bundle, "FORECASTER"),
        ("settings/FORECASTER?model={model}", {"value": "arima"}, set_forecaster, "FORECASTER"),
        ("scaling/policies/{model}", {"strategy": "reactive", "mode": "auto"}, switch_bundle, "strategy"),
        ("models/{model}/bundle", {"bundle": "ssjf"}, switch_bundle, "ordering_policy"),
        ("models/{model}/bundle", {"bundle": "ssjf"}, change_router, "routing_policy"),
        ("models/{model}/bundle", {"bundle": "ssjf"}, set_forecaster, "FORECASTER"),
        ("models/{model}/bundle", {"bundle": "ssjf"}, set_policy, "strategy"),
        ("weighted-targets/chat", {"targets": {}}, add_target, "weight"),
        ("weighted-targets/chat", {"targets": {}}, end_target, "weight"),
    ],
)
def test_what_is_set_in_several_ways_is_watched_in_all(admin, deployment, path, body, others, field):
    create(WEIGHTED_TARGET, {"name": "chat", "target": deployment.model.name}, "alice")
    planning.set_policy(deployment.model, "lt_i", "shadow", {}, "alice")
    names = {"pk": deployment.pk, "model": deployment.model.name}
    read = tag(admin, path.format(**names))
    method = "PATCH" if "{pk}" in path else "PUT"
    if path.startswith("settings"):
        body = body | {"model": names["model"]}
    others(deployment)
    refused = admin.send(method, path.format(**names).partition("?")[0], body, if_match=read)
    assert refused.status_code == 412, refused.content
    assert f"bob changed {field}" in refused.json()["error"]["message"]


def test_a_switch_of_the_policy_changes_no_other_field(admin, deployment):
    read = tag(admin, f"deployments/{deployment.pk}")
    planning.switch_parts(deployment.model, {"FORECASTER": "arima"}, "bob")
    assert admin.patch(f"deployments/{deployment.pk}", if_match=read, max_instances=9).status_code == 200
