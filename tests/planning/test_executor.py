"""One instance more or fewer: the nearest way, the bounds, the GPUs, who is let go, and what is written about it."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.dispatch.live_fleet import inventory as live_inventory
from controlplane.events.models import Event
from controlplane.fleet import services as fleet
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import CommandState, Instance, InstanceCommand, Launcher, Node
from controlplane.planning.execution import executor
from controlplane.planning.models import MoveSource, ScalingMove
from workers.tasks.fleet import claim

pytestmark = pytest.mark.django_db
S = InstanceState
PLACE = ("llama-3.1-8b", "us-east")


def why(reason="a test asks for it", source=MoveSource.STRATEGY, **inputs):
    return executor.Why(source, "reactive", reason, inputs)


def states():
    return {row.name: row.state for row in Instance.objects.all()}


def long_ago(instance, **ago):
    Instance.objects.filter(pk=instance.pk).update(state_changed_at=timezone.now() - timedelta(**ago))


class TestAdding:
    def test_a_new_one_is_created_next_to_its_siblings(self, make_instance, node):
        make_instance(node=node)
        move = executor.add(*PLACE, why(use=0.9))
        row = Instance.objects.get(name=move.instance)
        assert row.name == "llama-3-1-8b-us-east-1"
        assert (row.state, row.launcher, row.node) == (S.PROVISIONING, Launcher.EMULATED, node)
        assert InstanceCommand.objects.get().instance == row
        assert (move.delta, move.source, move.gpu_type) == (1, "strategy", "a100-80gb")
        event = Event.objects.get(kind="scaling.added")
        assert (event.subject, event.actor, event.reason) == (row.name, "autoscaler reactive", "a test asks for it")
        assert event.inputs == {"use": 0.9, "how": "new"}

    def test_the_nearest_method_comes_first(self, make_instance, deployment, django_capture_on_commit_callbacks):
        deployment.max_instances = 9
        deployment.save()
        serving, drained = make_instance(), make_instance()
        failed = make_instance(state=S.FAILED)
        stopped = make_instance(state=S.STOPPED)
        asleep = make_instance(state=S.SLEEPING)
        long_ago(failed, minutes=5)
        executor.remove(*PLACE, why(), load={serving.name: 5})
        assert states()[drained.name] == S.DRAINING
        moves = [executor.add(*PLACE, why()) for _ in range(5)]
        assert [move.instance for move in moves[:3]] == [drained.name, asleep.name, stopped.name]
        assert [move.inputs["how"] for move in moves] == [
            "taken back while it drained",
            "woken",
            "started again (stopped)",
            "new",
            "new",
        ]
        assert states()[drained.name] == S.READY
        assert states()[failed.name] == S.FAILED

    def test_a_failed_one_is_the_last_method_and_not_at_once(self, make_instance, node, deployment):
        deployment.max_instances = 4
        deployment.save()
        Node.objects.update(gpu_count=4)
        make_instance(node=node)
        failed = make_instance(state=S.FAILED, node=node, failures=4)
        with pytest.raises(executor.Refused, match="no node has 2 free GPUs, 0 at most"):
            executor.add(*PLACE, why())
        long_ago(failed, seconds=41)  # 5 s, doubled three times
        assert executor.add(*PLACE, why()).instance == failed.name
        assert states()[failed.name] == S.PROVISIONING

    @pytest.mark.parametrize("actor", [executor.FLOOR_ACTOR, executor.PLANNER])
    def test_one_whose_stop_no_worker_has_begun_is_taken_back(self, make_instance, deployment, actor):
        deployment.min_instances = 0
        deployment.save()
        instance = make_instance()
        executor.remove(*PLACE, why())
        assert executor.finish_drain(Instance.objects.get(), 0, actor)
        move = executor.add(*PLACE, why())
        assert (move.instance, move.inputs["how"]) == (instance.name, "taken back while it drained")
        assert states() == {instance.name: S.READY}
        command = InstanceCommand.objects.get()
        assert (command.state, command.error) == (CommandState.FAILED, "superseded by resume")
        assert claim(command.pk) is None

    def test_one_that_is_being_stopped_is_not(self, make_instance, deployment, operator):
        deployment.min_instances, deployment.max_instances = 0, 9
        deployment.save()
        begun, by_hand = make_instance(), make_instance()
        executor.remove(*PLACE, why(), load={begun.name: 0, by_hand.name: 1})
        executor.remove(*PLACE, why())
        assert executor.finish_drain(Instance.objects.get(pk=begun.pk), 0, executor.PLANNER)
        assert claim(InstanceCommand.objects.get().pk)
        fleet.stop(by_hand, operator, "new driver")
        assert executor.add(*PLACE, why()).inputs["how"] == "new"
        with pytest.raises(ActionError, match="cannot resume: a stop is pending"):
            fleet.resume(by_hand, operator, "not yet")

    def test_one_that_an_operator_drained_after_us_is_left_alone(self, make_instance, operator, deployment):
        deployment.min_instances = 0
        deployment.save()
        instance = make_instance()
        executor.remove(*PLACE, why())
        fleet.resume(instance, operator, "not yet")
        ScalingMove.objects.update(at=timezone.now() - timedelta(minutes=1))
        fleet.drain(instance, operator, "but now")
        assert executor.drained() == []
        assert executor.add(*PLACE, why()).inputs["how"] == "new"
        assert states()[instance.name] == S.DRAINING

    @pytest.mark.parametrize(
        ("states", "gpus", "words"),
        [
            ((S.READY, S.READY, S.READY), 8, "a100-80gb: 3 instances are there, at most 3"),
            ((S.READY, S.LOADING, S.PROVISIONING), 8, "a100-80gb: 3 instances are there, at most 3"),
            ((S.READY,), 3, "no node has 2 free GPUs, 1 at most"),
        ],
    )
    def test_not_past_the_maximum_nor_without_free_gpus(self, make_instance, node, states, gpus, words):
        Node.objects.update(gpu_count=gpus)
        for state in states:
            make_instance(state=state, node=node)
        with pytest.raises(executor.Refused, match=words):
            executor.add(*PLACE, why())
        assert not ScalingMove.objects.exists()

    def test_the_fullest_node_that_has_room_is_taken(self, make_instance, node, region, gpu_type):
        fuller = Node.objects.create(name="node-2", region=region, gpu_type=gpu_type, gpu_count=4)
        Node.objects.create(name="node-3", region=region, gpu_type=gpu_type, gpu_count=4, active=False)
        make_instance(node=fuller)
        assert Instance.objects.get(name=executor.add(*PLACE, why()).instance).node == fuller
        assert Instance.objects.get(name=executor.add(*PLACE, why()).instance).node == node

    def test_one_that_stopped_moves_to_a_node_with_room(self, make_instance, node, region, gpu_type):
        Node.objects.update(gpu_count=2)
        make_instance(node=node)
        stopped = make_instance(state=S.STOPPED, node=node)
        other = Node.objects.create(name="node-2", region=region, gpu_type=gpu_type, gpu_count=8)
        assert executor.add(*PLACE, why()).instance == stopped.name
        stopped.refresh_from_db()
        assert stopped.node == other

    def test_what_pilothouse_never_started_it_cannot_start(self, make_instance):
        make_instance(launcher=Launcher.EXTERNAL)
        with pytest.raises(executor.Refused, match="does not know how to start one"):
            executor.add(*PLACE, why())

    def test_where_nothing_is_deployed(self, make_instance, deployment):
        with pytest.raises(executor.Refused, match="is not deployed in mars"):
            executor.add(PLACE[0], "mars", why())
        deployment.active = False
        deployment.save()
        with pytest.raises(executor.Refused, match="is not deployed"):
            executor.add(*PLACE, why())

    def test_names_are_not_given_twice(self, make_instance):
        make_instance(name="llama-3-1-8b-us-east-1")
        assert executor.add(*PLACE, why()).instance == "llama-3-1-8b-us-east-2"


class TestBelowTheMinimum:
    """A failed instance is started again first; a new one is made where that does not help."""

    @pytest.fixture(autouse=True)
    def two(self, deployment):
        deployment.min_instances, deployment.max_instances = 2, 3
        deployment.save()

    def test_the_failed_one_is_waited_for(self, make_instance):
        make_instance()
        failed = make_instance(state=S.FAILED, failures=1)
        with pytest.raises(executor.Waits):
            executor.add(*PLACE, why())
        assert executor.attempt(1, *PLACE, why()) is None
        assert not Event.objects.filter(kind="scaling.refused").exists()  # nothing is wrong with that
        long_ago(failed, seconds=6)
        move = executor.add(*PLACE, why())
        assert (move.instance, move.inputs["how"]) == (failed.name, "started again (failed)")
        assert Instance.objects.count() == 2

    @pytest.mark.parametrize(
        ("ready", "failures", "stopped", "how"),
        [
            (0, 1, 0, "new"),  # a second one is missing
            (1, 1, 1, "started again (stopped)"),  # need not be waited for
            (1, 3, 0, "new"),  # one in a crash loop is replaced
            (2, 1, 0, "new"),  # above the minimum
        ],
    )
    def test_what_is_not_waited_for(self, make_instance, ready, failures, stopped, how):
        for state in [S.READY] * ready + [S.STOPPED] * stopped:
            make_instance(state=state)
        make_instance(state=S.FAILED, failures=failures)
        assert executor.add(*PLACE, why()).inputs["how"] == how

    def test_but_not_without_end(self, make_instance):
        looping = [make_instance(state=S.FAILED, failures=5) for _ in range(3)]
        with pytest.raises(executor.Waits):
            executor.add(*PLACE, why())
        long_ago(looping[1], minutes=2)
        assert executor.add(*PLACE, why()).instance == looping[1].name


class TestRemoving:
    def test_the_least_loaded_drains_else_the_newest(self, make_instance):
        busy, idle, newest = (make_instance() for _ in range(3))
        move = executor.remove(*PLACE, why(), load={busy.name: 9, idle.name: 1, newest.name: 4})
        assert (move.instance, move.delta) == (idle.name, -1)
        assert states() == {busy.name: S.READY, idle.name: S.DRAINING, newest.name: S.READY}
        assert Event.objects.get(kind="scaling.removed").subject == idle.name
        assert executor.remove(*PLACE, why()).instance == newest.name
        with pytest.raises(executor.Refused, match="1 instances are there, at least 1"):
            executor.remove(*PLACE, why())

    def test_not_one_that_could_not_be_started_again(self, make_instance):
        make_instance(launcher=Launcher.EXTERNAL), make_instance(launcher=Launcher.EXTERNAL)
        with pytest.raises(executor.Refused, match="none is ready that Pilothouse could start again"):
            executor.remove(*PLACE, why())


class TestCancelling:
    """A removal cancels a start first."""

    @pytest.fixture
    def started(self, make_instance, deployment, node):
        """A ready instance, and three that were asked for one after the other; the first of them loads."""
        deployment.max_instances = 9
        deployment.save()
        Node.objects.update(gpu_count=32)
        make_instance(node=node)
        rows = [Instance.objects.get(name=executor.add(*PLACE, why()).instance) for _ in range(3)]
        for ago, row in zip((90, 60, 30), rows, strict=True):
            long_ago(row, seconds=ago)
        fleet.move(rows[0], S.LOADING, actor="a test", reason="its server starts")
        InstanceCommand.objects.filter(instance=rows[0]).update(state=CommandState.DONE)
        return rows

    def test_the_one_farthest_from_ready_goes_first_and_no_ready_one(self, started):
        assert executor.present(*PLACE) == 4
        moves = [executor.remove(*PLACE, why(), drains=False) for _ in range(3)]
        assert [move.instance for move in moves] == [row.name for row in (started[2], started[1], started[0])]
        assert {move.inputs["how"] for move in moves} == {"start cancelled"}
        assert executor.present(*PLACE) == 1, "each counts no more from then on"
        assert {row.instance_id for row in InstanceCommand.objects.open()} == {row.pk for row in started}
        assert set(InstanceCommand.objects.open().values_list("verb", flat=True)) == {"stop"}
        with pytest.raises(executor.Refused):
            executor.remove(*PLACE, why(), drains=False)
        assert "held" not in {row.held for row in Instance.objects.all()}

    def test_its_gpus_are_taken_until_it_is_stopped(self, started):
        node = Node.objects.get()
        before = node.free_gpus()
        executor.remove(*PLACE, why())
        assert node.free_gpus() == before
        assert not live_inventory_has(started[2])

    def test_where_starts_are_not_enough_ready_ones_drain(self, started, make_instance):
        make_instance(node=Node.objects.get())
        made = [executor.remove(*PLACE, why()).inputs["how"] for _ in range(4)]
        assert made == ["start cancelled"] * 3 + ["drained"]

    @pytest.mark.parametrize("actor", ["an operator", "rollout"])
    def test_what_others_start_is_left_alone(self, make_instance, actor):
        make_instance()
        other = make_instance(state=S.STOPPED)
        fleet.start(other, actor, "by hand")
        with pytest.raises(executor.Waits, match="no start that Pilothouse asked for"):
            executor.remove(*PLACE, why(), drains=False)


def live_inventory_has(row) -> bool:
    return row.pk in {one.instance_id for one in live_inventory.read().instances}


class TestFinishing:
    @pytest.fixture
    def gone(self, make_instance):
        """`gone(9)`: the instance that was removed so many seconds ago."""
        make_instance()
        instance = make_instance()
        InstanceCommand.objects.create(instance=instance, verb="start", state="done", finished_at=timezone.now())
        executor.remove(*PLACE, why())

        def removed(seconds):
            ScalingMove.objects.update(at=timezone.now() - timedelta(seconds=seconds))
            long_ago(instance, seconds=seconds)
            return executor.drained()

        return removed

    def test_a_drained_one_is_stopped_when_nothing_runs_there(self, gone):
        assert executor.drained() == []  # too early: the gateway may not know yet
        (row,) = gone(9)
        assert not executor.finish_drain(row, 2, "a test")
        assert not executor.finish_drain(row, None, "a test")
        assert executor.finish_drain(row, 0, "a test")
        assert InstanceCommand.objects.open().get().verb == "stop"
        assert executor.drained() == []  # its stop is under way

    def test_what_never_ends_is_stopped_in_the_end_and_again_where_that_fails(self, gone):
        (row,) = gone(660)
        assert executor.finish_drain(row, 3, "a test")
        now = timezone.now()
        InstanceCommand.objects.update(state=CommandState.FAILED, finished_at=now)
        assert executor.drained() == []
        InstanceCommand.objects.update(finished_at=now - timedelta(minutes=2))
        assert len(executor.drained()) == 1


def test_a_repeated_refusal_is_one_event_and_a_different_one_another(make_instance):
    make_instance()
    for _ in range(2):
        assert executor.attempt(-1, *PLACE, why("use is low")) is None
    event = Event.objects.get(kind="scaling.refused")
    assert "1 instances are there, at least 1" in event.reason
    assert event.after == {"delta": -1, "model": PLACE[0], "region": PLACE[1]}
    assert event.inputs["asked"] == "use is low"
    make_instance(), make_instance()
    executor.attempt(1, *PLACE, why())
    assert Event.objects.filter(kind="scaling.refused").count() == 2
