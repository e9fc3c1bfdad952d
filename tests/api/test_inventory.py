"""`/api`: rows of the inventory created, changed and deleted."""

import pytest

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.fleet.inventory import model_source
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Region
from workers.vllm.model_shape import ShapeError

pytestmark = pytest.mark.django_db

GPU_TYPE = {"name": "l4", "title": "L4", "memory_bytes": 24 * 2**30, "on_demand_usd_per_hour": "0.70"}
MODEL = {"name": "m", "weights_bytes": 10**9, "kv_bytes_per_token": 1000, "context_tokens": 4096}


def delete(caller, path):
    return caller.send("DELETE", path, None)


def error(response):
    return response.json()["error"]


def test_a_fleet_from_nothing(sign_in, slo_class, django_capture_on_commit_callbacks):
    admin = sign_in("fleet_admin")
    with django_capture_on_commit_callbacks(execute=True):
        assert admin.post("regions", name="here", title="Here").json() == {
            "name": "here",
            "title": "Here",
            "active": True,
            "cordoned": "",
            "latency_ms": {},
        }
        assert admin.post("gpu-types", **GPU_TYPE).json()["device"] == "gpu"
        node = admin.post("nodes", name="n", region="here", gpu_type="l4", gpu_count=2).json()
        assert (node["region"], node["gpus_used"]) == ("here", 0)
        assert admin.post("models", **MODEL, source="org/m", reason="new").json()["title"] == "m"
        body = {
            "model": "m",
            "region": "here",
            "gpu_type": "l4",
            "secrets": {"HF_TOKEN": "hidden"},
            "api_key": "hidden",
        }
        deployment = admin.post("deployments", **body).json()
        assert (deployment["secret_names"], deployment["has_api_key"]) == (["HF_TOKEN"], True)
        assert "hidden" not in str(deployment)
        answer = admin.post("instances", name="m-1", model="m", region="here", launcher="process", node="n")
    assert answer.status_code == 201
    assert answer.json()["state"] == "provisioning"
    assert Instance.objects.get().commands.get().verb == "start"
    assert sign_in("viewer").get("nodes").json()["items"][0]["gpus_used"] == 1
    kinds = list(Event.objects.filter(kind__endswith=".created").order_by("pk").values_list("kind", flat=True))
    assert kinds == [
        "region.created",
        "gpu_type.created",
        "node.created",
        "model.created",
        "deployment.created",
        "instance.created",
    ]
    assert Event.objects.get(kind="model.created").reason == "new"
    assert not Event.objects.filter(after__icontains="hidden").exists()


def test_an_external_instance_is_looked_for_at_its_address(sign_in, deployment):
    body = {"name": "own", "model": "llama-3.1-8b", "region": "us-east", "url": "http://10.0.0.7:8000"}
    assert sign_in("fleet_admin").post("instances", **body).json()["state"] == "loading"


def test_tenants_are_created_changed_and_never_deleted(sign_in, slo_class):
    admin = sign_in("fleet_admin")
    body = {"name": "new", "slo_classes": ["interactive"], "default_slo_class": "interactive"}
    assert admin.post("tenants", **body).json()["slo_classes"] == ["interactive"]
    assert admin.patch("tenants/new", active=False, reason="left").json()["active"] is False
    assert Event.objects.get(kind="tenant.changed").after == {"active": False}
    assert error(admin.patch("tenants/new", slo_classes=[]))["field"] == "default_slo_class"
    assert delete(admin, "tenants/new").status_code == 405
    assert Tenant.objects.get(name="new").slo_classes.count() == 1


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("regions", {"title": "No name"}, "name"),
        ("regions", {"name": "us-east", "title": "Again"}, "name"),
        ("regions", {"name": "us-west", "title": "West", "colour": "red"}, "colour"),
        ("gpu-types", {**GPU_TYPE, "spot_usd_per_hour": "0.90"}, "spot_usd_per_hour"),
        ("nodes", {"name": "n", "region": "nowhere", "gpu_type": "a100-80gb", "gpu_count": 1}, "region"),
        ("models", {**MODEL, "weights_bytes": None}, "weights_bytes"),
        ("slo-classes", {"name": "s", "title": "S", "kind": "interactive"}, "ttft_target_ms"),
        ("deployments", {"model": "llama-3.1-8b", "region": "us-east", "gpu_type": "a100-80gb"}, "gpu_type"),
        ("instances", {"name": "i", "model": "llama-3.1-8b", "region": "us-east"}, "url"),
        ("instances", {"name": "i", "model": "none", "region": "us-east"}, "model"),
    ],
)
def test_a_mistake_names_its_field(path, body, field, sign_in, deployment):
    response = sign_in("fleet_admin").post(path, **body)
    assert response.status_code == 422
    assert error(response)["field"] == field


def test_a_source_that_cannot_be_read_is_the_mistake(sign_in, deployment, monkeypatch):
    def read(source, context_tokens):
        raise ShapeError(f"The config.json of {source} cannot be read")

    monkeypatch.setattr(model_source, "read", read)  # tests/workers/test_model_shape.py reads real ones
    response = sign_in("fleet_admin").post("models", name="m", source="/no/such/folder")
    assert response.status_code == 422
    assert error(response)["field"] == "source"
    assert "The config.json of /no/such/folder cannot be read" in error(response)["message"]


def test_only_what_is_given_changes(sign_in, region, fleet_admin):
    answer = sign_in("fleet_admin").patch("regions/us-east", active=False, reason="maintenance")
    assert answer.json() == {"name": "us-east", "title": "US East", "active": False, "cordoned": "", "latency_ms": {}}
    event = Event.objects.get()
    assert (event.kind, event.reason, event.user) == ("region.changed", "maintenance", fleet_admin)


@pytest.mark.parametrize(
    ("path", "change", "refused"),
    [
        ("gpu-types/a100-80gb", {"spot_usd_per_hour": None}, ""),
        ("regions/us-east", {"title": None}, "title"),
        ("regions/us-east", {"name": "other"}, "name"),
        ("nodes/node-1", {"gpu_count": 1}, "gpu_count"),
        ("instances/instance-1", {"node": None}, "node"),
        ("instances/instance-1", {"url": "http://x:1"}, "url"),
    ],
)
def test_a_change_is_made_or_refused_at_its_field(sign_in, make_instance, node, path, change, refused):
    make_instance(node=node)
    answer = sign_in("fleet_admin").patch(path, **change)
    assert (answer.status_code, answer.json().get("error", {}).get("field", "")) == (422 if refused else 200, refused)
    assert refused or answer.json() | change == answer.json()


class TestDelete:
    def test_unused_names(self, sign_in, region):
        assert delete(sign_in("fleet_admin"), "regions/us-east?reason=closed").status_code == 204
        assert not Region.objects.exists()
        assert Event.objects.get(kind="region.deleted").reason == "closed"

    def test_used_rows_stay_and_the_answer_names_their_user(self, sign_in, deployment, node):
        response = delete(sign_in("fleet_admin"), "regions/us-east")
        assert response.status_code == 422
        assert "US East is used by " in error(response)["message"]
        assert "node node-1" in error(response)["message"]
        assert Region.objects.exists()
        assert not Event.objects.filter(kind="region.deleted").exists()

    def test_instances_only_when_stopped(self, sign_in, make_instance, deployment):
        row = make_instance()
        assert (
            error(delete(sign_in("fleet_admin"), "instances/instance-1"))["message"]
            == "instance-1 is ready: stop it first."
        )
        Instance.objects.filter(pk=row.pk).update(state=InstanceState.STOPPED)
        assert delete(sign_in("fleet_admin"), "instances/instance-1").status_code == 204
        assert delete(sign_in("fleet_admin"), f"deployments/{deployment.pk}").status_code == 204
        assert not Deployment.objects.exists()


class TestDeployments:
    def test_change_is_checked_and_recorded(
        self, sign_in, deployment, fleet_admin, messages, django_capture_on_commit_callbacks
    ):
        with django_capture_on_commit_callbacks(execute=True):
            response = sign_in("fleet_admin").patch(
                f"deployments/{deployment.pk}", max_instances=2, routing_policy="round_robin", reason="calmer"
            )
        assert response.status_code == 200
        assert response.json()["max_instances"] == 2
        event = Event.objects.get()
        assert (event.kind, event.reason, event.user) == ("deployment.changed", "calmer", fleet_admin)
        assert event.before == {"max_instances": 3, "routing_policy": "join_shortest_queue"}
        assert event.after == {"max_instances": 2, "routing_policy": "round_robin"}
        assert messages == ["notify"]

    def test_counts(self, sign_in, make_instance):
        make_instance()
        make_instance(state=InstanceState.LOADING)
        make_instance(state=InstanceState.STOPPED)
        item = sign_in("viewer").get("deployments").json()["items"][0]
        assert (item["instances_ready"], item["instances_total"]) == (1, 2)


def test_latencies_between_regions(sign_in, region):
    admin = sign_in("fleet_admin")
    row = admin.send("PATCH", "regions/us-east", {"latency_ms": {"us-west": 33}, "reason": "measured"}).json()
    assert row["latency_ms"] == {"us-west": 33.0}
    for wrong in ({"us-west": -1}, {"us-east": 1}):
        refused = admin.send("PATCH", "regions/us-east", {"latency_ms": wrong})
        assert (refused.status_code, error(refused)["field"]) == (422, "latency_ms")


def test_adapters_are_rows_as_others(sign_in, deployment):
    admin = sign_in("fleet_admin")
    base = deployment.model.name
    answer = admin.post("adapters", name="sql", base=base, source="acme/sql", rank=16)
    assert answer.json() == {
        "name": "sql",
        "base": base,
        "source": "acme/sql",
        "rank": 16,
        "tenant": None,
        "active": True,
    }
    assert admin.patch("adapters/sql", rank=8).json()["rank"] == 8
    assert [row["name"] for row in sign_in("viewer").get("adapters", base=base).json()["items"]] == ["sql"]
    assert error(admin.post("adapters", name=base, base=base, source="x"))["field"] == "name"
    assert error(admin.post("models", **MODEL | {"name": "sql"}, source="org/m"))["field"] == "name"
    assert error(admin.post("adapters", name="poet", base="nothing", source="x"))["field"] == "base"
    few = admin.patch(f"deployments/{deployment.pk}", max_loras=4, max_cpu_loras=2)
    assert error(few)["field"] == "max_cpu_loras"
    assert admin.patch(f"deployments/{deployment.pk}", max_loras=4, max_cpu_loras=8).json()["max_loras"] == 4
    assert delete(admin, "adapters/sql").status_code == 204


def test_a_public_name_is_shared_by_weight_as_a_whole(sign_in, deployment):
    admin, model = sign_in("fleet_admin"), deployment.model.name

    def put(name, **targets):
        path = f"/api/weighted-targets/{name}"
        return admin.client.put(path, {"targets": targets, "reason": "canary"}, content_type="application/json")

    assert admin.post("adapters", name="sql", base=model, source="acme/sql").status_code == 201
    rows = put("acme/chat", **{model: 95, "sql": 5}).json()["items"]
    assert [(row["name"], row["target"], row["weight"]) for row in rows] == [
        ("acme/chat", model, 95),
        ("acme/chat", "sql", 5),
    ]
    assert [row["weight"] for row in put("acme/chat", **{model: 90}).json()["items"]] == [90]
    refused = put("acme/chat", **{model: 50, "nothing": 50})
    assert (refused.status_code, error(refused)["field"]) == (422, "target")
    assert [row["weight"] for row in sign_in("viewer").get("weighted-targets").json()["items"]] == [90]  # nothing of it
    (compared,) = sign_in("viewer").get("target-comparisons").json()["items"]
    assert (compared["target"], compared["share"], compared["heaviest"], compared["requests"]) == (model, 1.0, True, 0)
    kinds = Event.objects.filter(kind__startswith="weighted_target").order_by("pk").values_list("kind", "reason")
    assert list(kinds) == [
        (f"weighted_target.{what}", "canary") for what in ("created", "created", "deleted", "changed")
    ]
    assert put("acme/chat").json()["items"] == []


def test_a_model_has_a_fallback(sign_in, deployment):
    admin, model = sign_in("fleet_admin"), deployment.model.name
    assert admin.post("models", **MODEL | {"name": "small"}).status_code == 201
    changed = admin.patch(f"models/{model}", fallback="small", fallback_wait_s=5).json()
    assert (changed["fallback"], changed["fallback_wait_s"]) == ("small", 5)
    for wrong, field in (
        ({"fallback": model}, "fallback"),
        ({"fallback": "nothing"}, "fallback"),
        ({"fallback": None}, "fallback_wait_s"),
        ({"fallback_wait_s": -1}, "fallback_wait_s"),
    ):
        assert error(admin.patch(f"models/{model}", **wrong))["field"] == field
    assert admin.patch(f"models/{model}", fallback=None, fallback_wait_s=None).json()["fallback"] is None


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"secret": "s"}, "url"),
        ({"url": "ftp://functions/warm", "secret": "s"}, "url"),
        ({"url": "http://functions/warm"}, "secret"),
        ({"url": "http://functions/warm", "secret": "s", "kind": "tool"}, "kind"),
        ({"url": "http://functions/warm", "secret": "s", "keep_alive_s": 0}, "keep_alive_s"),
    ],
)
def test_a_backend_that_cannot_be_called_is_refused(sign_in, values, field):
    answer = sign_in("fleet_admin").post("unit-backends", name="py", **values)
    assert answer.status_code == 422
    assert error(answer)["field"].endswith(field)


def test_the_secret_of_a_backend_is_shown_nowhere(sign_in):
    client = sign_in("fleet_admin")
    made = client.post("unit-backends", name="py", url="http://functions/warm", secret="s3cret-of-py")
    assert made.status_code == 201
    assert "s3cret" not in made.content.decode() + client.get("unit-backends").content.decode()
    assert "s3cret" not in str(Event.objects.filter(subject="py").values("after", "inputs", "reason"))
