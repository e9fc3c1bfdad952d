"""A command belongs to the host that started its instance: elsewhere it is refused in words and passed on."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.lifecycle import hosts
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import CommandState, Instance, InstanceCommand, Launcher
from controlplane.planning.execution import executor, rows
from tests.fleet.test_tasks import FakeLauncher
from workers.tasks import fleet as tasks
from workers.vllm.launcher import ProcessLauncher

pytestmark = pytest.mark.django_db
S = InstanceState
deliver = services.deliver  # before `messages` takes its place


class Started(FakeLauncher, ProcessLauncher):
    """A process launcher whose records are what the test says."""

    def __init__(self):
        FakeLauncher.__init__(self)
        self.records = {}

    def record(self, name):
        return self.records.get(name)

    def how_it_ended(self, name):
        return ""

    async def end_failed(self, name, seen):
        self.calls.append(("end", name))
        return True

    def log_file(self, name):
        return f"/logs/{name}.log"


@pytest.fixture
def launcher(monkeypatch):
    fake = Started()
    monkeypatch.setattr(tasks, "launcher_for", lambda instance: fake)
    return fake


@pytest.fixture(autouse=True)
def sent(monkeypatch, settings):
    """Messages to workers: (task, arguments, queue)."""
    settings.HOST = "gpu-a"
    messages = []

    def send_task(task, *args, expires_s=None, queue=""):
        messages.append((task.rpartition(".")[2], args, queue))
        return True

    monkeypatch.setattr(services, "send_task", send_task)
    monkeypatch.setattr(tasks, "send_task", send_task)
    monkeypatch.setattr(services, "deliver", deliver)
    monkeypatch.setattr(tasks, "deliver", deliver)
    monkeypatch.setattr(tasks, "notify", lambda: True)
    return messages


def now(row):
    row.refresh_from_db()
    return row.state


class TestACommand:
    def test_a_stop_is_refused_where_the_server_does_not_run(self, make_instance, launcher, node, sent):
        instance = make_instance(launcher=Launcher.PROCESS, node=node, host="gpu-b", process_id=7)
        command = services.stop(instance, "test", "retired")
        tasks.run_command(command.pk)
        assert now(instance) == S.DRAINING  # not stopped: its GPUs are still in use
        assert instance.process_id == 7
        assert now(command) == CommandState.PENDING
        assert launcher.calls == []
        assert command.error == (
            "instance-1 runs on host gpu-b, and this is gpu-a: the worker on queue node.node-1 there acts for it"
        )
        event = Event.objects.get(kind="instance.stop_passed_on")
        assert event.reason == command.error

    def test_it_reaches_the_queue_of_its_node_once_and_is_done_there(
        self, make_instance, launcher, node, sent, settings
    ):
        instance = make_instance(launcher=Launcher.PROCESS, node=node, host="gpu-b")
        command = services.stop(instance, "test", "retired")
        for _ in range(3):
            tasks.run_command(command.pk)
        assert sent == [("run_command", (command.pk,), "node.node-1")]  # a wrong listener there would spin otherwise
        assert Event.objects.filter(kind="instance.stop_passed_on").count() == 1
        settings.HOST = "gpu-b"
        tasks.run_command(command.pk)
        assert (now(instance), instance.host) == (S.STOPPED, "")
        assert (now(command), command.error) == (CommandState.DONE, "")
        assert launcher.calls == [("stop", "instance-1")]

    def test_without_a_node_the_queue_is_the_hosts(self, make_instance, launcher):
        instance = make_instance(launcher=Launcher.PROCESS, host="gpu-b")
        assert hosts.queue_of(instance) == "node.gpu-b"
        assert "queue node.gpu-b" in hosts.obstacle(instance)

    def test_a_waiting_command_reaches_its_host(self, make_instance, launcher, node, sent):
        instance = make_instance(launcher=Launcher.PROCESS, node=node, host="gpu-b")
        command = services.stop(instance, "test", "retired")
        InstanceCommand.objects.update(created_at=timezone.now() - timedelta(minutes=1))
        assert tasks.run_pending_commands() == 1
        assert sent == [("run_command", (command.pk,), "node.node-1")]

    def test_a_start_belongs_to_the_machine_of_its_node(self, make_instance, launcher, node, settings):
        node.address = "192.0.2.7"
        node.save()
        instance = make_instance(state=S.PROVISIONING, launcher=Launcher.PROCESS, node=node)
        command = services.start(instance, "test", "more load")
        tasks.run_command(command.pk)
        assert (now(instance), now(command)) == (S.PROVISIONING, CommandState.PENDING)
        assert "placed on node node-1 at 192.0.2.7, and this host is gpu-a" in command.error

    def test_who_starts_it_is_its_host(self, make_instance, launcher, node, monkeypatch):
        instance = make_instance(state=S.PROVISIONING, launcher=Launcher.PROCESS, node=node)
        tasks.run_command(services.start(instance, "test", "more load").pk)
        assert (now(instance), instance.host) == (S.LOADING, "gpu-a")
        assert hosts.obstacle(instance) == ""

    @pytest.mark.parametrize("launcher_kind", [Launcher.EMULATED, Launcher.EXTERNAL])
    def test_others_belong_to_no_host(self, make_instance, launcher_kind):
        assert hosts.obstacle(make_instance(launcher=launcher_kind, host="gpu-b")) == ""

    def test_the_gateway_leaves_it_too(self, make_instance, launcher, node, monkeypatch):
        monkeypatch.setattr(rows.connections, "close_all", lambda: None)
        instance = make_instance(launcher=Launcher.PROCESS, node=node, host="gpu-b")
        services.stop(instance, executor.FLOOR_ACTOR, "drained")
        InstanceCommand.objects.update(created_at=timezone.now() - timedelta(minutes=1))
        assert rows.run_commands() == 0
        assert launcher.calls == []
        assert now(instance) == S.DRAINING


class TestWatching:
    def test_one_that_loads_elsewhere_is_not_failed_for_want_of_a_pid_file(self, make_instance, launcher, node, sent):
        instance = make_instance(state=S.LOADING, launcher=Launcher.PROCESS, node=node, host="gpu-b")
        launcher.is_alive = False
        assert tasks.watch_loading() == 0
        assert now(instance) == S.LOADING
        assert sent == [("watch_host", (["watch-loading"],), "node.node-1")]
        assert tasks.watch_loading(forward=False) == 0  # as it runs there: it asks nobody else
        assert len(sent) == 1

    def test_remnants_of_a_failed_server_are_ended(self, make_instance, launcher, node):
        failed = make_instance(state=S.FAILED, launcher=Launcher.PROCESS, node=node, host="gpu-a", process_id=7)
        serving = make_instance(launcher=Launcher.PROCESS, node=node, host="gpu-a")
        launcher.records = {failed.name: "its record", serving.name: "another"}
        launcher.is_alive = False
        assert tasks.end_failed() == 1
        assert launcher.calls == [("end", failed.name)]
        assert now(failed) == S.FAILED
        assert failed.process_id is None
        assert Event.objects.get(kind="instance.ended").subject == failed.name

    def test_one_that_may_only_hang_has_a_moment_to_answer_again(self, make_instance, launcher, node):
        instance = make_instance(state=S.FAILED, launcher=Launcher.PROCESS, node=node, host="gpu-a")
        launcher.records = {instance.name: "its record"}
        assert tasks.end_failed() == 0
        Instance.objects.update(state_changed_at=timezone.now() - timedelta(seconds=tasks.HUNG_S + 1))
        assert tasks.end_failed() == 1

    def test_what_failed_elsewhere_is_left_to_its_host(self, make_instance, launcher, node, sent):
        instance = make_instance(state=S.FAILED, launcher=Launcher.PROCESS, node=node, host="gpu-b")
        launcher.records, launcher.is_alive = {instance.name: "another's"}, False
        assert tasks.end_failed() == 0
        assert launcher.calls == []
        assert sent == [("watch_host", (["end-failed"],), "node.node-1")]


def test_an_address_of_this_machine():
    assert hosts.is_here("127.0.0.1")
    assert not hosts.is_here("192.0.2.1")
    assert not hosts.is_here("no-such-host.invalid")
