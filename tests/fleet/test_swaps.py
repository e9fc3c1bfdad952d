"""Several models on the same GPUs: who is awake, one swap after another, and what cuts them off."""

import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.fleet import LiveFleet
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.topology import Endpoint, Topology
from controlplane.dispatch.observation import Observation
from controlplane.dispatch.prewarming import LivePrewarming
from controlplane.dispatch.runs import ApplicationRuns
from controlplane.events.models import Event, Severity
from controlplane.fleet import places, services
from controlplane.fleet.lifecycle.launching import launch_spec
from controlplane.fleet.lifecycle.states import AWAKE, ActionError, InstanceState
from controlplane.fleet.models import (
    CommandState,
    Deployment,
    Instance,
    InstanceCommand,
    Launcher,
    Model,
    Node,
    Swap,
    SwapGroup,
    SwapState,
    Tier,
)
from controlplane.fleet.swaps import services as swaps
from controlplane.fleet.swaps import times
from controlplane.fleet.swaps.selectors import statuses
from controlplane.planning.execution import executor, rows
from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.standings import KnownGraph, RunCall
from scheduling.control.swaps import Swaps
from tests.fleet.test_tasks import FakeClient, FakeLauncher
from workers.tasks import fleet as tasks
from workers.tasks.tick import advance_swaps
from workers.vllm.client import VllmError

pytestmark = pytest.mark.django_db
S = InstanceState
RATE = ServiceRate(0.0, 0.0, 0.1)


class World:
    """Three models on the GPUs of one, a worker, and a gateway that finds ready what answers."""

    def __init__(self, rows, launcher):
        self.rows, self.launcher = rows, launcher
        self.answers = lambda row: True

    def work(self):
        for command in InstanceCommand.objects.filter(state=CommandState.PENDING).order_by("pk"):
            FakeClient.asleep = command.instance.state == S.SLEEPING
            tasks.run_command(command.pk)
        for row in Instance.objects.filter(state=S.LOADING):
            if self.answers(row):
                services.move(row, S.READY, actor="gateway", reason="it answers")

    def step(self):
        advance_swaps()
        assert Instance.objects.filter(state__in=AWAKE, swap_group__isnull=False).count() <= 1
        self.work()

    def run(self, most=20) -> Swap:
        for _ in range(most):
            self.step()
            if (swap := Swap.objects.first()).ended_at:
                return swap
        raise AssertionError(f"it does not end: {swap.message}")

    def swap_to(self, name) -> Swap:
        swaps.request(Instance.objects.get(name=name), "test", "next")
        return self.run()

    def states(self) -> dict[str, str]:
        return dict(Instance.objects.order_by("name").values_list("name", "state"))


@pytest.fixture
def world(deployment, make_instance, node, monkeypatch):
    launcher = FakeLauncher()
    monkeypatch.setattr(tasks, "launcher_for", lambda instance: launcher)
    monkeypatch.setattr(tasks, "VllmClient", FakeClient)
    monkeypatch.setattr(tasks, "deliver", lambda command: True)
    monkeypatch.setattr(tasks, "notify", lambda: True)
    FakeClient.calls, FakeClient.error, FakeClient.obeys, FakeClient.busy = [], None, True, []
    group = SwapGroup.objects.create(name="shared")
    rows = {}
    for name, state in (("a", S.READY), ("b", S.SLEEPING), ("c", S.STOPPED)):
        of = deployment
        if name != "a":
            model = Model.objects.create(
                name=f"model-{name}",
                title=name,
                source=f"/models/{name}",
                weights_bytes=10 * 10**9,
                kv_bytes_per_token=131_072,
                context_tokens=8_192,
            )
            of = Deployment.objects.create(
                model=model, region=deployment.region, gpu_type=deployment.gpu_type, tensor_parallel=2
            )
        rows[name] = make_instance(
            name=name, deployment=of, node=node, state=state, swap_group=group, launcher=Launcher.PROCESS
        )
    return World(rows, launcher)


def failed(world):
    services.move(world.rows["a"], S.FAILED, actor="gateway", reason="silent")


def asleep_by_hand(world):
    tasks.run_command(services.sleep(world.rows["a"], "test", "night").pk)


def no_sleep(world):
    FakeClient.error = VllmError("answered 404", 404)


def no_sleep_elsewhere(world):
    Instance.objects.filter(name="a").update(launcher=Launcher.EXTERNAL)
    no_sleep(world)


def no_memory(world):
    SwapGroup.objects.update(cpu_memory_bytes=12 * 10**9)  # b has 10 of it


OK, BAD = SwapState.SUCCEEDED, SwapState.FAILED
READY, ASLEEP, STOPPED = S.READY, S.SLEEPING, S.STOPPED


@pytest.mark.parametrize(
    ("before", "to", "state", "tiers", "commands", "after"),
    [
        (None, "b", OK, "cpu cpu", "a-sleep b-wake", (ASLEEP, READY, STOPPED)),
        (None, "c", OK, "stopped cpu", "a-sleep c-start", (ASLEEP, ASLEEP, READY)),
        (no_memory, "b", OK, "cpu storage", "a-sleep b-wake", (ASLEEP, READY, STOPPED)),
        (failed, "b", OK, "cpu", "b-wake", (S.FAILED, READY, STOPPED)),
        (asleep_by_hand, "c", OK, "stopped", "a-sleep c-start", (ASLEEP, ASLEEP, READY)),
        (no_sleep, "c", OK, "stopped stopped", "a-sleep a-sleep a-sleep a-stop c-start", (STOPPED, ASLEEP, READY)),
        (no_sleep_elsewhere, "b", BAD, "cpu cpu", "a-sleep a-sleep a-sleep", (S.DRAINING, ASLEEP, STOPPED)),
    ],
)
def test_a_swap(world, before, to, state, tiers, commands, after):
    """Who is awake sleeps, or stops where it cannot; the other wakes, or starts."""
    if before:
        before(world)
    swap = world.swap_to(to)
    assert (swap.state, f"{swap.tier} {swap.sleep_tier}".strip()) == (state, tiers), swap.message
    assert " ".join(f"{row.instance.name}-{row.verb}" for row in InstanceCommand.objects.order_by("pk")) == commands
    assert tuple(world.states().values()) == after
    if state == BAD:
        assert swap.message == "a cannot be put to sleep: answered 404"
    elif swap.gave_way and before is not no_sleep:
        assert min(swap.drain_s, swap.sleep_s, swap.load_s) >= 0
    else:
        assert swap.sleep_s is None
    events = Event.objects.filter(kind__startswith="swap.").order_by("pk")
    assert [(row.kind, row.actor) for row in events] == [("swap.started", "test"), (f"swap.{state}", "swap")]


def test_back_and_forth_with_weights_that_memory_does_not_hold(world):
    no_memory(world)
    for name in "bcab":
        assert world.swap_to(name).state == OK
    assert ("reload_weights", world.rows["a"].url) in FakeClient.calls


@pytest.mark.sql
def test_requests_that_are_refused(world, make_instance):
    with pytest.raises(ActionError, match="a is ready: it has the GPUs of shared"):
        swaps.request(world.rows["a"], "test", "x")
    with pytest.raises(ActionError, match="shares its GPUs with no other"):
        swaps.request(make_instance(), "test", "x")
    first = swaps.request(world.rows["b"], "test", "x")
    assert swaps.request(world.rows["b"], "test", "y").pk == first.pk
    with pytest.raises(ActionError, match="shared swaps to b now: c has to wait"):
        swaps.request(world.rows["c"], "test", "z")


class TestFailures:
    def test_a_wake_that_fails(self, world):
        swaps.request(world.rows["b"], "test", "x")
        for _ in range(3):
            world.step()
            if world.states()["a"] == S.SLEEPING:
                FakeClient.error = VllmError("out of memory", 500)
        swap = Swap.objects.get()
        assert (swap.state, swap.message) == (SwapState.FAILED, "b did not come up: out of memory")
        assert world.states() == {"a": S.SLEEPING, "b": S.FAILED, "c": S.STOPPED}
        assert Event.objects.get(kind="swap.failed").severity == Severity.CRITICAL
        FakeClient.error = None
        assert world.swap_to("a").state == SwapState.SUCCEEDED
        assert world.swap_to("b").tier == Tier.STOPPED  # it is started again

    def test_a_worker_that_died_in_the_middle(self, world):
        swaps.request(world.rows["b"], "test", "x")
        advance_swaps()
        command = InstanceCommand.objects.get()
        tasks.claim(command.pk)  # and nothing more is heard of it
        world.step()
        assert Swap.objects.get().message == "a finishes what it runs, then sleeps."
        InstanceCommand.objects.update(started_at=timezone.now() - tasks.STALE_AFTER - timedelta(seconds=1))
        tasks.run_pending_commands()
        assert world.run().state == SwapState.SUCCEEDED

    def test_one_that_starts_comes_up_first_and_one_that_takes_too_long_fails(self, world):
        Instance.objects.filter(name="a").update(state=S.LOADING)
        world.answers = lambda row: False
        swaps.request(world.rows["b"], "test", "x")
        world.step()
        assert Swap.objects.get().message == "a is loading: it can sleep once it is ready."
        Swap.objects.update(started_at=timezone.now() - timedelta(seconds=swaps.LIMIT_S + 1))
        advance_swaps()
        assert Swap.objects.get().state == SwapState.FAILED
        world.answers = lambda row: True
        assert world.swap_to("b").state == SwapState.SUCCEEDED


class TestOneAwake:
    @pytest.mark.sql
    def test_waking_and_starting_a_second_one_is_refused(self, world):
        with pytest.raises(ActionError, match="b shares its GPUs with a, which is ready: swap to b"):
            services.wake(world.rows["b"], "test", "x")
        with pytest.raises(ActionError, match="c shares its GPUs with a, which is ready: swap to c"):
            services.start(world.rows["c"], "test", "x")
        with pytest.raises(ActionError, match="b cannot become loading: its GPUs are those of a, ready"):
            services.move(world.rows["b"], S.LOADING, actor="gateway", reason="it answers again")
        with pytest.raises(IntegrityError), transaction.atomic():  # the database keeps it too
            Instance.objects.filter(name="b").update(state=S.LOADING)
        Instance.objects.filter(name="a").update(state=S.SLEEPING)
        services.wake(world.rows["b"], "test", "x")
        with pytest.raises(ActionError, match="shares its GPUs with b"):  # one that is to wake counts
            services.start(world.rows["c"], "test", "x")

    def test_gpus_count_once(self, world, node):
        assert (node.free_gpus(), Node.objects.with_gpus_used().get().gpus_used) == (6, 2)
        assert node.free_gpus(without=world.rows["c"]) == 8
        Instance.objects.filter(name__in="ab").update(state=S.STOPPED)
        assert (node.free_gpus(), Node.objects.with_gpus_used().get().gpus_used) == (8, 0)

    def test_a_place_that_is_full_with_it_holds_them_all(self, world, node):
        Node.objects.update(gpu_count=2)
        for row in world.rows.values():
            row.refresh_from_db()
            row.full_clean(exclude=["url"])
            assert places.keeps(row)

    def test_members_have_the_same_gpus(self, world, deployment):
        row = world.rows["b"]
        row.deployment.tensor_parallel = 1
        with pytest.raises(ValidationError, match="2 x A100 80 GB in shared"):
            row.clean()
        row.deployment.tensor_parallel = 2
        row.node = None
        with pytest.raises(ValidationError, match="a of shared is on node-1"):
            row.clean()
        row.node, row.deployment = world.rows["a"].node, deployment
        with pytest.raises(ValidationError, match=r"serves .* too"):
            row.clean()


class TestScaling:
    def test_instances_that_share_gpus_exist_and_are_not_scaled(self, world):
        why = executor.Why("floor", "floor", "x")
        for name, region in (("model-b", "us-east"), ("model-c", "us-east")):
            assert executor.present(name, region) == 1
            Deployment.objects.filter(model__name=name).update(max_instances=1)
            with pytest.raises(executor.Refused, match="1 instances are there"):
                executor.add(name, region, why)
        Deployment.objects.update(min_instances=0)
        with pytest.raises(executor.Refused, match="none is ready that Pilothouse could start again"):
            executor.remove("llama-3.1-8b", "us-east", why)

    def test_one_that_failed_while_awake_is_started_again(self, world):
        services.move(world.rows["a"], S.FAILED, actor="gateway", reason="silent")
        Instance.objects.update(state_changed_at=timezone.now() - timedelta(minutes=10))
        executor.add("llama-3.1-8b", "us-east", executor.Why("floor", "floor", "x"))
        assert world.states()["a"] == S.PROVISIONING


def fleet_of(topology: Topology, waiting: Callable[[Endpoint], int], clock=lambda: 0.0) -> LiveFleet:
    """Return a fleet in which *waiting* requests wait for an endpoint."""
    dispatcher = Dispatcher(topology, clock, deliver=lambda record: None)
    for endpoint in topology.endpoints:
        dispatcher.queue.arrays.size[endpoint.index] = waiting(endpoint)
    return dispatcher.fleet


def wanted(swaps: Swaps, topology: Topology) -> list[tuple[int, str]]:
    """Return the rows that are swapped to, with the reasons."""
    return [(topology.by_slot[slot].spec.instance_id, why) for slot, why in swaps.wanted()]


class TestGateway:
    """What the gateway knows of groups, and what the floor asks of them."""

    @pytest.fixture
    def topology(self, world):
        topology = Topology()
        topology.apply(inventory.read())
        return topology

    def floor(self, topology, **waiting) -> list[tuple[int, str]]:
        fleet = fleet_of(topology, lambda one: waiting.get(one.model.replace("-", "_"), 0))
        return wanted(Swaps(fleet), topology)

    def test_who_shares_gpus_with_whom(self, world, topology):
        (group,) = topology.swap_groups
        assert [(one.name, one.state) for one in group.members] == [("a", "ready"), ("b", "sleeping"), ("c", "stopped")]
        assert (group.awake.name, group.in_progress) == ("a", False)
        of = world.rows["b"].deployment
        assert group.members[1].swap_s == pytest.approx(
            times.usual_sleep_s(world.rows["a"].deployment, Tier.CPU) + times.usual_load_s(of, Tier.CPU)
        )
        assert all(endpoint.spec.shares_gpus for endpoint in topology.endpoints)
        assert {replica.name: replica.spec.swap_group for replica in topology.replicas.values()} == {
            "a": "shared",
            "b": "shared",
            "c": "shared",
        }
        swaps.request(world.rows["b"], "test", "x")
        assert inventory.read().swap_groups[0].in_progress

    def test_a_model_that_is_asked_for_has_the_gpus_of_one_that_is_idle(self, world, topology, make_instance):
        assert self.floor(topology) == []
        wanted = self.floor(topology, model_b=2, model_c=3)
        assert wanted == [(world.rows["c"].pk, "3 requests wait for model-c, and a is idle.")]
        assert self.floor(topology, llama_3_1_8b=1) == []
        make_instance(name="other", deployment=world.rows["b"].deployment)  # what another serves needs no swap
        topology.apply(inventory.read())
        assert self.floor(topology, model_b=2) == []

    def test_a_busy_model_keeps_them_until_swaps_take_a_tenth_of_the_time(self, world, topology):
        load = {"llama_3.1_8b": 5, "model_b": 2}
        assert self.floor(topology, **load) == []
        Instance.objects.filter(name="a").update(state_changed_at=timezone.now() - timedelta(seconds=100))
        topology.apply(inventory.read())
        ((key, reason),) = self.floor(topology, **load)
        assert (key, reason) == (world.rows["b"].pk, "2 requests wait for model-b, and a has held the GPUs for 100 s.")

    def test_requests_that_reach_one_that_sleeps_go_elsewhere(self, world, topology):
        """They were in transit when it fell asleep, and would hang there until it wakes."""
        (replica,) = [one for one in topology.replicas.values() if one.name == "a"]
        replica.requests.add("late")
        assert topology.apply(inventory.read()) == []
        Instance.objects.filter(name="a").update(state=S.SLEEPING)
        assert topology.apply(inventory.read()) == [replica]
        replica.requests.clear()
        assert topology.apply(inventory.read()) == []

    def test_a_sleeping_instance_is_no_spare_to_the_floor(self, world, topology):
        observation = Observation(topology, lambda endpoint: 1, lambda endpoint: (0, None, None), time.monotonic)
        spare = {view.model: (view.spot, view.instances) for view in observation.views().values()}
        assert spare["model-b"] == (0, 0)

    def test_a_model_that_will_probably_be_called_is_woken_while_the_gpus_are_idle(self, world, topology):
        now_s = 0.0
        fleet = fleet_of(topology, lambda one: 0, lambda: now_s)
        runs = ApplicationRuns(fleet, lambda endpoint: None)
        prewarming = LivePrewarming(fleet, runs)

        swaps_of = Swaps(fleet, prewarming.control.early)
        awake, target = (topology.endpoint(name, "us-east") for name in ("llama-3.1-8b", "model-b"))
        units = {name: Backend("llm", model) for name, model in (("plan", "llama-3.1-8b"), ("write", "model-b"))}
        record = RunRecord((Step("plan", -1, 10.0, 5.0), Step("write", 0, 10.0, 5.0)))
        runs.graphs[1, "review"] = KnownGraph.of(
            DemandGraph("review", units, [record] * 10), dict.fromkeys(units, RATE)
        )
        plan = RunCall(0, (1, "review"), "run-1", "plan", 10, 5, RATE, endpoint=awake.index)
        runs.standings.arrive(plan, 0.0)
        prewarming.sweep()
        (call,) = prewarming.control.likely
        assert (call.target.kind, call.target.name, call.target.endpoint) == ("model", "model-b", target.index)
        assert wanted(swaps_of, topology) == [(world.rows["b"].pk, "Prewarming: write will probably follow.")]
        assert prewarming.run_of(call) == ("review", "run-1")
        now_s = 10.0
        assert wanted(swaps_of, topology) == []  # it is being woken
        assert prewarming.figures() == {"model": [1, 0]}

    @pytest.mark.parametrize("waiting", [0, 1])
    def test_none_is_woken_for_a_call_while_the_gpus_have_work(self, world, topology, waiting):
        fleet = fleet_of(topology, lambda one: waiting * (one.model == "llama-3.1-8b"))
        woken = [why for _, why in Swaps(fleet, lambda endpoint: "likely").wanted()]
        assert woken == ["likely"] * (not waiting)

    def test_it_asks_again_only_after_a_pause(self, world, topology):
        clock = SimpleNamespace(now_s=0.0)
        wants = Swaps(fleet_of(topology, lambda one: int(one.model == "model-b"), lambda: clock.now_s))
        asked = [len(list(wants.wanted())) for clock.now_s in (0.0, 1.0, 6.0)]
        assert asked == [1, 0, 1]
        swap = rows.swap.__wrapped__(world.rows["b"].pk, "2 requests wait")
        assert (swap.instance, swap.actor) == (world.rows["b"], "safety autoscaler")
        assert rows.swap.__wrapped__(world.rows["c"].pk, "x") is None


@pytest.mark.sql
def test_times_are_the_usual_ones_until_some_are_measured(world):
    a, b = (world.rows[name] for name in "ab")
    seen = times.read()
    assert seen.load(b.deployment, Tier.CPU) == times.MedianTime(10e9 / (2 * times.PCIE_BYTES_PER_S))
    assert seen.load(b.deployment, Tier.STORAGE) == times.MedianTime(10e9 / times.STORAGE_BYTES_PER_S)
    ends = {"gave_way": a, "instance": b, "tier": Tier.CPU, "sleep_tier": Tier.CPU, "ended_at": timezone.now()}
    for load_s in (3.0, 1.0, 2.0):
        swap = Swap.objects.create(
            group=a.swap_group, state=SwapState.SUCCEEDED, sleep_s=load_s / 2, load_s=load_s, actor="test", **ends
        )
    seen = times.read()
    assert seen.load(b.deployment, Tier.CPU) == times.MedianTime(2.0, 3)
    assert seen.sleep(a.deployment, Tier.CPU) == times.MedianTime(1.0, 3)
    (status,) = statuses(model="model-b")
    assert (status.awake, status.running, status.swaps[0]) == (a, None, swap)
    (member,) = [one for one in status.members if one.instance == b]
    assert (member.seconds, member.is_measured) == (3.0, True)
    assert statuses(region="elsewhere") == []


def test_a_server_that_shares_gpus_can_sleep_and_knows_with_whom(world, gpu_type):
    spec = launch_spec(world.rows["b"])
    assert (spec.sleep_mode, spec.shares_gpus_with) == (True, ("a", "c"))
    gpu_type.device = "cpu"
    gpu_type.save()
    row = Instance.objects.get(name="b")
    assert not launch_spec(row).sleep_mode
