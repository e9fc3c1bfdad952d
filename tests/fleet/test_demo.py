"""The demo: complete, consistent, honest about what was measured, and never in an operator's way."""

import math

import pytest

from controlplane.accounts.models import Membership, Role, Tenant, User
from controlplane.events.models import Event
from controlplane.fleet import demo
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import (
    Deployment,
    GpuType,
    Instance,
    Launcher,
    Model,
    Node,
    PerformanceProfile,
    Region,
    SloClass,
)
from controlplane.planning.demo import seed_all
from tests import database

pytestmark = pytest.mark.django_db

TABLES = (Region, GpuType, Node, Model, PerformanceProfile, Deployment, Instance, SloClass, Tenant, User, Membership)


def contents():
    return {model.__name__: list(model.objects.order_by("pk").values()) for model in TABLES}


def seed() -> None:
    demo.seed("emulated")


@pytest.fixture
def seeded(db):
    database.write(seed)


def test_twice_is_once(seeded):
    before, events = contents(), Event.objects.count()
    assert demo.seed("emulated") == {}
    assert contents() == before
    assert Event.objects.count() == events == 1


def test_what_is_there(seeded):
    assert set(Region.objects.values_list("title", flat=True)) == {"US East", "US Central", "US West"}
    assert Model.objects.count() == 5
    assert Deployment.objects.count() == 13
    assert 24 <= Instance.objects.count() <= 30
    (swapped_to,) = Instance.objects.exclude(launcher=Launcher.EMULATED, state=InstanceState.PROVISIONING)
    assert (swapped_to.state, swapped_to.swap_group.instances.count()) == (InstanceState.STOPPED, 2)
    assert set(GpuType.objects.values_list("name", flat=True)) == {"a100-80gb", "h100-80gb", "h200-141gb", "l40s-48gb"}
    assert SloClass.objects.count() == 3
    assert Tenant.objects.filter(operates_fleet=False).count() == 2


def test_every_row_passes_its_own_validation(seeded):
    for model in TABLES:
        for row in model.objects.all():
            row.full_clean(exclude=["password"])


def test_every_region_serves_every_model_that_generates_and_can_grow_to_its_maximum(seeded):
    for region in Region.objects.all():
        assert region.deployments.filter(model__task="generate").count() == 4
    for deployment in Deployment.objects.all():
        assert deployment.profile() is not None
        deployment.min_instances = deployment.max_instances
        deployment.full_clean()
    for region in Region.objects.all():
        for gpu_type in GpuType.objects.all():
            wanted = sum(d.max_instances * d.tensor_parallel for d in region.deployments.filter(gpu_type=gpu_type))
            assert sum(node.gpu_count for node in region.nodes.filter(gpu_type=gpu_type)) >= wanted


def test_no_instance_without_its_gpus(seeded):
    assert not Instance.objects.filter(node=None).exists()
    assert all(node.free_gpus() >= 0 for node in Node.objects.all())


def test_an_operators_edits_stay(seeded):
    Deployment.objects.update(max_instances=17)
    Tenant.objects.filter(name="acme").update(title="Changed", active=False)
    Tenant.objects.get(name="acme").slo_classes.clear()
    GpuType.objects.update(on_demand_usd_per_hour=9)
    Membership.objects.all().delete()
    before = contents()
    demo.seed("emulated")
    assert contents() == before
    assert not Tenant.objects.get(name="acme").slo_classes.exists()


def test_only_removed_rows_come_back(seeded):
    Instance.objects.filter(deployment__model__name="bloom-176b").delete()
    assert demo.seed("emulated") == {"instances": 6}


def test_without_a_fleet(db):
    demo.seed("none")
    assert Deployment.objects.count() == 13
    assert not Instance.objects.exists()


def test_the_operator_signs_in_by_link_only(seeded):
    user = User.objects.get(username=demo.OPERATOR)
    assert not user.has_usable_password()
    assert user.fleet_role() == Role.ADMIN
    assert not user.is_superuser


def test_default_classes_are_within_the_entitlement(seeded):
    for tenant in Tenant.objects.all():
        assert tenant.default_slo_class in tenant.slo_classes.all()


def test_weights_and_kv_cache_are_those_of_the_published_shapes(seeded):
    """2 (K and V) x layers x KV heads x head size x 2 bytes."""
    shapes = {
        "llama-2-70b": (80, 8, 128, 68.98e9),
        "bloom-176b": (70, 112, 128, 176.25e9),
        "llama-3.1-8b": (32, 8, 128, 8.03e9),
        "llama-3.2-3b": (28, 8, 128, 3.21e9),
        "qwen3-embedding-0.6b": (28, 8, 128, 0.5958e9),
    }
    for name, (layers, kv_heads, head_size, parameters) in shapes.items():
        model = Model.objects.get(name=name)
        assert model.kv_bytes_per_token == 2 * layers * kv_heads * head_size * 2
        assert math.isclose(model.weights_bytes, 2 * parameters, rel_tol=0.005)


def test_profiles_say_where_they_come_from_and_are_plausible(seeded):
    for row in PerformanceProfile.objects.filter(estimated=True):
        assert row.model.pools
        assert row.source.startswith("estimated from ")
        assert row.prefill_error_pct is None
    for row in PerformanceProfile.objects.filter(estimated=False):
        assert row.source.startswith("fit of ")
        assert row.prefill_error_pct is not None
        profile = row.coefficients()
        assert 0.005 < profile.step_time_s(1024, 0, 0) < 1.0, row
        assert 0.005 < profile.step_time_s(0, 16, 16 * 1024) < 0.2, row
    with_more_gpus = [
        PerformanceProfile.objects.get(model__name="llama-2-70b", gpu_type__name="a100-80gb", tensor_parallel=gpus)
        for gpus in (2, 4, 8)
    ]
    times = [row.coefficients().step_time_s(4096, 0, 0) for row in with_more_gpus]
    assert times == sorted(times, reverse=True)


def test_unmeasured_gpu_types_have_no_profile_and_no_deployment(seeded):
    for name in ("h200-141gb", "l40s-48gb"):
        gpu_type = GpuType.objects.get(name=name)
        assert not gpu_type.profiles.exists()
        assert not gpu_type.deployments.exists()


def test_it_is_made_once(db):
    assert seed_all("none")["deployments"] == 13
    assert not seed_all("none")
