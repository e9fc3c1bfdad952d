"""Weights by region: what a pull takes, who asks for one, and what a start without them notes."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet import services as fleet
from controlplane.fleet.lifecycle.launching import EMULATED_STARTUP_S, launch_spec
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import Model, Region, Weights, WeightsState
from controlplane.fleet.weights import selectors, services
from controlplane.planning.plans import inventory
from controlplane.tuning import services as tuning
from workers.tasks.weights import advance_pulls

pytestmark = pytest.mark.django_db
S = InstanceState
MODEL, HERE = "llama-3.1-8b", "us-east"
SIZE_S = 16.06 / 0.25
"""Seconds of a pull by the defaults."""


@pytest.fixture
def elsewhere():
    return Region.objects.create(name="us-west", title="US West")


@pytest.fixture
def emulated(language_model):
    """A model without a file."""
    Model.objects.filter(pk=language_model.pk).update(source="")
    language_model.source = ""
    return language_model


def test_a_pull_has_a_size_a_time_and_a_price(language_model, region):
    tuning.change("WEIGHTS_GB_PER_S", 0.5, actor="test")
    tuning.change("WEIGHTS_USD_PER_GB", 0.1, actor="test")
    pull = selectors.estimate(language_model)
    assert (pull.gigabytes, pull.seconds, pull.usd) == pytest.approx((16.06, 32.12, 1.606))


def test_nothing_is_remote_until_something_is_known(language_model, region, elsewhere, django_assert_max_num_queries):
    assert selectors.remote() == {}
    assert services.ask(MODEL, "us-west", "planner", "a plan") is None
    Weights.objects.create(model=language_model, region=region)
    with django_assert_max_num_queries(4):  # in any number of regions
        assert selectors.remote() == {(MODEL, "us-west"): pytest.approx(SIZE_S)}


def test_a_pull_becomes_present_when_its_time_is_over(emulated, region, elsewhere, operator):
    Weights.objects.create(model=emulated, region=region)
    row = services.pull(emulated, elsewhere, operator, "a launch tomorrow")
    assert selectors.remote()[MODEL, "us-west"] == pytest.approx(SIZE_S, abs=2)
    with pytest.raises(ActionError, match="being pulled to US West already"):
        services.pull(emulated, elsewhere, operator, "again")
    assert advance_pulls() == 1
    row.refresh_from_db()
    assert row.state == WeightsState.PULLING
    Weights.objects.filter(pk=row.pk).update(ready_at=timezone.now() - timedelta(seconds=1))
    advance_pulls()
    row.refresh_from_db()
    assert row.state == WeightsState.PRESENT
    assert selectors.remote() == {}
    assert [event.kind for event in Event.objects.order_by("pk")] == ["weights.pull_requested", "weights.present"]
    with pytest.raises(ActionError, match="in US West already"):
        services.pull(emulated, elsewhere, operator, "again")


def test_a_pull_that_fails_says_why_and_may_be_repeated(language_model, region, operator, tmp_path):
    Model.objects.filter(pk=language_model.pk).update(source=str(tmp_path / "gone"))
    language_model.refresh_from_db()
    services.pull(language_model, region, operator, "a test")
    advance_pulls()
    row = Weights.objects.get()
    assert (row.state, row.reason) == (WeightsState.FAILED, f"there is no folder {tmp_path}/gone")
    (tmp_path / "gone").mkdir()
    services.pull(language_model, region, operator, "it is there now")
    advance_pulls()
    assert Weights.objects.get().state == WeightsState.PRESENT


def test_a_start_without_them_takes_the_pull_and_notes_them(emulated, region, elsewhere, make_instance):
    Weights.objects.create(model=emulated, region=elsewhere)
    instance = make_instance(state=S.LOADING)
    assert launch_spec(instance).startup_s == pytest.approx(EMULATED_STARTUP_S + SIZE_S)
    services.ask(MODEL, HERE, "fleet worker", "it starts there")
    assert launch_spec(instance).startup_s == pytest.approx(EMULATED_STARTUP_S + SIZE_S, abs=2)
    fleet.move(instance, S.READY, actor="gateway", reason="health check passed")
    assert Weights.objects.get(region=region).state == WeightsState.PRESENT
    assert launch_spec(instance).startup_s == EMULATED_STARTUP_S


def test_the_plan_prices_a_region_without_them(language_model, deployment, elsewhere, make_instance):
    make_instance()
    there = type(deployment).objects.create(
        model=language_model, region=elsewhere, gpu_type=deployment.gpu_type, tensor_parallel=2, max_instances=3
    )
    Weights.objects.create(model=language_model, region=deployment.region)
    planned = inventory.read({MODEL}).to_plan().deployments
    assert planned[MODEL, HERE, "a100-80gb"].pull_s == 0
    assert planned[MODEL, there.region.name, "a100-80gb"].pull_s == pytest.approx(SIZE_S)
