"""A changed deployment rolled out one by one: order, capacity, failure, cancelling, and what cuts it off."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from controlplane.dispatch.live_fleet import inventory
from controlplane.events.models import Event, Severity
from controlplane.fleet import services
from controlplane.fleet.lifecycle.launching import launch_spec
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import (
    CommandState,
    Deployment,
    Instance,
    InstanceCommand,
    Launcher,
    Node,
    Rollout,
    RolloutState,
)
from controlplane.fleet.rollouts import revisions, selectors
from controlplane.fleet.rollouts import services as rollouts
from controlplane.planning.execution import executor
from scheduling.fleet.front_end import FrontEnd
from tests.examples import at_night_but
from tests.fleet.test_tasks import FakeLauncher
from workers.tasks import fleet as tasks
from workers.tasks.tick import advance_rollouts

pytestmark = pytest.mark.django_db
S = InstanceState


class World:
    """A worker, servers that answer unless they are `broken`, and the clock: `step` is one look of each part."""

    def __init__(self, deployment, launcher):
        self.deployment, self.launcher = deployment, launcher
        self.broken = lambda spec: False
        self.busy: set[str] = set()
        self.ready: list[int] = []
        self.moves = 0

    def changed(self, **values):
        Deployment.objects.filter(pk=self.deployment.pk).update(**values)
        self.deployment.refresh_from_db()

    def work(self):
        """Do the work of workers and gateway between two steps of a rollout."""
        for command in InstanceCommand.objects.filter(state=CommandState.PENDING).order_by("pk"):
            tasks.run_command(command.pk)
        specs = {spec.name: spec for spec in self.launcher.specs}
        for row in Instance.objects.filter(state=S.LOADING).exclude(launcher=Launcher.EXTERNAL):
            broken = self.broken(specs[row.name])
            services.move(
                row, S.FAILED if broken else S.READY, actor="gateway", reason="out of memory" if broken else ""
            )
        draining = Instance.objects.filter(state=S.DRAINING)
        draining.update(state_changed_at=timezone.now() - timedelta(seconds=10))
        for row in executor.drained():
            executor.finish_drain(row, int(row.name in self.busy), "test")
        self.ready.append(self.deployment.instances.filter(state=S.READY).count())

    def step(self):
        advance_rollouts()
        self.ready.append(self.deployment.instances.filter(state=S.READY).count())
        self.work()

    def run(self, most=60):
        """Step until the rollout ends."""
        for _ in range(most):
            self.step()
            if self.newest().ended_at:
                return self.newest()
        raise AssertionError(f"it does not end: {self.newest().message}")

    def newest(self) -> Rollout:
        return Rollout.objects.first()

    def begin(self, **values) -> Rollout:
        """Without a time of proof, and without a way back: what follows is the same then."""
        self.changed(**(values or {"max_num_seqs": 7}))
        return rollouts.start(self.deployment, "ada", "fewer at once", bake_s=0, auto_back=False)

    def seqs(self) -> list[int]:
        return sorted(row.max_num_seqs for row in self.deployment.instances.filter(state=S.READY))


@pytest.fixture
def world(deployment, node, make_instance, monkeypatch):
    """Two instances started by a worker, on a node with GPUs for four."""
    launcher = FakeLauncher()
    monkeypatch.setattr(tasks, "launcher_for", lambda instance: launcher)
    monkeypatch.setattr(tasks, "EMULATOR_PATIENCE_S", 0.0)
    monkeypatch.setattr(tasks, "deliver", lambda command: True)
    monkeypatch.setattr(tasks, "notify", lambda: True)
    world = World(deployment, launcher)
    for name in ("a", "b"):
        services.start(make_instance(state=S.PROVISIONING, name=name, node=node), "test", "begin")
    world.work()
    world.ready.clear()
    return world


def states(world) -> dict[str, str]:
    return {row.name: row.state for row in world.deployment.instances.order_by("name")}


class TestWhatAnInstanceWasStartedWith:
    def test_a_change_of_the_engine_is_seen_and_a_change_of_the_queue_is_not(self, world):
        row = Instance.objects.get(name="a")
        row.launched_with = {key: row.launched_with[key] for key in ("model", "max_num_seqs")} | {"gone": 1}
        assert revisions.difference(row) == ()  # a field of another release says nothing
        world.changed(queue_bound=7, routing_policy="round_robin", max_instances=4)
        row = Instance.objects.get(name="a")
        assert revisions.difference(row) == ()
        world.changed(max_num_seqs=7, gpu_memory_utilization=0.8)
        row = Instance.objects.get(name="a")
        assert revisions.difference(row) == ("kv_cache", "max_num_seqs")
        keys = Instance.objects.values_list("pk", flat=True)
        assert revisions.outdated(Instance.objects.all()) == dict.fromkeys(keys, ("kv_cache", "max_num_seqs"))

    def test_of_a_process_flags_variables_and_secrets_count_and_no_secret_is_kept(
        self, make_instance, node, deployment
    ):
        row = make_instance(launcher=Launcher.PROCESS, node=node)
        Deployment.objects.update(secrets={"HF_TOKEN": "hidden-1"}, api_key="hidden-2", environment={"A": "1"})
        row = Instance.objects.get(pk=row.pk)
        row.launched_with = revisions.settings_of(launch_spec(row))
        row.save()
        assert "hidden" not in str(row.launched_with)
        # Unknown limits are infinite in a profile, which JSON does not have.
        limited = launch_spec(row).model_copy(update={"front_end": FrontEnd(requests_per_s=63.0)})
        assert revisions.settings_of(limited)["front_end"] == {"requests_per_s": 63.0}
        for values, name in (
            ({"vllm_args": "--enforce-eager"}, "vllm_args"),
            ({"environment": {"A": "2"}}, "environment"),
            ({"secrets": {"HF_TOKEN": "hidden-3"}}, "environment"),
            ({"api_key": "hidden-4"}, "api_key"),
            ({"ordering_policy": "fcfs"}, "scheduling_policy"),
            ({"tensor_parallel": 1}, "tensor_parallel"),
        ):
            with transaction.atomic():
                Deployment.objects.update(**values)
                assert revisions.difference(Instance.objects.get(pk=row.pk)) == (name,)
                transaction.set_rollback(True)
        language_model = deployment.model
        language_model.source = "other/model"
        language_model.save()
        assert revisions.difference(Instance.objects.get(pk=row.pk)) == ("source",)

    def test_unknown_settings_are_not_outdated_and_are_rolled_out(self, world):
        Instance.objects.update(launched_with={})
        assert revisions.outdated(Instance.objects.all()) == {}
        assert rollouts.start(world.deployment, "ada", "to be sure", bake_s=0).total == 2
        assert world.run().state == RolloutState.SUCCEEDED

    def test_each_server_is_asked_with_the_token_and_the_room_that_it_was_started_with(
        self, world, make_instance, monkeypatch, node
    ):
        process = make_instance(state=S.PROVISIONING, launcher=Launcher.PROCESS, name="p", node=node)
        elsewhere = make_instance(launcher=Launcher.EXTERNAL, name="x")
        world.changed(api_key="old", max_num_seqs=16, max_instances=5)
        services.start(process, "test", "x")
        world.work()
        world.changed(api_key="new", max_num_seqs=32)
        seen = {spec.name: spec for spec in inventory.read().instances}
        assert (seen["p"].api_key, seen["p"].max_num_seqs) == ("old", 16)
        assert (seen["x"].api_key, seen["x"].max_num_seqs) == ("new", 32)
        assert elsewhere.token == "new"
        process.refresh_from_db()
        services.stop(process, "test", "x")
        world.work()
        process.refresh_from_db()
        services.start(process, "test", "x")
        world.work()
        seen = {spec.name: spec for spec in inventory.read().instances}
        assert (seen["p"].api_key, seen["p"].max_num_seqs) == ("new", 32)

    def test_gpus_are_counted_by_what_servers_were_started_with(self, world, node, profile):
        profile.pk, profile.tensor_parallel = None, 1
        profile.save()
        assert node.free_gpus() == 4
        world.changed(tensor_parallel=1)
        assert node.free_gpus() == 4  # both still have two
        assert Node.objects.with_gpus_used().get().gpus_used == 4
        rollouts.start(world.deployment, "ada", "one GPU is enough", bake_s=0)
        world.run()
        assert node.free_gpus() == 6


class TestOneByOne:
    @pytest.mark.parametrize(
        ("gpus", "changes", "ready", "words"),
        [
            (8, {}, (2, 3), "one more for the moment"),
            (4, {}, (1, 2), "no node has 2 free GPUs"),
            (8, {"max_instances": 2}, (1, 2), "at most 2 instances are allowed"),
            (8, {"max_instances": 2, "min_instances": 2}, (1, 2), "one below the minimum for the moment"),
        ],
    )
    def test_one_more_first_else_one_in_its_place(self, world, gpus, changes, ready, words):
        """Below the minimum only where there is no other way, and it says so."""
        Node.objects.update(gpu_count=gpus)
        world.begin(max_num_seqs=7, **changes)
        world.step()
        message = world.newest().message
        assert words in message
        assert ("below the minimum" in message) == ("min_instances" in changes)
        ended = world.run()
        assert (ended.state, ended.up_to_date, ended.total) == (RolloutState.SUCCEEDED, 2, 2)
        assert (world.seqs(), (min(world.ready), max(world.ready))) == ([7, 7], ready)
        if ready == (1, 2):
            assert states(world) == {"a": "ready", "b": "ready"}
        kinds = Event.objects.filter(kind__startswith="rollout.").order_by("pk").values_list("kind", flat=True)
        assert list(kinds) == ["rollout.started", "rollout.succeeded"]
        begun = Event.objects.get(kind="rollout.started")
        assert (begun.actor, begun.reason, begun.after["settings"]) == ("ada", "fewer at once", ["max_num_seqs"])

    def test_never_two_below(self, world):
        Node.objects.update(gpu_count=4)
        world.begin(max_num_seqs=7, max_instances=2, min_instances=2)
        b = Instance.objects.get(name="b")
        services.move(b, S.FAILED, actor="gateway", reason="no answer")
        InstanceCommand.objects.create(instance=b, verb="stop", actor="x", state="running")
        for _ in range(4):
            world.step()
        assert world.newest().message == "Waits for ready instances: 1, and 2 is the minimum."
        assert states(world)["a"] == "ready"

    def test_running_requests_are_waited_for(self, world):
        world.busy = {"a", "b"}
        world.begin()
        for _ in range(12):
            world.step()
        assert world.newest().message == "a drains."
        assert states(world)["a"] == "draining"
        assert world.seqs() == [7, 256]
        world.busy = set()
        assert world.run().state == RolloutState.SUCCEEDED

    def test_servers_from_elsewhere_and_what_an_operator_drains_are_left_alone(self, world, make_instance, node):
        make_instance(launcher=Launcher.EXTERNAL, name="x")
        world.changed(max_instances=4)
        world.begin()
        services.drain(Instance.objects.get(name="b"), "ada", "looked at")
        ended = world.run()
        assert ended.state == RolloutState.SUCCEEDED
        assert "b: drained by others and left as it is" in ended.message
        assert states(world) == {"a": "stopped", "b": "draining", "llama-3-1-8b-us-east-1": "ready", "x": "ready"}
        assert not InstanceCommand.objects.filter(instance__name="x").exists()

    def test_sleeping_ones_are_stopped(self, world):
        services.move(Instance.objects.get(name="b"), S.SLEEPING, actor="test", reason="night")
        world.begin()
        world.run()
        assert states(world)["b"] == "stopped" or Instance.objects.get(name="b").max_num_seqs == 7
        assert world.seqs() == [7]

    @pytest.mark.sql
    def test_floor_and_rollout_do_not_start_the_same_twice(self, world):
        """The floor keeps the minimum while a rollout is one below it; the rollout's drains are not undone."""
        world.begin(max_num_seqs=7, max_instances=2, min_instances=2)
        Node.objects.update(gpu_count=4)
        for _ in range(40):
            advance_rollouts()
            floor_move("below its minimum")
            world.work()
            floor_move("below its minimum")
            if world.newest().ended_at:
                break
        assert world.newest().state == RolloutState.SUCCEEDED
        assert states(world) == {"a": "ready", "b": "ready"}
        assert world.seqs() == [7, 7]
        starts = [name for call, name in world.launcher.calls if call == "start"]
        assert sorted(starts) == ["a", "a", "b", "b"]


def floor_move(reason):
    why = executor.Why(executor.MoveSource.FLOOR, "floor", reason)
    executor.attempt(1, "llama-3.1-8b", "us-east", why, to_minimum=True)


class TestFailure:
    def test_an_instance_that_does_not_come_up_ends_it_and_the_rest_serves_on(self, world):
        world.broken = lambda spec: spec.max_num_seqs == 7
        world.begin()
        ended = world.run()
        assert ended.state == RolloutState.FAILED
        assert ended.message == ("llama-3-1-8b-us-east-1 did not come up with the present settings: out of memory")
        assert world.seqs() == [256, 256]
        assert min(world.ready) == 2
        assert Event.objects.get(kind="rollout.failed").severity == Severity.CRITICAL
        (status,) = selectors.failed()
        assert status.rollout.pk == ended.pk
        for _ in range(5):
            world.step()
        assert world.seqs() == [256, 256]
        world.changed(max_num_seqs=256)  # with the settings back nothing needs attention, and the next one continues
        assert selectors.failed() == []
        world.begin(max_num_seqs=8)
        assert world.run().state == RolloutState.SUCCEEDED
        assert world.seqs() == [8, 8]

    def test_so_it_does_in_its_place_even_if_the_floor_starts_it_again_meanwhile(self, world):
        Node.objects.update(gpu_count=4)
        world.broken = lambda spec: spec.max_num_seqs == 7
        world.begin(max_num_seqs=7, min_instances=2)
        while not Instance.objects.filter(state=S.FAILED).exists():
            world.step()
        services.start(Instance.objects.get(state=S.FAILED), "safety autoscaler", "below its minimum")
        advance_rollouts()
        assert world.newest().state == RolloutState.FAILED
        assert "out of memory" in world.newest().message
        assert world.seqs() == [256]

    def test_settings_that_cannot_be_started_are_refused_and_end_one_that_runs(self, world, profile):
        world.begin()
        profile.delete()
        advance_rollouts()
        assert world.newest().state == RolloutState.FAILED
        assert "no performance profile" in world.newest().message
        with pytest.raises(ActionError, match="no performance profile"):
            rollouts.start(world.deployment, "ada", "x")
        assert world.seqs() == [256, 256]

    def test_one_that_never_becomes_ready_has_failed_after_the_deadline(self, world):
        world.begin()
        advance_rollouts()
        for command in InstanceCommand.objects.filter(state=CommandState.PENDING):
            tasks.run_command(command.pk)
        advance_rollouts()
        assert world.newest().ended_at is None
        late = timezone.now() - rollouts.PROGRESS_DEADLINE - timedelta(seconds=1)
        Instance.objects.filter(state=S.LOADING).update(state_changed_at=late)
        advance_rollouts()
        assert world.newest().state == RolloutState.FAILED
        assert "not ready after 30 minutes" in world.newest().message


class TestCancelAndChange:
    def test_what_drains_serves_again(self, world):
        world.busy = {"a"}
        world.begin()
        while not Instance.objects.filter(state=S.DRAINING).exists():
            world.step()
        cancelled = rollouts.cancel(world.deployment, "ada", "not today")
        assert (cancelled.state, cancelled.message) == (RolloutState.CANCELLED, "Cancelled by ada: not today")
        assert states(world)["a"] == "ready"
        for _ in range(4):
            world.step()
        assert world.seqs() == [7, 256, 256]
        assert Event.objects.filter(kind="rollout.cancelled", actor="ada").exists()
        with pytest.raises(ActionError, match="No rollout"):
            rollouts.cancel(world.deployment, "ada", "again")

    def test_one_that_is_being_stopped_is_started_again(self, world):
        Node.objects.update(gpu_count=4)
        world.begin()
        advance_rollouts()
        Instance.objects.filter(state=S.DRAINING).update(state_changed_at=timezone.now() - timedelta(seconds=10))
        (row,) = executor.drained()
        assert executor.finish_drain(row, 0, "test")
        rollouts.cancel(world.deployment, "ada", "not today")
        for _ in range(5):
            world.step()
        assert states(world) == {"a": "ready", "b": "ready"}
        assert world.seqs() == [7, 256]
        assert not selectors.open_rollouts()

    def test_it_waits_for_gpus_that_others_have_taken(self, world, make_instance, node):
        Node.objects.update(gpu_count=4)
        world.begin()
        while states(world)["a"] != "stopped":
            world.work()
            if states(world)["a"] == "ready":
                advance_rollouts()
        other = make_instance(name="other", node=node, state=S.FAILED)  # it holds its GPUs and serves nobody
        assert rollouts.cancel(world.deployment, "ada", "not today").state == RolloutState.CANCELLED
        advance_rollouts()
        assert states(world)["a"] == "stopped"
        Instance.objects.filter(pk=other.pk).update(state=S.STOPPED)
        advance_rollouts()
        assert states(world)["a"] == "provisioning"
        assert not selectors.open_rollouts()

    def test_one_more_that_still_starts_is_stopped(self, world):
        world.begin()
        advance_rollouts()
        rollouts.cancel(world.deployment, "ada", "not today")
        for _ in range(3):
            world.step()
        assert states(world) == {"a": "ready", "b": "ready", "llama-3-1-8b-us-east-1": "stopped"}

    @pytest.mark.parametrize("seqs", [9, 256])
    def test_a_change_meanwhile_is_rolled_out_too_and_a_change_back_ends_it(self, world, seqs):
        world.begin()
        for _ in range(3):
            world.step()
        assert 7 in world.seqs()
        world.changed(max_num_seqs=seqs)
        assert world.run().state == RolloutState.SUCCEEDED
        assert world.seqs() == [seqs, seqs]
        assert min(world.ready) == 2

    @pytest.mark.sql
    def test_two_at_once_and_nothing_to_do_are_refused(self, world):
        with pytest.raises(ActionError, match="all 2 instances"):
            rollouts.start(world.deployment, "ada", "x")
        world.begin()
        with pytest.raises(ActionError, match="in progress"):
            rollouts.start(world.deployment, "ada", "again")
        with pytest.raises(IntegrityError), transaction.atomic():
            Rollout.objects.create(deployment=world.deployment, actor="x")


class TestCutOff:
    @pytest.mark.parametrize("at", at_night_but((4,), range(1, 12)))
    def test_a_worker_that_dies_in_the_middle_of_a_move_costs_nothing(self, world, monkeypatch, at):
        """The transaction of one step is lost after its moves were made, and the step is repeated later."""
        world.begin()
        for _ in range(at):
            world.step()
        if world.newest().ended_at:
            return
        before = (states(world), InstanceCommand.objects.count(), world.newest().message)

        def killed(*arguments):
            rollouts_step(*arguments)
            raise SystemExit

        rollouts_step = rollouts._step
        monkeypatch.setattr(rollouts, "_step", killed)
        with pytest.raises(SystemExit):
            advance_rollouts()
        monkeypatch.setattr(rollouts, "_step", rollouts_step)
        assert (states(world), InstanceCommand.objects.count(), world.newest().message) == before
        assert world.run().state == RolloutState.SUCCEEDED
        assert world.seqs() == [7, 7]
        assert min(world.ready) == 2

    def test_an_instance_that_is_deleted_or_taken_away_meanwhile_stops_nothing(self, world):
        world.begin()
        advance_rollouts()
        started = world.newest().starting
        InstanceCommand.objects.filter(instance=started).delete()
        started.delete()
        assert world.run().state == RolloutState.SUCCEEDED
        assert world.seqs() == [7, 7]
