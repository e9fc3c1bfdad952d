"""Start times as they were seen: what plans, comparisons and simulations of the live fleet estimate with."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from controlplane.dispatch.live_fleet import inventory as live_inventory
from controlplane.events.models import Event
from controlplane.fleet.lifecycle import start_times
from controlplane.fleet.lifecycle.start_times import MedianTime
from controlplane.gateway.models import LedgerRow
from controlplane.planning.plans import inventory
from controlplane.planning.scenario import live_scenario
from controlplane.tuning import services as tuning
from scheduling.planning.places import problem_of
from scheduling.simulation.cluster.description import cluster_of
from scheduling.simulation.scenario import Scenario
from tests.planning.conftest import PLACE

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("profile")]
NOW = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
KEY = PLACE[0], "a100-80gb"


def moved(instance, **at_s):
    """Write the events of *instance*'s moves, at that many seconds by state."""
    for state, seconds in at_s.items():
        Event.objects.create(
            kind="instance.moved", subject_id=str(instance.pk), actor="x", after={"state": state},
            at=NOW + timedelta(seconds=seconds),
        )  # fmt: skip


@pytest.fixture
def three_starts(make_instance):
    for took in (10, 40, 60):
        moved(make_instance(), provisioning=0, loading=1, ready=took)


def test_the_median_of_those_seen(three_starts, make_instance):
    moved(make_instance(), ready=5)  # nobody saw it asked for
    assert start_times.read().of(*KEY) == MedianTime(40.0, 3)
    assert start_times.read().of(PLACE[0], "h100") == MedianTime(120.0, 0)


def test_the_gateway_hears_when_one_that_starts_was_asked_for(three_starts, make_instance):
    coming = make_instance(state="loading")
    moved(coming, provisioning=500, loading=505)
    seen = {spec.name: spec for spec in live_inventory.read().instances}
    assert seen[coming.name].start_s == 40.0
    assert seen[coming.name].start_began_at == (NOW + timedelta(seconds=500)).timestamp()
    assert all(spec.start_s is None for name, spec in seen.items() if name != coming.name)


def test_but_for_failures_and_a_stack_that_was_off_meanwhile(make_instance):
    moved(make_instance(), provisioning=0, ready=30)
    moved(make_instance(), provisioning=0, ready=6 * 3600)
    moved(make_instance(), provisioning=0, failed=5, loading=900, ready=950)
    assert start_times.read().of(*KEY) == MedianTime(30.0, 1)


def test_the_newest_count(make_instance, monkeypatch):
    monkeypatch.setattr(start_times, "STARTS", 2)
    instance = make_instance()
    for begin, took in ((0, 500), (1000, 20), (2000, 30)):
        moved(instance, provisioning=begin, ready=begin + took)
    assert start_times.read().of(*KEY) == MedianTime(25.0, 2)


def test_or_what_is_usual(language_model):
    assert start_times.read().of(*KEY) == MedianTime(120.0, 0)
    tuning.change("USUAL_START_S", 300.0, "test", model=language_model)
    assert start_times.read().of(*KEY) == MedianTime(300.0, 0)
    assert start_times.read().of("another", KEY[1]) == MedianTime(120.0, 0)


def test_what_a_start_costs_in_a_plan(three_starts):
    fleet = inventory.read({PLACE[0]}).to_plan()
    problem = problem_of(fleet, {PLACE[:2]: np.array([500.0])}, {}, {KEY: 1000.0}, 3600.0, 0.8).problem
    (row,) = fleet.deployments.values()
    assert problem.redeploy_cost_usd[0, 0, 0] == pytest.approx(row.usd_per_hour * row.gpus * 40.0 / 3600)
    assert problem.start_cost_usd.new_vm == 0.0


def test_how_long_one_takes_in_a_comparison(three_starts, slo_class):
    tables = live_scenario(inventory.read({PLACE[0]}), LedgerRow.objects.all())
    (group,) = tables["fleet"]
    assert group["start_s"] == 40.0
    cluster = cluster_of(Scenario.model_validate(tables))
    assert {spec.start_s for spec in cluster.instances} == {40.0}
