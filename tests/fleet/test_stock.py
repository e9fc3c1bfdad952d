"""Weights by node: what is on the disk there, what is pulled and what cannot be, and logs that are elsewhere."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.alerts.problems import find, read_known
from controlplane.events.models import Event
from controlplane.fleet import stock
from controlplane.fleet.lifecycle import engine_logs, hosts
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Adapter, Deployment, Gpu, Launcher, Model, Node, Stock, StockState
from workers.tasks import nodes
from workers.vllm import hardware
from workers.vllm import stock as disk

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch, settings, tmp_path):
    """Messages to workers: (task, arguments, queue)."""
    settings.HOST, settings.STATE_DIR = "gpu-a", tmp_path
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    messages = []

    def send_task(task, *args, expires_s=None, queue=""):
        messages.append((task.rpartition(".")[2], args, queue))
        return True

    monkeypatch.setattr(stock, "send_task", send_task)
    monkeypatch.setattr(engine_logs, "send_task", send_task)
    return messages


@pytest.fixture
def instance(make_instance, node):
    return make_instance(launcher=Launcher.PROCESS, node=node)


def in_cache(home, source, files):
    """Put a snapshot with *files* into the hub's cache, as its client does: links to blobs."""
    repository = home / "hub" / f"models--{source.replace('/', '--')}"
    for folder in ("refs", "blobs", "snapshots/abc"):
        (repository / folder).mkdir(parents=True, exist_ok=True)
    (repository / "refs/main").write_text("abc")
    for name, content in files.items():
        (repository / "blobs" / name).write_bytes(content)
        (repository / "snapshots/abc" / name).symlink_to(f"../../blobs/{name}")


INDEX = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).encode()


@pytest.mark.parametrize(
    ("files", "whole"),
    [
        ({}, False),
        ({"config.json": b"{}"}, False),
        ({"model.safetensors": b"12345"}, True),
        ({"model.safetensors.index.json": INDEX, "1.safetensors": b"1"}, False),
        ({"model.safetensors.index.json": INDEX, "1.safetensors": b"1", "2.safetensors": b"2"}, True),
        ({"model.safetensors.index.json": b"{", "1.safetensors": b"1"}, False),
    ],
)
def test_weights_are_there_when_all_of_them_are(tmp_path, files, whole):
    in_cache(tmp_path, "a/b", files)
    assert disk.on_disk("a/b", {"HF_HOME": str(tmp_path)}) == (sum(map(len, files.values())) + len("abc"), whole)


def test_a_folder_counts_as_it_is(tmp_path):
    assert disk.on_disk(str(tmp_path / "none"), {}) == (0, False)
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert disk.on_disk(str(tmp_path), {}) == (2, True)


def test_a_node_has_rows_for_what_its_processes_load(instance, node, tmp_path):
    model = instance.deployment.model
    Deployment.objects.update(max_loras=2)
    Adapter.objects.create(name="sql", base=model, source="c/d")
    in_cache(tmp_path, model.source, {"model.safetensors": b"123"})
    assert nodes.report_nodes() == 1
    rows = dict(Stock.objects.values_list("name", "state"))
    assert rows == {model.name: StockState.PRESENT, "sql": StockState.MISSING}
    node.refresh_from_db()
    assert node.reported_at
    assert nodes.report_nodes() == 0  # not due
    Model.objects.update(active=False)
    stock.report(node)
    assert not Stock.objects.exists()


def test_nothing_is_said_of_nodes_without_processes(make_instance, node):
    make_instance(node=node)  # emulated
    assert nodes.report_nodes() == 0
    node.refresh_from_db()
    assert node.reported_at is None


class TestAPull:
    @pytest.fixture
    def row(self, instance, node):
        stock.report(node)
        return Stock.objects.get()

    def test_is_asked_for_by_rest_and_begun_on_the_node(
        self, row, acting, sent, node, django_capture_on_commit_callbacks
    ):
        Node.objects.update(host="gpu-b")
        path = f"/api/stock/{row.pk}/pull"
        with django_capture_on_commit_callbacks(execute=True):
            answer = acting.post(path, {"reason": "release"}, content_type="application/json")
        assert answer.status_code == 200, answer.content
        assert sent == [("report_node", ("node-1",), "node.node-1")]
        [item] = acting.get("/api/stock").json()["items"]
        assert (item["state"], item["node"]) == ("pulling", "node-1")
        assert acting.post(path, {"reason": "again"}, content_type="application/json").status_code == 409
        nodes.report_node("node-1")  # this is not its host
        row.refresh_from_db()
        assert (row.state, row.error) == (StockState.PULLING, "")

    def test_that_fails_says_why_once_and_may_be_asked_for_again(self, row, operator, node, settings, monkeypatch):
        stock.pull(row, operator, "release")
        asked = []
        monkeypatch.setattr(disk, "pull", lambda python, source, base, order, environment: asked.append(order))
        stock.report(node)  # begun
        base = settings.STATE_DIR / "pulls" / str(row.pk)
        base.parent.mkdir()
        base.with_suffix(".lock").write_text(asked[0])
        base.with_suffix(".error").write_text("RepositoryNotFoundError: 401")
        for _ in range(2):
            stock.report(node)
        row.refresh_from_db()
        assert (row.state, row.error, len(asked)) == (StockState.FAILED, "RepositoryNotFoundError: 401", 1)
        assert Event.objects.filter(kind="stock.pull_failed").count() == 1
        stock.pull(row, operator, "again")
        stock.report(node)
        assert len(asked) == 2

    def test_of_a_folder_is_refused(self, row, operator):
        Stock.objects.update(source="/models/x")
        with pytest.raises(ActionError, match="copy it to node-1"):
            stock.pull(row, operator, "release")

    def test_is_offered_on_the_page_of_its_node(self, row, client, operator):
        client.force_login(operator)
        Node.objects.update(host="gpu-a")
        assert f"/operations/stock/{row.pk}/pull/" not in client.get("/fleet/").content.decode()
        assert f"/operations/stock/{row.pk}/pull/" in client.get("/fleet/nodes/node-1/").content.decode()


class TestAnAgent:
    def test_takes_the_node_over_by_announcing_itself(self, instance, node, settings):
        assert hosts.acts_for(node)  # by its address
        settings.HOST = "gpu-b"
        nodes.announce("node-1")
        node.refresh_from_db()
        assert (node.host, hosts.acts_for(node)) == ("gpu-b", True)
        assert Event.objects.get(kind="node.agent").after == {"host": "gpu-b"}
        settings.HOST = "gpu-a"
        assert not hosts.acts_for(node)
        assert "queue node.node-1 there starts it" in hosts.obstacle(type(instance).objects.get())

    def test_is_reminded_by_its_queue(self, instance, node, sent):
        Node.objects.update(host="gpu-b")
        nodes.report_nodes()
        assert sent == [("report_node", ("node-1",), "node.node-1")]

    def test_that_falls_silent_is_a_problem(self, node):
        Node.objects.update(host="gpu-b", reported_at=timezone.now() - timedelta(minutes=6))
        [problem] = find({}, read_known(timezone.now()))
        assert (problem.kind, problem.title) == ("part", "The agent of node-1 does not report")

    def test_names_gpus_by_their_address(self, instance, node, monkeypatch):
        monkeypatch.setattr(hardware, "_nvidia_smi", lambda query: "0, 00000000:3B:00.0\n1, 00000000:AF:00.0\n")
        stock.report(node)
        assert dict(Gpu.objects.values_list("name", "address")) == {"0": "0:3b:00", "1": "0:af:00"}

    def test_that_does_not_answer_leaves_a_log_that_says_so(self, instance, acting, sent):
        type(instance).objects.update(host="gpu-b")
        answer = acting.get(f"/api/instances/{instance.name}/log?lines=5").json()  # no Redis answers here
        assert (answer["lines"], answer["error"]) == ([], "The agent on gpu-b does not answer.")
        assert [(task, args[:2], queue) for task, args, queue in sent] == [
            ("send_log", (instance.name, 5), "node.node-1")
        ]
