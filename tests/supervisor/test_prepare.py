"""What is made true before the stack starts; migrations, static files and the demo are tried in test_up.py."""

import json
import os

import pytest

from controlplane.accounts.models import User
from controlplane.accounts.services import use_sign_in_link
from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import CommandState, CommandVerb, Instance, InstanceCommand, Launcher
from controlplane.supervisor import prepare
from tests.inventory import *  # noqa: F403
from workers.tasks import fleet as fleet_tasks


@pytest.fixture
def instance(make_instance):
    def make(name: str, launcher: Launcher, state: InstanceState) -> Instance:
        return make_instance(state, launcher, name=name)

    return make


def started() -> dict[str, str]:
    """State of each instance that was asked to start."""
    commands = InstanceCommand.objects.filter(verb=CommandVerb.START, state=CommandState.PENDING)
    return {command.instance.name: command.instance.state for command in commands.select_related("instance")}


def test_every_emulated_instance_that_was_to_stay_is_started_again(instance, messages) -> None:
    for state in InstanceState:
        instance(f"emulated-{state}", Launcher.EMULATED, state)
    instance("process-ready", Launcher.PROCESS, InstanceState.READY)
    instance("external-ready", Launcher.EXTERNAL, InstanceState.READY)
    assert prepare.emulated() == "7 instances asked to start"
    others = set(InstanceState) - {InstanceState.STOPPED, InstanceState.DRAINING}
    assert started() == {f"emulated-{state}": InstanceState.PROVISIONING for state in others}
    assert Instance.objects.get(name="emulated-stopped").state == InstanceState.STOPPED
    assert Instance.objects.get(name="emulated-draining").state == InstanceState.STOPPED
    assert Instance.objects.get(name="process-ready").state == InstanceState.READY
    moved = Event.objects.filter(kind="instance.moved", subject="emulated-ready").order_by("pk").first()
    assert moved.after == {"state": "stopped"}
    assert moved.severity == "info"  # an expected end, not a failure


def test_a_command_of_a_dead_worker_is_taken_up_again(instance, messages, django_capture_on_commit_callbacks) -> None:
    row = instance("emulated-1", Launcher.EMULATED, InstanceState.PROVISIONING)
    InstanceCommand.objects.create(instance=row, verb=CommandVerb.START, state=CommandState.RUNNING, actor="test")
    with django_capture_on_commit_callbacks(execute=True):
        assert prepare.emulated() == "1 instance asked to start"
    command = row.commands.get()
    assert command.state == CommandState.PENDING
    assert command.pk in messages


def test_a_failed_start_is_reported_and_the_rest_continues(instance, messages) -> None:
    stuck = instance("emulated-1", Launcher.EMULATED, InstanceState.FAILED)
    InstanceCommand.objects.create(instance=stuck, verb=CommandVerb.SLEEP, actor="test")
    instance("emulated-2", Launcher.EMULATED, InstanceState.READY)
    said = prepare.emulated()
    assert said.startswith("1 instance asked to start; emulated-1: a sleep is pending")
    assert set(started()) == {"emulated-2"}


def test_vllm_servers_that_ended_with_the_stack_are_started_again(instance, messages, monkeypatch) -> None:
    class Launched:
        async def alive(self, name: str) -> bool:
            return name == "still-there"

    monkeypatch.setattr(fleet_tasks, "launcher_for", lambda _: Launched())
    assert prepare.vllm() == ""
    for name, state in [("still-there", "ready"), ("ended", "ready"), ("failed", "failed"), ("stopped", "stopped")]:
        instance(name, Launcher.PROCESS, InstanceState(state))
    instance("on-another-host", Launcher.PROCESS, InstanceState.READY)
    Instance.objects.filter(name="on-another-host").update(host="gpu-7")
    assert prepare.vllm() == "1 instance asked to start"
    assert set(started()) == {"ended"}


def test_the_link_is_for_an_admin_of_the_fleet(viewer, operator, fleet_admin) -> None:
    token = prepare.link().removeprefix("/sign-in/").removesuffix("/")
    assert use_sign_in_link(token) == fleet_admin
    assert User.objects.count() == 3


@pytest.mark.django_db
def test_an_admin_is_made_when_there_is_none() -> None:
    prepare.link()
    user = User.objects.get()
    assert user.is_superuser
    assert not user.has_usable_password()
    prepare.link()
    assert User.objects.count() == 1


@pytest.mark.django_db
def test_each_step_is_said_in_one_line(capsys) -> None:
    prepare.main(["database", "link"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == ["database", "link"]
    assert "up to date" in lines[0]["text"]
    assert all(line["took_s"] >= 0 for line in lines)


def test_a_compressed_copy_older_than_its_file_goes(tmp_path) -> None:
    for name, at_s in (("new.js", 20), ("new.js.gz", 10), ("old.js", 10), ("old.js.gz", 20), ("alone.gz", 5)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (at_s, at_s))
    assert prepare.drop_stale_copies(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone.gz", "new.js", "old.js", "old.js.gz"]
