"""A setting that is changed is in force without a restart: in a running gateway, in Celery's tasks, and in beat."""

from datetime import timedelta

import pytest
from celery import Celery
from channels.db import database_sync_to_async
from django.utils import timezone

from controlplane.fleet.models import Model
from controlplane.jobs import schedule
from controlplane.planning.models import Forecast, ScalingPlan, ScalingPolicy
from controlplane.tuning import selectors, services
from controlplane.tuning.selectors import tuned
from tests.gateway.conftest import gateway_options, served, until  # noqa: F401 (fixtures)
from workers.beat import Scheduler
from workers.tasks import planning as tasks


@pytest.mark.asyncio
async def test_a_running_gateway(served, monkeypatch):  # noqa: F811
    gateway = served.gateway
    assert gateway.dispatching.topology.tuned.FLOOR
    assert gateway.lengths.cache is not None

    def change():
        services.change("FLOOR", False, "test")
        services.change("MAX_HOLD_S", 5.0, "test")
        services.change("LENGTH_BUDGET_MS", 50.0, "test")
        services.change("LENGTH_BUDGET_MS", 70.0, "test", model=Model.objects.get(name="m"))
        services.change("LENGTH_CACHE_ENTRIES", 0, "test")
        services.change("SPILL_ABOVE", 0.4, "test", model=Model.objects.get(name="m"))
        services.change("SCALE_EASE_S", 7.0, "test")
        services.change("LOOKAHEAD_ITERATIONS", 300, "test", model=Model.objects.get(name="m"))
        services.change("LOOKAHEAD_OVERLOAD_ABOVE", 0.6, "test")

    await database_sync_to_async(change)()
    gateway.dispatching.refresh_now()
    await until(lambda: not gateway.dispatching.topology.tuned.FLOOR)
    assert gateway.dispatching.topology.tuned.MAX_HOLD_S == 5.0
    lengths = gateway.lengths
    assert (lengths.budget_s("m"), lengths.budget_s("other"), lengths.cache) == (0.07, 0.05, None)
    (endpoint,) = gateway.dispatching.topology.endpoints
    assert (endpoint.spec.policy.region_threshold, endpoint.spec.tuned.SCALE_EASE_S) == (0.4, 7.0)
    (slot,) = (replica.slot for replica in gateway.dispatching.topology.members(endpoint))
    assert gateway.dispatching.topology.fleet.look_ahead[slot].tolist() == [300.0, 0.8, 1.0, 0.6, 0.1]
    assert (await served.chat()).status == 200

    # Nothing on the event loop reads rows: a request is served with the reader out of order.
    monkeypatch.setattr(selectors, "read", None)
    assert (await served.chat()).status == 200


@pytest.mark.django_db
def test_a_task_of_celery(tmp_path, settings, monkeypatch, language_model):
    settings.STATE_DIR = tmp_path
    now = timezone.now()
    Forecast.objects.create(
        made_at=now - timedelta(minutes=5), model="m", region="r", quantity="prompt", forecaster="x", window_s=60,
        start_at=now,
    )  # fmt: skip
    ScalingPlan.objects.create(model=language_model, made_at=now - timedelta(minutes=5), valid_until=now)
    ScalingPolicy.objects.create(model=language_model, strategy="lt_ua")
    ScalingPolicy.objects.update(changed_at=now - timedelta(days=1))
    made = []
    monkeypatch.setattr(tasks.forecasts, "make_forecasts", lambda now: made.append("forecasts") or [])
    monkeypatch.setattr(tasks.plans, "make_plans", lambda now, models: made.append("plans") or [])
    tasks.forecast_and_plan()
    assert made == []
    services.change("FORECAST_EVERY_S", 240, "test")
    tasks.forecast_and_plan()
    assert made == ["forecasts"]
    services.change("PLAN_EVERY_S", 240, "test")
    tasks.forecast_and_plan()
    assert made == ["forecasts", "forecasts", "plans"]
    assert schedule.periods()["plans"] == 240


@pytest.mark.django_db
def test_the_periods_of_beat(tmp_path, settings, caplog):
    app = Celery("test", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.beat_schedule = settings.CELERY_BEAT_SCHEDULE
    beat = Scheduler(app, schedule_filename=str(tmp_path / "schedule"))
    sent = []
    beat.__dict__["producer"] = None  # it would connect
    beat.apply_async = lambda entry, **_: sent.append((entry.name, entry.options["expires"]))
    services.change("FORECAST_EVERY_S", 180.0, "test")
    beat.take_up_periods()
    for entry in beat.schedule.values():
        entry.last_run_at = entry.default_now() - timedelta(seconds=10)
    while beat.tick() == 0:
        pass
    assert "fleet-tick" in {name for name, _ in sent}
    assert "forecast-and-plan" not in {name for name, _ in sent}
    assert schedule.periods()["forecasts"] == 180.0

    sent.clear()
    services.change("FORECAST_EVERY_S", 12.0, "test")
    while beat.tick() == 0:  # long before it would have been due
        pass
    assert ("forecast-and-plan", 2.0) in sent
    assert schedule.beat_periods()["forecast-and-plan"] == 2.0 == tuned().FORECAST_EVERY_S / 6
    assert beat.tick() <= 1.0
    beat.close()
