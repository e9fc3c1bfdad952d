"""The nightly what-if: when it is due, what it asks, and what is kept."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.simulation.selectors import ledger_rows
from controlplane.simulation.whatif import nightly, selectors, services, working
from controlplane.simulation.whatif.arrivals import drawn
from controlplane.simulation.whatif.models import Future, FutureSeed, WhatIf, WhatIfState
from controlplane.simulation.whatif.start import Start, stage_start
from scheduling.bundles import BUNDLES
from scheduling.simulation.scenario import Scenario
from tests.console.conftest import make_request  # noqa: F401 (a fixture)
from tests.simulation.whatif import rows
from tests.simulation.whatif.test_arrivals import row as stored
from workers.tasks import simulation as tasks

pytestmark = pytest.mark.django_db
MODEL = "llama-3.1-8b"


@pytest.fixture(autouse=True)
def setting(monkeypatch, settings):
    monkeypatch.setattr(working, "send_task", lambda *_, **__: True)
    settings.NIGHTLY_EVERY_S = 600.0


@pytest.fixture
def ledger(make_instance, slo_class, make_request):  # noqa: F811
    """Write 220 requests of the last minutes: every tenth for a model without a profile, every eleventh elsewhere."""
    make_instance()
    now = timezone.now()
    for number in range(220):
        make_request(
            arrived_at=now - timedelta(seconds=2 * (220 - number)),
            model="tiny" if number % 10 == 0 else MODEL,
            region="nowhere" if number % 11 == 0 and number % 10 else "us-east",
            prompt_tokens=200,
            output_tokens=60,
        )
    return now


def done(cost_usd: float, missed: int, bundle_usd: float, bundle_missed: int, **values) -> WhatIf:
    """Write a nightly what-if that is done, of the present policies and of QLM."""
    row = WhatIf.objects.create(**{"nightly": True, "state": WhatIfState.DONE, "horizon_s": 86_400.0} | values)
    for letter, name, usd, lost in (("A", "As now", cost_usd, missed), ("B", "QLM", bundle_usd, bundle_missed)):
        future = Future.objects.create(what_if=row, letter=letter, name=name)
        result = {"columns": {"all": {"cost_usd": usd, "missed": lost}}}
        FutureSeed.objects.create(future=future, seed=1, state=WhatIfState.DONE, result=result)
    return row


def test_the_task_submits_an_ordinary_what_if_of_every_bundle_and_only_once(ledger, settings):
    row = WhatIf.objects.get(pk=tasks.nightly_what_if())
    assert (row.nightly, row.state, row.seeds, row.horizon_s) == (True, WhatIfState.QUEUED, 1, 600.0)
    changes = [[each.get("value") for each in future.changes] for future in row.futures.all()]
    assert changes == [[], *([name] for name in BUNDLES if name not in nightly.BASELINES)]
    assert "tiny (22 requests)" in row.start["remarks"][0]
    assert tasks.nightly_what_if() is None  # while it waits
    staged = stage_start(Start.model_validate(row.start), Scenario.model_validate(row.start["scenario"]), 1, (), 600.0)
    assert len(staged.requests.arrival_s) == 180


def test_it_waits_for_what_people_ask_for(ledger, operator):
    tasks.nightly_what_if()
    services.submit(rows.draft(operator), operator)
    assert [run.future.what_if.nightly for run in working.waiting_runs()][:2] == [False, False]
    assert not working.claim(timezone.now()).future.what_if.nightly


def test_when_it_is_due(ledger, settings):
    assert nightly.due(ledger)
    row = done(1.0, 0, 1.0, 0)
    for state, after_s, due in (
        (WhatIfState.DONE, 590, False),
        (WhatIfState.DONE, 610, True),
        (WhatIfState.CANCELLED, 590, False),
        (WhatIfState.RUNNING, 610, False),
        (WhatIfState.FAILED, 590, False),
        (WhatIfState.FAILED, 610, True),
    ):
        WhatIf.objects.update(state=state, created_at=ledger - timedelta(seconds=after_s))
        assert nightly.due(ledger) == due, (state, after_s)
    row.delete()
    settings.NIGHTLY_EVERY_S = 0.0
    assert not nightly.due(ledger)
    settings.NIGHTLY_EVERY_S = 600.0
    ledger_rows()[:30].model.objects.filter(model="tiny").delete()
    assert not nightly.due(ledger)  # 198 requests


def test_one_a_day_is_kept():
    now = timezone.now().replace(hour=12)
    kept = [done(1.0, 0, 1.0, 0, created_at=now - timedelta(hours=hours)) for hours in (0, 24)]
    kept.append(done(1.0, 0, 1.0, 0, created_at=now - timedelta(hours=1), plan={"letter": "B"}))
    kept.append(done(1.0, 0, 1.0, 0, created_at=now - timedelta(hours=2), nightly=False))
    done(1.0, 0, 1.0, 0, created_at=now - timedelta(hours=3))
    done(1.0, 0, 1.0, 0, created_at=now - timedelta(days=31))
    done(1.0, 0, 1.0, 0, created_at=now, state=WhatIfState.FAILED)
    nightly.prune(now)
    assert set(WhatIf.objects.all()) == set(kept)


def test_it_is_a_row_of_the_list(viewer, client):
    row = done(100.0, 10, 88.0, 13)
    client.force_login(viewer)
    assert '<span class="tag">nightly</span>' in client.get("/what-if/").content.decode()
    other = done(1.0, 0, 1.0, 0, nightly=False)
    for wanted, number in (("true", row.pk), ("false", other.pk)):
        assert [each["id"] for each in client.get(f"/api/what-ifs?nightly={wanted}").json()["items"]] == [number]


def test_a_fork_leaves_out_models_without_a_profile(ledger):
    arrivals = {"kind": "forecast", "horizon_s": 60.0, "streams": []}
    for name in (MODEL, "tiny"):
        rates = {"start_s": 0.0, "window_s": 60.0, "mean": [2.0], "lower": [2.0], "upper": [2.0]}
        rows_of = [stored(at_s, name, "us-east", "interactive", "acme", 9, 9, 9) for at_s in (0.0, 0.5)]
        stream = {"model": name, "region": "us-east", "gaps": [0.5], "calls": 1.0, "requests_per_s": rates}
        arrivals["streams"].append(stream | {"rows": rows_of})
    fork = Start(kind="fleet", at=ledger, scenario=selectors.present_scenario(), arrivals=arrivals)
    staged = stage_start(fork, Scenario.model_validate(fork.scenario), 1, (), 60.0)
    assert 0 < staged.requests.arrival_s.size == len(drawn(arrivals, 1)) - staged.left_out
    assert staged.left_out > 0
    assert staged.recent is not None


@pytest.mark.nightly
def test_every_bundle_is_simulated(ledger):
    row = WhatIf.objects.get(pk=tasks.nightly_what_if())
    rows.run_all(row)
    assert row.state == WhatIfState.DONE
    requests = {run.result["columns"]["all"]["requests"] for run in FutureSeed.objects.all()}
    assert requests == {180}
