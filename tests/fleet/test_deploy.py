"""Deploying a model in one go: everything that is missing or nothing, errors at their fields, an estimated profile."""

from decimal import Decimal

import pytest
from django.core.exceptions import ValidationError

from controlplane.events.models import Event
from controlplane.fleet.inventory.deploy import DeployRequest, completed, deploy, estimate, place_options
from controlplane.fleet.models import (
    Deployment,
    GpuType,
    Instance,
    InstanceCommand,
    Launcher,
    Model,
    Node,
    PerformanceProfile,
    Region,
)
from controlplane.simulation.services import store_profiles
from scheduling.fleet.profile import Profile
from scheduling.fleet.profile_fitting import Fit, Setting
from scheduling.fleet.published_models import PUBLISHED

NEW = DeployRequest(
    region="eu-west", gpu_type="h100-80gb", gpus=8, usd_per_gpu_hour=Decimal("2.50"), model="qwen-8b",
    parameters_billion=8.2, layers=36, kv_heads=8, head_dim=128, context_tokens=32_768, launcher="emulated",
    min_instances=2,
)  # fmt: skip
ROWS = (Region, GpuType, Node, Model, Deployment, PerformanceProfile, Instance, InstanceCommand, Event)
pytestmark = pytest.mark.django_db


def test_from_nothing_to_instances_that_start(fleet_admin, messages, django_capture_on_commit_callbacks):
    with django_capture_on_commit_callbacks(execute=True):
        made = deploy(NEW, fleet_admin, "a new model")
    assert [row.objects.count() for row in ROWS[:8]] == [1, 1, 1, 1, 1, 1, 2, 2]
    model = Model.objects.get()
    assert (model.weights_bytes, model.kv_bytes_per_token) == (16_400_000_000, 2 * 36 * 8 * 128 * 2)
    assert Node.objects.get().name == "eu-west-h100-1"
    assert [row.state for row in made.instances] == ["provisioning"] * 2
    assert sorted(pk for pk in messages if pk != "notify") == sorted(
        InstanceCommand.objects.values_list("pk", flat=True)
    )
    profile = PerformanceProfile.objects.get()
    assert (profile.estimated, profile.prefill_error_pct) == (True, None)
    assert 0.005 < profile.decode_a_s < 0.02
    event = Event.objects.get(kind="model.deployed")
    assert (event.reason, event.actor, event.subject) == ("a new model", "fleet-admin", "qwen-8b")
    assert event.after["profile"] == "estimated"
    assert event.after["instances"] == [row.name for row in made.instances]


def test_an_estimated_profile_is_measured_once_it_is_fitted(fleet_admin):
    deploy(NEW, fleet_admin)
    fitted = Profile(0.02, 0.01, 1e-4, 0.0, 0.02, 1e-4, 1e-8)
    store_profiles([Fit(Setting("qwen-8b", "h100-80gb", 1), fitted)], "own ledger", "test")
    row = PerformanceProfile.objects.get()
    assert (row.estimated, row.decode_a_s) == (False, 0.02)


def test_what_is_there_is_taken(deployment, fleet_admin, make_instance):
    west = Region.objects.create(name="us-west", title="US West")
    Node.objects.create(name="west", region=west, gpu_type=deployment.gpu_type, gpu_count=4)
    make_instance()
    wanted = DeployRequest(region="us-west", gpu_type="a100-80gb", model="llama-3.1-8b", tensor_parallel=2)
    made = deploy(wanted, fleet_admin)
    assert [row.objects.count() for row in ROWS[:6]] == [2, 1, 2, 1, 2, 1]
    assert made.profile.estimated is False
    assert made.instances[0].launcher == "emulated"  # as the others
    assert made.instances[0].node.name == "west"


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"gpus": 0}, "gpus", "has no node"),
        ({"gpus": 1}, "min_instances", "hold 1 instances"),
        ({"gpus": 1, "tensor_parallel": 2}, "tensor_parallel", "more than 1 GPUs"),
        ({"gpu_type": "unheard-of"}, "gpu_type", "known are a100-40gb"),
        ({"usd_per_gpu_hour": None}, "usd_per_gpu_hour", "say what one costs"),
        ({"parameters_billion": None}, "weights_gb", "or a source"),
        ({"layers": None}, "kv_kib_per_token", "or a source"),
        ({"context_tokens": None}, "context_tokens", "or a source"),
        ({"parameters_billion": 1800.0}, "tensor_parallel", "Use more GPUs"),
        ({"min_instances": 5}, "max_instances", "Not below the minimum"),
        ({"launcher": "process"}, "launcher", "has no source"),
        ({"model": "a name with blanks"}, "model", ""),
        ({"address": "http://x"}, "address", "host name"),
    ],
)
def test_an_error_is_at_its_field_and_nothing_is_left(fleet_admin, changes, field, said):
    with pytest.raises(ValidationError) as refused:
        deploy(NEW.model_copy(update=dict(**changes)), fleet_admin)
    assert field in refused.value.message_dict
    assert said in " ".join(refused.value.message_dict[field])
    assert [row.objects.count() for row in ROWS] == [0] * len(ROWS)


def test_gpus_that_others_have_are_not_free(deployment, node, fleet_admin, make_instance):
    for _ in range(3):
        make_instance(node=node)
    wanted = NEW.model_copy(update={"region": "us-east", "gpu_type": "a100-80gb", "gpus": 0, "tensor_parallel": 2})
    assert (estimate(wanted).free_gpus, estimate(wanted).room) == (2, False)
    with pytest.raises(ValidationError) as refused:
        deploy(wanted, fleet_admin)
    assert refused.value.message_dict == {"gpus": ["No node has 2 free GPUs, 0 at most."]}
    assert not Model.objects.filter(name="qwen-8b").exists()


def test_an_estimate_says_what_would_come_of_it_and_writes_nothing():
    seen = estimate(NEW)
    assert seen.weights_bytes == 16_400_000_000
    assert seen.kv_tokens == int((85_899_345_920 * 0.9 - 16.4e9) // 147_456)
    assert (seen.fits, seen.requests, seen.room) == (True, seen.kv_tokens // 32_768, True)
    assert (seen.usd_per_hour, seen.measured) == (2.5, False)
    assert 30 < seen.ttft_ms < 200
    assert 5 < seen.itl_ms < 30
    assert seen.tensor_parallel == 1
    larger = estimate(NEW.model_copy(update={"parameters_billion": 180.0}))
    assert (larger.fits, larger.tensor_parallel, larger.room) == (True, 8, False)
    assert larger.usd_per_million > 3 * seen.usd_per_million
    assert estimate(NEW.model_copy(update={"parameters_billion": 180.0, "tensor_parallel": 4})).fits is False
    little = estimate(DeployRequest(region="", gpu_type="", model=""))
    assert (little.fits, little.kv_tokens, little.ttft_ms, little.usd_per_hour) == (None, None, None, None)
    assert [row.objects.count() for row in ROWS] == [0] * len(ROWS)


@pytest.mark.parametrize(
    ("model", "given", "weights_gb", "kv_kib"),
    [
        ("qwen3-8b", {}, 16.38, 144.0),
        ("qwen3-8b", {"parameters_billion": 8.2, "bits": 8}, 8.2, 144.0),
        ("qwen3-8b", {"kv_kib_per_token": 72.0}, 16.38, 72.0),
        ("gpt-oss-120b", {}, 65.3, 72.0),
        ("qwen-8b", {}, None, None),
    ],
)
def test_a_published_model_needs_its_name_alone(model, given, weights_gb, kv_kib):
    wanted = DeployRequest(region="eu-west", gpu_type="h100-80gb", model=model, **given)
    seen = estimate(wanted)
    assert seen.weights_bytes == (weights_gb and pytest.approx(weights_gb * 1e9))
    assert seen.kv_bytes_per_token == (kv_kib and kv_kib * 1024)
    assert completed(wanted).source == (PUBLISHED[model].source if weights_gb else "")
    assert completed(wanted.model_copy(update={"launcher": Launcher.EMULATED})).source == ""


def test_every_place_says_what_the_model_would_be_there(deployment, node, fleet_admin):
    (place,) = place_options(DeployRequest(region="", gpu_type="", model="llama-3.1-8b"))
    assert (place.region.name, place.gpu_type.name, place.free, place.gpus) == ("us-east", "a100-80gb", 8, 8)
    assert (place.estimate.tensor_parallel, place.estimate.measured) == (2, True)  # as it was measured
    (place,) = place_options(DeployRequest(region="", gpu_type="", model="llama-3.3-70b"))
    assert (place.estimate.tensor_parallel, place.estimate.measured) == (4, False)
    assert 0.1 < place.estimate.usd_per_million < 10
    (place,) = place_options(DeployRequest(region="", gpu_type="", model="llama-3.1-405b-fp8"))
    assert (place.estimate.fits, place.estimate.tensor_parallel) == (True, 8)
    deploy(NEW.model_copy(update={"region": "eu-north"}), fleet_admin)
    assert Region.objects.get(name="eu-north").title == "EU North"


def test_of_a_model_that_is_measured_the_estimate_is_the_measured_one(deployment):
    wanted = DeployRequest(region="us-east", gpu_type="a100-80gb", model="llama-3.1-8b", tensor_parallel=2)
    seen = estimate(wanted)
    assert seen.measured
    assert seen.ttft_ms == pytest.approx(1e3 * deployment.profile().coefficients().step_time_s(1024, 0, 0))
    assert (seen.free_gpus, seen.usd_per_hour) == (8, pytest.approx(2.7))
