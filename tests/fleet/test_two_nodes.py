"""Two nodes with an agent each (Celery workers with hosts and disks of their own), and emulated engines as processes."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from django.db import connection

from controlplane.events.models import Event
from controlplane.fleet import services, stock
from controlplane.fleet.lifecycle import engine_logs
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Gpu, Launcher, Node, Stock, StockState
from tests.fleet.test_with_services import redis_url, until  # noqa: F401 (a fixture)
from workers.tasks import fleet as tasks
from workers.tasks import nodes
from workers.vllm.launcher import ProcessLauncher

pytestmark = [pytest.mark.services, pytest.mark.gate, pytest.mark.django_db(transaction=True)]
S = InstanceState
ROOT = Path(__file__).parents[2]
FILES = {"config.json": b"{}", "model.safetensors": b"w" * 100_000}
SHA = "0" * 40
ENGINE = f"""#!{sys.executable}
import os, sys
python, given = sys.executable, sys.argv[1:]
if given[0].endswith("pull.py"):
    os.execv(python, [python, *given])
if os.environ.get("CUDA_VISIBLE_DEVICES") == os.environ["BAD_GPU"]:
    print("Traceback (most recent call last):")
    sys.exit("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered")
flags = dict(zip(given, given[1:]))
single = ["--single", flags["--served-model-name"], "--host", flags["--host"], "--port", flags["--port"]]
os.execv(python, [python, "-m", "workers.emulator", *single])
"""


class Hub(BaseHTTPRequestHandler):
    """One repository, a/b, as the hub serves it."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/a/b/tree"):
            tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": name} for name in FILES]
            body = json.dumps(tree).encode()
        elif path.startswith("/api/models/a/b"):
            body = json.dumps({"id": "a/b", "sha": SHA, "siblings": [{"rfilename": name} for name in FILES]}).encode()
        else:
            body = FILES.get(path.rpartition("/")[2])
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body or b"")))
        self.send_header("ETag", f'"{len(body or b"")}"')
        self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body or b"")

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def messages():
    """Nothing is replaced here, unlike in the other modules."""


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def running(tmp_path):
    """Agents that the test has started; they end with it, and so do their engines."""
    processes = []
    yield processes
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait(30)
    for folder in tmp_path.glob("node-*/instances"):
        asyncio.run(ProcessLauncher("", folder).stop("instance-1", grace_s=0))


@pytest.fixture
def agents(redis_url, hub, running, tmp_path, node, settings):  # noqa: F811
    """The agents of `node-1`, whose first GPU is broken, and `node-2`; the test itself is on no node."""
    settings.HOST = "elsewhere"
    Node.objects.update(gpu_count=2)
    Node.objects.create(name="node-2", region=node.region, gpu_type=node.gpu_type, gpu_count=2)
    engine = tmp_path / "python"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    database = connection.settings_dict
    for name, bad in (("node-1", "0"), ("node-2", "")):
        environment = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "controlplane.settings",
            "DATABASE_URL": f"sqlite:///{database['NAME']}",
            "REDIS_URL": redis_url,
            "PILOTHOUSE_HOST": f"host-of-{name}",
            "PILOTHOUSE_STATE_DIR": str(tmp_path / name),
            "VLLM_PYTHON": str(engine),
            "HF_ENDPOINT": hub,
            "HF_HOME": str(tmp_path / name / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": str(ROOT),
            "BAD_GPU": bad,
        }
        (tmp_path / name).mkdir()
        command = [sys.executable, "-m", "celery", "-A", "workers.celery", "worker", "--queues", f"node.{name}"]
        with (tmp_path / f"{name}.log").open("wb") as log:
            running.append(
                subprocess.Popen(
                    [*command, "--concurrency", "1", "--hostname", f"{name}@%h", "--loglevel", "info"],
                    env=environment,
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                )
            )
    until(lambda: set(Node.objects.values_list("host", flat=True)) == {"host-of-node-1", "host-of-node-2"})


def test_two_nodes(agents, make_instance, node, deployment, operator):
    deployment.model.source = "a/b"
    deployment.model.save()
    Deployment.objects.filter(pk=deployment.pk).update(tensor_parallel=1)
    node.refresh_from_db()
    there = Node.objects.get(name="node-2")
    first = make_instance(state=S.STOPPED, launcher=Launcher.PROCESS, node=node)
    make_instance(state=S.STOPPED, launcher=Launcher.PROCESS, node=there)

    # Weights are pulled where they are asked for, and there alone.
    def listed():
        Node.objects.update(reported_at=None)  # the report of an agent that announces itself is too early
        nodes.report_nodes()
        return Stock.objects.filter(state=StockState.MISSING).count() == 2

    until(listed)
    stock.pull(Stock.objects.get(node=node), operator, "before the release")

    def pulled():
        nodes.report_nodes()  # as the fleet's tick does
        row = Stock.objects.get(node=node)
        assert row.state != StockState.FAILED, row.error
        return row.state == StockState.PRESENT and row.bytes

    assert until(pulled) >= sum(map(len, FILES.values()))
    assert Stock.objects.get(node=there).state == StockState.MISSING
    assert Event.objects.filter(kind="stock.pulled").exists()

    # The first start meets the broken GPU: it is cordoned, and the next start gets the other one at once.
    services.start(first, "test", "more load")

    def cordoned():
        tasks.watch_loading()
        return Gpu.objects.exclude(cordoned="").first()

    gpu = until(cordoned)
    assert (gpu.node, gpu.name) == (node, "0")
    assert "uncorrectable ECC error" in gpu.cordoned
    first.refresh_from_db()
    assert (first.state, first.failures, node.free_gpus(without=first)) == (S.FAILED, 0, 1)
    services.start(first, "test", "again")

    def loads():
        first.refresh_from_db()
        return first.state == S.LOADING

    until(loads)
    assert (first.gpus, first.host) == (["1"], "host-of-node-1")

    # Its log is read from here.
    until(lambda: any("emulator: on http" in line for line in engine_logs.read(first, 20).lines))
    log = engine_logs.read(first, 20)
    assert (log.host, "node-1/instances" in log.file) == ("host-of-node-1", True)

    services.stop(first, "test", "enough")

    def stopped():
        first.refresh_from_db()
        return first.state == S.STOPPED

    until(stopped)
    assert (first.host, first.gpus) == ("", [])
