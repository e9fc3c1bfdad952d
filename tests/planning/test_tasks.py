"""What beat runs: each when it is due, one at a time, and a failure of one is said and leaves the others."""

from datetime import timedelta

import pytest
from django.conf import settings as real_settings
from django.utils import timezone

from controlplane.jobs.models import JobRow
from controlplane.planning import services
from controlplane.planning.forecasts import services as forecast_services
from controlplane.planning.models import Forecast, PlanStatus, ScalingPlan, ScalingPolicy
from controlplane.planning.plans import services as plan_services
from controlplane.simulation.whatif.models import Future, FutureSeed, WhatIf, WhatIfState
from workers.tasks import planning as tasks

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def state(settings, tmp_path):
    settings.STATE_DIR = tmp_path


@pytest.fixture
def made(monkeypatch):
    """Return the plans that would be made: names in order; `made.error` lets the solver fail."""

    class Made(list):
        error = models = None

    calls = Made()

    def make(what):
        def run(now, models=None):
            calls.append(what)
            calls.models = models
            if calls.error and what == "plans":
                raise calls.error
            return []

        return run

    monkeypatch.setattr(forecast_services, "make_forecasts", make("forecasts"))
    monkeypatch.setattr(plan_services, "make_plans", make("plans"))
    return calls


def forecast(**ago):
    values = {"model": "m", "region": "r", "quantity": "prompt", "forecaster": "x", "window_s": 60}
    return Forecast.objects.create(made_at=timezone.now() - timedelta(**ago), start_at=timezone.now(), **values)


def policy(model, strategy="x"):
    ScalingPolicy.objects.create(model=model, strategy=strategy)
    ScalingPolicy.objects.update(changed_at=timezone.now() - timedelta(days=9))


def plan(model, **ago):
    return ScalingPlan.objects.create(
        model=model, strategy="x", made_at=timezone.now() - timedelta(**ago), valid_until=timezone.now()
    )


class TestSchedule:
    def test_both_are_made_at_first(self, made):
        tasks.forecast_and_plan()
        assert made == ["forecasts", "plans"]

    def test_and_then_when_they_are_due(self, made, settings, language_model):
        settings.FORECAST_EVERY_S, settings.PLAN_EVERY_S = 600.0, 3600.0
        policy(language_model)
        forecast(minutes=5)
        plan(language_model, minutes=50)
        tasks.forecast_and_plan()
        assert made == []
        Forecast.objects.update(made_at=timezone.now() - timedelta(minutes=10))
        tasks.forecast_and_plan()
        assert made == ["forecasts"]
        ScalingPlan.objects.update(made_at=timezone.now() - timedelta(minutes=59, seconds=50))
        tasks.forecast_and_plan()
        assert made == ["forecasts", "forecasts", "plans"]

    @pytest.mark.parametrize(
        ("strategy", "minutes", "made_again"),
        [("lt_ua", 59, False), ("lt_ua", 60, True), ("pilothouse", 19, False), ("pilothouse", 20, True),
         ("preserve", 9, False), ("preserve", 10, True)],
    )  # fmt: skip
    def test_each_strategy_has_its_own_period(self, made, language_model, strategy, minutes, made_again):
        forecast()
        policy(language_model, strategy)
        plan(language_model, minutes=minutes)
        tasks.forecast_and_plan()
        assert made == ["plans"] * made_again
        assert made.models == ({language_model.name} if made_again else None)

    def test_a_new_policy_is_planned_at_once_and_alone(self, made, language_model):
        other = type(language_model).objects.create(
            name="other", context_tokens=4096, weights_bytes=1, kv_bytes_per_token=1
        )
        forecast()
        for each in (language_model, other):
            policy(each, "lt_ua")
            plan(each, minutes=5)
        services.set_policy(other, "preserve", "shadow", {}, "a test")
        tasks.forecast_and_plan()
        assert (list(made), made.models) == (["plans"], {"other"})

    def test_plans_wait_for_forecasts_in_the_making_and_not_for_long(self, made, settings, language_model):
        settings.PLAN_EVERY_S = 600.0
        policy(language_model)
        plan(language_model, minutes=11)
        with tasks.only_one("forecasts"):
            tasks.forecast_and_plan()
            assert made == []
            ScalingPlan.objects.update(made_at=timezone.now() - timedelta(minutes=15))
            tasks.forecast_and_plan()
        assert made == ["plans"]

    def test_the_first_plans_wait_for_the_first_forecasts(self, made):
        with tasks.only_one("forecasts"):
            tasks.forecast_and_plan()
        assert made == []

    def test_a_second_worker_does_not_do_the_same_at_the_same_time(self, made):
        with tasks.only_one("forecasts") as free, tasks.only_one("plans"):
            assert free
            tasks.forecast_and_plan()
        assert made == []
        tasks.forecast_and_plan()
        assert made

    def test_a_solver_that_fails_is_counted_said_once_and_costs_no_forecast(self, made, caplog):
        made.error = ArithmeticError("unbounded")
        tasks.forecast_and_plan()
        tasks.forecast_and_plan()
        assert made == ["forecasts", "plans"] * 2
        plans, forecasts = JobRow.objects.get(pk="plans"), JobRow.objects.get(pk="forecasts")
        assert (plans.failures_in_a_row, plans.last_error) == (2, "ArithmeticError: unbounded")
        assert plans.last_success_at is None
        assert forecasts.last_success_at is not None
        assert forecasts.failures_total == 0
        assert caplog.text.count("Traceback") == 1
        made.error = None
        tasks.forecast_and_plan()
        plans.refresh_from_db()
        assert (plans.failures_in_a_row, plans.failures_total, plans.failing_since) == (0, 2, None)

    def test_every_task_of_the_schedule_is_there_and_goes_to_a_queue_that_is_worked_on(self):
        from workers.celery import app as celery_app

        celery_app.loader.import_default_modules()
        scheduled = {entry["task"] for entry in real_settings.CELERY_BEAT_SCHEDULE.values()}
        assert scheduled <= set(celery_app.tasks)
        assert {name for name in celery_app.tasks if name.startswith("workers.tasks.planning.")} <= scheduled
        queues = {route["queue"] for route in real_settings.CELERY_TASK_ROUTES.values()}
        assert queues <= {"control", "simulation"}
        assert set(real_settings.CELERY_TASK_ROUTES) <= set(celery_app.tasks)


class TestPruning:
    def test_forecasts_and_plans_never_carried_out_are_deleted_and_history_stays(self, language_model, settings):
        settings.PLANNING_KEEP_DAYS, settings.FORECAST_KEEP_HOURS, settings.FORECAST_EVERY_S = 2.0, 3.0, 3.5 * 3600
        forecast(hours=8), forecast(hours=6)
        for status in PlanStatus:
            old = plan(language_model, days=3)
            ScalingPlan.objects.filter(pk=old.pk).update(status=status)
        plan(language_model, days=1)
        assert tasks.prune_planning() == 1 + 3
        assert Forecast.objects.count() == 1
        left = set(ScalingPlan.objects.values_list("status", flat=True))
        assert left == {"advice", "approved", "in_progress", "in_force", "carried_out", "expired"}


class TestRequestedWork:
    def test_periodic_work_ends_for_runs_of_a_what_if(self, db):
        what_if = WhatIf.objects.create(title="a", state=WhatIfState.RUNNING, submitted_at=timezone.now())
        future = Future.objects.create(what_if=what_if, letter="A", name="As now")
        run = FutureSeed.objects.create(future=future, seed=1, state=WhatIfState.QUEUED)
        assert tasks.requested_work_waits()
        WhatIf.objects.update(nightly=True)
        assert not tasks.requested_work_waits()
        WhatIf.objects.update(nightly=False)
        FutureSeed.objects.filter(pk=run.pk).update(state=WhatIfState.RUNNING)
        assert not tasks.requested_work_waits()
