"""Forecasts and plans from rows: what is read, what is solved, what is written, and what becomes of it."""

import hashlib
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Model, Node, Region
from controlplane.gateway.models import MinuteRow
from controlplane.planning import services
from controlplane.planning.forecasts import demand
from controlplane.planning.forecasts import services as forecasts
from controlplane.planning.models import Forecast, PlanStatus, PolicyMode, Quantity, ScalingPlan
from controlplane.planning.plans import inventory
from controlplane.planning.plans import services as plans

pytestmark = pytest.mark.django_db
S = InstanceState
NOW = datetime(2026, 3, 2, 12, 0, 40, tzinfo=UTC)
PLACE = ("llama-3.1-8b", "us-east")


@pytest.fixture(autouse=True)
def pace(settings, tmp_path):
    settings.FORECAST_WINDOW_S, settings.FORECAST_WINDOWS, settings.FORECASTER = 60, 5, "seasonal_naive"
    settings.STATE_DIR = tmp_path


@pytest.fixture
def make_minutes(deployment, slo_class):
    """`make_minutes(30, prompt=6000, …)`: so many minutes before NOW, each with that many tokens."""

    def make(count, prompt=60_000, output=12_000, until=NOW, **values):
        until = until.replace(second=0, microsecond=0)
        defaults = {"model": PLACE[0], "region": PLACE[1], "slo_class": "interactive", "requests": 10} | values
        MinuteRow.objects.bulk_create(
            MinuteRow(minute=until - timedelta(minutes=ago), prompt_tokens=prompt, output_tokens=output, **defaults)
            for ago in range(1, count + 1)
        )

    return make


def policy(model, mode, strategy="lt_ua"):
    return services.set_policy(model, strategy, mode, {}, "a test")


class TestDemand:
    def test_tokens_a_second_by_window_and_quantity(self, make_minutes):
        make_minutes(4)
        found = demand.read(NOW - timedelta(minutes=4), NOW, 60)
        assert found.start == NOW.replace(minute=56, second=0) - timedelta(hours=1)
        assert found.of(PLACE, Quantity.PROMPT).tolist() == [1000.0] * 4
        assert found.of(PLACE, Quantity.OUTPUT).tolist() == [200.0] * 4
        assert found.known == 4

    def test_classes_are_added_up_or_kept_apart(self, make_minutes):
        make_minutes(2)
        make_minutes(2, prompt=6_000, slo_class="flexible")
        since = NOW - timedelta(minutes=2)
        found = demand.read(since, NOW, 60)
        assert found.of(PLACE, Quantity.PROMPT).tolist() == [1100.0] * 2
        assert found.of(PLACE, Quantity.PROMPT, "interactive").tolist() == [1000.0] * 2
        assert found.of(PLACE, Quantity.PROMPT, "flexible").tolist() == [100.0] * 2
        assert found.of(PLACE, Quantity.PROMPT, "nobody").tolist() == [0.0] * 2

    def test_a_class_has_the_gaps_of_all_and_a_zero_where_others_have_rows(self, make_minutes):
        make_minutes(3)
        make_minutes(1, prompt=6_000, output=0, slo_class="flexible")
        MinuteRow.objects.filter(minute=NOW.replace(second=0) - timedelta(minutes=2)).delete()
        found = demand.read(NOW - timedelta(minutes=3), NOW, 60)
        np.testing.assert_equal(found.of(PLACE, Quantity.PROMPT, "flexible"), [0.0, np.nan, 100.0])
        np.testing.assert_equal(found.of(PLACE, Quantity.PROMPT, "nobody"), [0.0, np.nan, 0.0])
        assert found.known == 2

    def test_all_classes_are_read_at_once(self, make_minutes, django_assert_num_queries):
        for name in ("interactive", "flexible", "idle"):
            make_minutes(2, slo_class=name)
        with django_assert_num_queries(2):  # the deployments, and the rows
            found = demand.read(NOW - timedelta(minutes=2), NOW, 60)
        assert {slo_class for _, _, slo_class in found.by_class()} == {"interactive", "flexible", "idle"}

    def test_a_series_of_a_class_without_a_token_is_not_listed(self, make_minutes):
        make_minutes(2)
        make_minutes(2, output=0, slo_class="flexible")
        make_minutes(2, slo_class="flexible", model="not deployed")
        found = demand.read(NOW - timedelta(minutes=2), NOW, 60)
        assert sorted(found.by_class(), key=str) == [
            (PLACE, Quantity.OUTPUT, "interactive"),
            (PLACE, Quantity.PROMPT, "flexible"),
            (PLACE, Quantity.PROMPT, "interactive"),
        ]

    def test_a_minute_in_which_nobody_counted_is_a_gap_and_one_with_others_alone_a_zero(self, make_minutes):
        make_minutes(3)
        MinuteRow.objects.filter(minute=NOW.replace(second=0) - timedelta(minutes=2)).delete()
        MinuteRow.objects.filter(minute=NOW.replace(second=0) - timedelta(minutes=3)).update(model="another")
        series = demand.read(NOW - timedelta(minutes=3), NOW, 60).of(PLACE, Quantity.PROMPT)
        assert series[0] == 0.0
        assert np.isnan(series[1])
        assert series[2] == 1000.0

    def test_a_wide_window_has_the_mean_of_its_known_minutes(self, make_minutes):
        make_minutes(20, until=NOW.replace(hour=12))
        MinuteRow.objects.filter(minute__minute=45).delete()
        series = demand.read(NOW - timedelta(minutes=20), NOW, 600).of(PLACE, Quantity.PROMPT)
        assert series.tolist() == [1000.0, 1000.0]

    def test_the_window_that_is_still_filling_is_left_out(self):
        assert demand.last_complete(NOW, 60) == NOW.replace(second=0)
        assert demand.last_complete(NOW - timedelta(seconds=20), 60) == NOW.replace(second=0) - timedelta(minutes=1)

    def test_buffer_of_what_can_wait(self, make_minutes):
        from controlplane.fleet.models import SloClass, SloKind

        SloClass.objects.create(name="flexible", title="Flexible", kind=SloKind.NON_INTERACTIVE, deadline_s=3600)
        make_minutes(10)
        make_minutes(10, prompt=6_000, output=0, slo_class="flexible")
        rates = demand.non_interactive(NOW.replace(second=0))
        assert rates == {PLACE: pytest.approx(100.0)}


class TestForecasts:
    def test_one_row_a_series_for_the_windows_to_come(self, make_minutes):
        make_minutes(40)
        rows = services.make_forecasts(NOW)
        assert {(row.model, row.region, row.quantity) for row in rows} == {(*PLACE, "prompt"), (*PLACE, "output")}
        row = Forecast.objects.get(quantity="prompt", slo_class="")
        assert row.start_at == NOW.replace(second=0)
        assert (row.window_s, len(row.mean), row.made_at) == (60, 5, NOW)
        assert row.mean == [1000.0] * 5
        assert all(low <= mean <= high for low, mean, high in zip(row.lower_95, row.mean, row.upper_95, strict=True))

    def test_nothing_from_nothing(self, make_minutes):
        assert services.make_forecasts(NOW) == []
        make_minutes(1)
        assert services.make_forecasts(NOW) == []

    def test_what_was_learned_is_told_what_is_new(self, make_minutes, monkeypatch):
        make_minutes(40)
        services.make_forecasts(NOW)
        fitted = []
        monkeypatch.setattr(forecasts._Learner, "_keep", lambda self, forecaster, how: fitted.append(how.windows))
        later = NOW + timedelta(minutes=3)
        make_minutes(3, prompt=120_000, until=later)
        rows = services.make_forecasts(later)
        assert fitted == [40, 40]  # taken in, not fitted anew
        assert rows[0].start_at == later.replace(second=0)

    def test_a_broken_file_costs_a_fit(self, make_minutes, settings):
        make_minutes(40)
        services.make_forecasts(NOW)
        for file in (settings.STATE_DIR / "forecasters").rglob("*.npz"):
            file.write_bytes(b"not what it was")
        assert len(services.make_forecasts(NOW)) == 4

    def test_one_series_that_fails_costs_no_other(self, make_minutes, monkeypatch, caplog):
        make_minutes(40)
        real = forecasts._Learner.predict

        def predict(self, horizon):
            if "prompt" in self.series.name:
                raise ArithmeticError("no convergence")
            return real(self, horizon)

        monkeypatch.setattr(forecasts._Learner, "predict", predict)
        assert [row.quantity for row in services.make_forecasts(NOW)] == ["output"] * 2  # of all classes, and of one
        assert "no convergence" in caplog.text

    def test_each_class_with_demand_has_rows_of_its_own(self, make_minutes, settings):
        make_minutes(40)
        make_minutes(40, prompt=6_000, output=0, slo_class="flexible")
        MinuteRow.objects.create(
            minute=NOW - timedelta(days=settings.FORECAST_HISTORY_DAYS + 1), model=PLACE[0], region=PLACE[1],
            slo_class="of old", prompt_tokens=9,
        )  # fmt: skip
        services.make_forecasts(NOW)
        rows = {(row.slo_class, row.quantity): row for row in Forecast.objects.all()}
        assert {key: row.mean[0] for key, row in rows.items()} == {
            ("", "prompt"): 1100.0,
            ("", "output"): 200.0,
            ("interactive", "prompt"): 1000.0,
            ("interactive", "output"): 200.0,
            ("flexible", "prompt"): 100.0,
        }
        assert {row.start_at for row in rows.values()} == {NOW.replace(second=0)}
        # Interactive output is all there is of it: it goes without a file of its own.
        assert len(list((settings.STATE_DIR / "forecasters").rglob("*.npz"))) == 4

    def test_classes_have_files_of_their_own_and_those_of_all_keep_their_names(self, settings):
        names = {
            forecasts._file((PLACE, quantity, slo_class), 60).name
            for quantity in Quantity
            for slo_class in ("", "interactive", "flexible")
        }
        assert len(names) == 6
        was = hashlib.sha256(b"llama-3.1-8b us-east prompt 60").hexdigest()[:20]
        assert forecasts._file((PLACE, Quantity.PROMPT, ""), 60).name == f"{was}.npz"

    def test_a_class_that_fails_costs_no_other(self, make_minutes, monkeypatch, caplog):
        make_minutes(40)
        make_minutes(40, slo_class="flexible")
        real = forecasts._Learner.predict

        def predict(self, horizon):
            if "flexible" in self.series.name:
                raise ArithmeticError("no convergence")
            return real(self, horizon)

        monkeypatch.setattr(forecasts._Learner, "predict", predict)
        assert sorted(row.slo_class for row in services.make_forecasts(NOW)) == ["", "", "interactive", "interactive"]
        assert "2 series have no forecast. llama-3.1-8b us-east prompt flexible" in caplog.text

    def test_where_a_forecaster_fails_a_simpler_one_stands_in_and_the_row_says_so(
        self, make_minutes, monkeypatch, settings, caplog
    ):
        from forecasting.workload.forecasters.blend import BlendModel

        def fails(*_):
            raise IndexError("index 20 is out of bounds")

        settings.FORECASTER = "blend"
        monkeypatch.setattr(BlendModel, "fit", fails)
        make_minutes(20)
        for minute in range(3):
            now = NOW + timedelta(minutes=minute)
            rows = services.make_forecasts(now)
            make_minutes(1, until=now + timedelta(minutes=1))
            assert {(row.slo_class, row.forecaster) for row in rows} == {("", "ets"), ("interactive", "ets")}
            assert {row.note for row in rows} == {"blend failed (IndexError: index 20 is out of bounds): ets stands in"}
        # Once for all series and rounds: neither an event nor a traceback for each.
        event = Event.objects.get(kind="planning.forecaster_failed")
        assert event.severity == "warning"
        assert event.reason.startswith(
            "2 series are forecast by a simpler forecaster. llama-3.1-8b us-east prompt: Index"
        )
        assert caplog.text.count("Traceback") == 1
        # When it is fitted anew, the forecaster itself is tried again.
        monkeypatch.undo()
        settings.FORECASTER, settings.FORECAST_REFIT_S = "blend", -1.0
        rows = services.make_forecasts(NOW + timedelta(minutes=3))
        assert {(row.forecaster, row.note) for row in rows} == {("blend", "")}

    def test_refits_take_a_part_of_a_round_and_the_others_wait(self, make_minutes, monkeypatch, settings):
        make_minutes(40)
        services.make_forecasts(NOW)
        settings.FORECAST_REFIT_S = -1.0
        fitted, real = [], forecasts._Learner._new
        monkeypatch.setattr(forecasts._Learner, "_new", lambda self: fitted.append(self.series.name) or real(self))
        clock = iter(range(0, 100_000, int(forecasts.REFITS_SHARE * settings.FORECAST_EVERY_S) - 1))
        monkeypatch.setattr(forecasts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert len(services.make_forecasts(NOW)) == 4
        assert fitted == ["llama-3.1-8b us-east prompt"]

    def test_when_their_time_is_over_the_classes_left_come_first_the_next_time(
        self, make_minutes, settings, monkeypatch
    ):
        for slo_class in ("interactive", "flexible"):
            make_minutes(40, slo_class=slo_class)
        clock = iter(range(1000))
        monkeypatch.setattr(forecasts, "time", SimpleNamespace(monotonic=lambda: next(clock) * 2.4))
        settings.FORECAST_EVERY_S = 60.0  # a tenth of them is time for two series
        first = services.make_forecasts(NOW)
        assert [row.slo_class for row in first[:2]] == ["", ""]
        make_minutes(1, until=NOW + timedelta(minutes=1))
        second = services.make_forecasts(NOW + timedelta(minutes=1))
        made = [{(row.slo_class, row.quantity) for row in rows if row.slo_class} for rows in (first, second)]
        assert [len(some) for some in made] == [2, 2]
        assert not made[0] & made[1]

    def test_an_unknown_forecaster_is_said(self, make_minutes, settings):
        from django.core.exceptions import ImproperlyConfigured

        make_minutes(40)
        settings.FORECASTER = "crystal ball"
        with pytest.raises(ImproperlyConfigured, match="crystal ball"):
            services.make_forecasts(NOW)


class TestExpected:
    def make(self, start, values, **more):
        return Forecast(start_at=start, window_s=60, mean=values, upper_80=[2 * value for value in values], **more)

    def test_it_is_read_from_now_on_and_its_last_window_goes_on(self):
        start = NOW.replace(second=0)
        forecast = self.make(start - timedelta(minutes=2), [1, 2, 3, 4, 5])
        assert plans.ahead(forecast, start, 5).tolist() == [3, 4, 5, 5, 5]
        assert plans.ahead(forecast, start + timedelta(minutes=3), 5) is None

    def test_the_upper_end_may_be_planned_for_or_what_lies_between(self):
        start = NOW.replace(second=0)
        forecast = self.make(start, [1, 2], upper_95=[5, 10])
        assert plans.ahead(forecast, start, 2, "upper_80", 1.0).tolist() == [2, 4]
        assert plans.ahead(forecast, start, 2, "upper_80", 0.5).tolist() == [1.5, 3]
        assert plans.ahead(forecast, start, 2, "upper_95", 1.0).tolist() == [5, 10]

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
    def test_what_is_planned_for_is_the_strategys_word_unless_an_operator_says(
        self, settings, of, strategy, band, soon, kept
    ):
        settings.PLAN_DEMAND = of
        assert plans.levels(strategy) == (band, (soon, kept))

    def test_our_strategy_keeps_for_more_than_it_adds_for(self, make_minutes, settings):
        settings.PLAN_DEMAND = "strategy"
        make_minutes(40)
        services.make_forecasts(NOW)
        assert Forecast.objects.exclude(upper_80=[]).update(mean=[100.0] * 5, upper_80=[200.0] * 5)
        ours, other = (plans.expect(NOW, {PLACE[0]: name}) for name in ("pilothouse", "lt_ua"))
        quantities = 2
        assert ours.tokens_per_s[PLACE].tolist() == [170.0 * quantities] * 5
        assert ours.soon_tokens_per_s[PLACE].tolist() == [150.0 * quantities] * 5
        assert other.tokens_per_s[PLACE].tolist() == other.soon_tokens_per_s[PLACE].tolist() == [100.0 * quantities] * 5

    def test_windows_of_another_length_are_not_mixed_in(self, settings):
        settings.FORECAST_WINDOW_S = 600
        assert plans.ahead(self.make(NOW, [1, 2]), NOW, 2) is None

    def test_forecasts_of_single_classes_are_not_planned_for(self, make_minutes):
        make_minutes(40)
        make_minutes(40, prompt=6_000, output=0, slo_class="flexible")
        services.make_forecasts(NOW)
        assert plans.expect(NOW, {}).tokens_per_s[PLACE].tolist() == [1300.0] * 5
        Forecast.objects.exclude(slo_class="").update(mean=[9e9] * 5)
        assert plans.expect(NOW, {}).tokens_per_s[PLACE].tolist() == [1300.0] * 5
        Forecast.objects.filter(slo_class="").delete()
        assert "no forecast yet" in plans.expect(NOW, {}).notes[PLACE]

    def test_before_the_first_forecast_the_last_minutes_stand_in(self, make_minutes):
        make_minutes(3)
        expected = plans.expect(NOW, {})
        assert expected.tokens_per_s[PLACE].tolist() == [1200.0] * 5
        assert "no forecast yet" in expected.notes[PLACE]
        assert expected.prompt_share(PLACE[0]) == pytest.approx(1000 / 1200)

    def test_nothing_known_is_not_no_demand(self, deployment):
        assert plans.expect(NOW, {}) is None

    def test_nor_is_a_first_minute_that_was_not_counted_from_its_begin(self, make_minutes):
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
        services.make_forecasts(NOW)

    def test_a_plan_is_a_row_with_all_that_it_was_made_from(self, busy, language_model):
        policy(language_model, PolicyMode.SHADOW)
        (row,) = services.make_plans(NOW)
        (target,) = row.targets
        assert (target["region"], target["gpu_type"], target["present"]) == ("us-east", "a100-80gb", 1)
        assert target["target"] > 1
        needed = target["demand_tokens_per_s"] / target["capability_tokens_per_s"]
        assert target["target"] == min(3, np.ceil(needed))
        assert target["reason"]
        assert row.valid_until == NOW + timedelta(hours=2)  # two periods of plans
        assert (row.strategy, row.status) == ("lt_ua", PlanStatus.SHADOW)
        assert row.inputs["demand_tokens_per_s"]["us-east"] == [pytest.approx(30_000, rel=0.01)] * 5
        assert row.inputs["capability_tokens_per_s"]["a100-80gb"]["source"] == "profile"
        assert row.inputs["bounds"] == {"us-east a100-80gb": [1, 3]}
        assert row.cost_usd_per_hour_before == pytest.approx(2 * 1.35)
        assert row.cost_usd_per_hour_after == pytest.approx(2 * 1.35 * target["target"])
        assert row.solver
        assert row.solve_ms > 0

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
        (row,) = services.make_plans(NOW)
        assert row.status == status
        assert row.carried_out_at is None  # nothing has been moved yet
        assert Event.objects.filter(kind="plan.in_force").exists() == (status == PlanStatus.IN_FORCE)

    def test_a_plan_that_its_strategy_did_not_carry_out_says_so_and_why(self, busy, language_model):
        policy(language_model, PolicyMode.AUTO, "lt_ua")
        (first,) = services.make_plans(NOW)
        Deployment.objects.update(max_instances=2)
        (second,) = services.make_plans(NOW + timedelta(minutes=1))
        first.refresh_from_db()
        assert (first.status, second.status) == (PlanStatus.SUPERSEDED, PlanStatus.IN_FORCE)
        wanted = first.targets[0]["target"] - 1
        assert first.note.startswith(f"0 of {wanted} moves made; LT-UA adds only while use is above 70 %")

    def test_a_plan_in_force_that_the_next_repeats_goes_on(self, busy, language_model, make_instance, node):
        """Also when its strategy has added one meanwhile: three are wanted, of which there was one at first."""
        policy(language_model, PolicyMode.AUTO, "lt_ua")
        (first,) = services.make_plans(NOW)
        assert first.targets[0]["target"] == 3
        make_instance(node=node)
        (second,) = services.make_plans(NOW + timedelta(minutes=1))
        assert (second.pk, second.status) == (first.pk, PlanStatus.IN_FORCE)
        assert (second.targets[0]["present"], second.targets[0]["target"]) == (1, 3)
        assert second.made_at > first.made_at
        make_instance(node=node)
        (third,) = services.make_plans(NOW + timedelta(minutes=2))
        first.refresh_from_db()
        assert (first.status, third.status) == (PlanStatus.CARRIED_OUT, PlanStatus.CARRIED_OUT)
        assert "nothing to move" in third.note

    def test_a_plan_is_valid_until_its_successor_may_be_late(self, busy, language_model, settings):
        settings.PLAN_EVERY_S = 60.0
        policy(language_model, PolicyMode.AUTO)
        (row,) = services.make_plans(NOW)
        assert row.valid_until == NOW.replace(second=0) + timedelta(minutes=5)  # the end of its forecast
        settings.PLAN_EVERY_S = 600.0
        (row,) = services.make_plans(NOW)
        assert row.valid_until == NOW + timedelta(minutes=20)

    def test_an_approved_plan_that_the_next_repeats_goes_on(self, busy, language_model, operator):
        policy(language_model, PolicyMode.ASK)
        (first,) = services.make_plans(NOW)
        ScalingPlan.objects.update(status=PlanStatus.IN_PROGRESS)
        (second,) = services.make_plans(NOW + timedelta(minutes=1))
        assert (second.pk, second.status) == (first.pk, PlanStatus.IN_PROGRESS)
        assert second.valid_until > first.valid_until

    def test_a_model_that_is_off_or_has_no_policy_is_not_planned(self, busy, language_model):
        assert services.make_plans(NOW) == []
        policy(language_model, PolicyMode.OFF)
        assert services.make_plans(NOW) == []

    def test_a_newer_plan_supersedes_an_open_one_and_leaves_decided_ones(self, busy, language_model):
        policy(language_model, PolicyMode.SHADOW)
        (first,) = services.make_plans(NOW)
        applied = ScalingPlan.objects.create(
            model=language_model, strategy="x", status=PlanStatus.CARRIED_OUT, valid_until=NOW
        )
        services.make_plans(NOW + timedelta(minutes=1))
        first.refresh_from_db()
        applied.refresh_from_db()
        assert (first.status, applied.status) == (PlanStatus.SUPERSEDED, PlanStatus.CARRIED_OUT)

    def test_advice_that_would_be_the_same_stays_the_same_row(self, busy, language_model):
        policy(language_model, PolicyMode.ASK)
        (first,) = services.make_plans(NOW)
        (second,) = services.make_plans(NOW + timedelta(minutes=1))
        assert first.pk == second.pk
        first.refresh_from_db()
        assert first.valid_until == NOW + timedelta(hours=2, minutes=1)
        assert first.made_at == NOW + timedelta(minutes=1)

    def test_nothing_to_do_is_no_advice(self, make_minutes, make_instance, language_model):
        make_instance()
        make_minutes(40)
        services.make_forecasts(NOW)
        policy(language_model, PolicyMode.ASK)
        (row,) = services.make_plans(NOW)
        assert row.status == PlanStatus.CARRIED_OUT
        assert row.note.startswith("nothing to move")

    def test_what_nobody_can_value_is_not_planned_away(self, busy, language_model, profile, caplog):
        policy(language_model, PolicyMode.AUTO)
        profile.delete()
        assert services.make_plans(NOW) == []
        assert "no capability from profile or ledger" in caplog.text

    def test_demand_beyond_all_capacity_is_said(self, make_minutes, make_instance, language_model, node):
        make_instance(node=node)
        make_minutes(40, prompt=60 * 100_000)
        services.make_forecasts(NOW)
        policy(language_model, PolicyMode.SHADOW)
        (row,) = services.make_plans(NOW)
        assert row.targets[0]["target"] == 3
        assert "tokens/s cannot be served anywhere" in row.note


class TestInventory:
    def other_place(self, language_model, gpu_type, profile):
        """A second region, in which another model shares the GPUs."""
        west = Region.objects.create(name="us-west", title="US West")
        other = Model.objects.create(
            name="other", title="Other", weights_bytes=10**10, kv_bytes_per_token=10**5, context_tokens=4096
        )
        values = {"region": west, "gpu_type": gpu_type, "tensor_parallel": 2, "min_instances": 0, "max_instances": 4}
        return west, Deployment.objects.create(model=other, **values), other

    def problem(self, fleet, **tokens):
        theta = {(model, gpu): 1000.0 for model, _, gpu in fleet.deployments}
        demands = {place: np.array([500.0]) for place in {(model, region) for model, region, _ in fleet.deployments}}
        return inventory.problem_of(fleet, demands, {}, theta, timedelta(hours=1), 0.8)

    def test_gpus_of_nodes_are_the_capacity_and_what_others_hold_is_not(self, make_instance, node, deployment):
        make_instance(node=node), make_instance(node=node, state=S.FAILED), make_instance(node=node, state=S.DRAINING)
        fleet = inventory.read({PLACE[0]})
        assert fleet.present == {(*PLACE, "a100-80gb"): 1}
        assert fleet.units == {("us-east", "a100-80gb"): 6}
        assert inventory.read(set()).deployments == {}

    def test_a_model_is_never_planned_where_it_is_not_deployed(
        self, make_instance, node, deployment, language_model, gpu_type, profile
    ):
        west, _, _ = self.other_place(language_model, gpu_type, profile)
        Node.objects.create(name="west-1", region=west, gpu_type=gpu_type, gpu_count=8)
        planned = self.problem(inventory.read({PLACE[0], "other"}))
        problem = planned.problem
        i, j = problem.models.index(PLACE[0]), problem.regions.index("us-west")
        assert problem.models == ("llama-3.1-8b", "other")
        for k in range(len(problem.gpu_types)):
            assert problem.capability_tokens_per_s[i, k] == 0 or problem.capacity[j, k] == 0
        plan = plans.solve(problem)
        assert not plan.targets[i, j].any()
        assert plan.targets[problem.models.index("other"), j].sum() == 1

    def test_more_instances_than_the_nodes_hold_is_no_error(self, make_instance, node):
        for _ in range(3):
            make_instance()
        Node.objects.update(gpu_count=2)
        problem = self.problem(inventory.read({PLACE[0]})).problem
        assert problem.capacity.tolist() == [[6]]

    def test_without_nodes_the_bounds_are_the_capacity(self, make_instance, node):
        node.delete()
        assert self.problem(inventory.read({PLACE[0]})).problem.capacity.tolist() == [[6]]

    def test_a_sleeping_instance_is_the_nearest_spare_one(self, make_instance, node):
        make_instance(node=node), make_instance(node=node, state=S.SLEEPING)
        problem = self.problem(inventory.read({PLACE[0]})).problem
        assert (problem.instances.tolist(), problem.spot.tolist()) == ([[[1]]], [[[1]]])
