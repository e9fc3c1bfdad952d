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
        assert (instance.state, command.verb, command.actor) == (S.DRAINING, CommandVerb.STOP, "operator")
        assert command.delivered is True
        assert messages == ["notify", command.pk]
        assert Event.objects.filter(kind="instance.stop_requested", reason="retired").exists()

    @pytest.mark.parametrize("state", [S.PROVISIONING, S.LOADING, S.DRAINING, S.SLEEPING, S.FAILED])
    def test_others_keep_their_state_until_it_is_done(self, state, make_instance, operator):
        instance = make_instance(state=state)
        assert services.stop(instance, operator, "retired").state == CommandState.PENDING
        assert instance.state == state

    def test_asking_twice_is_one_command(self, make_instance, operator):
        instance = make_instance()
        first, second = services.stop(instance, operator, "a"), services.stop(instance, operator, "b")
        assert first == second
        assert InstanceCommand.objects.count() == 1

    @pytest.mark.sql
    def test_it_supersedes_what_has_not_begun(self, make_instance, operator):
        instance = make_instance(state=S.STOPPED)
        start = services.start(instance, operator, "more load")
        services.stop(instance, operator, "no, less")
        start.refresh_from_db()
        assert (start.state, start.error) == (CommandState.FAILED, "superseded by stop")

    def test_it_waits_behind_what_has_begun(self, make_instance, operator):
        instance = make_instance(state=S.STOPPED)
        start = services.start(instance, operator, "more load")
        InstanceCommand.objects.update(state=CommandState.RUNNING)
        services.stop(instance, operator, "no, less")
        start.refresh_from_db()
        assert start.state == CommandState.RUNNING
        assert InstanceCommand.objects.filter(verb=CommandVerb.STOP, state=CommandState.PENDING).exists()

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

    def test_a_server_started_elsewhere_is_looked_for(self, make_instance, operator):
        instance = make_instance(state=S.STOPPED, launcher=Launcher.EXTERNAL, url="http://10.0.0.7:8000")
        assert services.start(instance, operator, "is up again") is None
        assert (instance.state, instance.url) == (S.LOADING, "http://10.0.0.7:8000")

    def test_and_needs_an_address(self, make_instance, operator):
        instance = make_instance(state=S.STOPPED, launcher=Launcher.EXTERNAL, url="")
        with pytest.raises(ActionError, match=r"instance-1 cannot start: .* needs its address"):
            services.start(instance, operator, "x")

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


class TestSleepAndWake:
    def test_sleep_drains_first(self, make_instance, operator):
        instance = make_instance()
        assert services.sleep(instance, operator, "night").verb == CommandVerb.SLEEP
        assert instance.state == S.DRAINING

    def test_wake_leaves_the_state_to_the_worker(self, make_instance, operator):
        instance = make_instance(state=S.SLEEPING)
        assert services.wake(instance, operator, "morning").verb == CommandVerb.WAKE
        assert instance.state == S.SLEEPING


class TestWords:
    def test_what_happened_in_one_sentence(self, make_instance, operator, committed, monkeypatch):
        instance = make_instance()
        assert services.act(Action.DRAIN, instance, operator, "x") == "instance-1 is draining"

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
        assert selectors.possible_actions(instance) == [Action.DRAIN, Action.STOP, Action.SLEEP]
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
                    with pytest.raises(ActionError):
                        services.act(action, instance, operator, "x")
                transaction.set_rollback(True)
            instance.refresh_from_db()


def test_notify_never_raises(settings, monkeypatch):
    monkeypatch.undo()
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert services.notify() is False


def test_lists_take_one_query(make_instance, django_assert_num_queries):
    for _ in range(5):
        make_instance()
    with django_assert_num_queries(1):
        for row in selectors.instances():
            assert row.deployment.model.name
            assert row.deployment.region.title
            assert row.deployment.gpu_type.title
            assert row.node is None
    with django_assert_num_queries(1):
        assert [row.instances_ready for row in selectors.deployments()] == [5]
