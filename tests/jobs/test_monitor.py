"""The web process notices by itself: one event when something begins, one when it is over."""

import time

import pytest
from django.db import OperationalError
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.jobs import monitor as module
from controlplane.jobs import schedule
from controlplane.jobs.models import JobRow
from controlplane.jobs.monitor import Monitor
from controlplane.jobs.parts import Part, PartState
from controlplane.jobs.record import Jobs

pytestmark = pytest.mark.django_db(transaction=True)


class Watched:
    """A monitor over jobs and parts that a test moves, and a clock that it sets."""

    def __init__(self, monkeypatch) -> None:
        self.jobs = Jobs()
        self.ledger = self.jobs.add("flush-ledger", 0.5, "database")
        self.floor = self.jobs.add("floor", 1.0)
        self.states = {"redis": PartState.OK, "celery": PartState.OK, "database": PartState.OK, "beat": PartState.OK}
        self.leads = True
        self.now = time.time()
        clock = type("Clock", (), {"time": lambda _: self.now, "perf_counter": staticmethod(time.perf_counter)})()
        for name in ("monitor", "parts", "record"):
            monkeypatch.setattr(f"controlplane.jobs.{name}.time", clock)
        # Celery's jobs, done at this moment of the real clock.
        self.fresh()
        self.monitor = self.restarted()

    def restarted(self) -> Monitor:
        return Monitor(
            self.jobs, lambda: [Part(n, s, f"{n} is {s}") for n, s in self.states.items()], lambda: self.leads
        )

    def fresh(self) -> None:
        at = timezone.datetime.fromtimestamp(self.now, timezone.get_current_timezone())
        for name in schedule.periods():
            JobRow.objects.update_or_create(pk=name, defaults={"last_success_at": at})

    async def pass_s(self, seconds: float, celery: bool = True) -> None:
        """Let time pass, with all jobs done each second but those that a test has broken."""
        from channels.db import database_sync_to_async

        until = self.now + seconds
        while self.now < until:
            self.now += min(5.0, until - self.now)
            for job in (self.ledger, self.floor):
                if job.ok:
                    job.succeeded()
            if celery:
                await database_sync_to_async(self.fresh)()
            with self.monitor.job:
                await self.monitor.look()

    async def events(self) -> list[tuple[str, str]]:
        from channels.db import database_sync_to_async

        rows = await database_sync_to_async(lambda: list(Event.objects.order_by("pk")))()
        return [(row.kind, row.subject) for row in rows]


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


def bad(watched) -> set[str]:
    return {job["name"] for job in watched.monitor.report()["jobs"] if job["state"] in ("late", "failing")}


async def test_nothing_happens_while_all_is_well(watched):
    await watched.pass_s(30)
    assert await watched.events() == []
    assert bad(watched) == set()


async def test_a_failing_job_is_one_event_and_its_recovery_another(watched):
    await watched.pass_s(10)
    for _ in range(40):
        watched.floor.failed(IndexError("out of range"))
    await watched.pass_s(60)
    assert await watched.events() == [("job.failing", "floor")]
    assert bad(watched) == {"floor"}
    watched.floor.succeeded()
    await watched.pass_s(10)
    assert await watched.events() == [("job.failing", "floor"), ("job.recovered", "floor")]


async def test_a_restarted_process_does_not_say_it_again(watched):
    await watched.pass_s(10)
    watched.floor.failed(IndexError("out of range"))
    await watched.pass_s(30)
    watched.monitor = watched.restarted()
    await watched.pass_s(30)
    assert await watched.events() == [("job.failing", "floor")]


async def test_jobs_that_celery_does_not_run_are_late_without_a_writer(watched):
    """The workers answer and run nothing, as when beat sends to a queue that nobody reads."""
    await watched.pass_s(10)
    await watched.pass_s(70, celery=False)
    late = {subject for kind, subject in await watched.events() if kind == "job.late"}
    assert {"advance-rollouts", "advance-swaps", "end-failed"} <= late
    assert "prune-ledger" not in late
    await watched.pass_s(10)
    assert {subject for kind, subject in await watched.events() if kind == "job.recovered"} == late


async def test_a_dead_worker_is_one_event_and_not_one_of_each_job(watched):
    await watched.pass_s(10)
    watched.states["celery"] = PartState.DOWN
    await watched.pass_s(120, celery=False)
    assert await watched.events() == [("part.down", "part celery")]
    assert "advance-rollouts" in bad(watched)  # the page still says so
    assert all(job["quiet"] for job in watched.monitor.report()["jobs"] if job["state"] == "late")
    watched.states["celery"] = PartState.OK
    await watched.pass_s(90)
    assert await watched.events() == [("part.down", "part celery"), ("part.recovered", "part celery")]


async def test_a_part_that_is_back_in_seconds_is_no_event(watched):
    await watched.pass_s(10)
    watched.states["redis"] = PartState.DOWN
    await watched.pass_s(6)
    watched.states["redis"] = PartState.OK
    await watched.pass_s(90)
    assert await watched.events() == []


async def test_what_happens_while_the_database_is_away_is_written_when_it_is_back(watched, monkeypatch):
    await watched.pass_s(10)
    with monkeypatch.context() as patch:
        patch.setattr(module.selectors, "celery_records", gone)
        patch.setattr(module, "write_notice", gone)
        watched.floor.failed(IndexError("out of range"))
        watched.states["database"] = PartState.DOWN
        await watched.pass_s(40)
    assert await watched.events() == []
    assert watched.monitor.job.failures_in_a_row > 1
    await watched.pass_s(10)
    assert set(await watched.events()) == {("job.failing", "floor"), ("part.down", "part database")}


def gone(*_):
    raise OperationalError("unable to open database file")


async def test_a_process_that_stands_by_writes_nothing(watched):
    watched.leads = False
    await watched.pass_s(10)
    watched.floor.failed(IndexError("out of range"))
    await watched.pass_s(30)
    assert await watched.events() == []
    assert bad(watched) == {"floor"}
