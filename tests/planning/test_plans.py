"""Plans from rows: the demand that is planned for, what is written, and what becomes of it."""

from datetime import timedelta

import numpy as np
import pytest

from controlplane.events.models import Event
from controlplane.fleet.models import Deployment, Node, SloClass
from controlplane.gateway.models import MinuteRow
from controlplane.planning import selectors as planning
from controlplane.planning import services
from controlplane.planning.forecasts.services import make_forecasts
from controlplane.planning.models import WHAT_IF, Forecast, PlanStatus, PolicyMode, ScalingPlan
from controlplane.planning.plans import expected as plans
from controlplane.planning.plans import waiting
from controlplane.planning.plans.services import due, make_plans
from controlplane.tuning import services as tuning
from scheduling.planning.bursts import instances_for
from tests.planning.conftest import NOW, PLACE

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("minute_windows")]


def policy(model, mode, strategy="lt_ua"):
    return services.set_policy(model, strategy, mode, {}, "a test")


class TestExpected:
    def make(self, start, values, **more):
        return Forecast(start_at=start, window_s=60, mean=values, upper_80=[2 * value for value in values], **more)

    def test_it_is_read_from_now_on_and_its_last_window_continues(self):
        start = NOW.replace(second=0)
        forecast = self.make(start - timedelta(minutes=2), [1, 2, 3, 4, 5])
        assert plans.ahead(forecast, start, 5).mean.tolist() == [3, 4, 5, 5, 5]
        assert plans.ahead(forecast, start + timedelta(minutes=3), 5) is None

    def test_the_upper_end_may_be_planned_for_or_what_lies_between(self, settings):
        start = NOW.replace(second=0)
        forecast = self.make(start, [1, 2], upper_95=[5, 10])
        for band, level, values in (("upper_80", 1.0, [2, 4]), ("upper_80", 0.5, [1.5, 3]), ("upper_95", 1.0, [5, 10])):
            assert plans.ahead(forecast, start, 2, band).level(level).tolist() == values
        settings.FORECAST_WINDOW_S = 600  # windows of another length are not mixed in
        assert plans.ahead(forecast, start, 2) is None

    @pytest.mark.parametrize(
        ("of", "strategy", "band", "soon", "kept"),
        [
            ("strategy", "lt_ua", "upper_80", 0.0, 0.0),
            ("strategy", "no such strategy", "upper_80", 0.0, 0.0),
            ("strategy", "pilothouse", "upper_80", 0.5, 0.7),
            ("mean", "pilothouse", "upper_80", 0.0, 0.0),
            ("upper_95", "pilothouse", "upper_95", 1.0, 1.0),
        ],
    )
    def test_the_strategy_sets_the_planned_level_unless_an_operator_does(
        self, settings, of, strategy, band, soon, kept
    ):
        settings.PLAN_DEMAND = of
        named, plans_for = plans.levels("any", strategy)
        assert (named, plans_for.soon, plans_for.kept) == (band, soon, kept)
        assert plans_for.two_plans == (strategy == "pilothouse")

    @pytest.mark.parametrize(("cv", "kept", "soon"), [(1.0, 100.0, 100.0), (2.0, 135.0, 125.0), (9.0, 170.0, 150.0)])
    def test_our_strategy_keeps_for_more_than_it_adds_for_where_arrivals_are_uneven(
        self, make_minutes, settings, monkeypatch, cv, kept, soon
    ):
        monkeypatch.setattr(plans.demand.DemandSeries, "arrival_cv", lambda series, endpoint: cv)
        settings.PLAN_DEMAND = "strategy"
        make_minutes(40)
        make_forecasts(NOW)
        assert Forecast.objects.exclude(upper_80=[]).update(mean=[100.0] * 5, upper_80=[200.0] * 5)
        ours, other = (plans.expect(NOW, {PLACE[0]: name}) for name in ("pilothouse", "lt_ua"))
        quantities = 2
        assert ours.demand.of[PLACE].kept.tolist() == [kept * quantities] * 5
        assert ours.demand.of[PLACE].soon.tolist() == [soon * quantities] * 5
        assert other.demand.of[PLACE].kept.tolist() == other.demand.of[PLACE].soon.tolist() == [100.0 * quantities] * 5

    @pytest.mark.parametrize(("share", "beta"), [(1.0, 100.0 + 100.0), (0.5, 100.0), (0.0, 0.0)])
    def test_deferred_work_that_arrives_and_that_waits_is_planned_for(self, make_minutes, monkeypatch, share, beta):
        """Of 360,000 tokens that wait, 2,400 arrived by the minute; 100 a second would do them all in their hour."""
        SloClass.objects.create(name="flex", title="Flex", kind="non_interactive", deadline_s=3600)
        tuning.change("PLAN_NIW_BUFFER", share, actor="test")
        make_minutes(60)
        make_minutes(60, prompt=4_800, output=1_200, slo_class="flex")
        monkeypatch.setattr(waiting, "read", lambda: {PLACE[0]: waiting.Waiting(9, 360_000.0, 100.0)})
        expected = plans.expect(NOW, {PLACE[0]: "lt_ua"})
        assert sum(each.beta_tokens_per_s for each in expected.demand.of.values()) == pytest.approx(beta)
        monkeypatch.setattr(waiting, "read", lambda: {PLACE[0]: waiting.Waiting(9, 360_000.0, 600.0)})
        expected = plans.expect(NOW, {PLACE[0]: "lt_ua"})
        assert sum(each.beta_tokens_per_s for each in expected.demand.of.values()) == pytest.approx(600.0 * share)

    def test_forecasts_of_single_classes_are_not_planned_for(self, make_minutes):
        make_minutes(40)
        make_minutes(40, prompt=6_000, output=0, slo_class="flexible")
        make_forecasts(NOW)
        assert plans.expect(NOW, {}).demand.of[PLACE].kept.tolist() == [1300.0] * 5
        Forecast.objects.exclude(slo_class="").update(mean=[9e9] * 5)
        assert plans.expect(NOW, {}).demand.of[PLACE].kept.tolist() == [1300.0] * 5
        Forecast.objects.filter(slo_class="").delete()
        assert "no forecast yet" in plans.expect(NOW, {}).notes[PLACE]

    def test_before_the_first_forecast_the_last_minutes_are_used(self, make_minutes):
        make_minutes(3)
        expected = plans.expect(NOW, {})
        assert expected.demand.of[PLACE].kept.tolist() == [1200.0] * 5
        assert "no forecast yet" in expected.notes[PLACE]
        assert expected.demand.prompt_share(PLACE[0]) == pytest.approx(1000 / 1200)

    def test_nothing_known_nor_a_minute_that_was_counted_in_part_is_no_demand(self, make_minutes, deployment):
        assert plans.expect(NOW, {}) is None
        make_minutes(1)
        make_minutes(1, until=NOW + timedelta(minutes=1))  # the running one
        assert plans.expect(NOW, {}) is None


class TestPlans:
    @pytest.fixture
    def busy(self, make_minutes, make_instance, deployment):
        """One instance, and demand for about two and a half."""
        make_instance(node=Node.objects.get())
        theta = 12_000 * 60
        make_minutes(40, prompt=2 * theta, output=theta // 2)
        make_forecasts(NOW)

    def test_a_plan_is_a_row_with_all_that_it_was_made_from(self, busy, language_model):
        policy(language_model, PolicyMode.SHADOW)
        (row,) = make_plans(NOW)
        (target,) = row.targets
        assert (target["region"], target["gpu_type"], target["present"]) == ("us-east", "a100-80gb", 1)
        assert target["target"] > 1
        needed = target["demand_tokens_per_s"] / target["capability_tokens_per_s"]
        able, cv = row.inputs["capability_tokens_per_s"]["a100-80gb"], row.inputs["arrival_cv"]["us-east"]
        assert target["target"] == min(3, np.ceil(instances_for(needed, able["reserve"], cv)))
        assert (able["percentile"], able["instances"]) == (95.0, 8)
        assert row.inputs["start_times"] == {"a100-80gb": {"seconds": 120.0, "starts": 0}}
        assert target["reason"]
        assert row.valid_until == NOW + timedelta(hours=2)  # two periods of plans
        assert (row.strategy, row.status) == ("lt_ua", PlanStatus.SHADOW)
        assert row.inputs["demand_tokens_per_s"]["us-east"] == [pytest.approx(30_000, rel=0.01)] * 5
        assert row.inputs["capability_tokens_per_s"]["a100-80gb"]["source"] == "simulated"
        assert row.inputs["bounds"] == {"us-east a100-80gb": [1, 3]}
        assert row.cost_usd_per_hour_before == pytest.approx(2 * 1.35)
        assert row.cost_usd_per_hour_after == pytest.approx(2 * 1.35 * target["target"])
        assert row.solve_ms > 0

    def test_what_is_neither_forecast_nor_counted_is_not_planned_for(self, busy, language_model, settings):
        """The forecaster raised for one series while the ledger is behind: unknown is not zero demand."""
        settings.FORECAST_EVERY_S = 3600
        policy(language_model, PolicyMode.AUTO)
        later = NOW + timedelta(minutes=20)
        Forecast.objects.update(start_at=later)
        assert len(make_plans(later)) == 1
        Forecast.objects.filter(quantity="output").delete()
        assert make_plans(later) == []

    @pytest.mark.parametrize("ttft_ms", [1, 3])
    def test_a_goal_out_of_reach_is_said_once_and_does_not_pin_the_fleet(
        self, make_minutes, make_instance, language_model, slo_class, ttft_ms
    ):
        make_instance(node=Node.objects.get())
        make_minutes(40, prompt=60_000, output=6_000)  # a tenth of what one instance can do
        make_forecasts(NOW)
        SloClass.objects.filter(pk=slo_class.pk).update(ttft_target_ms=ttft_ms)
        policy(language_model, PolicyMode.SHADOW)
        for seconds in range(0, 100, 20):
            (row,) = make_plans(NOW + timedelta(seconds=seconds))
            assert "out of reach at any number of instances: 100% of requests miss their goal" in row.note
            assert [target["target"] for target in row.targets] == [1]
        said = Event.objects.get(kind="plan.goal_out_of_reach")
        assert (said.severity, said.subject) == ("warning", language_model.name)

    @pytest.mark.parametrize(
        ("mode", "strategy", "status"),
        [
            (PolicyMode.SHADOW, "lt_u", PlanStatus.SHADOW),
            (PolicyMode.ASK, "lt_u", PlanStatus.ADVICE),
            (PolicyMode.AUTO, "lt_u", PlanStatus.IN_FORCE),
            (PolicyMode.AUTO, "reactive", PlanStatus.SHADOW),
        ],
    )
    def test_the_mode_says_what_becomes_of_it(self, busy, language_model, mode, strategy, status):
        policy(language_model, mode, strategy)
        (row,) = make_plans(NOW)
        assert row.status == status
        assert row.carried_out_at is None  # nothing has been moved yet
        assert Event.objects.filter(kind="plan.in_force").exists() == (status == PlanStatus.IN_FORCE)

    @pytest.mark.parametrize("mode", [PolicyMode.SHADOW, PolicyMode.ASK])
    def test_a_what_ifs_proposal_is_shown_next_to_it(self, busy, language_model, mode):
        """It is neither replaced by a round, nor counted as one, nor followed as a forecast by a strategy."""
        policy(language_model, mode, "lt_u")
        proposed = ScalingPlan.objects.create(
            model=language_model, strategy=WHAT_IF, valid_until=NOW + timedelta(hours=1), made_at=NOW,
            targets=[{"region": "us-east", "gpu_type": "a100-80gb", "present": 1, "target": 2, "reason": "so many"}],
        )  # fmt: skip
        (row,) = make_plans(NOW)
        proposed.refresh_from_db()
        assert (proposed.status, row.pk != proposed.pk) == (PlanStatus.ADVICE, True)
        row.delete()
        assert due(NOW, 0, 0) == {language_model.name}
        ScalingPlan.objects.update(status=PlanStatus.APPROVED)
        assert planning.plan_in_force(language_model.name, NOW) is None

    def test_a_plan_that_its_strategy_did_not_carry_out_says_so_and_why(self, busy, language_model):
        policy(language_model, PolicyMode.AUTO, "lt_ua")
        (first,) = make_plans(NOW)
        Deployment.objects.update(max_instances=2)
        (second,) = make_plans(NOW + timedelta(minutes=1))
        first.refresh_from_db()
        assert (first.status, second.status) == (PlanStatus.SUPERSEDED, PlanStatus.IN_FORCE)
        wanted = first.targets[0]["target"] - 1
        assert first.note.startswith(f"0 of {wanted} moves made; LT-UA adds only while use is above 70%")

    def test_a_plan_in_force_that_the_next_repeats_continues(self, busy, language_model, make_instance, node):
        """Also if its strategy has added one meanwhile: three are wanted, and there was one at first."""
        policy(language_model, PolicyMode.AUTO, "lt_ua")
        (first,) = make_plans(NOW)
        assert first.targets[0]["target"] == 3
        make_instance(node=node)
        (second,) = make_plans(NOW + timedelta(minutes=1))
        assert (second.pk, second.status) == (first.pk, PlanStatus.IN_FORCE)
        assert (second.targets[0]["present"], second.targets[0]["target"]) == (1, 3)
        assert second.made_at > first.made_at
        make_instance(node=node)
        (third,) = make_plans(NOW + timedelta(minutes=2))
        first.refresh_from_db()
        assert (first.status, third.status) == (PlanStatus.CARRIED_OUT, PlanStatus.CARRIED_OUT)
        assert "nothing to move" in third.note

    def test_a_plan_is_valid_until_its_successor_may_be_late(self, busy, language_model, settings):
        settings.PLAN_EVERY_S = 60.0
        policy(language_model, PolicyMode.AUTO)
        (row,) = make_plans(NOW)
        assert row.valid_until == NOW.replace(second=0) + timedelta(minutes=5)  # the end of its forecast
        settings.PLAN_EVERY_S = 600.0
        (row,) = make_plans(NOW)
        assert row.valid_until == NOW + timedelta(minutes=20)

    def test_preserves_algorithm_2_plans_for_its_strategies(self, busy, language_model, settings):
        """Live as in its experiment: N for the next window, whatever comes later."""
        settings.PLAN_EVERY_S = 60.0
        policy(language_model, PolicyMode.SHADOW, "preserve")
        theta = make_plans(NOW)[0].inputs["capability_tokens_per_s"]["a100-80gb"]["used"]
        MinuteRow.objects.filter(minute__gte=NOW - timedelta(minutes=11)).update(prompt_tokens=60, output_tokens=12)
        for quantity, share in (("prompt", 0.8), ("output", 0.2)):
            mean = [share * theta * n for n in (0.5, 1.5, 2.9, 2.9, 2.9)]
            assert Forecast.objects.filter(slo_class="", quantity=quantity).update(mean=mean, upper_80=mean)
        (row,) = make_plans(NOW)
        assert row.targets[0]["target"] == 2
        assert row.targets[0]["reason"].startswith("Algorithm 2: ")
        assert row.inputs["demand_of"]["by_capability"]
        policy(language_model, PolicyMode.SHADOW, "lt_ua")
        assert make_plans(NOW)[0].targets[0]["target"] == 3

    def test_a_forecast_below_the_load_of_now_takes_nothing_away(self, busy, language_model, make_instance, node):
        """Two and a half instances are asked for, and a tenth of one is expected."""
        for _ in range(2):
            make_instance(node=node)
        policy(language_model, PolicyMode.SHADOW)
        for row in Forecast.objects.filter(slo_class=""):
            row.mean = row.upper_80 = [value / 25 for value in row.mean]
            row.save()
        (row,) = make_plans(NOW)
        assert [(target["present"], target["target"]) for target in row.targets] == [(3, 3)]
        assert any("what is asked for now needs" in limit for limit in row.binding)
        MinuteRow.objects.filter(minute__gte=NOW - timedelta(minutes=11)).update(prompt_tokens=60, output_tokens=12)
        assert make_plans(NOW)[0].targets[0]["target"] == 1

    def test_an_approved_plan_that_the_next_repeats_continues(self, busy, language_model, operator):
        policy(language_model, PolicyMode.ASK)
        (first,) = make_plans(NOW)
        ScalingPlan.objects.update(status=PlanStatus.IN_PROGRESS)
        (second,) = make_plans(NOW + timedelta(minutes=1))
        assert (second.pk, second.status) == (first.pk, PlanStatus.IN_PROGRESS)
        assert second.valid_until > first.valid_until

    def test_a_model_that_is_off_or_has_no_policy_is_not_planned(self, busy, language_model):
        assert make_plans(NOW) == []
        policy(language_model, PolicyMode.OFF)
        assert make_plans(NOW) == []

    @pytest.mark.sql
    def test_a_newer_plan_supersedes_an_open_one_and_leaves_decided_ones(self, busy, language_model):
        policy(language_model, PolicyMode.SHADOW)
        (first,) = make_plans(NOW)
        applied = ScalingPlan.objects.create(
            model=language_model, strategy="x", status=PlanStatus.CARRIED_OUT, valid_until=NOW
        )
        make_plans(NOW + timedelta(minutes=1))
        first.refresh_from_db()
        applied.refresh_from_db()
        assert (first.status, applied.status) == (PlanStatus.SUPERSEDED, PlanStatus.CARRIED_OUT)

    def test_advice_that_would_be_the_same_stays_the_same_row(self, busy, language_model):
        policy(language_model, PolicyMode.ASK)
        (first,) = make_plans(NOW)
        (second,) = make_plans(NOW + timedelta(minutes=1))
        assert first.pk == second.pk
        first.refresh_from_db()
        assert first.valid_until == NOW + timedelta(hours=2, minutes=1)
        assert first.made_at == NOW + timedelta(minutes=1)

    def test_nothing_to_do_is_no_advice(self, make_minutes, make_instance, language_model):
        make_instance()
        make_minutes(40)
        make_forecasts(NOW)
        policy(language_model, PolicyMode.ASK)
        (row,) = make_plans(NOW)
        assert row.status == PlanStatus.CARRIED_OUT
        assert row.note.startswith("nothing to move")

    def test_a_model_without_capability_is_not_planned_away(self, busy, language_model, profile, caplog):
        policy(language_model, PolicyMode.AUTO)
        profile.delete()
        assert make_plans(NOW) == []
        assert "no capability from profile or ledger" in caplog.text

    def test_demand_beyond_all_capacity_is_said(self, make_minutes, make_instance, language_model, node):
        make_instance(node=node)
        make_minutes(40, prompt=60 * 100_000)
        make_forecasts(NOW)
        policy(language_model, PolicyMode.SHADOW)
        (row,) = make_plans(NOW)
        assert row.targets[0]["target"] == 3
        assert "tok/s cannot be served anywhere" in row.note
