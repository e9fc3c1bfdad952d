"""`/api/inventory`: rows of every kind, created, changed and deleted as a fleet file says."""

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
LLAMA, PLACE = "llama-3.1-8b", {"model": "llama-3.1-8b", "region": "us-east", "gpu_type": "a100-80gb"}


def delete(caller, path):
    return caller.send("DELETE", f"inventory/{path}", None)


def error(response):
    return response.json()["error"]


def rows(caller, kind):
    return caller.get(f"inventory/{kind}").json()["items"]


@pytest.fixture
def admin(sign_in):
    return sign_in("fleet_admin")


def test_a_fleet_from_nothing(admin, sign_in, slo_class, django_capture_on_commit_callbacks):
    secrets = {"secrets": {"HF_TOKEN": "hidden"}, "api_key": "hidden"}
    of = {"model": "m", "region": "here"}
    body = {
        "regions": [{"name": "here", "title": "Here"}],
        "gpu_types": [GPU_TYPE],
        "nodes": [{"name": "n", "region": "here", "gpu_type": "l4", "gpu_count": 2}],
        "models": [MODEL | {"source": "org/m"}],
        "deployments": [of | {"gpu_type": "l4"} | secrets],
        "instances": [of | {"name": "m-1", "launcher": "process", "node": "n"}],
        "unit_backends": [{"name": "py", "url": "http://functions/warm", "secret": "hidden"}],
    }
    tried = admin.patch("inventory", **body, dry_run=True).json()["items"]
    assert not Region.objects.exists()
    with django_capture_on_commit_callbacks(execute=True):
        answer = admin.patch("inventory", **body, reason="new")
    assert answer.status_code == 200, answer.content
    assert answer.json()["items"] == tried
    made = [(each["verb"], each["kind"], each["name"]) for each in tried]
    assert made == [
        ("create", kind, name)
        for kind, name in (
            *(("regions", "here"), ("gpu_types", "l4"), ("nodes", "n"), ("models", "m"), ("deployments", "m/here/l4")),
            *(("instances", "m-1"), ("unit_backends", "py")),
        )
    ]
    assert (Instance.objects.get().state, Instance.objects.get().commands.get().verb) == ("provisioning", "start")
    viewer = sign_in("viewer")
    assert viewer.get("nodes").json()["items"][0]["gpus_used"] == 1
    (deployment,) = viewer.get("deployments").json()["items"]
    assert (deployment["secret_names"], deployment["has_api_key"]) == (["HF_TOKEN"], True)
    shown = str([rows(viewer, kind) for kind in body]) + answer.content.decode()
    assert "hidden" not in shown + str(list(Event.objects.values_list("before", "after")))
    assert set(Event.objects.filter(kind__endswith=".created").values_list("reason", flat=True)) == {"new"}


def test_what_is_read_changes_nothing_when_it_is_sent_back(admin, make_instance, node, slo_class, acme):
    make_instance(node=node)
    kinds = ("regions", "gpu_types", "nodes", "models", "slo_classes", "tenants", "deployments", "instances")
    read = {kind: rows(admin, kind) for kind in kinds}
    assert all(read.values())
    answer = admin.patch("inventory", **read)
    assert (answer.status_code, answer.json()) == (200, {"items": []})


def test_an_external_instance_is_looked_for_at_its_address(admin, deployment):
    own = {"name": "own", "model": LLAMA, "region": "us-east", "url": "http://10.0.0.7:8000"}
    assert admin.patch("inventory", instances=[own]).status_code == 200
    assert Instance.objects.get().state == "loading"


@pytest.mark.parametrize(
    ("kind", "row", "field"),
    [
        ("regions", {"title": "No name"}, "name"),
        ("regions", {"name": "us-west"}, "title"),
        ("regions", {"name": "us-west", "title": "West", "colour": "red"}, "colour"),
        ("regions", {"name": "us-east", "title": None}, "title"),
        ("gpu_types", {**GPU_TYPE, "spot_usd_per_hour": "0.90"}, "spot_usd_per_hour"),
        ("nodes", {"name": "n", "region": "nowhere", "gpu_type": "a100-80gb", "gpu_count": 1}, "region"),
        ("nodes", {"name": "node-1", "gpu_count": 1}, "gpu_count"),
        ("models", {**MODEL, "weights_bytes": None}, "weights_bytes"),
        ("models", {**MODEL, "length_model": "oracle"}, "length_model"),
        ("models", {**MODEL, "source": "/no/such/folder"} | dict.fromkeys(list(MODEL)[1:]), "source"),
        ("models", {"name": LLAMA, "fallback": LLAMA}, "fallback"),
        ("models", {"name": LLAMA, "fallback": "nothing"}, "fallback"),
        ("models", {"name": LLAMA, "fallback_wait_s": -1}, "fallback_wait_s"),
        ("adapters", {"name": LLAMA, "base": LLAMA, "source": "x"}, "name"),
        ("adapters", {"name": "poet", "base": "nothing", "source": "x"}, "base"),
        ("slo_classes", {"name": "s", "title": "S", "kind": "interactive"}, "ttft_target_ms"),
        ("tenants", {"name": "acme", "slo_classes": []}, "default_slo_class"),
        ("regions", {"name": "us-east", "latency_ms": {"us-west": -1}}, "latency_ms"),
        ("regions", {"name": "us-east", "latency_ms": {"us-east": 1}}, "latency_ms"),
        ("weighted_targets", {"name": "chat", "target": "nothing", "weight": 50}, "target"),
        ("deployments", PLACE | {"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras"),
        ("deployments", PLACE | {"kv_offload_gib": -1.0}, "kv_offload_gib"),
        ("deployments", PLACE | {"ordering_stretch": float("inf")}, "ordering_stretch"),
        ("schedules", {"name": "s", "model": LLAMA, "instances": 1, "begins": "0830Z", "ends": "18:00"}, "begins"),
        ("instances", {"name": "i", "model": LLAMA, "region": "us-east"}, "url"),
        ("instances", {"name": "i", "model": "none", "region": "us-east"}, "model"),
        ("instances", {"name": "instance-1", "node": None}, "node"),
        ("instances", {"name": "instance-1", "url": "http://x:1"}, "url"),
        ("unit_backends", {"name": "py", "secret": "s"}, "url"),
        ("unit_backends", {"name": "py", "url": "ftp://functions/warm", "secret": "s"}, "url"),
        ("unit_backends", {"name": "py", "url": "http://functions/warm"}, "secret"),
        ("unit_backends", {"name": "py", "url": "http://x/", "secret": "s", "kind": "tool"}, "kind"),
        ("unit_backends", {"name": "py", "url": "http://x/", "secret": "s", "keep_alive_s": 0}, "keep_alive_s"),
    ],
)
def test_a_mistake_names_its_field_and_nothing_is_written(
    kind, row, field, admin, make_instance, node, acme, monkeypatch
):
    def read(source, context_tokens):  # tests/workers/test_model_shape.py reads real ones
        raise ShapeError(f"The config.json of {source} cannot be read")

    make_instance(node=node)
    monkeypatch.setattr(model_source, "read", read)
    body = {kind: [row]} | ({"gpu_types": [GPU_TYPE]} if kind != "gpu_types" else {})
    answer = admin.patch("inventory", **body)
    assert answer.status_code == 422
    assert error(answer)["field"].rpartition(".")[2] == field
    assert not Event.objects.exists()


def test_only_what_is_given_changes_and_is_recorded(
    admin, deployment, fleet_admin, messages, django_capture_on_commit_callbacks
):
    given = {"max_instances": 2, "routing_policy": "round_robin"}
    with django_capture_on_commit_callbacks(execute=True):
        answer = admin.patch("inventory", deployments=[PLACE | given], reason="calmer")
    before = {"max_instances": 3, "routing_policy": "join_shortest_queue"}
    name = "llama-3.1-8b/us-east/a100-80gb"
    changed = {"verb": "change", "kind": "deployments", "name": name, "before": before, "after": given}
    assert answer.json() == {"items": [changed]}
    event = Event.objects.get()
    assert (event.kind, event.reason, event.user) == ("deployment.changed", "calmer", fleet_admin)
    assert (event.before, event.after, messages) == (before, given, ["notify"])


def test_tenants_are_never_deleted(admin, acme):
    assert admin.patch("inventory", tenants=[{"name": "acme", "active": False}], reason="left").status_code == 200
    assert Event.objects.get(kind="tenant.changed").after == {"active": False}
    refused = delete(admin, "tenants/acme")
    assert (refused.status_code, Tenant.objects.filter(name="acme").exists()) == (422, True)


class TestDelete:
    def test_unused_names(self, admin, region):
        assert delete(admin, "regions/us-east?reason=closed").status_code == 204
        assert not Region.objects.exists()
        assert Event.objects.get(kind="region.deleted").reason == "closed"
        assert delete(admin, "regions/us-east").status_code == 404
        assert delete(admin, "colours/red").status_code == 422

    def test_used_rows_stay_and_the_answer_names_their_user(self, admin, deployment, node):
        response = delete(admin, "regions/us-east")
        assert response.status_code == 422
        assert "US East is used by " in error(response)["message"]
        assert "node node-1" in error(response)["message"]
        assert Region.objects.exists()
        assert not Event.objects.filter(kind="region.deleted").exists()

    def test_instances_only_when_stopped(self, admin, make_instance, deployment):
        row = make_instance()
        assert error(delete(admin, "instances/instance-1"))["message"] == "instance-1 is ready: stop it first."
        Instance.objects.filter(pk=row.pk).update(state=InstanceState.STOPPED)
        assert delete(admin, "instances/instance-1").status_code == 204
        assert delete(admin, "deployments/llama-3.1-8b/us-east/a100-80gb").status_code == 204
        assert not Deployment.objects.exists()


def test_how_many_instances_a_deployment_has(sign_in, make_instance):
    make_instance()
    make_instance(state=InstanceState.LOADING)
    make_instance(state=InstanceState.STOPPED)
    item = sign_in("viewer").get("deployments").json()["items"][0]
    assert (item["instances_ready"], item["instances_total"]) == (1, 2)


def test_a_public_name_is_shared_by_weight(admin, sign_in, deployment):
    sql = {"name": "sql", "base": LLAMA, "source": "acme/sql", "rank": 16}
    shares = [{"name": "acme/chat", "target": LLAMA, "weight": 95.0}, {"name": "acme/chat", "target": "sql"}]
    shares[1]["weight"] = 5.0
    assert admin.patch("inventory", adapters=[sql], weighted_targets=shares).status_code == 200
    (first, second) = sign_in("viewer").get("target-comparisons").json()["items"]
    assert (first["target"], first["share"], first["heaviest"], first["requests"]) == (LLAMA, 0.95, True, 0)
    assert (second["target"], second["share"]) == ("sql", 0.05)
    assert admin.patch("inventory", models=[MODEL | {"name": "sql", "source": "org/m"}]).status_code == 422
    assert delete(admin, "weighted_targets/acme/chat/sql").status_code == 204
    assert [row["share"] for row in admin.get("target-comparisons").json()["items"]] == [1.0]


def test_a_model_has_a_fallback(admin, deployment):
    small = MODEL | {"name": "small"}
    given = {"name": LLAMA, "fallback": "small", "fallback_wait_s": 5}
    assert admin.patch("inventory", models=[small, given]).status_code == 200
    row = next(row for row in admin.get("models").json()["items"] if row["name"] == LLAMA)
    assert (row["fallback"], row["fallback_wait_s"]) == ("small", 5)
    ended = [{"name": LLAMA, "fallback": None, "fallback_wait_s": None}]
    assert admin.patch("inventory", models=ended).status_code == 200
