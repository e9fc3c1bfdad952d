"""Held and cordoned instances on pages and in REST: by whom, who may lift it, and the minimums it breaks."""

import pytest
from django.urls import reverse

from controlplane.console.live import attention
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Region
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
    for name, args in (("places", ()), ("instance", (held.name,)), ("instances", ())):
        answer = text_of(client.get(reverse(f"console:{name}", args=args)))
        assert "kernel update" in answer, name
        assert operator.get_username() in answer, name
    assert "1 of 2 instances of its minimum" in text_of(client.get(reverse("console:places")))


def test_the_list_of_what_needs_an_eye_names_who_holds_it(held):
    from controlplane.console.selectors.attention import held as holds

    key = (held.deployment.model.name, held.deployment.region.name)
    known = attention.Known(min_instances={key: 2}, held=holds())
    row = dict.fromkeys(("waiting", "oldest_wait_s"), 0) | {"model": key[0], "region": key[1], "instances_ready": 1}
    [item] = attention._endpoints([row], known)
    assert "held by" in item.detail
    assert "kernel update" in item.detail


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
