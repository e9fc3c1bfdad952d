"""Strategies between plans: what they are shown, what they remember, and that their moves are made and said to be alive."""

import math
from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.dispatch.wire import as_inputs
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, GpuType, Instance, Node, PerformanceProfile
from controlplane.planning import selectors, services
from controlplane.planning.execution import executor, live_views, strategist
from controlplane.planning.models import MoveSource, PlanStatus, PolicyMode, ScalingMove, ScalingPlan, ScalingPolicy
from controlplane.tuning import services as tuning
from scheduling.scaling import EndpointView

pytestmark = pytest.mark.django_db
S = InstanceState
PLACE = ("llama-3.1-8b", "us-east")


@pytest.fixture
def load(monkeypatch):
    """`load(use=0.9, …)`: publish the gateway's view of the endpoint; `load.alive` is what was published to it."""

    class Published:
        def __init__(self):
            self.alive, self.summary = None, None

        def __call__(self, left_tokens=None, **values):
            defaults = {
                "model": PLACE[0],
                "region": PLACE[1],
                "ready": 1,
                "coming": 0,
                "draining": 0,
                "spot": 0,
                "spot_other": 0,
                "min_instances": 1,
                "max_instances": 3,
                "use": 0.5,
                "waiting": 0,
                "kv_use": 0.4,
                "tokens_per_s": 1000.0,
                "since_change_s": 1e6,
            }
            view = EndpointView(**defaults | values)
            self.summary = live_views.Load({PLACE: as_inputs(view)}, {}, left_tokens or {})

    published = Published()
    monkeypatch.setattr(live_views, "read", lambda: published.summary)
    monkeypatch.setattr(
        live_views, "send_heartbeat", lambda models, for_s: setattr(published, "alive", (list(models), for_s))
    )
    return published


@pytest.fixture
def automatic(language_model, deployment):
    def set_to(strategy, mode=PolicyMode.AUTO, **parameters):
        return services.set_policy(language_model, strategy, mode, parameters, "a test")

    return set_to


def plan(language_model, target, present=1, demand=5000.0, minutes=60, **values):
    values = {"status": PlanStatus.IN_FORCE} | values
    row = {
        "region": PLACE[1],
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
        inputs={"demand_tokens_per_s": {PLACE[1]: [demand / 2, demand]}},
        **values,
    )


def run(after_s=0.0):
    return strategist.run_strategies(timezone.now() + timedelta(seconds=after_s))


class TestMoves:
    def test_a_full_endpoint_gets_one_more_and_the_move_says_why(self, automatic, load, make_instance):
        make_instance()
        automatic("reactive")
        load(use=0.93, waiting=4)
        (move,) = run()
        assert (move.delta, move.source, move.strategy) == (1, MoveSource.STRATEGY, "reactive")
        assert move.reason == "Use is 93% with 4 waiting, above 70%: 1 → 2 instances, on free GPUs."
        assert move.inputs["view"]["use"] == 0.93
        assert Instance.objects.count() == 2

    def test_an_idle_one_loses_its_least_loaded(self, automatic, load, make_instance):
        busy, idle = make_instance(), make_instance()
        Instance.objects.update(state_changed_at=timezone.now() - timedelta(minutes=5))
        automatic("reactive", patience_s=0)
        load(ready=2, use=0.1, left_tokens={busy.name: 3, idle.name: 0})
        (move,) = run()
        assert (move.delta, move.instance) == (-1, idle.name)
        assert move.reason == "Use is 10%, below 30%: 2 → 1 instances."

    def test_marks_are_those_of_the_settings_from_the_next_tick_on(
        self, automatic, load, make_instance, language_model
    ):
        make_instance()
        automatic("reactive")
        load(use=0.65)
        assert run() == []
        tuning.change("SCALE_OUT_ABOVE", 0.6, "test", model=language_model)
        (move,) = run(after_s=60)
        assert (move.delta, move.reason[:24]) == (1, "Use is 65%, above 60%: 1")

    @pytest.mark.parametrize(
        "change", [{"memory": {"ticked_s": 9e9}}, {"mode": PolicyMode.SHADOW}, {"strategy": "lt_i"}]
    )
    def test_another_process_that_ticked_or_an_operator_goes_first(
        self, automatic, load, make_instance, monkeypatch, change
    ):
        """Nothing is locked while a strategy decides."""
        make_instance()
        automatic("reactive")
        load(use=0.93, waiting=4)
        read = live_views.views

        def meanwhile(*asked):
            ScalingPolicy.objects.update(**change)
            return read(*asked)

        monkeypatch.setattr(live_views, "views", meanwhile)
        assert run() == []
        assert not ScalingMove.objects.exists()
        assert {name: getattr(ScalingPolicy.objects.get(), name) for name in change} == change

    def test_a_move_of_several_is_several_moves(self, automatic, load, make_instance, language_model):
        make_instance()
        automatic("lt_i")
        plan(language_model, 3)
        load()
        moves = run()
        assert [move.delta for move in moves] == [1, 1]
        assert {move.plan for move in moves} == {ScalingPlan.objects.get()}
        assert moves[0].inputs["advice"]["forecast_tokens_per_s"] == 5000.0

    def test_refused_rows_are_written_down(self, automatic, load, make_instance, node, messages):
        from controlplane.events.models import Event
        from controlplane.fleet.models import Node

        Node.objects.update(gpu_count=2)
        make_instance(node=node)
        automatic("reactive")
        load(use=0.93)
        assert run() == []
        event = Event.objects.get(kind="scaling.refused")
        assert event.reason == "a100-80gb: no node has 2 free GPUs, 0 at most"
        assert event.inputs["view"]["use"] == 0.93

    @pytest.mark.parametrize("mode", [PolicyMode.OFF, PolicyMode.SHADOW, PolicyMode.ASK])
    def test_only_automatic_policies_move(self, automatic, load, make_instance, mode):
        make_instance()
        automatic("reactive", mode)
        load(use=0.93)
        assert run() == []
        assert load.alive is None

    def test_without_live_load_nothing_is_done_or_said(self, automatic, load, make_instance):
        make_instance()
        automatic("reactive")
        assert run() == []
        assert load.alive is None

    def test_the_gpus_that_the_plan_names_come_first(self, automatic, load, make_instance, deployment, profile, region):
        cheap = GpuType.objects.create(
            name="l40s", title="L40S", memory_bytes=80 * 2**30, on_demand_usd_per_hour="0.10"
        )
        values = {name: getattr(profile, name) for name in ("prefill_a_s", "prefill_b_s_per_token", "prefill_t0_s")}
        decode = {"decode_a_s": 0.01, "decode_b_s_per_sequence": 0.0, "decode_c_s_per_token": 0.0}
        PerformanceProfile.objects.create(
            model=deployment.model, gpu_type=cheap, tensor_parallel=2, source="x", **values, **decode
        )
        Deployment.objects.create(
            model=deployment.model, region=region, gpu_type=cheap, tensor_parallel=2, min_instances=0
        )
        make_instance()
        automatic("lt_i")
        wanted = plan(deployment.model, 3)
        wanted.targets.append({**wanted.targets[0], "gpu_type": "l40s", "present": 0, "target": 0})
        wanted.save()
        load(max_instances=7)
        assert [move.gpu_type for move in run()] == ["a100-80gb", "a100-80gb"]


class TestMemory:
    def test_a_plan_is_followed_once_over_many_ticks(self, automatic, load, make_instance, language_model):
        make_instance()
        automatic("lt_i")
        plan(language_model, 2)
        load()
        assert len(run()) == 1
        Instance.objects.exclude(name="instance-1").delete()
        assert run(after_s=20) == []
        assert any(key.startswith("llama-3.1-8b|us-east") for key in ScalingPolicy.objects.get().memory)

    def test_it_ticks_at_its_own_time(self, automatic, load, make_instance, settings):
        settings.STRATEGY_EVERY_S = 5.0
        make_instance()
        automatic("reactive", tick_s=15)
        load(use=0.5)
        run()
        load(use=0.93)
        assert run(after_s=5) == []
        assert run(after_s=10) == []
        assert len(run(after_s=14.8)) == 1

    def test_another_strategy_remembers_nothing_of_it(self, automatic, load, make_instance):
        make_instance()
        automatic("pilothouse")
        load()
        run()
        assert ScalingPolicy.objects.get().memory
        automatic("lt_i")
        assert ScalingPolicy.objects.get().memory == {}

    def test_the_cooldown_is_that_of_the_rows(self, automatic, load, make_instance):
        make_instance()
        automatic("reactive")
        load(use=0.93)
        assert len(run()) == 1
        assert run(after_s=14) == []
        load(use=1.93)  # too much even with the one on the way
        ScalingMove.objects.update(at=timezone.now() - timedelta(seconds=20))
        assert len(run(after_s=30)) == 1


class TestAdvice:
    def test_of_a_plan_in_force(self, language_model, deployment, automatic):
        policy = automatic("lt_i")
        row = plan(language_model, 2, demand=6000.0)
        assert selectors.plan_in_force(policy.model.name, timezone.now()) == row
        advice = strategist.advice(row, "us-east", timezone.now())
        assert (advice.target_instances, advice.forecast_tokens_per_s) == (2, 6000.0)
        assert advice.made_at_s == row.made_at.timestamp()
        assert strategist.advice(row, "mars", timezone.now()) is None

    def test_its_soon_target_moves_with_time(self, language_model, deployment, automatic):
        row = plan(language_model, 4, demand=6000.0)
        assert strategist.advice(row, "us-east", timezone.now()).soon_instances is None
        row.inputs |= {
            "start_at": row.made_at.isoformat(), "window_s": 600, "soon_instances": {"us-east": [2, 4, 3]},
            "period_s": 1200.0,
        }  # fmt: skip
        soon = [
            strategist.advice(row, "us-east", row.made_at + timedelta(seconds=after_s)).soon_instances
            for after_s in (0, 599, 601, 1201, 9000)
        ]
        assert soon == [2, 2, 4, 3, 3]
        assert strategist.advice(row, "us-east", row.made_at).next_plan_s == row.made_at.timestamp() + 1200

    @pytest.mark.parametrize("status", sorted(set(PlanStatus) - set(selectors.IN_FORCE)))
    def test_an_unapproved_plan_is_not_the_current_one(self, language_model, deployment, automatic, status):
        plan(language_model, 2, status=status)
        assert selectors.plan_in_force(automatic("lt_i").model.name, timezone.now()) is None

    def test_nor_is_a_plan_whose_time_is_over(self, language_model, deployment, automatic):
        plan(language_model, 2, minutes=-1)
        assert selectors.plan_in_force(automatic("lt_i").model.name, timezone.now()) is None

    def test_the_newest_counts(self, language_model, deployment, automatic):
        plan(language_model, 2)
        newer = plan(language_model, 3)
        assert selectors.plan_in_force(automatic("lt_i").model.name, timezone.now()) == newer


class TestAlive:
    def test_models_count_as_scaled_for_some_ticks(self, automatic, load, make_instance, settings):
        settings.STRATEGY_EVERY_S = 5.0
        make_instance()
        automatic("reactive", tick_s=20)
        load()
        run()
        models, for_s = load.alive
        assert models == ["llama-3.1-8b"]
        assert for_s >= 60

    def test_an_approved_plan_is_what_the_floor_is_beneath_as_long_as_it_holds(
        self, automatic, load, make_instance, language_model
    ):
        """Otherwise the floor alone would undo, by its own thresholds, what an operator approved."""
        make_instance()
        automatic("lt_i", PolicyMode.ASK)
        load()
        row = plan(language_model, 1, status=PlanStatus.CARRIED_OUT)
        ScalingPlan.objects.update(decided_by=executor.PLANNER)
        assert run() == []
        assert load.alive is None  # a plan in force that nobody approved
        ScalingPlan.objects.update(decided_by="an operator")
        assert run() == []
        assert load.alive[0] == ["llama-3.1-8b"]
        load.alive = None
        assert strategist.run_strategies(row.valid_until + timedelta(seconds=1)) == []
        assert load.alive is None

    def test_a_strategy_that_fails_is_not_and_the_others_are(self, automatic, load, make_instance, monkeypatch, caplog):
        make_instance()
        automatic("reactive")
        load()

        def fail(*args):
            raise ArithmeticError("the strategy is broken")

        monkeypatch.setattr("scheduling.scaling.Unified.decide", fail)
        assert run() == []
        assert load.alive[0] == []
        assert "the strategy is broken" in caplog.text


class TestViews:
    def test_counts_and_bounds_are_those_of_the_rows(self, make_instance, load):
        for state in (S.READY, S.READY, S.LOADING, S.PROVISIONING, S.DRAINING, S.SLEEPING, S.FAILED, S.STOPPED):
            make_instance(state=state)
        load(ready=2, use=0.8)
        (view,) = live_views.views(PLACE[0], load.summary, timezone.now())
        assert (view.ready, view.coming, view.draining, view.spot) == (2, 2, 1, 1)
        assert (view.min_instances, view.max_instances) == (1, 3)
        assert view.since_change_s == float("inf")

    def test_one_that_the_gateway_does_not_know_yet_is_on_its_way(self, make_instance, load):
        make_instance(), make_instance()
        load(ready=1)
        (view,) = live_views.views(PLACE[0], load.summary, timezone.now())
        assert (view.ready, view.coming) == (1, 1)

    def test_null_is_what_it_stood_for(self, make_instance, load):
        make_instance(state=S.LOADING)
        load(ready=0, use=float("inf"))
        (view,) = live_views.views(PLACE[0], load.summary, timezone.now())
        assert view.use == float("inf")
        assert view.peak_kv_sum != view.peak_kv_sum  # NaN: no map

    def test_an_endpoint_of_which_the_gateway_says_nothing_is_left_out(self, make_instance, load):
        make_instance()
        load(region="elsewhere")
        load.summary = live_views.Load({}, {})
        assert live_views.views(PLACE[0], load.summary, timezone.now()) == []


class TestMissingMeasurements:
    """For twenty minutes nothing, or nothing new, is known: what is there stays, and after it nothing jumps."""

    READY = 3
    STRATEGIES = ("reactive", "lt_i", "lt_u", "lt_ua", "proactive", "hybrid", "preserve", "pilothouse")

    @pytest.fixture
    def busy(self, deployment, make_instance):
        Node.objects.update(gpu_count=16)
        Deployment.objects.update(max_instances=6)
        for _ in range(self.READY):
            make_instance()
        Instance.objects.update(state_changed_at=timezone.now() - timedelta(days=1))

    @pytest.fixture
    def missing(self, load, language_model, monkeypatch):
        """`missing(what, at_s)`: what strategies see *at_s* into the time in which *what* is away."""
        shown = {"ready": self.READY, "max_instances": 6, "use": 0.6, "tokens_per_s": 9000.0}

        def see(what, at_s):
            load(**shown)
            match what:
                case "redis" | "the gateway's figures":
                    load.summary = None
                case "metrics of all instances":  # none is known to take work
                    load(**shown | {"ready": 0, "use": math.inf, "kv_use": 0.0, "tokens_per_s": 0.0})
                case "this endpoint's figures":
                    load.summary = live_views.Load()
                case "demand":  # the ledger is behind, and forecasts are of what is in it
                    plan(language_model, 1, present=self.READY, demand=0.0, minutes=600)
                case "plans":  # forecaster or solver fails
                    ScalingPlan.objects.update(valid_until=timezone.now() - timedelta(days=1))

        return see

    @pytest.mark.parametrize("strategy", STRATEGIES)
    @pytest.mark.parametrize(
        "what",
        ["redis", "the gateway's figures", "metrics of all instances", "this endpoint's figures", "demand", "plans"],
    )
    def test_nothing_is_removed(self, what, strategy, automatic, missing, load, busy):
        automatic(strategy)
        load(ready=self.READY, max_instances=6, use=0.6)
        run()
        for at_s in range(15, 1215, 60):
            missing(what, at_s)
            run(after_s=at_s)
        load(ready=self.READY, max_instances=6, use=0.6)
        for at_s in range(1215, 1400, 15):
            run(after_s=at_s)
        # One that present load does not need may go by a plan that is in force, never more.
        gone = -sum(ScalingMove.objects.filter(delta__lt=0).values_list("delta", flat=True))
        assert gone <= (1 if what == "demand" else 0)
        # Where none is known to take work, the minimum is brought up, and that is all.
        assert ScalingMove.objects.filter(delta__gt=0).count() == (what == "metrics of all instances")

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_low_use_before_the_gap_does_not_count_after_it(self, strategy, automatic, load, busy):
        """Use was low for a moment, then nobody looked; the first look after it removes nothing."""
        automatic(strategy)
        load(ready=self.READY, max_instances=6, use=0.1)
        run()
        made = run(after_s=1200)
        assert made == []
