"""Held and cordoned instances on pages and in REST: by whom, who may lift it, and the minimums it breaks."""

import re
from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.alerts.problems import find, read_known
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Gpu, Instance, Launcher, Node, Region, Stock
from tests.console.test_pages import text_of

pytestmark = pytest.mark.django_db


@pytest.fixture
def held(make_instance, deployment, operator):
    Deployment.objects.filter(pk=deployment.pk).update(min_instances=2, max_instances=2)
    rows = [make_instance(state=InstanceState.READY) for _ in range(2)]
    services.stop(rows[0], operator, "kernel update, do not start")
    Instance.objects.filter(pk=rows[0].pk).update(state=InstanceState.STOPPED)
    return Instance.objects.get(pk=rows[0].pk)


def test_held_instances_are_shown_where_they_are_looked_for(client, operator, held):
    client.force_login(operator)
    for name, args in (("nodes", ()), ("instance", (held.name,)), ("instances", ())):
        answer = text_of(client.get(reverse(f"console:{name}", args=args)))
        assert "kernel update" in answer, name
        assert operator.get_username() in answer, name
    assert "1 of 2 instances of its minimum" in text_of(client.get(reverse("console:nodes")))


def test_a_node_opens_with_all_that_is_on_it(acting, node, make_instance, operator):
    row = make_instance(state=InstanceState.READY, node=node, launcher=Launcher.PROCESS, gpus=["0"])
    make_instance(state=InstanceState.FAILED, node=node)
    Node.objects.filter(pk=node.pk).update(host="gpu-box", reported_at=timezone.now() - timedelta(minutes=6))
    Gpu.objects.create(node=node, name="1", cordoned="GPU health, fallen off the bus")
    Stock.objects.create(node=node, name="llama", source="meta/llama", state="failed", error="401")
    closed = acting.get(reverse("console:nodes")).content.decode()
    shut = re.sub(r"<[^>]*>", "", closed)
    assert "1 ready, 1 failed" in shut
    assert "1 pull failed" in shut
    assert re.search(r'gpu-box</span><span class="under warn-text"><time', closed), "silent for six minutes"
    assert "meta/llama" not in closed
    html = acting.get(reverse("console:nodes"), {"open": node.name}).content.decode()
    for part in (
        f"/instances/{row.name}/#engine-log",
        "GPU health, fallen off the bus",
        f"/operations/gpus/{Gpu.objects.get().pk}/uncordon/",
        "meta/llama",
        f"/operations/stock/{Stock.objects.get().pk}/pull/",
        "vLLM process on the node",
        'aria-expanded="true"',
    ):
        assert part in html, part
    [item] = acting.get("/api/nodes").json()["items"]
    assert (item["gpu_count"], item["gpus_used"], item["gpus_cordoned"]) == (8, 4, 1)
    assert item["gpus_free"] == 4, "the failed instance claims none on top of the cordoned one"


def test_the_list_of_what_needs_an_eye_names_who_holds_it(held):
    row = {"model": held.deployment.model.name, "region": held.deployment.region.name, "instances_ready": 0}
    [problem] = find({"endpoints": [row | {"waiting": 0}]}, read_known(timezone.now()))
    assert "held by" in problem.words
    assert "kernel update" in problem.words


def test_rest_says_and_does_the_same(acting, held, node):
    [item] = [one for one in acting.get("/api/instances").json()["items"] if one["name"] == held.name]
    assert "kernel update" in item["held"]
    answer = acting.post(f"/api/nodes/{node.name}/cordon", {"reason": "cooling"}, content_type="application/json")
    assert (answer.status_code, "nothing is started" in answer.json()["message"]) == (200, True)
    assert acting.post(
        f"/api/nodes/{node.name}/cordon", {"reason": "again"}, content_type="application/json"
    ).status_code == 409  # fmt: skip
    [row] = [one for one in acting.get("/api/nodes").json()["items"] if one["name"] == node.name]
    assert "cooling" in row["cordoned"]
    region = Region.objects.get(pk=node.region_id)
    path = f"/api/regions/{region.name}"
    assert acting.post(f"{path}/cordon", {"reason": "flood"}, content_type="application/json").status_code == 200
    assert acting.post(f"{path}/uncordon", {"reason": "dry"}, content_type="application/json").status_code == 200
