"""The demo fleet: creates what is missing of the fleet file `demo.toml`, and a user who operates it."""

from collections import Counter
from pathlib import Path
from typing import Final, Literal

from django.db import transaction

from controlplane.accounts.models import Membership, Role, Tenant, User
from controlplane.events.services import record
from controlplane.fleet.inventory import fleet_file, services
from controlplane.fleet.inventory.kinds import INSTANCE
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance, Node, SwapGroup

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
