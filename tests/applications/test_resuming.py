"""Runs in progress are followed on from the ledger after a restart, and by a process that takes the regions over."""

from datetime import timedelta

import numpy as np
import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.utils import timezone

from controlplane.applications import feeding
from controlplane.applications.feeding import GraphFeeder, calls_in_progress
from controlplane.applications.models import Application, ApplicationRun, RunOutcome
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.port import RunReport
from scheduling.applications.demand_graph import ServiceRate
from scheduling.applications.standings import PastCall, RunCall
from scheduling.fleet.profile import USUAL
from tests.applications.conftest import write_run
from tests.console.conftest import ledger_row

pytestmark = pytest.mark.django_db
RATE = ServiceRate.of(USUAL)
"""Of a model that is not served."""


@pytest.fixture(autouse=True)
def one_connection(monkeypatch):
    """Reads keep the connection of the test, which has its rows, open."""
    monkeypatch.setattr(feeding, "database_sync_to_async", sync_to_async)


def dispatcher():
    return Dispatcher(Topology(), lambda: 0.0, deliver=lambda record: None)


def feeder(dispatcher, shards=lambda: ["shard 1"]):
    return GraphFeeder(dispatcher.runs, shards)


def test_a_second_process_goes_by_what_the_first_one_saw(acme, application, running):
    first, second = dispatcher(), dispatcher()
    (ended,) = calls_in_progress(timezone.now()).values()
    (written,) = ended
    assert (written.unit, written.output_tokens > 0) == ("write", True)
    for each in (first, second):
        async_to_sync(feeder(each).tick)(0.0)
    key, runs = (acme.pk, "review"), first.runs.standings
    assert key in second.runs.graphs
    runs.arrive(RunCall(0, key, "now", "write", 300, 9, RATE), -written.began_s)
    runs.end(0, written.output_tokens, -written.ended_s)

    assert async_to_sync(feeder(second).resume)() == 1
    before, after = (
        each.runs.standings.refreshed(
            each.runs.standings.arrive(
                RunCall(1, key, "now", "review", 2 * written.output_tokens, 9, RATE, 600.0), 0.0
            ),
            0.0,
        )
        for each in (first, second)
    )
    assert after.attained_s == before.attained_s > 0.0
    assert after.rank_s == pytest.approx(before.rank_s, rel=0.2)  # other walks of the graph
    assert after.began_s == pytest.approx(-written.began_s, abs=2.0)
    assert after.due_s == after.began_s + 600.0


def test_runs_are_resumed_when_a_process_takes_the_regions_and_not_before(acme, running):
    owner, owned = dispatcher(), [[], ["shard 1"], ["shard 1"], [], ["shard 1"], ["shard 1", "shard 2"]]
    resume = async_to_sync(feeder(owner, lambda: owned[0]).resume)
    resumed = []
    while owned:
        resumed.append(resume())
        owner.runs.standings.runs.clear()  # as if it knew none
        owned.pop(0)
    assert resumed == [0, 1, 0, 0, 1, 1], "once for each shard that is taken"


def test_only_runs_that_are_not_idle_and_calls_that_ended_count(acme):
    now = timezone.now()
    write_run(acme, "old", now - timedelta(minutes=8), np.random.default_rng(1), reviews=0)
    values = {"application": "review", "run": "new"}
    ledger_row(acme, arrived_at=now - timedelta(seconds=60), unit="write", **values)
    ledger_row(acme, arrived_at=now - timedelta(seconds=30), unit="review", outcome="failed", e2e_ms=None, **values)
    ledger_row(acme, arrived_at=now - timedelta(seconds=30))
    ended = calls_in_progress(now)
    assert list(ended) == [((acme.pk, "review"), "new")]
    assert [(one.unit, one.output_tokens) for one in ended[(acme.pk, "review"), "new"]] == [
        ("review", None),
        ("write", 40),
    ]


def test_a_call_of_a_model_that_is_served_no_longer_counts_by_a_usual_profile():
    owner = dispatcher()
    call = PastCall("write", 30.0, 20.0, 100, 50, model="gone", region="east")
    assert owner.runs.resume([((1, "review"), "now", [call])]) == 1
    assert owner.runs.standings.runs[(1, "review"), "now"].attained_s() > 0.0


def test_units_that_run_and_deadlines_are_known_after_a_restart(acme, running):
    now = timezone.now()
    ApplicationRun.objects.filter(pk=running.pk).update(opened=True, deadline_s=600.0)
    ended_at = now - timedelta(seconds=5)
    for name, began_s, ends in (("search-1", 9, ended_at), ("tests-1", 4, None), ("lint-1", 3, None)):
        running.reports.create(
            report=name,
            unit=name[:-2],
            kind="tool",
            backend="tool",
            began_at=now - timedelta(seconds=began_s),
            ended_at=ends,
        )
    owner, key = dispatcher(), (acme.pk, "review")
    async_to_sync(feeder(owner).resume)()
    run = owner.runs.standings.runs[key, "now"]
    open_units = {call.unit: number for number, (_, call) in run.calls.items()}
    assert set(open_units) == {"tests", "lint"}
    assert run.due_s == pytest.approx(600.0 - (now - running.began_at).total_seconds(), abs=2.0)
    assert [at for at, _ in owner.runs._units.values()] == [
        pytest.approx(-4.0, abs=2.0),
        pytest.approx(-3.0, abs=2.0),
    ], "oldest first"
    had_s = run.attained_s()
    assert had_s > 4.0, "four seconds of search, and the call that wrote"
    tests = running.reports.get(report="tests-1")
    owner.runs.report(RunReport("ended", *key, "now", tests.pk, "tests", 7.0))
    assert run.attained_s() == had_s + 7.0
    assert set(owner.runs._units) == {-running.reports.get(report="lint-1").pk}


def test_runs_that_were_stopped_are_refused_after_a_restart(acme, running):
    ApplicationRun.objects.filter(pk=running.pk).update(outcome=RunOutcome.STOPPED, closed_at=timezone.now())
    owner = dispatcher()
    async_to_sync(feeder(owner).resume)()
    assert owner.runs.is_stopped((acme.pk, "review"), "now")
    assert not owner.runs.is_stopped((acme.pk, "review"), "another")


@pytest.mark.parametrize(("unit", "resumed"), [("after-user", 1), ("write", 0)])
def test_a_session_of_an_agent_is_resumed_after_minutes(acme, unit, resumed):
    values = {"application": "claude-code", "run": "session", "unit": unit}
    ledger_row(acme, arrived_at=timezone.now() - timedelta(minutes=10), **values)
    Application.objects.create(tenant=acme, name="claude-code")
    assert async_to_sync(feeder(dispatcher()).resume)() == resumed
