"""The pages beside a fleet of 1,000 instances: 10 models in 10 regions, on 50 nodes."""

import time

import pytest
from django.test import Client

from controlplane.fleet.models import Instance
from tests.console.conftest import rows_of
from tests.console.feed import Feed

PAGES = (
    "/", "/fleet/", "/fleet/?open=:all", "/fleet/?sort=-kv_ratio", "/fleet/?format=csv", "/queues/", "/models/",
    "/models/llama-3.1-8b/", "/models/deploy/", "/batches/", "/scaling/", "/timeline/",
    "/settings/", "/usage/", "/system/", "/events/", "/alerts/", "/api/instances", "/api/deployments", "/api/endpoints",
)  # fmt: skip
MOST_S = 1.0
STATES = ("ready", "ready", "ready", "ready", "loading", "draining", "failed")


def copies(row, values):
    """New rows like *row*, each with one of *values*."""
    fields = [field.attname for field in row._meta.concrete_fields if not field.primary_key]
    same = {name: getattr(row, name) for name in fields}
    return type(row).objects.bulk_create([type(row)(**(same | each)) for each in values])


@pytest.mark.nightly
def test_no_page_takes_a_second(live, fleet_admin, deployment, node, make_instance):
    regions = copies(deployment.region, [{"name": f"r-{number}", "title": f"R {number}"} for number in range(9)])
    models = copies(deployment.model, [{"name": f"m-{number}", "title": f"M {number}"} for number in range(9)])
    places = [
        {"model_id": model.pk, "region_id": region.pk}
        for model in (deployment.model, *models)
        for region in (deployment.region, *regions)
    ]
    deployments = [deployment, *copies(deployment, places[1:])]
    everywhere = [deployment.region, *regions]
    nodes = [node, *copies(node, [{"name": f"n-{at}", "region_id": everywhere[at % 10].pk} for at in range(1, 50)])]
    copies(
        make_instance(state="ready", node=node),
        [
            {
                "name": f"i-{at}",
                "deployment_id": deployments[at % 100].pk,
                "node_id": nodes[at % 50].pk,
                "state": STATES[at % 7],
                "url": f"http://i-{at}",
            }
            for at in range(999)
        ],
    )
    rows = Instance.objects.select_related("deployment__model", "deployment__region", "deployment__gpu_type")
    live.show(Feed(rows_of(rows)))
    client, took_s = Client(), {}
    client.force_login(fleet_admin)
    folded = client.get("/fleet/").content.decode()
    assert (folded.count('<tr class="node"'), folded.count("<tr data-row")) == (50, 0), (
        "rows come when a node is opened"
    )
    assert client.get("/fleet/?open=n-7").content.decode().count("<tr data-row") == 20
    for path in PAGES:
        client.get(path)
        begun_s = time.process_time()
        answer = client.get(path)
        assert answer.status_code == 200, path
        assert b"".join(answer.streaming_content) if answer.streaming else answer.content
        took_s[path] = round(time.process_time() - begun_s, 3)
    print(dict(sorted(took_s.items(), key=lambda each: -each[1])))
    assert max(took_s.values()) < MOST_S, took_s
