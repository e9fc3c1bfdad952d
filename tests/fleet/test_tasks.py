"""Instance commands carried out: each verb, each failure, and that nothing is done twice."""

import asyncio
import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.utils import timezone

from controlplane.events.models import Event, Severity
from controlplane.fleet import services
from controlplane.fleet.lifecycle import engine_logs
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import CommandState, CommandVerb, Instance, InstanceCommand, Launcher
from tests.workers.conftest import lives
from workers.tasks import fleet as tasks
from workers.vllm.client import VllmError
from workers.vllm.launcher import Launched, LaunchError

pytestmark = pytest.mark.django_db
S = InstanceState


class FakeLauncher:
    """Remembers what it was asked, fails on demand."""

    def __init__(self):
        self.calls, self.specs, self.error, self.is_alive = [], [], None, True

    async def start(self, spec):
        self.calls.append(("start", spec.name))
        self.specs.append(spec)
        if self.error:
            raise self.error
        return Launched(f"http://127.0.0.1:9000/{spec.name}", 4242)

    async def stop(self, name, *, grace_s=10.0):
        self.calls.append(("stop", name))
        if self.error:
            raise self.error

    async def alive(self, name):
        return self.is_alive


class FakeClient:
    calls: list
    busy: list  # requests that run, at its next looks
    error: Exception | None = None
    asleep = False
    obeys = True

    def __init__(self, url, *, timeout_s, api_key=""):
        self.url = url

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def is_sleeping(self):
        return FakeClient.asleep

    async def metrics(self):
        left = FakeClient.busy.pop() if FakeClient.busy else 0
        return SimpleNamespace(running=left, waiting=0)

    async def sleep(self, level, mode):
        FakeClient.asleep = self.obeys
        self.calls.append(("sleep", self.url, level, mode))
        if self.error:
            raise self.error

    async def wake_up(self, tags=()):
        FakeClient.asleep = not self.obeys if not tags or "kv_cache" in tags else FakeClient.asleep
        self.calls.append(("wake_up", self.url, *tags))
        if self.error:
            raise self.error

    async def reload_weights(self):
        self.calls.append(("reload_weights", self.url))

    async def reset_prefix_cache(self):
        self.calls.append(("reset_prefix_cache", self.url))


@pytest.fixture
def launcher(monkeypatch):
    fake = FakeLauncher()
    monkeypatch.setattr(tasks, "launcher_for", lambda instance: fake)
    monkeypatch.setattr(tasks, "EMULATOR_PATIENCE_S", 0.0)
    return fake


@pytest.fixture
def client(monkeypatch):
    FakeClient.calls, FakeClient.error, FakeClient.asleep, FakeClient.obeys = [], None, False, True
    FakeClient.busy = []
    monkeypatch.setattr(tasks, "VllmClient", FakeClient)
    return FakeClient


@pytest.fixture(autouse=True)
def delivered(monkeypatch):
    """The tasks' own view of `deliver` and `notify`."""
    sent = []
    monkeypatch.setattr(tasks, "deliver", lambda command: sent.append(command.pk) or True)
    monkeypatch.setattr(tasks, "notify", lambda: True)
    return sent


def now(row):
    row.refresh_from_db()
    return row.state


SERVER = """#!/bin/sh
case "$1" in *parse_arguments.py) echo '{"error": ""}'; exit;; esac
sleep 600 &
echo "engine $!"
wait
"""


class TestKilled:
    """The API server of a launched instance is killed; its engine lives on and keeps the GPU."""

    @pytest.fixture
    def python(self, settings, tmp_path):
        settings.STATE_DIR, settings.VLLM_PYTHON = tmp_path, str(tmp_path / "python")
        (tmp_path / "python").write_text(SERVER)
        (tmp_path / "python").chmod(0o755)

    @pytest.fixture
    def server(self, python, make_instance, deployment):
        """`server()`: start it; return the row, its API server and its engine."""

        def start():
            row = Instance.objects.filter(launcher="process").first() or make_instance(
                state=S.PROVISIONING, launcher="process", name="killed"
            )
            Instance.objects.filter(pk=row.pk).update(state=S.PROVISIONING)
            log = engine_logs.path_of(row)
            command = InstanceCommand.objects.create(instance=row, verb=CommandVerb.START)
            tasks.run_command(command.pk)
            command.refresh_from_db()
            assert command.state == CommandState.DONE, command.error
            row.refresh_from_db()
            until = time.monotonic() + 10.0
            while "engine" not in log.read_text() and time.monotonic() < until:
                time.sleep(0.02)
            return row, row.process_id, int(log.read_text().split()[-1])

        yield start
        asyncio.run(tasks.launcher_for(Instance.objects.get(name="killed")).stop("killed", grace_s=0.0))

    def kill(self, process_id):
        os.kill(process_id, signal.SIGKILL)
        until = time.monotonic() + 10.0
        while lives(process_id) and time.monotonic() < until:
            time.sleep(0.02)

    def said(self):
        return Event.objects.filter(kind="instance.ended").values_list("reason", flat=True)

    def test_its_engine_is_ended_and_the_event_says_why(self, server):
        row, api, engine = server()
        self.kill(api)
        assert lives(engine)
        Instance.objects.filter(pk=row.pk).update(state=S.FAILED)
        assert tasks.end_failed() == 1
        assert not lives(engine)
        (reason,) = self.said()
        assert "killed (9), perhaps out of memory; what was left of it is ended" in reason
        assert tasks.end_failed() == 0

    def test_a_start_before_that_ends_it_first(self, server):
        _, api, engine = server()
        self.kill(api)
        _, other, second = server()
        assert (lives(engine), lives(second), other != api) == (False, True, True)
        (reason,) = self.said()
        assert "killed (9), perhaps out of memory" in reason

    def test_while_loading_the_failure_says_it(self, server):
        row, api, engine = server()
        self.kill(api)
        assert tasks.watch_loading() == 1
        row.refresh_from_db()
        assert (row.state, "killed (9), perhaps out of memory" in row.state_reason) == (S.FAILED, True)
        assert tasks.end_failed() == 1
        assert not lives(engine)


class TestStart:
    def test_from_provisioning_to_loading_with_address_and_process(self, make_instance, launcher):
        instance = make_instance(state=S.PROVISIONING)
        command = services.start(instance, "test", "more load")
        tasks.run_command(command.pk)
        assert now(instance) == S.LOADING
        assert (instance.url, instance.process_id) == ("http://127.0.0.1:9000/instance-1", 4242)
        assert now(command) == CommandState.DONE
        assert command.finished_at is not None
        tasks.run_command(command.pk)  # a second time it does nothing
        assert launcher.calls == [("stop", "instance-1"), ("start", "instance-1")]
        event = Event.objects.get(kind="instance.moved")
        assert (event.reason, event.inputs["command"]) == ("more load", command.pk)

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (LaunchError("there is no such folder"), "there is no such folder"),
            (RuntimeError("boom"), "unexpected RuntimeError: boom"),
            (None, "there is no performance profile"),
        ],
    )
    def test_a_failure_fails_the_instance_with_its_reason(self, make_instance, launcher, profile, error, said):
        launcher.error = error
        instance = make_instance(state=S.PROVISIONING)
        command = services.start(instance, "test", "x")
        if error is None:
            profile.delete()
        tasks.run_command(command.pk)
        assert (now(instance), now(command)) == (S.FAILED, CommandState.FAILED)
        assert command.error.startswith(said)
        assert instance.state_reason == command.error
        assert Event.objects.get(kind="instance.moved").severity == Severity.CRITICAL

    def test_an_emulator_that_is_not_up_yet_is_waited_for(self, make_instance, launcher, monkeypatch):
        monkeypatch.setattr(tasks, "EMULATOR_PATIENCE_S", 30.0)
        launcher.error = LaunchError("cannot be reached")

        async def meanwhile(seconds):
            launcher.error = None

        monkeypatch.setattr(tasks.asyncio, "sleep", meanwhile)
        instance = make_instance(state=S.PROVISIONING)
        tasks.run_command(services.start(instance, "test", "x").pk)
        assert now(instance) == S.LOADING


class TestStop:
    def test_from_draining_to_stopped(self, make_instance, launcher):
        instance = make_instance(process_id=7)
        command = services.stop(instance, "test", "retired")
        tasks.run_command(command.pk)
        assert (now(instance), instance.process_id) == (S.STOPPED, None)
        assert launcher.calls == [("stop", "instance-1")]

    def test_a_failure_leaves_the_instance_and_says_so(self, make_instance, launcher):
        launcher.error = LaunchError("the emulator cannot be reached")
        instance = make_instance()
        tasks.run_command(services.stop(instance, "test", "retired").pk)
        assert now(instance) == S.DRAINING
        event = Event.objects.get(kind="instance.stop_failed")
        assert (event.reason, event.severity) == ("the emulator cannot be reached", Severity.WARNING)


class TestSleepAndWake:
    def test_running_requests_are_waited_for_and_their_end_is_recorded(self, make_instance, client):
        client.busy, instance = [1, 2], make_instance()
        command = services.sleep(instance, "test", "night")
        tasks.run_command(command.pk)
        assert (client.busy, client.calls) == ([], [("sleep", instance.url, 1, "wait")])
        assert (now(instance), now(command)) == (S.SLEEPING, CommandState.DONE)
        assert command.started_at < command.drained_at <= command.finished_at

    def test_running_for_too_long_is_a_failure(self, make_instance, client, monkeypatch):
        monkeypatch.setattr(tasks, "SLEEP_WAIT_S", 0.0)
        client.busy = [1] * 1000
        command = services.sleep(make_instance(), "test", "night")
        tasks.run_command(command.pk)
        assert now(command) == CommandState.FAILED
        assert "still runs 1 requests" in command.error
        assert client.calls == []

    def test_discarded_weights_are_loaded_again(self, make_instance, client):
        instance = make_instance()
        tasks.run_command(services.sleep(instance, "test", "night", level=2).pk)
        assert client.calls == [("sleep", instance.url, 2, "wait")]
        assert (now(instance), instance.sleep_level, instance.tier) == (S.SLEEPING, 2, "storage")
        tasks.run_command(services.wake(instance, "test", "morning").pk)
        assert [call[0] for call in client.calls[1:]] == ["wake_up", "reload_weights", "wake_up", "reset_prefix_cache"]
        assert (now(instance), instance.sleep_level, instance.tier) == (S.LOADING, None, "gpu")

    def test_wake(self, make_instance, client):
        instance = make_instance(state=S.SLEEPING)
        tasks.run_command(services.wake(instance, "test", "morning").pk)
        assert now(instance) == S.LOADING
        assert client.calls == [("wake_up", instance.url)]

    def test_a_failure_leaves_the_instance_where_it_is(self, make_instance, client):
        client.error = VllmError("answered 404", 404)
        instance = make_instance()
        command = services.sleep(instance, "test", "night")
        tasks.run_command(command.pk)
        assert now(instance) == S.DRAINING
        assert (now(command), command.error) == (CommandState.FAILED, "answered 404")
        assert Event.objects.filter(kind="instance.sleep_failed").exists()
        services.resume(instance, "test", "so be it")  # nothing is in the way any more

    @pytest.mark.parametrize(("verb", "state"), [("sleep", S.READY), ("wake", S.SLEEPING)])
    def test_an_answer_is_no_proof(self, verb, state, make_instance, client, monkeypatch):
        """The server answers 200 without doing it: `is_sleeping` shows it."""
        monkeypatch.setattr(tasks, "SLEEP_PROOF_S", 0.0)
        client.obeys = False
        instance = make_instance(state=state)
        command = services.ACTIONS[verb](instance, "test", "night")
        tasks.run_command(command.pk)
        assert now(command) == CommandState.FAILED
        assert "says that it is " in command.error
        assert now(instance) != (S.SLEEPING if verb == "sleep" else S.LOADING)

    def test_an_instance_that_failed_meanwhile_is_not_put_to_sleep(self, make_instance, client):
        instance = make_instance()
        command = services.sleep(instance, "test", "night")
        services.move(instance, S.FAILED, actor="gateway", reason="silent")
        tasks.run_command(command.pk)
        assert client.calls == []
        assert "cannot become sleeping" in InstanceCommand.objects.get().error


class TestOrder:
    @pytest.mark.sql
    def test_commands_of_one_instance_wait_for_each_other(self, make_instance, launcher, delivered):
        instance = make_instance(state=S.PROVISIONING)
        start = services.start(instance, "test", "x")
        InstanceCommand.objects.update(state=CommandState.RUNNING)
        stop = services.stop(instance, "test", "y")
        tasks.run_command(stop.pk)
        assert now(stop) == CommandState.PENDING
        InstanceCommand.objects.filter(pk=start.pk).update(state=CommandState.PENDING)
        tasks.run_command(start.pk)
        assert delivered == [stop.pk]  # the workers are notified of the next in line at once
        tasks.run_command(stop.pk)
        assert now(instance) == S.STOPPED


class TestHousekeeping:
    def test_pending_commands_are_delivered_again(self, make_instance, delivered):
        command = services.start(make_instance(state=S.PROVISIONING), "test", "x")
        assert tasks.run_pending_commands() == 0  # just made: its own message is on the way
        InstanceCommand.objects.update(created_at=timezone.now() - timedelta(minutes=1))
        assert tasks.run_pending_commands() == 1
        assert delivered == [command.pk]

    @pytest.mark.sql
    def test_a_dead_workers_command_is_given_back(self, make_instance, delivered):
        command = services.start(make_instance(state=S.PROVISIONING), "test", "x")
        long_ago = timezone.now() - timedelta(hours=1)
        InstanceCommand.objects.update(state=CommandState.RUNNING, started_at=timezone.now(), created_at=long_ago)
        assert tasks.run_pending_commands() == 0
        InstanceCommand.objects.update(started_at=long_ago)
        assert tasks.run_pending_commands() == 1
        assert now(command) == CommandState.PENDING

    def test_a_server_that_dies_while_loading_is_noticed(self, make_instance, launcher):
        instance, other = make_instance(state=S.LOADING), make_instance(state=S.LOADING, launcher=Launcher.EXTERNAL)
        assert tasks.watch_loading() == 0
        launcher.is_alive = False
        assert tasks.watch_loading() == 1
        assert now(instance) == S.FAILED
        assert now(other) == S.LOADING


class TestSpec:
    def test_it_is_of_the_deployment_and_its_profile_or_its_source(self, make_instance, deployment, node):
        deployment.vllm_args = "--enforce-eager --kv-cache-dtype 'fp8'"
        deployment.save()
        node.address = "127.0.0.9"
        node.save()
        emulated, process = (
            tasks.start_spec(make_instance(launcher=launcher, node=node))
            for launcher in (Launcher.EMULATED, Launcher.PROCESS)
        )
        for spec in (emulated, process):
            assert (spec.model, spec.max_num_seqs, spec.max_model_len) == ("llama-3.1-8b", 256, 8192)
            assert (spec.scheduling_policy, spec.tensor_parallel) == ("priority", 2)
        assert (emulated.kv_blocks, emulated.profile.decode_a_s) == (deployment.expected_kv_tokens // 16, 0.00844396)
        assert process.extra_args == ("--enforce-eager", "--kv-cache-dtype", "fp8")
        assert (process.source, process.host) == ("meta-llama/Llama-3.1-8B", "127.0.0.9")

    def test_launchers(self, make_instance, settings, tmp_path):
        settings.VLLM_PYTHON, settings.STATE_DIR = "/usr/bin/python", tmp_path
        assert type(tasks.launcher_for(make_instance())).__name__ == "EmulatedLauncher"
        assert type(tasks.launcher_for(make_instance(launcher=Launcher.PROCESS))).__name__ == "ProcessLauncher"
        with pytest.raises(LaunchError, match="started elsewhere"):
            tasks.launcher_for(make_instance(launcher=Launcher.EXTERNAL))


def test_the_tasks_are_registered_under_the_names_by_which_they_are_sent():
    from workers.celery import app as celery_app

    celery_app.loader.import_default_modules()
    assert services.RUN_COMMAND_TASK in celery_app.tasks
    assert {services.TICK_TASK, tasks.WATCH_TASK} <= set(celery_app.tasks)
    assert set(tasks.VERBS) == set(CommandVerb)
