"""Weights by region: what a start without them takes, and what it records."""

import pytest

from controlplane.fleet import services as fleet
from controlplane.fleet.lifecycle.launching import EMULATED_STARTUP_S, launch_spec
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Region
from controlplane.fleet.weights import remote
from controlplane.planning.plans import inventory

pytestmark = pytest.mark.django_db
S = InstanceState
MODEL, HERE = "llama-3.1-8b", "us-east"
SIZE_S = 16.06 / 0.25
"""Seconds of a pull by the defaults."""


@pytest.fixture
def elsewhere():
    return Region.objects.create(name="us-west", title="US West")


def test_nothing_is_remote_until_something_is_known(language_model, region, elsewhere, django_assert_max_num_queries):
    assert remote() == {}
    language_model.weights_in.add(region)
    with django_assert_max_num_queries(4):  # in any number of regions
        assert remote() == {(MODEL, "us-west"): pytest.approx(SIZE_S)}


def test_a_start_without_them_takes_the_pull_and_records_them(language_model, region, elsewhere, make_instance):
    language_model.weights_in.add(elsewhere)
    instance = make_instance(state=S.LOADING)
    assert launch_spec(instance).startup_s == pytest.approx(EMULATED_STARTUP_S + SIZE_S)
    fleet.move(instance, S.READY, actor="gateway", reason="health check passed")
    assert {row.name for row in language_model.weights_in.all()} == {HERE, "us-west"}
    assert launch_spec(instance).startup_s == EMULATED_STARTUP_S


def test_the_plan_prices_a_region_without_them(language_model, deployment, elsewhere, make_instance):
    make_instance()
    type(deployment).objects.create(
        model=language_model, region=elsewhere, gpu_type=deployment.gpu_type, tensor_parallel=2, max_instances=3
    )
    language_model.weights_in.add(deployment.region)
    planned = inventory.read({MODEL}).to_plan().deployments
    assert planned[MODEL, HERE, "a100-80gb"].pull_s == 0
    assert planned[MODEL, "us-west", "a100-80gb"].pull_s == pytest.approx(SIZE_S)
