"""Runs of what-ifs: taken, made, interrupted, taken again, cancelled; with the same numbers by any process."""

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.simulation.whatif import selectors, services, working
from controlplane.simulation.whatif.models import FutureSeed, WhatIf, WhatIfState
from controlplane.simulation.whatif.results import curves_of
from controlplane.simulation.whatif.start import Start, stage_start
from tests.simulation.whatif import rows
from tests.simulation.whatif.test_arrivals import stream
from workers.tasks import simulation

pytestmark = pytest.mark.django_db

MORE = {"name": "More at night", "changes": [{"kind": "bounds", "model": "m", "min_instances": 3}]}
QLM = {"name": "QLM", "changes": [{"kind": "policy", "part": "bundle", "value": "qlm"}]}


@pytest.fixture(autouse=True)
def sent(monkeypatch) -> list[str]:
    """Return the tasks sent to workers."""
    tasks: list[str] = []
    monkeypatch.setattr(working, "send_task", lambda task, **_: tasks.append(task) or True)
    return tasks


@pytest.fixture
def asked(operator) -> WhatIf:
    return services.submit(rows.draft(operator, MORE, QLM), operator)


def results(row: WhatIf) -> dict[tuple[str, int], tuple[dict, dict]]:
    runs = FutureSeed.objects.filter(future__what_if=row).select_related("future")
    return {(run.future.letter, run.seed): (run.result, curves_of(run.curves)) for run in runs}


def test_every_future_runs_with_every_seed(asked, sent, django_capture_on_commit_callbacks):
    row = rows.run_all(asked)
    assert row.state == WhatIfState.DONE
    assert not [run.error for run in FutureSeed.objects.all() if run.error]
    made = results(row)
    assert set(made) == {(letter, seed) for letter in "ABC" for seed in (1, 2)}
    # Paired: each future has the same requests of a seed; seeds differ.
    requests = {key: result["about"]["requests"] for key, (result, _) in made.items()}
    assert requests["A", 1] == requests["B", 1] == requests["C", 1] > 1000
    assert requests["A", 1] != requests["A", 2]
    for result, curves in made.values():
        columns = result["columns"]["all"]
        assert columns["judged"] == columns["requests"] == result["about"]["requests"]
        assert 0 <= columns["slo_met"] <= 1
        assert columns["ttft_p50_ms"] <= columns["ttft_p95_ms"] <= columns["ttft_p99_ms"]
        assert columns["cost_usd"] == pytest.approx(2 * columns["instance_hours"])
        assert len(curves["series"]["t_s"]) <= 200
        assert curves["latency"]["ttft_p95_ms"]
    # At least three in each region cost at least as much.
    assert made["B", 1][0]["columns"]["all"]["instance_hours"] > made["A", 1][0]["columns"]["all"]["instance_hours"]
    kinds = set(Event.objects.filter(subject_type="whatif").values_list("kind", flat=True))
    assert kinds == {"what_if.requested", "what_if.done"}


def test_first_seeds_of_all_futures_come_first(asked):
    order = list(working.waiting_runs().values_list("seed", "future__letter"))
    assert order == [(1, "A"), (1, "B"), (1, "C"), (2, "A"), (2, "B"), (2, "C")]


def test_a_task_makes_runs_until_its_shift_is_over(asked, sent, monkeypatch, settings, tmp_path):
    settings.STATE_DIR = tmp_path
    monkeypatch.setattr(simulation, "SHIFT_S", 0.0)
    sent.clear()
    simulation.run_future()
    assert FutureSeed.objects.filter(state="done").count() == 1
    assert sent == [working.TASK]
    monkeypatch.setattr(simulation, "SHIFT_S", 600.0)
    simulation.run_future()
    asked.refresh_from_db()
    assert asked.state == WhatIfState.DONE
    assert simulation.run_future() is None


@pytest.mark.sql
@pytest.mark.parametrize("lost_by", ["delivered again", "past its time limit"])
def test_a_lost_run_is_made_again_with_the_same_numbers(asked, operator, lost_by):
    now = timezone.now()
    lost = working.claim(now - timedelta(seconds=working.LIMIT_S + working.GRACE_S + 1), "task")
    assert (lost.future.letter, lost.seed, lost.state) == ("A", 1, "running")
    assert working.claim(now, "other").future.letter == "B"
    if lost_by == "delivered again":
        assert working.claim(now, "task").pk == lost.pk
        FutureSeed.objects.filter(state="running").update(state="queued")
    else:
        assert working.supervise(now) == 1
        FutureSeed.objects.filter(state="running").update(state="queued")
    row = rows.run_all(asked)
    lost.refresh_from_db()
    assert (row.state, lost.state) == ("done", "done")
    alone = rows.run_all(services.submit(rows.draft(operator, MORE, QLM), operator))
    assert results(alone) == results(row)


def test_a_run_that_is_lost_too_often_fails(asked):
    for _ in range(working.MAX_ATTEMPTS):
        taken = working.claim(timezone.now() - timedelta(seconds=working.LIMIT_S + working.GRACE_S + 1))
        assert (taken.future.letter, taken.seed) == ("A", 1)
        working.supervise(timezone.now())
    taken.refresh_from_db()
    assert (taken.state, taken.error) == ("failed", "Its worker was lost 3 times.")
    row = rows.run_all(asked)
    assert row.state == WhatIfState.DONE
    services.resume(row, row.requested_by)
    assert rows.run_all(row).futures.get(letter="A").runs.get(seed=1).state == "done"


def test_what_fails_or_is_cancelled_is_resumed(asked, operator):
    asked.futures.get(letter="C").runs.update(state="cancelled")
    row = rows.run_all(asked)
    states = {
        future["letter"]: (future["state"], future["seeds_done"]) for future in selectors.progress(row.pk)["futures"]
    }
    assert states == {"A": ("done", 2), "B": ("done", 2), "C": ("cancelled", 0)}
    with pytest.raises(ActionError, match="It is done"):
        services.cancel(row, operator)
    services.resume(row, operator)
    assert rows.run_all(row).futures.get(letter="C").runs.filter(state="done").count() == 2
    with pytest.raises(ActionError, match="Nothing is missing"):
        services.resume(row, operator)


def test_a_cancelled_run_stops_and_what_is_done_stays(asked, operator, monkeypatch):
    working.work()
    taken = working.claim(timezone.now())
    services.cancel(asked, operator)
    with pytest.raises(working.Ended):
        working.run(taken)
    taken.refresh_from_db()
    asked.refresh_from_db()
    assert (taken.state, asked.state, asked.ended_by) == ("cancelled", "cancelled", operator.get_username())
    assert working.work() is None
    assert selectors.comparison(asked)["futures"][0]["seeds_done"] == 1


def test_what_fails_is_said_and_the_others_stay(operator):
    # The class promises what no requests of the workload have room for: the run fails, the what-if does not.
    big = {"kind": "demand", "edit": "lengths", "prompt": 9.0}
    row = rows.draft(operator, {"name": "Long prompts", "changes": [big]})
    row = rows.run_all(services.submit(row, operator))
    assert row.state == WhatIfState.DONE
    failed = row.futures.get(letter="B").runs.first()
    assert failed.state == "failed"
    assert "set demand.too_long" in failed.error


@pytest.mark.parametrize(
    ("changes", "field", "what"),
    [
        ([{"kind": "hope"}], "B.changes[0].kind", "does not match any of the expected tags"),
        ([{"kind": "bounds", "model": "n", "min_instances": 1}], "B.changes[0].model", "there is no model 'n'; there is m"),
        ([{"kind": "bounds", "model": "m", "min_instances": 9}], "B.changes[0].min_instances", "is 9, above the most"),
        ([{"kind": "policy", "part": "routing", "value": "dice"}], "B.changes[0].value", "there is no router 'dice'"),
        ([{"kind": "key", "path": "planner.epsilon", "value": 7}], "B.changes", "planner.epsilon: should be less than"),
        ([{"kind": "key", "path": "no such", "value": 7}], "B.changes[0].path", "is no path"),
        ([{"kind": "key", "path": "trace", "value": {"file": "/etc/passwd", "format": "azure"}}], "B.changes", "not both"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(operator, changes, field, what):
    row = rows.draft(operator, {"name": "Wrong", "changes": changes})
    with pytest.raises(ValidationError) as error:
        services.submit(row, operator)
    (wrong, (message,)) = next(iter(error.value.message_dict.items()))
    assert wrong == field
    assert what in message
    row.refresh_from_db()
    assert row.submitted_at is None


def test_too_many_requests_are_refused_before_they_are_drawn(operator, monkeypatch):
    """A factor of 10 on a week of a small fleet took 4 GB in each process, and more."""
    rates = {"start_s": 0.0, "window_s": 600.0, "mean": [1.0], "lower": [1.0], "upper": [1.0]}
    one = stream(requests_per_s=rates)
    begin = rows.start() | {"arrivals": {"kind": "forecast", "horizon_s": 1200.0, "streams": [one]}}
    twice = {"kind": "demand", "edit": "factor", "by": 2.0}
    row = rows.draft(operator, start=begin, edits=[twice])
    monkeypatch.setattr(services, "MAX_REQUESTS", 2000)
    with pytest.raises(ValidationError, match="some 2,400 requests; 2,000 are the most"):
        services.submit(row, operator)
    monkeypatch.setattr("controlplane.simulation.whatif.start.MAX_REQUESTS", 2000)
    changed = working.changed(row, row.futures.get(letter="A"), Start.model_validate(begin))
    with pytest.raises(ValueError, match="2,000 are the most"):
        stage_start(Start.model_validate(begin), changed.scenario, 1, changed.edits(1, 1200.0), 1200.0)


def test_the_state_of_a_fleet_that_another_version_stored_is_refused():
    state = {"instances": [], "running": [], "waiting": [], "endpoints": [], "at": 1.0}
    assert Start.model_validate(rows.start() | {"state": state}).state.at == 1.0
    with pytest.raises(ValueError, match="stored by another version, start again from the fleet"):
        Start.model_validate(rows.start() | {"state": state | {"iterations": []}})


def test_no_file_of_the_server_is_read(operator):
    values = rows.start()
    values["scenario"]["clients"][0]["lengths"] = {"file": "/etc/passwd", "format": "azure"}
    for name in ("prompt", "output"):
        values["scenario"]["clients"][0].pop(name)
    row = rows.draft(operator, start=values)
    assert "upload a trace" in services.check(row)["start"]


@pytest.mark.nightly
def test_more_seeds_are_added_to_what_is_done(asked, operator):
    row = rows.run_all(asked)
    before = results(row)
    row = rows.run_all(services.add_seeds(row, 1, operator))
    after = results(row)
    assert set(after) - set(before) == {("A", 3), ("B", 3), ("C", 3)}
    assert {key: after[key] for key in before} == before


def test_the_comparison(asked):
    row = rows.run_all(asked)
    made = selectors.comparison(row)
    first, second, _ = made["futures"]
    assert [future["letter"] for future in made["futures"]] == ["A", "B", "C"]
    assert second["changes"] == ["m min 1 to 3"]
    for future in made["futures"]:
        slo = future["slo_met"]
        assert slo["low"] <= slo["mean"] <= slo["high"]
        assert future["seeds_done"] == 2
    assert first["cost_usd"]["delta"] == 0
    assert second["cost_usd"]["delta"] == pytest.approx(second["cost_usd"]["mean"] - first["cost_usd"]["mean"])
    curves = selectors.curves(row)
    for letter in "ABC":
        (values,) = curves[letter]["ttft_p95_ms"].values()
        assert len(values) == len(curves[letter]["until_s"]) == 60
        assert all(value > 0 for value in values if value is not None)
        assert set(curves[letter]["ready"]) == {"m east", "m west"}


def test_futures_share_the_runs_of_an_application(operator):
    """Each order serves the same runs of a seed; completion times are compared."""
    application = {"suite": "CC", "model": "m", "slo_class": "iw", "runs_per_h": 60.0, "deadline_factor": [3.0]}
    edit = {"kind": "application", "application": application}
    by_run = {"name": "By run", "changes": [{"kind": "policy", "part": "ordering", "value": "hermes"}]}
    start = rows.start()
    start["scenario"]["models"]["m"]["context_tokens"] = 4096
    row = services.submit(rows.draft(operator, by_run, start=start, edits=[edit]), operator)
    assert selectors.edits_in_words(row) == ["60 runs an hour of CC on m"]
    assert rows.run_all(row).state == WhatIfState.DONE
    made = results(row)
    assert made["A", 1][0]["runs"]["CC"]["runs"] == made["B", 1][0]["runs"]["CC"]["runs"] > 10
    for future in selectors.comparison(row)["futures"]:
        (every, cc) = future["runs"]
        assert (every["application"], cc["application"]) == ("all", "CC")
        assert cc["in_time"] <= cc["due"] == cc["runs"]
        assert cc["mean_s"] > 1
    wrong = {"kind": "application", "application": {**application, "model": "n"}}
    assert (
        "there is no model 'n'"
        in services.check(rows.draft(operator, start=start, edits=[wrong]))["edits[0].application.model"]
    )


def test_a_fleet_without_demand_is_refused_before_any_run(operator):
    quiet = rows.start() | {"kind": "fleet", "arrivals": {"kind": "forecast", "horizon_s": 1200.0, "streams": []}}
    with pytest.raises(ValidationError) as refused:
        services.submit(rows.draft(operator, MORE, start=quiet), operator)
    assert "add a tenant" in refused.value.message_dict["edits"][0]
    client = {"tenant": "t", "model": "m", "slo_class": "iw", "requests_per_s": 1.0}
    tenant = {"kind": "tenant", "client": client, "from_s": 0.0, "until_s": 600.0}
    assert "edits" not in services.check(rows.draft(operator, MORE, start=quiet, edits=[tenant]))
