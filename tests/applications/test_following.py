"""Runs are followed in the ledger, end when they are idle, and teach the application's demand graph."""

from datetime import timedelta

import numpy as np
import pytest
from django.utils import timezone

from controlplane.applications import services
from controlplane.applications.models import Application, ApplicationRun, RunOutcome
from controlplane.applications.selectors import graph_of, predictions, unit_summaries
from controlplane.gateway.models import LedgerRow
from scheduling.applications.demand_graph import DemandGraph
from tests.applications.conftest import learned, write_run
from tests.console.conftest import ledger_row

pytestmark = pytest.mark.django_db


def test_a_run_ends_when_it_is_idle_and_its_steps_are_kept(acme):
    now = timezone.now()
    write_run(acme, "one", now - timedelta(minutes=10), np.random.default_rng(1), reviews=2)
    assert services.follow_runs(now) == 1
    run = ApplicationRun.objects.get()
    assert (run.calls, run.failed_calls, run.application.name) == (3, 0, "review")
    assert [(step["unit"], step.get("parent", -1)) for step in run.steps] == [
        ("write", -1),
        ("review", 0),
        ("review", 1),
    ]
    assert run.application.units == {name: {"kind": "llm", "name": "llama-3.1-8b"} for name in ("write", "review")}
    assert services.follow_runs(now) == 0


def test_a_run_with_a_late_call_runs_again(acme):
    now = timezone.now()
    write_run(acme, "one", now - timedelta(minutes=10), np.random.default_rng(1), reviews=0)
    services.follow_runs(now)
    ledger_row(acme, arrived_at=now, application="review", run="one", unit="review")
    services.follow_runs(now)
    run = ApplicationRun.objects.get()
    assert (run.ended_at, run.calls, run.steps) == (None, 2, [])
    assert services.follow_runs(now + timedelta(minutes=5)) == 1
    run.refresh_from_db()
    assert len(run.steps) == 2


@pytest.mark.parametrize(
    ("units", "minutes", "ended"),
    [(("after-user", "after-tool"), 10, 0), (("after-user", "subagent"), 31, 1), (("write", "write"), 10, 1)],
)
def test_a_session_of_an_agent_waits_for_its_user(acme, units, minutes, ended):
    now = timezone.now()
    for number, unit in enumerate(units):
        arrived_at = now - timedelta(minutes=minutes, seconds=20 - number)
        ledger_row(acme, arrived_at=arrived_at, application="claude-code", run="session", unit=unit)
    assert services.follow_runs(now) == ended
    assert ApplicationRun.objects.get().calls == 2


def test_a_run_that_was_stopped_stays_so_when_its_refused_calls_are_seen(acme, running):
    now = timezone.now()
    ApplicationRun.objects.filter(pk=running.pk).update(outcome=RunOutcome.STOPPED, closed_at=now)
    late = {"application": "review", "run": "now", "unit": "review", "outcome": "rejected", "e2e_ms": 1.0}
    ledger_row(acme, arrived_at=now + timedelta(seconds=1), **late)
    services.follow_runs(now + timedelta(seconds=10))
    running.refresh_from_db()
    assert (running.state, running.calls, running.steps, running.ended_at) == ("stopped", 2, [], now)


def test_units_of_all_runs_that_end_together_are_known(acme):
    now = timezone.now()
    for run, unit in (("one", "write"), ("two", "review"), ("three", "deploy")):
        ledger_row(acme, arrived_at=now - timedelta(minutes=9), application="review", run=run, unit=unit, e2e_ms=90.0)
    assert services.follow_runs(now) == 3
    assert set(graph_of(Application.objects.get()).units) == {"write", "review", "deploy"}


def test_failed_calls_are_counted_and_teach_nothing(acme):
    now = timezone.now()
    ledger_row(
        acme, arrived_at=now - timedelta(hours=1), application="review", run="one", outcome="failed", e2e_ms=None
    )
    services.follow_runs(now)
    run = ApplicationRun.objects.get()
    assert (run.calls, run.failed_calls, run.steps) == (1, 1, [])
    assert run.ended_at is not None
    assert graph_of(run.application).records == []


def test_calls_without_a_run_or_an_application_are_no_run(acme):
    ledger_row(acme, application="review")
    ledger_row(acme, run="one")
    services.follow_runs(timezone.now())
    assert not ApplicationRun.objects.exists()


def test_each_tenant_has_separate_applications(acme, globex):
    for tenant in (acme, globex):
        write_run(tenant, "one", timezone.now() - timedelta(hours=1), np.random.default_rng(1))
    services.follow_runs(timezone.now())
    assert Application.objects.filter(name="review").count() == ApplicationRun.objects.count() == 2


def test_the_graph_says_what_units_take_and_lead_to(application):
    graph = graph_of(application)
    assert len(graph.records) == 40
    assert graph.next_units("write") == {("review",): 1.0}
    assert 0.2 < graph.branch_probabilities()["review", "review"] < 0.8
    write, review = unit_summaries(graph)
    assert (write.name, write.runs, write.parallelism) == ("write", 1.0, 1.0)
    assert review.runs == pytest.approx(2.0, abs=0.4)
    assert write.share + review.share == pytest.approx(1.0)


def test_a_running_run_has_a_rank_and_an_interval(application, running):
    graph = graph_of(application)
    [one] = predictions(graph, [running])
    assert one.run == running
    assert one.attained_s > 0
    assert one.low_s <= one.mean_s <= one.high_s
    assert 0 < one.rank < one.mean_s * 2


def test_runs_with_less_left_have_a_lower_rank(acme, application):
    random, now = np.random.default_rng(5), timezone.now()
    write_run(acme, "begun", now - timedelta(seconds=30), random, reviews=0)
    write_run(acme, "reviewed", now - timedelta(seconds=60), random, reviews=3)
    services.follow_runs(now)
    runs = list(application.runs.filter(ended_at=None).select_related("application"))
    assert [one.run.run for one in predictions(graph_of(application), runs)] == ["reviewed", "begun"]


def test_without_a_record_nothing_is_predicted(acme):
    graph = graph_of(learned(acme, runs=1))
    write_run(acme, "now", timezone.now() - timedelta(seconds=25), np.random.default_rng(2), reviews=0)
    services.follow_runs(timezone.now())
    run = ApplicationRun.objects.get(run="now")
    assert [one.mean_s > 0 for one in predictions(graph, [run])] == [True]
    assert predictions(DemandGraph("review", graph.units), [run]) == []


def test_calls_at_once_are_one_step_of_a_running_run(acme):
    """One text, three reviews of it at once, then three checks: four calls of seven are done."""
    now = timezone.now()
    for number, began_at in enumerate([now - timedelta(minutes=5)] * 8 + [now - timedelta(seconds=9)]):
        for after_s, unit, count in ((0, "write", 1), (2, "review", 3), (4, "check", 3))[: 2 if number == 8 else 3]:
            for _ in range(count):
                ledger_row(
                    acme, arrived_at=began_at + timedelta(seconds=after_s), application="review", run=f"run-{number}",
                    unit=unit, prompt_tokens=0, output_tokens=100, e2e_ms=1000.0,
                )  # fmt: skip
    services.follow_runs(now)
    run = ApplicationRun.objects.get(ended_at=None)
    (one,) = predictions(graph_of(run.application), [run])
    assert one.mean_s == pytest.approx(3 / 4 * one.attained_s)


def test_an_imported_graph_replaces_the_one_imported_before(acme, application, operator):
    graph = graph_of(application)
    copy = DemandGraph("copy", graph.units, graph.records)
    for _ in range(2):
        imported = services.import_graph(acme, DemandGraph.from_json(copy.to_json()), operator, timezone.now())
    assert imported.runs.count() == 40
    assert graph_of(imported).records == graph.records
    assert graph_of(imported).units == graph.units


def test_old_runs_go_unless_the_graph_needs_them(acme, application, monkeypatch):
    monkeypatch.setattr(services, "MOST_RECORDS", 20)
    later = timezone.now() + timedelta(days=services.KEPT_DAYS + 1)
    assert services.prune_runs(timezone.now()) == 0
    assert services.prune_runs(later) == 20
    assert len(graph_of(application).records) == 20


def test_rows_that_commit_late_are_seen(acme):
    """A gateway may commit a row with a lower key after another one was read."""
    now = timezone.now()
    write_run(acme, "one", now - timedelta(seconds=30), np.random.default_rng(1), reviews=0)
    services.follow_runs(now)
    first = LedgerRow.objects.get()
    ledger_row(acme, id=first.pk - 1, arrived_at=now, application="review", run="two")
    services.follow_runs(now)
    assert ApplicationRun.objects.count() == 2


def test_a_loop_that_does_not_end_is_recorded_up_to_a_bound(acme, monkeypatch):
    monkeypatch.setattr(services, "MAX_CALLS", 20)
    now = timezone.now()
    write_run(acme, "endless", now - timedelta(hours=2), np.random.default_rng(1), reviews=40)
    services.follow_runs(now)
    run = ApplicationRun.objects.get()
    assert (run.calls, len(run.steps), run.outcome) == (41, 20, "ended")


def test_a_unit_that_was_never_seen_is_served_and_learned(acme, application, running):
    """Its service is unknown, so it counts as nothing until a run with it has ended."""
    now = timezone.now()
    ledger_row(
        acme, arrived_at=now - timedelta(seconds=3), application="review", run="now", unit="deploy", e2e_ms=900.0
    )
    services.follow_runs(now)
    (before,) = predictions(graph_of(application), [running])
    assert before.mean_s > 0
    services.follow_runs(now + timedelta(minutes=5))
    application.refresh_from_db()
    assert "deploy" in graph_of(application).units
    assert graph_of(application).records[-1].steps[-1].unit == "deploy"
