"""The fleet's pages: the tree of regions, nodes and instances, what operators do there, and the same in REST."""

import re
import time
from datetime import timedelta

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.alerts.problems import find, read_known
from controlplane.console.live.state import NO_TABLES, LiveState, Source
from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Gpu, Instance, Launcher, Node, Region, Stock, SwapGroup
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
    for name, args in (("fleet", ()), ("instance", (held.name,))):
        answer = text_of(client.get(reverse(f"console:{name}", args=args)))
        assert "Stopped by operator" in answer, name
        assert "kernel update" in answer, name
        assert operator.get_username() in answer, name
    assert "1 of 2 instances of llama-3.1-8b in US East are ready, fewer than its minimum; held by" in text_of(
        client.get(reverse("console:fleet"))
    )


@pytest.mark.parametrize(
    ("states", "shared", "due"),
    [
        (("sleeping", "ready"), True, 1),  # a swap wakes it
        (("stopped", "loading"), True, 1),
        (("sleeping", "stopped"), True, 2),  # nothing does
        (("sleeping", "ready"), False, 2),  # lent out
        (("failed", "ready"), True, 2),
    ],
)
def test_pages_alerts_and_rest_count_the_same_as_missing(reader, live, make_instance, deployment, states, shared, due):
    Deployment.objects.update(min_instances=2)
    group = SwapGroup.objects.create(name="shared") if shared else None
    for state in states:
        make_instance(state=state, swap_group=group)
    words = "0 of 2 instances of llama-3.1-8b in US East are ready"
    row = {"model": "llama-3.1-8b", "region": "us-east", "waiting": 0, "instances_ready": 0}
    (rest,) = reader.get("/api/endpoints").json()["items"]
    assert (rest["min_instances"], rest["min_instances_ready"]) == (2, due)
    for ready in (due - 1, due):
        tables = {"endpoints": [row | {"instances_ready": ready}]}
        live.feed._state = LiveState(Source.LIVE, time.time(), tables=NO_TABLES | tables)
        (alarm,) = [each.title for each in find(tables, read_known(timezone.now()))] or [""]
        assert alarm == (words.replace("0", str(ready), 1) if ready < due else "")
        assert (words[1:] in text_of(reader.get("/fleet/"))) == (ready < due)


def test_the_page_of_a_stopped_instance_begins_with_its_story(acting, held):
    html = acting.get(reverse("console:instance", args=[held.name])).content.decode()
    assert "data-charts" not in html, "no empty charts"
    assert 'class="tile"' not in html, "no tiles of dashes"
    assert html.index("instance-events-title") < html.index("facts-title")
    assert "requests-title" not in html, "none has ended there"


@pytest.fixture
def two_nodes(node, make_instance):
    other = Node.objects.create(name="node-2", region=node.region, gpu_type=node.gpu_type, gpu_count=4)
    rows = [make_instance(node=node, gpus=["0"]), make_instance(node=node, state=InstanceState.FAILED)]
    return [*rows, make_instance(node=other), make_instance()]


def rows_of(answer):
    """What the table says, by the kind of row."""
    found = re.findall(r'<tr(?: class="(region|node)"| data-row)(.*?)</tr>', answer.content.decode(), re.DOTALL)
    return [
        (kind or "instance", " ".join(re.sub(r"<title>.*?</title>|<[^>]*>", " ", text).split())) for kind, text in found
    ]


def test_regions_nodes_and_instances_stand_below_each_other_with_their_sums(acting, two_nodes):
    rows = rows_of(acting.get(reverse("console:fleet")))
    assert [kind for kind, _ in rows] == [
        "region", "node", "instance", "instance", "node", "instance", "node", "instance"
    ]  # fmt: skip
    region, first, second = rows[0][1], rows[1][1], rows[4][1]
    assert "6 of 12 GPUs used, 6 free" in region
    assert "1 failed" in region
    assert "4 of 8 A100" in first
    assert "2 of 4 A100" in second
    assert "No node" in rows[6][1]


@pytest.mark.parametrize(
    ("query", "nodes", "instances"),
    [
        ({"open": ":none"}, 3, 0),
        ({"open": "node-2"}, 3, 1),
        ({"q": "node-2"}, 1, 1),
        ({"state": "failed"}, 1, 1),
        ({"region": "us-east", "model": "llama-3.1-8b"}, 3, 4),
        ({"sort": "name"}, 0, 4),
    ],
)
def test_nodes_fold_and_filters_narrow(acting, two_nodes, query, nodes, instances):
    kinds = [kind for kind, _ in rows_of(acting.get(reverse("console:fleet"), query))]
    assert (kinds.count("node"), kinds.count("instance")) == (nodes, instances)


def test_a_node_has_its_own_page_with_all_that_is_on_it(acting, node, make_instance, operator):
    row = make_instance(state=InstanceState.READY, node=node, launcher=Launcher.PROCESS, gpus=["0"])
    make_instance(state=InstanceState.FAILED, node=node)
    Node.objects.filter(pk=node.pk).update(host="gpu-box", reported_at=timezone.now() - timedelta(minutes=6))
    Gpu.objects.create(node=node, name="1", cordoned="GPU health, fallen off the bus")
    Stock.objects.create(node=node, name="llama", source="meta/llama", state="failed", error="401")
    assert "its agent was heard" in text_of(acting.get(reverse("console:fleet"))), "silent for six minutes"
    html = acting.get(reverse("console:node", args=[node.name])).content.decode()
    for part in (
        f"/fleet/instances/{row.name}/",
        "GPU health, fallen off the bus",
        f"/operations/gpus/{Gpu.objects.get().pk}/uncordon/",
        "meta/llama",
        f"/operations/stock/{Stock.objects.get().pk}/pull/",
        "vLLM process on the node",
    ):
        assert part in html, part
    [item] = acting.get("/api/nodes").json()["items"]
    assert (item["gpu_count"], item["gpus_used"], item["gpus_cordoned"]) == (8, 4, 1)
    assert item["gpus_free"] == 4, "the failed instance claims none on top of the cordoned one"


def test_maintenance_is_begun_noticed_and_ended(acting, node, make_instance):
    row = make_instance(node=node)
    path = reverse("console:operate", args=["nodes", node.pk, "maintenance"])
    assert "until: Input should be a valid datetime" in text_of(
        acting.post(path, {"reason": "x", "until": "soon"}, follow=True)
    )
    until = f"{timezone.localtime() + timedelta(hours=3):%Y-%m-%dT%H:%M}"
    said = text_of(acting.post(path, {"reason": "a new kernel", "until": until}, follow=True))
    assert "node-1 is in maintenance until" in said
    assert "1 instance drains" in said
    row.refresh_from_db()
    assert row.state == InstanceState.DRAINING
    for name, args in (("overview", ()), ("fleet", ()), ("node", (node.name,))):
        assert "is in maintenance until" in text_of(acting.get(reverse(f"console:{name}", args=args))), name
    window = node.maintenance.get()
    acting.post(reverse("console:operate", args=["maintenance", window.pk, "end"]), {"reason": "done"})
    row.refresh_from_db()
    assert row.state == InstanceState.READY
    assert "is in maintenance" not in text_of(acting.get(reverse("console:overview")))


def test_several_instances_are_acted_on_at_once(acting, node, make_instance):
    rows = [make_instance(), make_instance(), make_instance(state=InstanceState.STOPPED)]
    page = reverse("console:bulk")
    drain = {"verb": "drain", "instance": [row.pk for row in rows]}
    assert "give a reason" in text_of(acting.post(page, drain, follow=True))
    said = text_of(acting.post(page, drain | {"reason": "a new driver"}, follow=True))
    assert "Drain: 2 of 3 in progress or done: instance-1, instance-2." in said
    assert "1 of 3 refused: instance-3 is stopped: drain is for an instance that is ready." in said
    assert [Instance.objects.get(pk=row.pk).state for row in rows] == ["draining", "draining", "stopped"]
    assert set(Event.objects.filter(kind="instance.moved").values_list("reason", flat=True)) == {"a new driver"}
    soon = {"verb": "maintenance", "node": node.name, "until": "soon", "reason": "x"}
    assert "until: Input should be a valid datetime" in text_of(acting.post(page, soon, follow=True))
    for wrong in ({"verb": "sleep", "instance": rows[0].pk}, {"verb": "drain", "node": node.name}):
        assert "Select instances" in text_of(acting.post(page, wrong | {"reason": "x"}, follow=True))


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
