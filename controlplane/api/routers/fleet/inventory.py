"""`/api`: the inventory, and `/api/inventory`: rows of any kind, as in a fleet file."""

from typing import TYPE_CHECKING, Any, Literal

from django.db.models import QuerySet
from django.http import Http404
from ninja import Field, Router, Status
from pydantic import create_model

from controlplane.accounts.models import Role
from controlplane.api.callers import VIEWERS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.names import NAME
from controlplane.api.resources import add_list, add_operations, schema_of
from controlplane.api.schemas import Described, Items, Reason, Strict
from controlplane.applications.services import APPLICATION, UNIT_BACKEND
from controlplane.fleet.inventory import services
from controlplane.fleet.inventory.fleet_file import Entry, FleetFileError, apply
from controlplane.fleet.inventory.kinds import INSTANCE, KINDS, Kind
from controlplane.resources.inventory import (
    DEPLOYMENTS,
    GPUS,
    MAINTENANCE,
    MODELS,
    NODES,
    REGIONS,
    STOCK,
    TARGET_COMPARISONS,
)
from controlplane.resources.jobs import SHARDS
from controlplane.resources.spot import DONATIONS

router = Router(auth=VIEWERS, tags=["Inventory"])
BY_NAME = {kind.name: kind for kind in (*KINDS, APPLICATION, UNIT_BACKEND)}

for resource, name, about in (
    (REGIONS, "RegionOut", "List regions."),
    (NODES, "NodeOut", "Machines, and how many of their GPUs instances have."),
    (
        GPUS,
        "GpuOut",
        "GPUs that agents or failures have named: starts that failed on each, and by whom it is cordoned.",
    ),
    (STOCK, "StockOut", "Weights of models and adapters on the disks of the nodes that serve them."),
    (MODELS, "ModelOut", "Models. Tenants find the models that they can ask for in `/v1/models`."),
    (SHARDS, "ShardOut", "Shards of models, and which process owns each. Relays are in `/api/summary`."),
    (DEPLOYMENTS, "DeploymentOut", "List deployments with their policy."),
    (
        TARGET_COMPARISONS,
        "TargetComparisonOut",
        "Weighted targets of each public name, compared over the last day: latencies, output lengths and errors.",
    ),
):
    add_list(router, resource, schema_of(resource, name), about, paged=False)
    if resource.operations:
        add_operations(router, resource)
add_list(
    router, MAINTENANCE, schema_of(MAINTENANCE, "MaintenanceOut"), "Maintenance of nodes and regions, newest first."
)
add_operations(router, MAINTENANCE)
add_list(
    router,
    DONATIONS,
    schema_of(DONATIONS, "DonationOut"),
    "Donations, newest first: who let which instance go, and what became of it.",
)


class Applied(Strict):
    reason: str = Field("", max_length=255, description="Kept with the events.")
    dry_run: bool = Field(False, description="Only say what would change.")


if TYPE_CHECKING:
    KindName = str
    InventoryIn = Applied
else:
    KindName = Literal[tuple(BY_NAME)]
    InventoryIn = create_model(
        "InventoryIn", __base__=Applied, **{name: (list[kind.entry], []) for name, kind in BY_NAME.items()}
    )


class ChangeOut(Described):
    verb: Literal["create", "change"]
    kind: str
    name: str
    before: dict[str, Any]
    after: dict[str, Any]


@router.get("/inventory/{kind}", response=Items[dict[str, Any]])
def list_inventory(request: ApiRequest, kind: KindName) -> dict[str, Any]:
    """Rows of one kind, in the form in which `PATCH /api/inventory` and fleet files take them; secrets are left out."""
    of = BY_NAME[kind]
    shown = of.entry.model_fields.keys() - of.secret
    of_rows = [of.key_of(row) | of.values_of(row) for row in _rows(of)]
    return {"items": [{name: value for name, value in row.items() if name in shown} for row in of_rows]}


@router.patch("/inventory", response=Items[ChangeOut])
def apply_inventory(request: ApiRequest, body: InventoryIn) -> dict[str, Any]:
    """Create and change rows, all or nothing, as a fleet file does: those that are not named, and fields that are not given,
    stay. Rows refer to others by name. Needs the role admin.
    """
    user = request.auth.require(Role.ADMIN)
    entries = [
        _entry(kind, number, values.model_dump(exclude_unset=True))
        for name, kind in BY_NAME.items()
        for number, values in enumerate(getattr(body, name))
    ]
    try:
        changes = apply(entries, user, body.reason, dry_run=body.dry_run)
    except FleetFileError as error:
        field = ".".join(filter(None, (error.where, error.key)))
        raise ApiError(422, "invalid", error.text, field) from error
    return {
        "items": [
            {
                "verb": change.verb,
                "kind": change.kind.name,
                "name": change.label,
                "before": {name: before for name, (before, _) in change.values.items()},
                "after": {name: after for name, (_, after) in change.values.items()},
            }
            for change in changes
        ]
    }


@router.delete(f"/inventory/{{kind}}/{NAME}", response={204: None})
def delete_from_inventory(request: ApiRequest, kind: KindName, name: str, reason: str = Reason) -> Status[None]:
    """Delete a row; *name* joins the parts of its key with slashes, as in `deployments/llama-3.1-8b/us-east/a100-80gb`.

    Refused while other rows refer to it. Needs the role admin.
    """
    user, of = request.auth.require(Role.ADMIN), BY_NAME[kind]
    row = next((row for row in _rows(of) if of.label(of.key_of(row)) == name), None)
    if row is None:
        raise Http404(name)
    services.delete(of, row, user, reason)
    return Status(204, None)


def _entry(kind: Kind, number: int, values: dict[str, Any]) -> Entry:
    return Entry(kind, f"{kind.name}[{number}]", {name: values.pop(name) for name in kind.key}, values)


def _rows(kind: Kind) -> QuerySet[Any]:
    of = [f"deployment__{name}" for name in ("model", "region", "gpu_type")] if kind is INSTANCE else []
    related = [*of, *(name for name in kind.named if not kind.is_many(name))]
    return kind.model._default_manager.select_related(*related).order_by("pk")
