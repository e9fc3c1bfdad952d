"""What housekeeping takes away, what it leaves, and that beat runs it."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.conf import settings
from django.contrib.sessions.models import Session
from django.utils import timezone

from controlplane.accounts.models import SignInLink, Tenant, User
from controlplane.accounts.services import create_sign_in_link
from controlplane.fleet.models import SloClass, SloKind
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.jobs.models import JobRow
from controlplane.jobs.schedule import HOURLY
from workers.celery import app as celery_app
from workers.tasks import housekeeping, pruning, tick


@pytest.fixture
def tenant(db) -> Tenant:
    slo_class = SloClass.objects.create(name="interactive", title="Interactive", kind=SloKind.INTERACTIVE)
    return Tenant.objects.create(name="acme", default_slo_class=slo_class)


def rows(tenant: Tenant, count: int, age: timedelta) -> None:
    LedgerRow.objects.bulk_create(
        LedgerRow(
            request_id=f"{age.days}-{number}",
            arrived_at=timezone.now() - age,
            tenant=tenant,
            model="m",
            slo_class="interactive",
            streamed=True,
            outcome=Outcome.DONE,
            status_code=200,
        )
        for number in range(count)
    )


@pytest.mark.sql
def test_old_ledger_rows_go_in_batches(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "BATCH_ROWS", 2)
    pauses: list[float] = []
    monkeypatch.setattr(housekeeping.time, "sleep", pauses.append)
    rows(tenant, 5, timedelta(days=settings.LEDGER_KEEP_DAYS, minutes=1))
    rows(tenant, 3, timedelta(days=settings.LEDGER_KEEP_DAYS - 1))
    assert housekeeping.prune_ledger() == 5
    assert len(pauses) == 2
    assert LedgerRow.objects.count() == 3
    assert housekeeping.prune_ledger() == 0


def test_one_run_is_bounded_by_time_and_takes_the_oldest(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch takes a second of a clock that only batches and pauses move."""
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 0.5
        return now_s[0]

    monkeypatch.setattr(housekeeping, "BATCH_ROWS", 1)
    monkeypatch.setattr(housekeeping, "RUN_S", 2.0)
    monkeypatch.setattr(housekeeping, "time", SimpleNamespace(monotonic=clock, sleep=lambda s: None))
    for days in (1, 3, 2):
        rows(tenant, 1, timedelta(days=settings.LEDGER_KEEP_DAYS + days))
    assert housekeeping.prune_ledger() == 2
    assert LedgerRow.objects.get().request_id == f"{settings.LEDGER_KEEP_DAYS + 1}-0"


def test_retention_keeps_up_with_2000_rows_a_second() -> None:
    """A run that is due each minute has no bound but its time, which leaves no gap to the next one."""
    _, period_s = settings.PERIODIC_TASKS["prune"]
    assert period_s * 0.5 < housekeeping.RUN_S < period_s


def test_links_and_sessions_out_of_date_go(db) -> None:
    user = User.objects.create(username="ada")
    create_sign_in_link(user)
    create_sign_in_link(user, lifetime=timedelta(hours=-2))
    create_sign_in_link(user, lifetime=timedelta(days=-2))
    for days in (-1, 1):
        Session.objects.create(session_key=f"s{days}", expire_date=timezone.now() + timedelta(days=days))
    assert housekeeping.prune_sign_ins() == 1
    assert SignInLink.objects.count() == 2
    assert Session.objects.get().session_key == "s1"


@pytest.mark.parametrize(("made", "steps"), [(tick, tick.tick), (pruning, pruning.prune)])
def test_a_step_that_fails_is_recorded_and_the_others_are_done(
    db, made, steps, monkeypatch, settings, tmp_path
) -> None:
    settings.STATE_DIR = tmp_path
    done: list[str] = []

    def fails() -> None:
        raise IndexError("out of range")

    names = list(made.STEPS)
    fake = {name: (lambda name=name: done.append(name)) for name in names} | {names[0]: fails}
    monkeypatch.setattr(made, "STEPS", fake)
    steps.apply()
    assert done == names[1:]
    failed = JobRow.objects.get(pk=names[0])
    assert (failed.failures_in_a_row, failed.last_error) == (1, "IndexError: out of range")
    assert JobRow.objects.filter(last_success_at__isnull=False).count() == len(names) - 1
    assert set(names) == set(settings.JOBS_WITHIN_TASKS[{tick: "fleet-tick", pruning: "prune"}[made]])
    done.clear()
    steps.apply()
    assert done == [name for name in names[1:] if name not in HOURLY]


def test_a_tick_may_be_of_one_step(db, monkeypatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(tick, "STEPS", {name: (lambda name=name: done.append(name)) for name in "ab"})
    tick.tick.apply(("b",))
    assert done == ["b"]


def test_every_periodic_task_exists_and_expires() -> None:
    celery_app.loader.import_default_modules()
    for name, entry in settings.CELERY_BEAT_SCHEDULE.items():
        assert entry["task"] in celery_app.tasks, name
        assert entry["options"]["expires"] <= entry["schedule"], name
