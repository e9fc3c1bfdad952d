"""Machines of a Ray cluster as rows, and what their instances may do, without Ray."""

from dataclasses import replace

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controlplane.alerts.problems import read_known
from controlplane.events.models import Event
from controlplane.fleet import places, services
from controlplane.fleet.lifecycle import engine_logs, hosts, ray_nodes
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import CommandState, InstanceCommand, Launcher, Node
from controlplane.planning.execution import rows
from workers.ray.launcher import LOST, Machine, State
from workers.tasks import fleet as tasks
from workers.tasks import ray as watching
from workers.vllm.launcher import Launched

pytestmark = pytest.mark.django_db
S = InstanceState
MACHINE = Machine("1", "gpu-7", "10.0.0.7", True, "us-east", "a100-80gb", gpus=8)


@pytest.fixture
def rays(region, gpu_type):
    assert ray_nodes.report([MACHINE]) == []
    return Node.objects.get(name="gpu-7")


def problems():
    return {(each.subject, each.title) for each in read_known(timezone.now()).problems}


def seen(row):
    row.refresh_from_db()
    return row.active, row.gpu_count, row.ray["machines"], row.ray["lost"], row.ray["groups"]


class TestMembership:
    def test_machines_of_one_group_are_one_node(self, region, gpu_type):
        group = [replace(MACHINE, id="1", groups={"m-1": 4}), replace(MACHINE, id="2", gpus=4, groups={"m-1": 4})]
        assert ray_nodes.report(group) == []
        (row,) = Node.objects.all()
        assert seen(row) == (True, 12, 2, False, {"m-1": 8})
        assert (row.region, row.gpu_type, row.address) == (region, gpu_type, "10.0.0.7")
        assert Event.objects.filter(kind="node.joined").count() == 1
        ray_nodes.report(group[:1])
        assert seen(row) == (True, 8, 1, False, {"m-1": 4})

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"region": "mars"}, "gpu-7: there is no region 'mars' (its resource region:NAME)"),
            ({"gpu_type": "tpu"}, "gpu-7: 'tpu' names no GPU type (its resource gpu:NAME)"),
            ({"gpu_type": ""}, "gpu-7: 'nothing' names no GPU type (its resource gpu:NAME)"),
            ({"gpus": 0}, "gpu-7: Ensure this value is greater than or equal to 1."),
            ({"node": "node-1"}, "node-1: a node of this name is not Ray's: give Ray's another"),
        ],
    )
    def test_a_machine_that_cannot_be_a_node_is_named(self, region, gpu_type, node, changes, problem):
        Node.objects.update(host="gpu-host")
        (said,) = ray_nodes.report([replace(MACHINE, **changes)])
        assert said.startswith(problem)
        assert list(Node.objects.all()) == [node]

    def test_the_accelerators_name_finds_the_type(self, gpu_type):
        assert ray_nodes._gpu_type("A100") == gpu_type

    def test_a_lost_node_takes_nothing_until_it_is_back(self, rays, make_instance, deployment):
        instance = make_instance(launcher=Launcher.RAY, node=rays)
        for _ in range(2):
            ray_nodes.report([replace(MACHINE, alive=False)])
            assert seen(rays) == (False, 8, 0, True, {})
        assert Event.objects.filter(kind="node.lost").count() == 1
        assert not places.keeps(instance)
        assert ("node gpu-7", "gpu-7 is lost") in problems()
        ray_nodes.report([replace(MACHINE, id="2", address="10.0.0.8")])
        assert seen(rays)[0] is True
        assert rays.address == "10.0.0.8"

    def test_an_operators_word_stands(self, rays):
        Node.objects.update(active=False)
        ray_nodes.report([MACHINE])
        assert seen(rays)[0] is False

    def test_a_lost_node_that_nothing_refers_to_goes(self, rays):
        ray_nodes.report([])
        assert not Node.objects.exists()

    def test_where_ray_does_not_answer_the_rows_say_so_and_stay(self, rays):
        assert ray_nodes.note_error("Ray's head at x does not answer")
        rays.refresh_from_db()
        assert (rays.active, rays.ray["error"]) == (True, "Ray's head at x does not answer")
        assert ("node gpu-7", "Ray does not answer for gpu-7") in problems()
        ray_nodes.report([MACHINE])
        assert seen(rays)[3] is False
        assert rays.ray["error"] == ""


class TestInstances:
    def test_the_node_decides_who_starts_vllm(self, rays, node, make_instance, deployment):
        assert rays.launcher(Launcher.PROCESS) == rays.launcher(Launcher.RAY) == Launcher.RAY
        assert node.launcher(Launcher.PROCESS) == node.launcher(Launcher.RAY) == Launcher.PROCESS
        assert rays.launcher(Launcher.EMULATED) == Launcher.EMULATED
        deployment.model.source = "a/b"
        deployment.model.save()
        make_instance(state=S.STOPPED, launcher=Launcher.PROCESS, node=node)
        Node.objects.filter(pk=node.pk).update(active=False)
        made = places.new_instance(deployment)
        assert (made.node, made.launcher) == (rays, Launcher.RAY)
        for launcher, place, problem in (
            (Launcher.PROCESS, rays, "Instances on gpu-7 have the launcher ray."),
            (Launcher.RAY, node, "Instances on node-1 have the launcher process."),
            (Launcher.RAY, None, "Ray starts instances on its own nodes: name one of them."),
        ):
            made.launcher, made.node = launcher, place
            with pytest.raises(ValidationError, match=problem):
                made.clean()

    def test_it_shares_no_gpus(self, rays, make_instance, deployment):
        from controlplane.fleet.models import SwapGroup

        deployment.model.source = "a/b"
        row = make_instance(launcher=Launcher.RAY, node=rays)
        row.swap_group = SwapGroup.objects.create(name="g")
        with pytest.raises(ValidationError, match="Ray gives each instance GPUs of its own"):
            row.clean()

    def test_commands_wait_for_a_worker_and_for_the_head(self, rays, make_instance, settings, monkeypatch):
        instance = make_instance(launcher=Launcher.RAY, node=rays)
        settings.RAY_ADDRESS = ""
        assert "the worker on queue ray acts for it" in hosts.obstacle(instance)
        assert hosts.queue_of(instance) == "ray"
        settings.RAY_ADDRESS = "127.0.0.1:1"
        assert hosts.obstacle(instance) == ""
        command = services.stop(instance, "test", "enough")
        tasks.run_command(command.pk)
        command.refresh_from_db()
        assert (command.state, command.error) == (
            CommandState.PENDING,
            "Ray's head at 127.0.0.1:1 does not answer (Connection refused)",
        )

    def test_a_command_that_runs_when_the_head_goes_waits_again(self, rays, make_instance, settings, monkeypatch):
        settings.RAY_ADDRESS = "127.0.0.1:1"
        away = iter(["", "the head is away", "the head is away"])
        monkeypatch.setattr(tasks, "unreachable", lambda address: next(away))
        command = services.stop(make_instance(launcher=Launcher.RAY, node=rays), "test", "enough")
        tasks.run_command(command.pk)
        command.refresh_from_db()
        assert (command.state, command.error, command.started_at) == (CommandState.PENDING, "the head is away", None)

    def test_the_gateway_leaves_its_commands(self, rays, make_instance, settings):
        settings.RAY_ADDRESS = "127.0.0.1:1"
        command = services.stop(make_instance(launcher=Launcher.RAY, node=rays), rows.executor.FLOOR_ACTOR, "no load")
        InstanceCommand.objects.update(created_at=timezone.now() - 2 * rows.COMMAND_PATIENCE)
        assert rows.run_commands.__wrapped__() == 0
        command.refresh_from_db()
        assert (command.state, command.error) == (CommandState.PENDING, "")

    def test_its_log_is_asked_for_where_ray_is(self, rays, make_instance, settings, monkeypatch):
        asked = []
        monkeypatch.setattr(engine_logs, "send_task", lambda *_, queue, **__: asked.append(queue))
        instance = make_instance(launcher=Launcher.RAY, node=rays)
        for settings.RAY_ADDRESS in ("", "127.0.0.1:1"):
            log = engine_logs.read(instance, 5)
            assert (log.host, log.error) == ("gpu-7", "The worker that is connected to Ray does not answer.")
        assert asked == ["ray", ""]


class FakeLauncher:
    """Ray's launcher with given *states*."""

    def __init__(self, **states):
        self.kept, self.stopped = states, []

    def states(self):
        return self.kept

    def text(self, name):
        return "Starting to load model"

    def log(self, name, count):
        return "file", [], "ValueError: no such model"

    async def stop(self, name, *, grace_s):
        self.stopped.append(name)


RUNS, ENDED = State(Launched("http://10.0.0.7:1", 7), ""), State(None, "ended with status 3")


class TestWatching:
    @pytest.mark.parametrize(
        ("state", "rays_state", "becomes", "stopped"),
        [
            (S.LOADING, RUNS, S.LOADING, False),
            (S.LOADING, ENDED, S.FAILED, True),
            (S.LOADING, None, S.FAILED, True),
            (S.READY, RUNS, S.READY, False),
            (S.READY, ENDED, S.FAILED, True),
            (S.DRAINING, LOST, S.FAILED, True),
            (S.READY, None, S.READY, False),  # a head that has lost its tables: it serves as long as it can
            (S.PROVISIONING, ENDED, S.PROVISIONING, False),
            (S.FAILED, ENDED, S.FAILED, True),
            (S.FAILED, RUNS, S.FAILED, False),  # it may only hang
            (S.STOPPED, None, S.STOPPED, False),
        ],
    )
    def test_servers_that_ray_keeps(
        self, rays, make_instance, settings, monkeypatch, state, rays_state, becomes, stopped
    ):
        settings.RAY_ADDRESS = "127.0.0.1:1"
        row = make_instance(name="m-1", state=state, launcher=Launcher.RAY, node=rays)
        launcher = FakeLauncher(**({"m-1": rays_state} if rays_state else {}))
        monkeypatch.setattr(watching, "RayLauncher", lambda address: launcher)
        monkeypatch.setattr(watching, "machines", lambda address: [MACHINE])
        assert watching.watch_ray() == (becomes == S.FAILED != state)
        row.refresh_from_db()
        assert (row.state, launcher.stopped) == (becomes, ["m-1"] if stopped else [])
        if becomes == S.FAILED != state:
            assert row.state_reason.startswith("its server is gone: ")
            assert row.state_reason.endswith("ValueError: no such model")
        elif state == S.LOADING:
            assert row.startup == "Loading weights"


def test_the_page_of_nodes_shows_rays_view(rays, client, operator):
    client.force_login(operator)
    ray_nodes.report([replace(MACHINE, groups={"m-1": 4})])
    page = client.get(f"/fleet/nodes/{rays}/").content.decode()
    assert '1 machine, <span class="id">m-1</span> 4 GPUs' in page
    ray_nodes.note_error("Ray's head at x does not answer")
    assert "Ray&#x27;s head at x does not answer" in client.get(f"/fleet/nodes/{rays}/").content.decode()
