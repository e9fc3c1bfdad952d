"""Operators' actions: moves at once, commands for a worker, refusals in words."""

import pytest
from django.db import transaction

from controlplane.events.models import Event
from controlplane.fleet import selectors, services
from controlplane.fleet.lifecycle.states import Action, ActionError, InstanceState
from controlplane.fleet.models import CommandState, CommandVerb, Instance, InstanceCommand, Launcher
from workers.celery import app as celery_app

pytestmark = pytest.mark.django_db
S = InstanceState


@pytest.fixture
def committed(django_capture_on_commit_callbacks):
    """`with committed():` run what services defer to the commit."""
    return lambda: django_capture_on_commit_callbacks(execute=True)


class TestDrainAndResume:
    def test_they_move_at_once_and_notify(self, make_instance, operator, committed, messages):
        instance = make_instance()
        with committed():
            services.drain(instance, operator, "new driver")
        assert instance.state == S.DRAINING
        with committed():
            services.resume(instance, operator, "done")
        assert instance.state == S.READY
        assert messages == ["notify", "notify"]
        assert not InstanceCommand.objects.exists()

    def test_resume_waits_for_nothing_that_is_under_way(self, make_instance, operator):
        instance = make_instance()
        services.stop(instance, operator, "retired")
        with pytest.raises(ActionError, match="instance-1 cannot resume: a stop is pending"):
            services.resume(instance, operator, "changed my mind")


class TestStop:
    def test_a_ready_instance_takes_nothing_new_at_once(self, make_instance, operator, committed, messages):
        instance = make_instance()
        with committed():
            command = services.stop(instance, operator, "retired")
            assert services.stop(instance, operator, "again") == command
        assert (instance.state, command.verb, command.actor) == (S.DRAINING, CommandVerb.STOP, "operator")
        assert InstanceCommand.objects.count() == 1
        assert set(messages) == {"notify", command.pk}
        assert Event.objects.filter(kind="instance.stop_requested", reason="retired").exists()

    @pytest.mark.parametrize("state", [S.PROVISIONING, S.LOADING, S.DRAINING, S.SLEEPING, S.FAILED])
    def test_others_keep_their_state_until_it_is_done(self, state, make_instance, operator):
        instance = make_instance(state=state)
        assert services.stop(instance, operator, "retired").state == CommandState.PENDING
        assert instance.state == state

    @pytest.mark.sql
    @pytest.mark.parametrize("begun", [False, True])
    def test_it_supersedes_what_has_not_begun_and_waits_behind_what_has(self, begun, make_instance, operator):
        instance = make_instance(state=S.STOPPED)
        start = services.start(instance, operator, "more load")
        InstanceCommand.objects.update(state=CommandState.RUNNING if begun else CommandState.PENDING)
        stop = services.stop(instance, operator, "no, less")
        start.refresh_from_db()
        superseded = (CommandState.FAILED, "superseded by stop")
        assert (start.state, start.error) == ((CommandState.RUNNING, "") if begun else superseded)
        assert stop.state == CommandState.PENDING

    def test_a_server_started_elsewhere_is_only_taken_out_of_service(self, make_instance, operator):
        instance = make_instance(launcher=Launcher.EXTERNAL)
        assert services.stop(instance, operator, "retired") is None
        assert instance.state == S.STOPPED


class TestStart:
    @pytest.mark.parametrize("state", [S.STOPPED, S.FAILED])
    def test_it_forgets_the_old_address(self, state, make_instance, operator):
        instance = make_instance(state=state, url="http://127.0.0.1:9/x", process_id=7, kv_capacity_tokens=1)
        command = services.start(instance, operator, "more load")
        assert command.verb == CommandVerb.START
        row = Instance.objects.get()
        assert (row.state, row.url, row.process_id, row.kv_capacity_tokens) == (S.PROVISIONING, "", None, 0)

    def test_a_seeded_instance_starts_without_a_move(self, make_instance, operator):
        services.start(make_instance(state=S.PROVISIONING), operator, "demo")
        assert not Event.objects.filter(kind="instance.moved").exists()

    @pytest.mark.parametrize("url", ["http://10.0.0.7:8000", ""])
    def test_a_server_started_elsewhere_is_looked_for_at_its_address(self, url, make_instance, operator):
        instance = make_instance(state=S.STOPPED, launcher=Launcher.EXTERNAL, url=url)
        if not url:
            with pytest.raises(ActionError, match=r"instance-1 cannot start: .* needs its address"):
                services.start(instance, operator, "x")
            return
        assert services.start(instance, operator, "is up again") is None
        assert (instance.state, instance.url) == (S.LOADING, url)

    @pytest.mark.sql
    def test_its_gpus_may_have_gone_to_others(self, make_instance, operator, node):
        stopped = make_instance(state=S.STOPPED, node=node)
        for _ in range(4):
            make_instance(node=node)  # 4 x 2 GPUs are all that the node has
        with pytest.raises(ActionError, match="instance-1 cannot start: node-1 has 8 GPUs, 0 of them free"):
            services.start(stopped, operator, "x")
        stopped.refresh_from_db()
        assert stopped.state == S.STOPPED

    @pytest.mark.sql
    def test_its_address_may_have_gone_to_another(self, make_instance, operator):
        stopped = make_instance(state=S.STOPPED, launcher=Launcher.EXTERNAL, url="http://10.0.0.7:8000")
        make_instance(launcher=Launcher.EXTERNAL, url="http://10.0.0.7:8000")
        with pytest.raises(ActionError, match="instance-2 has this address and is ready"):
            services.start(stopped, operator, "x")

    def test_it_does_not_overtake_a_stop(self, make_instance, operator):
        instance = make_instance(state=S.FAILED)
        services.stop(instance, operator, "retired")
        with pytest.raises(ActionError, match="a stop is pending; start has to wait for it"):
            services.start(instance, operator, "x")
        instance.refresh_from_db()
        assert instance.state == S.FAILED  # the refusal took its move back


def test_sleep_drains_first_and_wake_leaves_the_state_to_the_worker(make_instance, operator):
    awake, asleep = make_instance(), make_instance(state=S.SLEEPING)
    commands = services.sleep(awake, operator, "night"), services.wake(asleep, operator, "morning")
    assert [command.verb for command in commands] == [CommandVerb.SLEEP, CommandVerb.WAKE]
    assert (awake.state, asleep.state) == (S.DRAINING, S.SLEEPING)


class TestWords:
    @pytest.mark.django_db(transaction=True)
    def test_a_broker_that_is_down_is_said_and_loses_nothing(self, make_instance, operator, monkeypatch, settings):
        monkeypatch.undo()  # the real `deliver`
        monkeypatch.setattr(services, "notify", lambda: False)
        monkeypatch.setattr(celery_app.conf, "broker_url", "redis://127.0.0.1:1/0")
        monkeypatch.setattr(celery_app.conf, "broker_write_url", "redis://127.0.0.1:1/0")
        sentence = services.act(Action.STOP, make_instance(), operator, "x")
        assert "the broker does not answer" in sentence
        assert InstanceCommand.objects.get().state == CommandState.PENDING

    def test_possible_actions(self, make_instance, operator):
        instance = make_instance()
        assert selectors.possible_actions(instance) == [Action.DRAIN, Action.STOP, Action.RESTART, Action.SLEEP]
        services.sleep(instance, operator, "x")
        assert selectors.possible_actions(instance) == [Action.STOP]
        services.stop(instance, operator, "x")
        assert selectors.possible_actions(instance) == []

    @pytest.mark.parametrize("state", S)
    def test_buttons_are_never_refused(self, state, make_instance, operator):
        """Every action in `possible_actions` is accepted by the service, and every other one is refused."""
        instance = make_instance(state=state)
        possible = selectors.possible_actions(instance)
        for action in Action:
            with transaction.atomic():
                if action in possible:
                    services.act(action, instance, operator, "x")
                else:
                    with pytest.raises(ActionError, match=f"is {state}: {action} is for an instance that is "):
                        services.act(action, instance, operator, "x")
                transaction.set_rollback(True)
            instance.refresh_from_db()


def test_notify_never_raises(settings, monkeypatch):
    monkeypatch.undo()
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert services.notify() is False
