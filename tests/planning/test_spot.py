"""The spot pool in rows: who is donated, who is taken back first, what becomes of the GPUs, and what is counted."""

from datetime import timedelta
from decimal import Decimal

import pytest
from django.utils import timezone

from controlplane.dispatch.snapshot import CONDITIONS
from controlplane.events.models import Event
from controlplane.fleet import services as fleet
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import (
    CommandState,
    Deployment,
    Donation,
    DonationState,
    Instance,
    InstanceCommand,
    Model,
    PerformanceProfile,
)
from controlplane.fleet.spot import selectors, services
from controlplane.planning.execution import executor, rows
from controlplane.planning.models import MoveSource
from controlplane.planning.plans import inventory as planned
from controlplane.tuning import services as tuning
from scheduling.fleet.profile import Profile
from scheduling.fleet.state import Condition
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from workers.tasks import fleet as tasks

pytestmark = pytest.mark.django_db
S = InstanceState
PLACE = ("llama-3.1-8b", "us-east")


@pytest.fixture(autouse=True)
def _donates(db):
    tuning.change("SPOT_DONATE", True, actor="test")


def why(reason="a test asks for it"):
    return executor.Why(MoveSource.STRATEGY, "reactive", reason)


def earlier(instance, **ago):
    Instance.objects.filter(pk=instance.pk).update(state_changed_at=timezone.now() - timedelta(**ago))


def let_go(row) -> Instance:
    """Remove *row* by scaling, and let it drain."""
    others = {each.name: 100 for each in Instance.objects.exclude(pk=row.pk)}
    move = executor.remove(*PLACE, why(), load=others)
    assert move.instance == row.name
    assert executor.finish_drain(Instance.objects.get(pk=row.pk), 0, "planner")
    row.refresh_from_db()
    return row


@pytest.fixture
def other(inventory, deployment):
    """Another model on the same GPUs."""
    model = Model.objects.create(
        name="other", title="Other", weights_bytes=10**10, kv_bytes_per_token=131_072, context_tokens=8_192
    )
    profile = PerformanceProfile.objects.get()
    profile.pk, profile.model = None, model
    profile.save()
    return Deployment.objects.create(
        model=model, region=deployment.region, gpu_type=deployment.gpu_type, tensor_parallel=2, min_instances=0,
        max_instances=3,
    )  # fmt: skip


def test_what_scaling_lets_go_is_donated_and_taken_back_first(make_instance, node):
    stays, gone = make_instance(node=node), make_instance(node=node)
    asleep = make_instance(state=S.SLEEPING, node=node)
    assert let_go(gone).state == S.DONATED
    donation = Donation.objects.get()
    assert (donation.instance, donation.state, donation.reason) == (gone, "donated", "a test asks for it")
    assert donation.spot_usd_per_hour == Decimal("1.2")
    assert not InstanceCommand.objects.exists(), "it stays loaded"
    assert executor.present(*PLACE) == 1
    assert planned.read({PLACE[0]}).spare[*PLACE, "a100-80gb"] == 2, "donated and asleep"

    moves = [executor.add(*PLACE, why()) for _ in range(2)]
    assert [(move.instance, move.inputs["how"]) for move in moves] == [
        (asleep.name, "woken"),  # in seconds, a reclaim in a minute
        (gone.name, "reclaimed from spot"),
    ]
    gone.refresh_from_db()
    assert gone.state == S.RECLAIMING
    assert executor.present(*PLACE) == 2, "one that is reclaimed counts, one that wakes not before it loads"
    fleet.move(gone, S.READY, actor="gateway", reason="reclaimed")
    donation.refresh_from_db()
    assert (donation.state, donation.taken_for) == (DonationState.RECLAIMED, stays.deployment)
    assert donation.reclaim_s == pytest.approx(0, abs=5)


@pytest.mark.parametrize("by", ["the setting is off", "an operator"])
def test_what_is_not_donated_is_stopped(make_instance, by):
    tuning.change("SPOT_DONATE", by == "an operator", actor="test")
    make_instance()
    row = make_instance()
    if by == "an operator":
        fleet.drain(row, by, "maintenance")
        earlier(row, minutes=1)
        assert executor.drained() == []
    else:
        assert executor.remove(*PLACE, why()).instance == row.name
        row.refresh_from_db()
    assert executor.finish_drain(row, 0, "planner")
    assert InstanceCommand.objects.get().verb == "stop"
    assert not Donation.objects.exists()


def test_another_model_gets_the_gpus_when_it_has_none(make_instance, node, other):
    make_instance(node=node)
    donor = let_go(make_instance(node=node))
    assert rows.read_rules.__wrapped__({}).spot_other["other", "us-east"] == 1
    move = executor.add("other", "us-east", why("load"))
    assert move.inputs["how"] == f"redeployed from {donor.name}"
    taker = Instance.objects.get(name=move.instance)
    donor.refresh_from_db()
    assert (taker.state, taker.node, taker.takes_over) == (S.PROVISIONING, node, donor)
    assert donor.state == S.DRAINING
    assert node.free_gpus() == 8 - 4, "the GPUs of both count once"
    with pytest.raises(ActionError, match="gets its GPUs"):
        fleet.resume(donor, "an operator", "back")

    start = InstanceCommand.objects.get(instance=taker)
    tasks.run_command(start.pk)
    start.refresh_from_db()
    assert start.state == CommandState.PENDING, "its GPUs are not free yet"
    earlier(donor, seconds=10)
    assert [row.pk for row in executor.drained()] == [donor.pk]
    assert executor.finish_drain(Instance.objects.get(pk=donor.pk), 0, "planner")
    assert InstanceCommand.objects.get(instance=donor).verb == "stop", "not donated again"
    fleet.move(donor, S.STOPPED, actor="a worker", reason="stopped")
    assert Donation.objects.get().state == DonationState.REDEPLOYED
    taker.refresh_from_db()
    assert not tasks.waits_for_gpus(InstanceCommand.objects.select_related("instance__takes_over").get(pk=start.pk))
    fleet.move(taker, S.LOADING, actor="a worker", reason="started")
    taker.refresh_from_db()
    assert taker.takes_over is None


def test_a_donated_instance_that_fails_while_its_gpus_are_given_away_is_stopped(
    make_instance, node, other, caplog, monkeypatch
):
    monkeypatch.setattr(rows.connections, "close_all", lambda: None)
    make_instance(node=node)
    donor = let_go(make_instance(node=node))
    taker = Instance.objects.get(name=executor.add("other", "us-east", why("load")).instance)
    InstanceCommand.objects.filter(instance=taker).update(
        actor=executor.FLOOR_ACTOR, created_at=timezone.now() - timedelta(minutes=1)
    )
    assert (rows.run_commands(), caplog.text) == (0, ""), "it says nothing of a command that waits for GPUs"
    fleet.move(donor, S.FAILED, actor="gateway", reason="silent")
    assert InstanceCommand.objects.get(instance=donor).verb == "stop"
    tasks.run_pending_commands()
    assert InstanceCommand.objects.filter(instance=donor).count() == 1, "not while one is fresh"
    InstanceCommand.objects.filter(instance=donor).delete()  # as one that failed before its successor was thought of
    tasks.run_pending_commands()
    assert InstanceCommand.objects.get(instance=donor).verb == "stop"
    fleet.move(donor, S.STOPPED, actor="a worker", reason="stopped")
    assert not tasks.waits_for_gpus(InstanceCommand.objects.get(instance=taker))


def test_both_clocks_take_instances_in_the_same_order(make_instance, node, deployment, other):
    """Own donated ones first, then another model's, at last a new one."""
    Deployment.objects.filter(pk=deployment.pk).update(max_instances=9)
    make_instance(node=node)
    own = let_go(make_instance(node=node))
    theirs = make_instance(deployment=other, node=node, state=S.DRAINING)
    services.donate(theirs, "planner", "a test")
    live = []
    for _ in range(3):
        move = executor.add(*PLACE, why())
        live.append(move.inputs["how"].removesuffix(f" from {theirs.name}"))
    assert live == ["reclaimed from spot", "redeployed", "new"]
    assert Donation.objects.get(instance=own).taken_for == deployment

    states = [("a", State.READY), ("a", State.SPOT), ("b", State.SPOT), ("a", State.EMPTY), ("b", State.READY)]
    engine = EngineConfig(4, 2048, 16, 400, "fcfs", 2000, Profile(0.01, 0.0, 1e-4, 0.0, 0.02, 1e-3, 1e-6))
    specs = [InstanceSpec(model, "east", engine, "a100", state=state) for model, state in states]
    simulation = Simulation(Cluster(specs, models=["a", "b"], share_spot=True), make_requests([0.0], [10], [10]))
    for _ in range(3):
        simulation.scale_out(simulation.cluster.endpoints.index(("a", "east")))
    changed = [int(one["instance"]) for one in simulation.lives.changes()]
    assert changed[:3] == [1, 2, 3]
    assert [State(state) for state in simulation.states[1:4]] == [State.RECLAIMING, State.LOADING, State.STARTING]


def test_a_fork_knows_every_state():
    assert set(CONDITIONS) == set(InstanceState)
    assert {condition.value for condition in Condition} <= set(State.__members__)


def test_redeployment_needs_the_same_gpus_and_the_setting(make_instance, other):
    make_instance()
    donor = let_go(make_instance())
    tuning.change("SPOT_REDEPLOY", False, actor="test", model=other.model)
    with pytest.raises(executor.Refused):
        executor.add("other", "us-east", why())
    other.tensor_parallel = 4
    with pytest.raises(ActionError, match="has 2 x A100"):
        services.redeploy(donor, other, "test", "load")


def test_a_failed_or_stopped_donation_ends(make_instance):
    make_instance(), make_instance()
    failed, stopped = let_go(make_instance()), let_go(make_instance())
    services.record_evicted(failed.pk, 2, 1)
    services.record_evicted(failed.pk, 1, 0)
    fleet.move(failed, S.FAILED, actor="gateway", reason="silent")
    fleet.stop(stopped, "planner", "no longer")
    fleet.move(stopped, S.STOPPED, actor="a worker", reason="stopped")
    ended = Donation.objects.order_by("pk").values_list("state", "evicted_requests", "ended_requests")
    assert list(ended) == [(DonationState.FAILED, 3, 1), (DonationState.STOPPED, 0, 0)]
    assert Event.objects.filter(kind__startswith="spot.").count() == 2


def test_hours_earnings_and_reclaims_are_counted(make_instance):
    now = timezone.now() - timedelta(minutes=5)
    since = now - timedelta(hours=12)
    row = make_instance()
    common = {"instance": row, "actor": "planner", "spot_usd_per_hour": Decimal("1.2")}
    for number, (hours, reclaim_s) in enumerate(((2, 40), (1, 80))):
        asked = now - timedelta(hours=number * 3)
        Donation.objects.create(
            **common, state=DonationState.RECLAIMED, donated_at=asked - timedelta(hours=hours), reclaim_at=asked,
            ended_at=asked + timedelta(seconds=reclaim_s), evicted_requests=3, ended_requests=1,
        )  # fmt: skip
    Donation.objects.create(**common, donated_at=since - timedelta(hours=1))
    (counted,) = selectors.donated_time(since, now + timedelta(minutes=5))
    assert counted.instance_hours == pytest.approx(2 + 1 + 12 + 5 / 60, abs=0.1)
    assert counted.offered_usd == pytest.approx(1.2 * counted.instance_hours)
    times = selectors.reclaim_times(now + timedelta(minutes=5))
    assert (times.median_s, times.most_s, times.expected_s) == (60, 80, 60)
    assert selectors.reclaim_times(now + timedelta(days=9)).expected_s == selectors.RECLAIM_S
