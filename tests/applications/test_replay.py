"""Recorded runs replayed with another order, with the other requests of the ledger."""

from datetime import timedelta

import numpy as np
import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.applications.selectors import graph_of
from controlplane.console.pages.what_if.rows import APPLICATION
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.simulation.whatif.arrivals import recorded
from controlplane.simulation.whatif.changes.base import ChangeError
from controlplane.simulation.whatif.models import WhatIf, WhatIfState
from controlplane.simulation.whatif.starts.runs import replay_orders
from tests.applications.conftest import learned
from tests.console.conftest import ledger_row
from tests.simulation.whatif.rows import run_all

pytestmark = pytest.mark.django_db


@pytest.fixture
def recorded_runs(acme, make_instance, profile):
    make_instance(state="ready")
    for number in range(5):  # other requests of that time
        ledger_row(acme, arrived_at=timezone.now() - timedelta(hours=3, minutes=number))
    return learned(acme, runs=20)


def window():
    now = timezone.now()
    return now - timedelta(hours=3, minutes=12), now - timedelta(hours=2, minutes=50)


def test_a_replay_has_the_runs_and_the_other_requests_of_that_time(recorded_runs, operator):
    row = replay_orders(recorded_runs, ["fcfs", "hermes"], *window(), operator)
    assert row.edits == []
    workload = recorded(row.start["arrivals"], window()[0])
    runs = np.unique(workload.calls.run[workload.calls.run >= 0])
    assert (workload.calls.run < 0).sum() == 5
    futures = [(each.name, each.changes[0]["models"]) for each in row.futures.order_by("letter")[1:]]
    assert [name for name, _ in futures] == ["FCFS", "Hermes"]
    run_all(row)
    assert row.state == WhatIfState.DONE
    for future in row.futures.all():
        for seed in future.runs.all():
            of = seed.result["runs"]
            assert {name: (each["runs"], each["ended"]) for name, each in of.items()} == {
                "all": (runs.size, runs.size), "review": (runs.size, runs.size)
            }  # fmt: skip


@pytest.mark.parametrize(("orders", "words"), [([], "Choose an order"), (["alphabetical"], "no order 'alphabetical'")])
def test_a_wrong_order_is_refused(recorded_runs, operator, orders, words):
    with pytest.raises(ActionError, match=words):
        replay_orders(recorded_runs, orders, *window(), operator)


def test_a_time_without_runs_is_refused(recorded_runs, operator):
    now = timezone.now()
    ledger_row(recorded_runs.tenant, arrived_at=now - timedelta(minutes=1))
    with pytest.raises(ActionError, match="No run of review had a call"):
        replay_orders(recorded_runs, ["fcfs"], now - timedelta(minutes=10), now, operator)


def test_the_pages_begin_a_replay_and_a_what_if_with_the_graph(client, operator, recorded_runs):
    client.force_login(operator)
    page = client.get(f"/applications/{recorded_runs.pk}/").content.decode()
    assert "Replay with another order…" in page
    answer = client.post(f"/applications/{recorded_runs.pk}/replay/", {"order": ["fcfs"], "hours": "6"})
    assert answer.url == f"/what-if/{WhatIf.objects.get().pk}/"
    asked = {
        "application-application.suite": f"application:{recorded_runs.pk}",
        "application-application.runs_per_h": "60",
    }
    form = client.get(reverse("console:new-what-if"), asked).content.decode()
    assert "review, as recorded" in form
    assert len(graph_of(recorded_runs).records) == 20


@pytest.mark.parametrize(("suite", "records"), [("application", 20), ("application:0", None), ("EV", None)])
def test_a_what_if_has_runs_of_a_recorded_graph(recorded_runs, suite, records):
    named = f"application:{recorded_runs.pk}" if suite == "application" else suite
    row = {"suite": named, "model": "m", "slo_class": "interactive", "runs_per_h": "60"}
    row = {f"application.{name}": text for name, text in row.items()}
    if suite == "application:0":
        with pytest.raises(ChangeError, match="is not known"):
            APPLICATION.change(row, {})
        return
    made = APPLICATION.change(row, {})["application"]
    assert (len(made["graph"]["records"]) if records else made["suite"]) == (records or suite)
