"""`ETag` and `If-Match` of `/api`: nobody overwrites unseen what another changed."""

import pytest

from controlplane.fleet.inventory.kinds import DEPLOYMENT, REGION, WEIGHTED_TARGET
from controlplane.fleet.inventory.services import change, create
from controlplane.planning import services as planning
from controlplane.tuning import services as tuning

pytestmark = pytest.mark.django_db

UNCONDITIONAL = {"change_what_if", "delete_what_if"}
"""They act on a state, and answer 409 where it has gone."""


@pytest.fixture
def admin(sign_in):
    return sign_in("fleet_admin")


def tag(caller, path="inventory/regions"):
    return caller.get(path)["ETag"]


def patch(caller, if_match="", **region):
    return caller.patch("inventory", if_match=if_match, regions=[{"name": "us-east", **region}])


def test_a_change_is_refused_with_what_another_changed_since_its_etag(admin, region):
    read = tag(admin)
    change(REGION, region, {"title": "Theirs"}, "alice")
    refused = patch(admin, read, title="Mine")
    assert (refused.status_code, refused.json()["error"]["code"]) == (412, "precondition_failed")
    message = "Nothing was saved: since this was read, alice changed title from US East to Theirs at "
    assert refused.json()["error"]["message"].startswith(message)
    assert admin.send("DELETE", "inventory/regions/us-east", None, if_match=read).status_code == 412
    region.refresh_from_db()
    assert (region.title, "ETag" in refused) == ("Theirs", False)

    assert patch(admin, read, active=False).status_code == 200, "of another field"
    assert patch(admin, tag(admin), title="Mine").status_code == 200
    change(REGION, region, {"title": "Theirs"}, "alice")
    assert patch(admin, title="Last").status_code == 200, "without a condition"


@pytest.mark.parametrize(
    ("if_match", "status"), [("*", 200), ('W/"{}"', 200), ('"{}"', 200), ("{}", 412), ('"x"', 412), ('"1", "2"', 412)]
)
def test_what_an_etag_may_be(admin, region, if_match, status):
    answer = patch(admin, if_match.format(tag(admin).strip('"')), title="Mine")
    assert answer.status_code == status, answer.content


def test_every_change_of_a_row_takes_a_condition_and_no_other_call_ignores_one(admin, client, region):
    paths = client.get("/api/openapi.json").json()["paths"]
    every = [
        (path, method, one)
        for path, operations in paths.items()
        if path.startswith("/api/")
        for method, one in operations.items()
    ]
    taking = {one["operationId"] for _, _, one in every if "If-Match" in str(one.get("parameters"))}
    changes = {one["operationId"] for _, method, one in every if method in ("put", "patch", "delete")}
    assert taking == changes - UNCONDITIONAL
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


def reweigh(deployment):
    change(WEIGHTED_TARGET, WEIGHTED_TARGET.model.objects.get(), {"weight": 3.0}, "bob")


DEPLOYMENT_OF = {"model": "llama-3.1-8b", "region": "us-east", "gpu_type": "a100-80gb"}
SHARE = {"name": "chat", "target": "llama-3.1-8b", "weight": 2.0}


@pytest.mark.parametrize(
    ("read", "path", "body", "others", "field"),
    [
        (
            *("deployments", "inventory", {"deployments": [DEPLOYMENT_OF | {"ordering_policy": "fcfs"}]}),
            *(switch_bundle, "ordering_policy"),
        ),
        ("settings", "settings/FORECASTER", {"value": "arima", "model": "llama-3.1-8b"}, switch_bundle, "FORECASTER"),
        ("settings", "settings/FORECASTER", {"value": "arima", "model": "llama-3.1-8b"}, set_forecaster, "FORECASTER"),
        *(
            ("scaling/policies", "scaling/policies/llama-3.1-8b", {"bundle": "ssjf"}, others, field)
            for others, field in (
                (switch_bundle, "ordering_policy"),
                (change_router, "routing_policy"),
                (set_forecaster, "FORECASTER"),
                (set_policy, "strategy"),
            )
        ),
        ("inventory/weighted_targets", "inventory", {"weighted_targets": [SHARE]}, reweigh, "weight"),
    ],
)
def test_what_is_set_in_several_ways_is_watched_in_all(admin, deployment, read, path, body, others, field):
    create(WEIGHTED_TARGET, {"name": "chat", "target": deployment.model.name}, "alice")
    planning.set_policy(deployment.model, "lt_i", "shadow", {}, "alice")
    etag = tag(admin, read)
    others(deployment)
    refused = admin.send("PUT" if path.startswith("settings") else "PATCH", path, body, if_match=etag)
    assert refused.status_code == 412, refused.content
    assert f"bob changed {field}" in refused.json()["error"]["message"]


def test_a_switch_of_the_policy_changes_no_other_field(admin, deployment):
    read = tag(admin)
    planning.switch_parts(deployment.model, {"FORECASTER": "arima"}, "bob")
    changed = [DEPLOYMENT_OF | {"max_instances": 9}]
    assert admin.patch("inventory", if_match=read, deployments=changed).status_code == 200
