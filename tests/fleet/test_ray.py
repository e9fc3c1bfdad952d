"""A real Ray cluster whose raylets are nodes, a worker that is connected to it, and emulated engines as processes."""

import functools
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from django.db import connection

from controlplane.events.models import Event
from controlplane.fleet import places, services
from controlplane.fleet.lifecycle import engine_logs
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import CommandState, Deployment, InstanceCommand, Launcher, Node
from tests.fleet import test_with_services
from tests.fleet.test_with_services import redis_url  # noqa: F401 (a fixture)
from tests.ray_cluster import RayCluster, ray_python
from workers.tasks import fleet as tasks
from workers.tasks.ray import watch_ray

pytestmark = [pytest.mark.services, pytest.mark.django_db(transaction=True)]
until = functools.partial(test_with_services.until, patience_s=120.0)  # Ray starts a Python process here and there
S = InstanceState
ROOT = Path(__file__).parents[2]
ENGINE = f"""#!{sys.executable}
import os, sys, time
given = sys.argv[1:]
flags = dict(zip(given, given[1:]))
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], "rank", flags.get("--node-rank"), "of", flags.get("--nnodes"), flush=True)
if "--headless" in given:
    time.sleep(600)
single = ["--single", flags["--served-model-name"], "--host", flags["--host"], "--port", flags["--port"]]
os.environ["PYTHONPATH"] = {str(ROOT)!r}
os.execv(sys.executable, [sys.executable, "-m", "workers.emulator", *single])
"""


@pytest.fixture(autouse=True)
def messages():
    """Nothing is replaced here, unlike in the other modules."""


@pytest.fixture
def cluster(tmp_path, redis_url):  # noqa: F811
    """A head whose tables are in Redis, and machines with one GPU each: `alone`, and two that are the node `pair`."""
    engine = tmp_path / "python"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    cluster = RayCluster(ray_python(), tmp_path, redis_url, VLLM_PYTHON=str(engine))
    try:
        cluster.head().machine("alone", 1, region__us_east=1, gpu__a100_80gb=1)
        for name in ("left", "right"):
            cluster.machine(name, 1, region__us_east=1, gpu__a100_80gb=1, group__pair=1)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def agent(redis_url, cluster, tmp_path, settings):  # noqa: F811
    """The worker on queue `ray`; the test itself has no connection."""
    settings.RAY_ADDRESS = ""
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "controlplane.settings",
        "DATABASE_URL": f"sqlite:///{connection.settings_dict['NAME']}",
        "REDIS_URL": redis_url,
        "PILOTHOUSE_STATE_DIR": str(tmp_path / "agent"),
        "RAY_ADDRESS": cluster.address,
        "PYTHONPATH": str(ROOT),
    }
    command = [ray_python(), "-m", "celery", "-A", "workers.celery", "worker", "--queues", "ray", "--concurrency", "2"]
    with (tmp_path / "agent.log").open("wb") as log:
        process = subprocess.Popen([*command, "--loglevel", "info"], env=environment, cwd=ROOT, stdout=log, stderr=log)
    yield
    process.terminate()
    process.wait(90)  # a connection to Ray may take half a minute to end


def answers(url):
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as response:
            return response.status == 200
    except OSError:
        return False


def test_ray(agent, cluster, make_instance, region, gpu_type, deployment):
    Node.objects.filter(name="node-1").delete()
    deployment.model.source = "a/b"
    deployment.model.save()
    Deployment.objects.filter(pk=deployment.pk).update(tensor_parallel=1)
    deployment.refresh_from_db()

    def becomes(row, state):
        def reached():
            watch_ray()  # as the fleet's tick does
            row.refresh_from_db()
            return row.state == state

        try:
            until(reached)
        except AssertionError:
            commands = [f"{each.verb} {each.state} {each.error}" for each in row.commands.all()]
            raise AssertionError(f"{row} is {row.state}: {row.state_reason}; {commands}") from None

    # Membership.
    until(lambda: set(Node.objects.values_list("name", "gpu_count")) == {("alone", 1), ("pair", 2)})
    alone, pair = Node.objects.get(name="alone"), Node.objects.get(name="pair")
    assert (alone.region, alone.gpu_type, alone.ray["machines"], pair.ray["machines"]) == (region, gpu_type, 1, 2)

    # Starts, by the same command rows.
    one = make_instance(state=S.STOPPED, launcher=Launcher.RAY, node=alone)
    command = services.start(one, "test", "more load")
    becomes(one, S.LOADING)
    until(lambda: InstanceCommand.objects.get(pk=command.pk).state == CommandState.DONE)  # written after the instance
    assert (one.host, bool(one.process_id)) == ("", True)
    until(lambda: answers(one.url))
    until(lambda: engine_logs.read(one, 20).lines)  # a first connection to Ray takes longer than a reader waits
    log = engine_logs.read(one, 20)
    assert (log.host, log.lines[0]) == ("alone", "sees 0 rank None of None")
    services.move(one, S.READY, actor="gateway", reason="answers")

    Deployment.objects.filter(pk=deployment.pk).update(tensor_parallel=2)
    deployment.refresh_from_db()
    wide = make_instance(state=S.STOPPED, launcher=Launcher.RAY, node=pair)
    services.start(wide, "test", "a large one")
    becomes(wide, S.LOADING)
    until(lambda: answers(wide.url))
    until(lambda: "sees 0 rank 0 of 2" in engine_logs.read(wide, 20).lines)
    services.move(wide, S.READY, actor="gateway", reason="answers")

    def groups():
        watch_ray()
        return {row.name: row.ray["groups"] for row in Node.objects.all()}

    until(lambda: groups() == {"alone": {one.name: 1}, "pair": {wide.name: 2}})

    # The head dies: servers stay, commands wait, and all is found again when it is back.
    before = one.url, one.process_id
    cluster.kill("head")
    stop = services.stop(wide, "test", "enough")

    def waits():
        watch_ray()
        stop.refresh_from_db()
        errors = {row.ray["error"] for row in Node.objects.all()}
        return stop.state == CommandState.PENDING and {stop.error} == errors and "does not answer" in stop.error

    until(waits)
    assert answers(one.url)
    assert answers(wide.url)
    cluster.head()
    until(lambda: groups()["alone"] == {one.name: 1})
    InstanceCommand.objects.filter(pk=stop.pk).update(created_at=stop.created_at - tasks.REDELIVER_AFTER)
    tasks.run_pending_commands()
    becomes(wide, S.STOPPED)
    one.refresh_from_db()
    assert ((one.url, one.process_id), one.state, answers(one.url)) == (before, S.READY, True)
    assert not answers(wide.url)

    # A server is killed: failed with its signal, and what Ray kept of it is ended.
    os.kill(one.process_id, signal.SIGKILL)
    becomes(one, S.FAILED)
    assert "killed (9)" in one.state_reason
    until(lambda: groups()["alone"] == {})
    Deployment.objects.filter(pk=deployment.pk).update(tensor_parallel=1)
    deployment.refresh_from_db()
    services.start(one, "test", "again")
    becomes(one, S.LOADING)
    until(lambda: answers(one.url))
    services.move(one, S.READY, actor="gateway", reason="answers")

    # A machine is lost: its instance is failed, its node takes none until it is back, and another node replaces it.
    cluster.kill("alone")
    until(lambda: not answers(one.url))  # as the gateway's heartbeats see
    becomes(one, S.FAILED)
    until(lambda: groups() and not Node.objects.get(name="alone").active)
    assert Event.objects.filter(kind="node.lost").exists()
    other = places.new_instance(deployment)
    assert (other.node, other.launcher) == (pair, Launcher.RAY)
    services.start(other, "floor", "one is missing")
    becomes(other, S.LOADING)
    until(lambda: answers(other.url))
    cluster.machine("alone", 1, region__us_east=1, gpu__a100_80gb=1)
    until(lambda: groups() and Node.objects.get(name="alone").active)
    services.stop(other, "test", "enough")
    becomes(other, S.STOPPED)
    until(lambda: groups() == {"alone": {}, "pair": {}})
