"""Fixtures for tests of rows and pages: a small inventory and the people who may, or may not, touch it.

Three kinds of people: the fleet's own (viewer, operator, admin), members of the tenant `acme`, and a stranger of `globex`.
"""

import pytest

from controlplane.accounts.models import Membership, Role, Tenant, User
from controlplane.fleet import services
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
    SloKind,
)


@pytest.fixture(autouse=True)
def messages(monkeypatch):
    """What would go out over Redis: ids of delivered commands, and "notify". Nothing is sent."""
    sent = []

    def deliver(command):
        command.delivered = True
        sent.append(command.pk)
        return True

    monkeypatch.setattr(services, "deliver", deliver)
    monkeypatch.setattr(services, "notify", lambda: sent.append("notify") or True)
    return sent


@pytest.fixture
def no_sidebar(monkeypatch):
    """Pages of the admin without the list of all models beside them, which takes as long as all else on a page.

    It is the list of the index page, from the same template.
    """
    from django.contrib import admin

    monkeypatch.setattr(admin.site, "enable_nav_sidebar", False)


@pytest.fixture
def slo_class(db):
    return SloClass.objects.create(
        name="interactive",
        title="Interactive",
        kind=SloKind.INTERACTIVE,
        service_tier="priority",
        ttft_target_ms=1000,
    )


@pytest.fixture
def region(db):
    return Region.objects.create(name="us-east", title="US East")


@pytest.fixture
def gpu_type(db):
    return GpuType.objects.create(
        name="a100-80gb",
        title="A100 80 GB",
        memory_bytes=80 * 2**30,
        on_demand_usd_per_hour="1.35",
        spot_usd_per_hour="0.60",
    )


@pytest.fixture
def node(region, gpu_type):
    return Node.objects.create(name="node-1", region=region, gpu_type=gpu_type, gpu_count=8)


@pytest.fixture
def language_model(db):
    return Model.objects.create(
        name="llama-3.1-8b",
        title="Llama 3.1 8B",
        source="meta-llama/Llama-3.1-8B",
        weights_bytes=16_060_000_000,
        kv_bytes_per_token=131_072,
        context_tokens=8_192,
    )


@pytest.fixture
def profile(language_model, gpu_type):
    return PerformanceProfile.objects.create(
        model=language_model,
        gpu_type=gpu_type,
        tensor_parallel=2,
        prefill_t0_s=0.0228808,
        prefill_a_s=0.00379609,
        prefill_b_s_per_token=4.73168e-05,
        prefill_c_s_per_token2=2.23414e-09,
        decode_a_s=0.00844396,
        decode_b_s_per_sequence=2.27225e-05,
        decode_c_s_per_token=7.23735e-08,
        source="a test",
    )


@pytest.fixture
def deployment(language_model, region, gpu_type, profile, node):
    return Deployment.objects.create(
        model=language_model, region=region, gpu_type=gpu_type, tensor_parallel=2, min_instances=1, max_instances=3
    )


@pytest.fixture
def make_instance(deployment):
    """`make_instance(state="ready", launcher="emulated", …)`: a row in any state, with an address where it has one."""

    def make(state=InstanceState.READY, launcher=Launcher.EMULATED, **values):
        number = Instance.objects.count() + 1
        has_url = state not in {InstanceState.PROVISIONING, InstanceState.STOPPED} or launcher == Launcher.EXTERNAL
        values.setdefault("name", f"instance-{number}")
        values.setdefault("url", f"http://127.0.0.1:8100/instance-{number}" if has_url else "")
        values.setdefault("deployment", deployment)
        return Instance.objects.create(state=state, launcher=launcher, **values)

    return make


@pytest.fixture
def operations(slo_class):
    return Tenant.objects.create(name="operations", operates_fleet=True, default_slo_class=slo_class)


@pytest.fixture
def acme(slo_class):
    tenant = Tenant.objects.create(name="acme", title="Acme", default_slo_class=slo_class)
    tenant.slo_classes.add(slo_class)
    return tenant


@pytest.fixture
def globex(slo_class):
    tenant = Tenant.objects.create(name="globex", title="Globex", default_slo_class=slo_class)
    tenant.slo_classes.add(slo_class)
    return tenant


@pytest.fixture
def make_user(db):
    def make(username, tenant=None, role=Role.VIEWER, **values):
        user = User.objects.create(username=username, **values)
        if tenant is not None:
            Membership.objects.create(user=user, tenant=tenant, role=role)
        return user

    return make


@pytest.fixture
def viewer(make_user, operations):
    return make_user("viewer", operations, Role.VIEWER)


@pytest.fixture
def operator(make_user, operations):
    return make_user("operator", operations, Role.OPERATOR)


@pytest.fixture
def fleet_admin(make_user, operations):
    return make_user("fleet-admin", operations, Role.ADMIN)


@pytest.fixture
def member(make_user, acme):
    """Sees acme, may not manage its keys."""
    return make_user("member", acme, Role.VIEWER)


@pytest.fixture
def key_manager(make_user, acme):
    """Manages acme's keys."""
    return make_user("key-manager", acme, Role.OPERATOR)


@pytest.fixture
def stranger(make_user, globex):
    return make_user("stranger", globex, Role.ADMIN)
