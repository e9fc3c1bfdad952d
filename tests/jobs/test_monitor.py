"""What the web process knows of jobs and parts: late, failing, and whose fault it is."""

import time

import pytest
from django.utils import timezone

from controlplane.jobs import schedule
from controlplane.jobs.models import JobRow
from controlplane.jobs.monitor import SETTLE_S, Monitor
from controlplane.jobs.parts import Part, PartState
from controlplane.jobs.record import Jobs

pytestmark = pytest.mark.django_db(transaction=True)


class Watched:
    """A monitor over jobs and parts that a test moves, and a clock that it sets."""

    def __init__(self, monkeypatch) -> None:
        self.jobs, self.now = Jobs(), float(int(time.time()))  # rows have microseconds
        self.own = self.jobs.add("floor", 1.0)
        self.states = {"redis": PartState.OK, "celery": PartState.OK, "database": PartState.OK, "beat": PartState.OK}
        clock = type("Clock", (), {"time": lambda _: self.now, "perf_counter": staticmethod(time.perf_counter)})()
        for name in ("monitor", "parts", "record"):
            monkeypatch.setattr(f"controlplane.jobs.{name}.time", clock)
        self.monitor = Monitor(self.jobs, lambda: [Part(name, state) for name, state in self.states.items()])

    def celery_ran(self) -> None:
        at = timezone.datetime.fromtimestamp(self.now, timezone.get_current_timezone())
        for name in schedule.periods():
            JobRow.objects.update_or_create(pk=name, defaults={"last_success_at": at})

    async def bad(self, *, quiet: bool = False) -> set[str]:
        """Names of the jobs that are late or failing, by their own fault or, if *quiet*, by that of a part."""
        with self.monitor.job:
            await self.monitor.read()
        assert self.monitor.job.ok, self.monitor.job.last_error
        jobs = self.monitor.report()["jobs"]
        return {job["name"] for job in jobs if job["state"] in ("late", "failing") and job["quiet"] == quiet}


@pytest.fixture
def watched(monkeypatch) -> Watched:
    made = Watched(monkeypatch)
    made.celery_ran()
    made.own.succeeded()
    return made


async def test_a_failing_job_until_it_succeeds(watched):
    assert await watched.bad() == set()
    for _ in range(40):
        watched.own.failed(IndexError("out of range"))
    watched.now += 30
    assert await watched.bad() == {"floor"}
    watched.own.succeeded()
    assert await watched.bad() == set()


async def test_jobs_that_celery_does_not_run_are_late_without_a_writer(watched):
    """The workers answer and run nothing, as when beat sends to a queue that nobody reads."""
    watched.now += 70
    watched.own.succeeded()
    late = await watched.bad()
    assert {"advance-rollouts", "advance-swaps", "end-failed"} <= late
    assert "prune-ledger" not in late


async def test_what_a_dead_part_delays_is_the_parts_trouble_until_it_had_time_to_run(watched):
    watched.states["celery"] = PartState.DOWN
    watched.now += 120
    watched.own.succeeded()
    assert await watched.bad() == set()
    assert "advance-rollouts" in await watched.bad(quiet=True)
    watched.states["celery"] = PartState.OK
    for after_s, bad in ((SETTLE_S - 1, False), (2, True)):
        watched.now += after_s
        watched.own.succeeded()
        assert bool(await watched.bad()) is bad
