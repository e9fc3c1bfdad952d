"""Fixtures for tests of rows and pages: a small inventory and the people who may, or may not, touch it.

Three kinds of people: the fleet's own (viewer, operator, admin), members of the tenant `acme`, and a stranger of `globex`.

A module whose tests all need the same many rows has them once: its fixture `standing`, of the module's scope, is an
`Inventory` as `standing_with` makes it, and each test undoes what it writes itself.
"""

import copy
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from typing import Any

import pytest
from django.utils import timezone

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
from tests import database


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
    """Pages of the admin without the list of all models alongside them, which takes as long as all else on a page.

    It is the list of the index page, from the same template.
    """
    from django.contrib import admin

    monkeypatch.setattr(admin.site, "enable_nav_sidebar", False)


class Inventory:
    """Rows by the names of their fixtures; each is made when it is first asked for."""

    def __init__(self, standing: "Inventory | None" = None) -> None:
        """With the rows of *standing*, copied: tests may change what they are given."""
        if standing is not None:
            vars(self).update(copy.deepcopy(vars(standing)))

    @cached_property
    def now(self) -> datetime:
        """The moment that rows which depend on the time were made for."""
        return timezone.now()

    @cached_property
    def slo_class(self) -> SloClass:
        return SloClass.objects.create(
            name="interactive",
            title="Interactive",
            kind=SloKind.INTERACTIVE,
            service_tier="priority",
            ttft_target_ms=1000,
        )

    @cached_property
    def region(self) -> Region:
        return Region.objects.create(name="us-east", title="US East")

    @cached_property
    def gpu_type(self) -> GpuType:
        return GpuType.objects.create(
            name="a100-80gb",
            title="A100 80 GB",
            memory_bytes=80 * 2**30,
            on_demand_usd_per_hour="1.35",
            spot_usd_per_hour="0.60",
        )

    @cached_property
    def node(self) -> Node:
        return Node.objects.create(name="node-1", region=self.region, gpu_type=self.gpu_type, gpu_count=8)

    @cached_property
    def language_model(self) -> Model:
        return Model.objects.create(
            name="llama-3.1-8b",
            title="Llama 3.1 8B",
            source="meta-llama/Llama-3.1-8B",
            weights_bytes=16_060_000_000,
            kv_bytes_per_token=131_072,
            context_tokens=8_192,
        )

    @cached_property
    def profile(self) -> PerformanceProfile:
        return PerformanceProfile.objects.create(
            model=self.language_model,
            gpu_type=self.gpu_type,
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

    @cached_property
    def deployment(self) -> Deployment:
        """With its profile and a node."""
        assert self.profile
        assert self.node
        return Deployment.objects.create(
            model=self.language_model,
            region=self.region,
            gpu_type=self.gpu_type,
            tensor_parallel=2,
            min_instances=1,
            max_instances=3,
        )

    def make_instance(
        self, state: str = InstanceState.READY, launcher: str = Launcher.EMULATED, **values: Any
    ) -> Instance:
        """A row in any state, with an address where it has one."""
        number = Instance.objects.count() + 1
        has_url = state not in {InstanceState.PROVISIONING, InstanceState.STOPPED} or launcher == Launcher.EXTERNAL
        values.setdefault("name", f"instance-{number}")
        values.setdefault("url", f"http://127.0.0.1:8100/instance-{number}" if has_url else "")
        values.setdefault("deployment", self.deployment)
        return Instance.objects.create(state=state, launcher=launcher, **values)

    def _tenant(self, name: str, title: str) -> Tenant:
        tenant = Tenant.objects.create(name=name, title=title, default_slo_class=self.slo_class)
        tenant.slo_classes.add(self.slo_class)
        return tenant

    @cached_property
    def operations(self) -> Tenant:
        return Tenant.objects.create(name="operations", operates_fleet=True, default_slo_class=self.slo_class)

    @cached_property
    def acme(self) -> Tenant:
        return self._tenant("acme", "Acme")

    @cached_property
    def globex(self) -> Tenant:
        return self._tenant("globex", "Globex")

    def make_user(self, username: str, tenant: Tenant | None = None, role: str = Role.VIEWER, **values: Any) -> User:
        user = User.objects.create(username=username, **values)
        if tenant is not None:
            Membership.objects.create(user=user, tenant=tenant, role=role)
        return user

    @cached_property
    def viewer(self) -> User:
        return self.make_user("viewer", self.operations, Role.VIEWER)

    @cached_property
    def operator(self) -> User:
        return self.make_user("operator", self.operations, Role.OPERATOR)

    @cached_property
    def fleet_admin(self) -> User:
        return self.make_user("fleet-admin", self.operations, Role.ADMIN)

    @cached_property
    def member(self) -> User:
        """Sees acme, may not manage its keys."""
        return self.make_user("member", self.acme, Role.VIEWER)

    @cached_property
    def key_manager(self) -> User:
        """Manages acme's keys."""
        return self.make_user("key-manager", self.acme, Role.OPERATOR)

    @cached_property
    def stranger(self) -> User:
        return self.make_user("stranger", self.globex, Role.ADMIN)


@pytest.fixture(scope="module")
def standing():
    """Nothing stands from test to test, unless a module says otherwise."""
    return None


def standing_with(build: Callable[[Inventory], object]):
    """A module's fixture `standing`: rows that *build* makes, in an inventory that it is given."""

    def quietly() -> Inventory:
        inventory = Inventory()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(services, "deliver", lambda command: True)
            patch.setattr(services, "notify", lambda: True)
            build(inventory)
        return inventory

    @pytest.fixture(scope="module")
    def standing(django_db_setup, django_db_blocker):
        with database.standing(django_db_blocker, quietly) as inventory:
            yield inventory

    return standing


@pytest.fixture
def inventory(standing, db):
    return Inventory(standing)


@pytest.fixture
def standing_clock(inventory, monkeypatch):
    """Time passes from the moment on that the rows were made for, however long ago they were."""
    real_now, begun, moment = timezone.now, timezone.now(), inventory.now
    monkeypatch.setattr(timezone, "now", lambda: moment + (real_now() - begun))


@pytest.fixture
def slo_class(inventory):
    return inventory.slo_class


@pytest.fixture
def region(inventory):
    return inventory.region


@pytest.fixture
def gpu_type(inventory):
    return inventory.gpu_type


@pytest.fixture
def node(inventory):
    return inventory.node


@pytest.fixture
def language_model(inventory):
    return inventory.language_model


@pytest.fixture
def profile(inventory):
    return inventory.profile


@pytest.fixture
def deployment(inventory):
    return inventory.deployment


@pytest.fixture
def make_instance(inventory):
    return inventory.make_instance


@pytest.fixture
def operations(inventory):
    return inventory.operations


@pytest.fixture
def acme(inventory):
    return inventory.acme


@pytest.fixture
def globex(inventory):
    return inventory.globex


@pytest.fixture
def make_user(inventory):
    return inventory.make_user


@pytest.fixture
def viewer(inventory):
    return inventory.viewer


@pytest.fixture
def operator(inventory):
    return inventory.operator


@pytest.fixture
def fleet_admin(inventory):
    return inventory.fleet_admin


@pytest.fixture
def member(inventory):
    return inventory.member


@pytest.fixture
def key_manager(inventory):
    return inventory.key_manager


@pytest.fixture
def stranger(inventory):
    return inventory.stranger


@pytest.fixture
def reader(client, viewer):
    """A client signed in as a viewer of the fleet."""
    client.force_login(viewer)
    return client


@pytest.fixture
def acting(client, operator):
    """A client signed in as an operator."""
    client.force_login(operator)
    return client


@pytest.fixture
def as_admin(client, fleet_admin):
    client.force_login(fleet_admin)
    return client


@pytest.fixture
def as_member(client, member):
    """A client signed in as one of acme's people."""
    client.force_login(member)
    return client
