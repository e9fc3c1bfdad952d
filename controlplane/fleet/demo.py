"""The demo fleet: creates what is missing of the fleet file `demo.toml`, and a user who operates it."""

from collections import Counter
from pathlib import Path
from typing import Final, Literal

from django.db import transaction
from django.utils.text import slugify

from controlplane.accounts.models import Membership, Role, Tenant, User
from controlplane.events.audit import record_creation
from controlplane.events.services import record
from controlplane.fleet.inventory import fleet_file, services
from controlplane.fleet.inventory.kinds import INSTANCE, SLO_CLASS, TENANT
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Node, SloClass, SwapGroup

FILE: Final = Path(__file__).with_name("demo.toml")
SHARED: Final = "small-us-west", ("llama-3-2-3b-us-west-2", "llama-3-1-8b-us-west-3")
"""The demo's swap group, and its members: the first is awake, the second is stopped until it is swapped to."""
OPERATOR: Final = "operator"
"""Name of the demo's only user, who signs in by a link and has no password."""


@transaction.atomic
def seed(fleet: Literal["none", "emulated"] = "emulated") -> Counter[str]:
    """Create what is missing of the demo and touch nothing that is there. Return the rows created, by kind.

    Rows are known by their names, so an operator's edits stay and a second run creates nothing. Instances are created
    without starting them.
    """
    created: Counter[str] = Counter()
    for entry in fleet_file.read(FILE):
        if (entry.kind is INSTANCE and fleet == "none") or entry.kind.find(entry.key) is not None:
            continue
        row = services.insert(entry.kind, entry.of_new_row())
        if isinstance(row, Instance):
            row.node = _free_node(row.deployment)
            row.full_clean()
            row.save()
        created[str(row._meta.verbose_name_plural)] += 1
    if created["instances"] and not SwapGroup.objects.exists():
        _share_gpus()
        created["swap groups"] += 1
    if not User.objects.filter(username=OPERATOR).exists():
        user = User(username=OPERATOR)
        user.set_unusable_password()
        user.save()
        Membership.objects.create(user=user, tenant=Tenant.objects.get(name="operations"), role=Role.ADMIN)
        created["users"] += 1
    if created:
        record("demo.seeded", actor="demo", after=dict(created))
    return created


@transaction.atomic
def add_tenant(name: str, actor: User | str) -> Tenant:
    """Create a tenant of every SLO class; where there is no class, those of the demo, to be edited."""
    if not SloClass.objects.exists():
        for entry in fleet_file.read(FILE):
            if entry.kind is SLO_CLASS:
                record_creation(services.insert(SLO_CLASS, entry.of_new_row()), actor)
    classes = list(SloClass.objects.order_by("priority", "pk").values_list("name", flat=True))
    values = {"name": slugify(name), "title": name, "default_slo_class": classes[0], "slo_classes": classes}
    made: Tenant = services.create(TENANT, values, actor)
    return made


def _share_gpus() -> None:
    """Let two models share GPUs (QLM section 5)."""
    name, members = SHARED
    first, second = (Instance.objects.get(name=each) for each in members)
    first.swap_group = second.swap_group = SwapGroup.objects.create(name=name)
    second.node, second.state = first.node, InstanceState.STOPPED
    for row in (first, second):
        row.full_clean()
        row.save()


def _free_node(deployment: Deployment) -> Node | None:
    """Return the first node with enough free GPUs; None (not placed) if operators use them otherwise."""
    nodes = Node.objects.filter(region=deployment.region, gpu_type=deployment.gpu_type, active=True)
    return next((node for node in nodes if node.free_gpus() >= deployment.tensor_parallel), None)
