"""The scaling loop: moves by the state of an endpoint, its policy and plan; what is missing moves nothing."""

import math
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import pytest
from django.db import OperationalError, connection
from django.utils import timezone

from controlplane.alerts.problems import read_known
from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.observation import Observation
from controlplane.dispatch.token_accounts import Outlook
from controlplane.events.models import Event
from controlplane.fleet import services as fleet
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import (
    Deployment,
    GpuType,
    Instance,
    InstanceCommand,
    Node,
    PerformanceProfile,
    ScheduledMinimum,
)
from controlplane.planning import selectors, services
from controlplane.planning.execution import executor, loop, rows
from controlplane.planning.execution.loop import ScalingLoop
from controlplane.planning.models import MoveSource, PlanStatus, PolicyMode, ScalingMove, ScalingPlan
from controlplane.tuning import services as tuning
from scheduling.scaling import EndpointView
from scheduling.scaling.schedule import EARLY_S
from workers.vllm.metrics import VllmMetrics

pytestmark = pytest.mark.django_db
S = InstanceState
MODEL, REGION = PLACE = ("llama-3.1-8b", "us-east")


class Given(Observation):
    """Views of the rows with `shown` instead of what is measured."""

    shown: ClassVar[dict] = {}

    def views(self) -> dict[int, EndpointView]:
        return {at: view._replace(**self.shown) for at, view in super().views().items()}


class LoopOverRows(ScalingLoop):
    """The scaling loop on a clock of the test: its threads are calls. `ahead_s` moves its clocks and Django's."""

    def __init__(self, monkeypatch) -> None:
        monkeypatch.setattr(rows.connections, "close_all", lambda: None)
        monkeypatch.setattr(rows, "run_commands", lambda: 0)  # nothing is started
        self.ahead_s, self.began, self.in_thread = 0.0, timezone.now(), False
        monkeypatch.setattr(timezone, "now", self.now)
        observation = Given(
            Topology(), lambda _: 0, lambda _: Outlook(0, math.nan, math.nan), lambda: 1e6 + self.ahead_s,
            lambda: self.now().timestamp(),
        )  # fmt: skip
        observation.began_s = 0.0
        dispatcher = MagicMock(topology=observation.topology)
        dispatcher.reordering.evicted = []
        dispatcher.prewarming.control.early.return_value = ""
        job = SimpleNamespace(period_s=1.0)
        super().__init__(dispatcher, observation, owns=lambda: True, read_inventory=MagicMock(), job=job)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.began.timestamp() + self.ahead_s, UTC)

    def check(self) -> None:
        self.topology.apply(inventory.read())
        with connection.execute_wrapper(self._only_in_threads):
            super().check()

    def _only_in_threads(self, execute, *query) -> object:
        assert self.in_thread, "the event loop waits for the database"
        return execute(*query)

    def _in_thread(self, work, done=lambda: None, *, moves=False) -> None:
        self.in_thread = True
        try:
            work()
        except Exception as error:
            self._report(error, moves=moves)
        self.in_thread = False
        done()


@pytest.fixture
def fleet_of(deployment, make_instance):
    """`fleet_of(2)`: so many ready instances since yesterday, on machines with room for more."""

    def make(count, state=S.READY, **values):
        Node.objects.update(gpu_count=16)
        Deployment.objects.update(**{"max_instances": 6} | values)
        made = [make_instance(state=state, kv_capacity_tokens=1000) for _ in range(count)]
        Instance.objects.update(state_changed_at=timezone.now() - timedelta(days=1))
        return made

    return make


@pytest.fixture
def scaling(monkeypatch, deployment):
    """`scaling(15, use=0.9)`: check after so many seconds with that load; return the moves made."""
    made = LoopOverRows(monkeypatch)

    def check(after_s=0.0, **shown):
        made.ahead_s += after_s
        made._next_rows_s.clear()
        made.observation.shown = {"use": 0.5, "kv_use": 0.4, "tokens_per_s": 1000.0, "since_change_s": 1e6} | shown
        before = set(ScalingMove.objects.values_list("pk", flat=True))
        made.check()
        return list(ScalingMove.objects.exclude(pk__in=before).order_by("pk"))

    check.loop = made
    return check


@pytest.fixture
def automatic(language_model, deployment):
    def set_to(strategy, mode=PolicyMode.AUTO, **parameters):
        return services.set_policy(language_model, strategy, mode, parameters, "a test")

    return set_to


def plan(language_model, target, present=1, demand=5000.0, minutes=60, **values):
    row = {
        "region": REGION,
        "gpu_type": "a100-80gb",
        "present": present,
        "target": target,
        "capability_tokens_per_s": 4000.0,
    }
    return ScalingPlan.objects.create(
        model=language_model,
        strategy="lt_i",
        valid_until=timezone.now() + timedelta(minutes=minutes),
        targets=[row],
        inputs={"demand_tokens_per_s": {REGION: [demand / 2, demand]}},
        **{"status": PlanStatus.IN_FORCE} | values,
    )


FULL = {"use": 1.2, "waiting": 4}
FLOOR, STRATEGY = MoveSource.FLOOR, MoveSource.STRATEGY


@pytest.mark.parametrize(
    ("policy", "shown", "source", "delta", "reason"),
    [
        (
            "",
            FULL,
            FLOOR,
            1,
            "Safety autoscaler: use is 120% with 4 waiting, above 70%: 2 → 3 instances, on free GPUs.",
        ),
        ("", {"use": 0.75}, FLOOR, 1, "Safety autoscaler: use is 75%, above 70%"),
        ("", {"use": 0.5}, FLOOR, 0, ""),
        ("", {"use": 0.1}, FLOOR, -1, "Safety autoscaler: use is 10%, below 30%"),
        ("reactive", {"use": 0.75}, STRATEGY, 1, "Use is 75%, above 70%: 2 → 3 instances, on free GPUs."),
        ("reactive", {"use": 0.1}, STRATEGY, -1, "Use is 10%, below 30% for 60 s: 2 → 1 instances."),
        ("pilothouse", {"use": 0.75}, STRATEGY, 0, ""),
        (
            "pilothouse",
            {"use": 0.5, "waiting": 2, "short_instances": 2},
            FLOOR,
            1,
            "Safety autoscaler: no order of the queue is in time",
        ),
        ("lt_i", {"use": 0.5}, STRATEGY, 0, ""),
    ],
)
def test_moves_by_policy_and_load(policy, shown, source, delta, reason, fleet_of, scaling, automatic):
    fleet_of(2)
    if policy:
        automatic(policy)
    made = [move for at in range(6) for move in scaling(15.0 if at else 0.0, **shown)][:1]
    assert [(move.source, move.delta) for move in made] == [(source, delta)] * (delta != 0)
    for move in made:
        assert move.reason.startswith(reason)
        assert move.strategy == (policy if source == STRATEGY else "floor")
        assert move.inputs["view"]["use"] == shown["use"]


@pytest.mark.parametrize("mode", [PolicyMode.OFF, PolicyMode.SHADOW, PolicyMode.ASK])
def test_only_automatic_policies_move(mode, fleet_of, scaling, automatic):
    fleet_of(1)
    automatic("reactive", mode)
    assert [move.source for move in scaling(use=0.93)] == [FLOOR]


def test_between_ticks_only_the_floor_moves_and_only_when_full(fleet_of, scaling, automatic):
    fleet_of(1)
    automatic("reactive", tick_s=60)
    assert scaling(use=0.5) == []
    assert scaling(5.0, use=0.9) == []
    assert [move.source for move in scaling(5.0, **FULL)] == [FLOOR]


def test_the_first_minute_is_the_floors(fleet_of, scaling, automatic):
    fleet_of(2)
    automatic("reactive", patience_s=0)
    scaling.loop.observation.began_s += 1e6 - loop.SETTLE_S / 2
    assert scaling(use=0.1) == []
    assert [move.delta for move in scaling(15.0, **FULL)] == [1]


def test_marks_are_those_of_the_settings_and_the_floor_can_be_off(fleet_of, scaling, automatic, language_model):
    fleet_of(1)
    automatic("reactive")
    assert scaling(use=0.65) == []
    tuning.change("SCALE_OUT_ABOVE", 0.6, "test", model=language_model)
    (move,) = scaling(60.0, use=0.65)
    assert (move.delta, move.reason[:24]) == (1, "Use is 65%, above 60%: 1")
    automatic("reactive", PolicyMode.OFF)
    tuning.change("FLOOR", False, "test")
    assert scaling(60.0, **FULL) == []


@pytest.mark.parametrize("strategy", ["", "reactive", "lt_ua"])
def test_a_scheduled_minimum_is_kept_from_a_start_before_it(strategy, fleet_of, scaling, automatic, language_model):
    fleet_of(1)
    if strategy:
        automatic(strategy, patience_s=0)
    begins = scaling.loop.now() + timedelta(minutes=10)
    begins = begins.replace(second=0)
    window = {"begins": f"{begins:%H:%M}", "ends": f"{begins + timedelta(hours=1):%H:%M}", "time_zone": "UTC"}
    ScheduledMinimum.objects.create(name="office", model=language_model, instances=3, **window)
    before_s = (begins - scaling.loop.now()).total_seconds() - 120.0 - EARLY_S  # the usual start
    assert scaling(before_s - 2.0) == []
    moves = scaling(3.0)
    assert [move.delta for move in moves] == [1, 1]
    assert "elow its minimum of 3: 1" in moves[0].reason


def test_the_least_loaded_goes(fleet_of, scaling, automatic):
    busy, idle = fleet_of(2)
    automatic("reactive", patience_s=0)
    scaling()
    for replica in scaling.loop.topology.replicas.values():
        scaling.loop.topology.fleet.remaining_tokens[replica.slot] = 3 if replica.name == busy.name else 0
    (move,) = scaling(15.0, use=0.1)
    assert (move.delta, move.instance) == (-1, idle.name)


def test_a_plan_is_followed_once_over_many_ticks(fleet_of, scaling, automatic, language_model):
    fleet_of(1)
    automatic("lt_i")
    row = plan(language_model, 3)
    moves = scaling()
    assert [(move.delta, move.plan) for move in moves] == [(1, row)] * 2
    assert moves[0].inputs["advice"]["forecast_tokens_per_s"] == 5000.0
    scaling(1.0)
    row.refresh_from_db()
    assert row.status == PlanStatus.CARRIED_OUT
    Instance.objects.exclude(name="instance-1").delete()
    assert scaling(20.0) == []


def test_what_was_added_stays_for_the_cooldown(fleet_of, scaling, automatic, language_model):
    fleet_of(3)
    automatic("lt_i")
    plan(language_model, 2, present=3)
    assert scaling(changed_delta=1, since_change_s=5.0) == []
    assert [move.delta for move in scaling(15.0, changed_delta=1, since_change_s=20.0)] == [-1]


def test_the_gpus_that_the_plan_names_come_first(fleet_of, scaling, automatic, deployment, profile, region):
    cheap = GpuType.objects.create(name="l40s", title="L40S", memory_bytes=80 * 2**30, on_demand_usd_per_hour="0.10")
    values = {name: getattr(profile, name) for name in ("prefill_a_s", "prefill_b_s_per_token", "prefill_t0_s")}
    decode = {"decode_a_s": 0.01, "decode_b_s_per_sequence": 0.0, "decode_c_s_per_token": 0.0}
    PerformanceProfile.objects.create(
        model=deployment.model, gpu_type=cheap, tensor_parallel=2, source="x", **values, **decode
    )
    Deployment.objects.create(model=deployment.model, region=region, gpu_type=cheap, tensor_parallel=2, min_instances=0)
    fleet_of(1)
    automatic("lt_i")
    wanted = plan(deployment.model, 3)
    wanted.targets.append({**wanted.targets[0], "gpu_type": "l40s", "present": 0, "target": 0})
    wanted.save()
    assert [move.gpu_type for move in scaling()] == ["a100-80gb", "a100-80gb"]


def test_a_refusal_is_recorded_and_not_repeated_at_once(fleet_of, scaling, automatic, node):
    fleet_of(1)
    Instance.objects.update(node=node)
    Node.objects.update(gpu_count=2)
    automatic("reactive")
    assert scaling(use=0.93) == []
    event = Event.objects.get(kind="scaling.refused")
    assert event.reason == "a100-80gb: no node has 2 free GPUs, 0 at most"
    assert event.inputs["view"]["use"] == 0.93
    endpoint = scaling.loop.topology.endpoints[0]
    scaling(1.0, **FULL)
    assert endpoint.can_start
    scaling(loop.REFUSED_HOLD_S, **FULL)
    assert not endpoint.can_start, "requests are not held for what cannot start"


def test_the_database_away_costs_time_and_no_move(fleet_of, scaling, automatic, language_model, monkeypatch, caplog):
    fleet_of(1)
    automatic("lt_i")
    plan(language_model, 2)

    def fails(*args, **options):
        raise OperationalError("disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "move", fails)
        assert scaling() == scaling(1.0) == []
    assert caplog.text.count("tried again: disk is full") == 1
    assert [move.delta for move in scaling(loop.PAUSE_S)] == [1]
    with monkeypatch.context() as patch:
        patch.setattr(rows, "read_rules", fails)
        assert scaling(15.0) == []
        assert [move.delta for move in scaling(15.0, use=3.0)] == [1], "by the policy that was read before"


def test_a_strategy_that_fails_leaves_the_floor(fleet_of, scaling, automatic, monkeypatch, caplog):
    fleet_of(1)
    automatic("reactive")

    def fails(*args):
        raise ArithmeticError("the strategy is broken")

    monkeypatch.setattr("scheduling.scaling.Unified.decide", fails)
    assert [move.source for move in scaling(**FULL)] == [FLOOR]
    assert "the strategy is broken" in caplog.text


def test_another_strategy_remembers_nothing_and_a_fork_has_what_it_remembers(fleet_of, scaling, automatic):
    fleet_of(1)
    automatic("pilothouse")
    scaling()
    strategies = scaling.loop.observation.strategies
    assert any(key.startswith(f"{MODEL}|{REGION}") for key in strategies[MODEL])
    automatic("lt_i")
    scaling(15.0)
    assert strategies == {MODEL: {}}


def test_no_removal_without_a_strategy_while_an_approved_plan_holds(fleet_of, scaling, automatic, language_model):
    fleet_of(2)
    automatic("lt_i", PolicyMode.ASK)
    row = plan(language_model, 2, status=PlanStatus.CARRIED_OUT, decided_by="an operator")
    for _ in range(6):
        assert scaling(15.0, use=0.1) == []
    assert [move.delta for move in scaling(15.0, **FULL)] == [1]
    ScalingPlan.objects.filter(pk=row.pk).update(valid_until=row.made_at)
    deltas = [move.delta for _ in range(12) for move in scaling(15.0, use=0.1)]
    assert deltas[0] == -1


class TestMinimum:
    @pytest.mark.parametrize("policy", ["", "lt_i"])
    @pytest.mark.parametrize(
        ("state", "held", "shown", "after_s", "added"),
        [
            (S.FAILED, "", {}, 0.0, 1),
            (S.STOPPED, "", {"since_change_s": 1.0}, 0.0, 0),  # time to lower it
            (S.STOPPED, "", {"since_change_s": 1.0, "waiting": 1}, 0.0, 1),
            (S.STOPPED, "", {"since_change_s": 20.0}, 0.0, 1),
            (S.STOPPED, "an operator", {"since_change_s": 20.0}, 0.0, 0),
        ],
    )
    def test_it_is_brought_back(
        self, policy, state, held, shown, after_s, added, fleet_of, scaling, automatic, operator
    ):
        _, other = fleet_of(2, min_instances=2, max_instances=2)
        if held:
            fleet.stop(other, operator, "a new driver")
        Instance.objects.filter(pk=other.pk).update(state=state, url="")
        InstanceCommand.objects.all().delete()
        if policy:
            automatic(policy)
        made = scaling(after_s, **shown)
        assert [move.delta for move in made] == [1] * added
        for move in made:
            assert "below its minimum of 2" in move.reason.lower()
            assert move.instance == other.name


class TestMissingMeasurements:
    """For twenty minutes nothing, or nothing new, is known: what is there stays, and after it nothing jumps."""

    READY = 3
    STRATEGIES = ("reactive", "lt_i", "lt_u", "lt_ua", "proactive", "hybrid", "preserve", "pilothouse")

    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize("what", ["metrics of all instances", "demand", "plans"])
    def test_nothing_is_removed(self, what, strategy, automatic, scaling, fleet_of, language_model):
        fleet_of(self.READY)
        automatic(strategy)
        usual = {"use": 0.6, "tokens_per_s": 9000.0}
        scaling(**usual)
        for _ in range(20):
            shown = usual
            match what:
                case "metrics of all instances":  # none is known to take work
                    shown = {"ready": 0, "use": math.inf, "kv_use": 0.0, "tokens_per_s": 0.0}
                case "demand":  # the ledger is behind, and forecasts are of what is in it
                    plan(language_model, 1, present=self.READY, demand=0.0, minutes=600)
                case "plans":  # forecaster or solver fails
                    ScalingPlan.objects.update(valid_until=timezone.now() - timedelta(days=1))
            scaling(60.0, **shown)
        for _ in range(12):
            scaling(15.0, **usual)
        # One that present load does not need may go by a plan that is in force, never more.
        gone = -sum(ScalingMove.objects.filter(delta__lt=0).values_list("delta", flat=True))
        assert gone <= (what == "demand")
        # Where none is known to take work, one is started, and that is all.
        assert ScalingMove.objects.filter(delta__gt=0).count() <= (what == "metrics of all instances")

    @pytest.mark.parametrize("strategy", ["", *STRATEGIES])
    def test_low_use_before_a_gap_does_not_count_after_it(self, strategy, automatic, scaling, fleet_of):
        fleet_of(self.READY)
        if strategy:
            automatic(strategy)
        scaling(use=0.1)
        assert scaling(1200.0, use=0.1) == []


def advice(row, after_s=0.0):
    return rows.endpoint_plans(row)[REGION].advice(row.made_at.timestamp() + after_s)


class TestAdvice:
    def test_its_soon_target_moves_with_time(self, language_model, deployment):
        row = plan(language_model, 4, demand=6000.0)
        seen = advice(row)
        assert (seen.target_instances, seen.forecast_tokens_per_s, seen.soon_instances) == (4, 6000.0, None)
        assert seen.made_at_s == row.made_at.timestamp()
        row.inputs |= {
            "start_at": row.made_at.isoformat(), "window_s": 600, "soon_instances": {REGION: [2, 4, 3]}, "period_s": 1200.0,
        }  # fmt: skip
        assert [advice(row, after_s).soon_instances for after_s in (0, 599, 601, 1201, 9000)] == [2, 2, 4, 3, 3]
        assert advice(row).next_plan_s == row.made_at.timestamp() + 1200

    @pytest.mark.parametrize("status", sorted(set(PlanStatus) - set(selectors.IN_FORCE)))
    def test_only_a_newest_plan_that_is_approved_and_valid_is_in_force(self, language_model, deployment, status):
        assert selectors.plan_in_force(MODEL, timezone.now()) is None
        plan(language_model, 2, minutes=-1)
        plan(language_model, 2)
        newest = plan(language_model, 3)
        plan(language_model, 2, status=status)
        assert selectors.plan_in_force(MODEL, timezone.now()) == newest


@pytest.mark.parametrize(
    ("requests", "running", "waiting", "heard_ago_s", "stops"),
    [(0, 0, 0, 0.0, 1), (1, 0, 0, 0.0, 0), (0, 1, 0, 0.0, 0), (0, 0, 1, 0.0, 0), (0, 0, 0, 60.0, 0)],
)
def test_a_drained_one_is_stopped_when_its_server_and_its_callers_are_done(
    requests, running, waiting, heard_ago_s, stops, fleet_of, scaling
):
    fleet_of(2)
    name = executor.remove(*PLACE, executor.Why(STRATEGY, "reactive", "use is low")).instance
    long_ago = timezone.now() - timedelta(seconds=30)
    ScalingMove.objects.update(at=long_ago)
    Instance.objects.filter(name=name).update(state_changed_at=long_ago)
    scaling.loop.check()
    (replica,) = [one for one in scaling.loop.topology.replicas.values() if one.name == name]
    replica.requests |= set(range(requests))
    replica.metrics = VllmMetrics(running=running, waiting=waiting)
    replica.heartbeat_at = timezone.now().timestamp() - heard_ago_s
    scaling()
    assert list(InstanceCommand.objects.values_list("verb", flat=True)) == ["stop"] * stops


def test_flapping_raises_an_alert(fleet_of):
    fleet_of(3)
    for number in range(5):
        ScalingMove.objects.create(
            at=timezone.now() - timedelta(seconds=500 - 60 * number), source=FLOOR if number % 2 else STRATEGY,
            strategy="lt_ua", model=MODEL, region=REGION, gpu_type="a100-80gb", delta=1 if number % 2 else -1,
            reason="a test",
        )  # fmt: skip
    (flapping,) = selectors.flapping(timezone.now())
    assert (flapping.reversals, flapping.by) == (4, {"Autoscaler": (0, 3), "Safety autoscaler": (2, 0)})
    (problem,) = read_known(timezone.now()).problems
    assert problem.title == f"Scaling of {MODEL} in US East flaps"
    ScalingMove.objects.update(at=timezone.now() - timedelta(hours=1))
    assert read_known(timezone.now()).problems == ()
