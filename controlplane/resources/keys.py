"""Tenants and their API keys. The secret of a key is never among the columns."""

from django.db.models import QuerySet

from controlplane.accounts.models import ApiKey, Role, Tenant
from controlplane.fleet.inventory.kinds import TENANT
from controlplane.resources.filters import Hidden, Search
from controlplane.resources.resource import LEAVES, Column, Filter, Resource, Viewer, search_in


def visible_keys(viewer: Viewer) -> QuerySet[ApiKey]:
    return ApiKey.objects.filter(tenant__in=viewer.tenants()).select_related("tenant", "created_by", "account")


def visible_tenants(viewer: Viewer) -> QuerySet[Tenant]:
    return viewer.tenants().select_related("default_slo_class").prefetch_related("slo_classes", "regions")


def by_state(rows: QuerySet[ApiKey], shown: str) -> QuerySet[ApiKey]:
    return rows.filter(revoked_at__isnull=True) if shown == "usable" else rows


KEYS = Resource(
    name="keys",
    noun="key",
    title="Keys and budgets",
    file="api-keys",
    model=ApiKey,
    rows=visible_keys,
    columns=(
        Column("id"),
        Column("name", "Name"),
        Column("prefix", "Key", draw="id"),
        Column("tenant", "Tenant", "tenant.name"),
        Column(
            "role",
            "Role over the fleet",
            label="Access",
            type=Role | None,
            draw="console/keys/role_cell.html",
            about="Of a service key: what it may do over the fleet.",
        ),
        Column(
            "allowed_models",
            "Allowed models",
            type=list[str],
            draw="console/keys/models_cell.html",
            about="Names that its requests may ask for; empty: all.",
        ),
        Column(
            "created_by",
            "Created by",
            lambda key: key.created_by.get_username() if key.created_by else None,
            type=str | None,
            leaves=LEAVES,
        ),
        Column("created_at", "Created (UTC)", draw="moment", leaves=LEAVES),
        Column("last_used_at", "Last used (UTC)", draw="age"),
        Column("expires_at", "Expires (UTC)"),
        Column("revoked_at", "Revoked (UTC)"),
        Column("usable", type=bool, label="State", draw="console/keys/state_cell.html"),
        Column("budgets", label="Budgets", source="pk", rest=False, draw="console/keys/budgets_cell.html", kind="wrap"),
    ),
    filters=(
        search_in("name", "prefix", control=Search("q", "Search by name or first characters", "Search keys")),
        Filter("tenant", "tenant__name"),
        Filter("show", by_state, rest=False, control=Hidden("show", ("usable", "all"), "usable")),
    ),
    page=(
        *("name", "prefix", "tenant", "role", "allowed_models", "budgets", "created_by", "created_at", "last_used_at"),
        "usable",
    ),
    template="console/keys/keys.html",
    actions="console/keys/actions.html",
)
TENANTS = Resource(
    name="tenants",
    noun="tenant",
    model=Tenant,
    kind=TENANT,
    rows=visible_tenants,
    columns=(
        *(Column(name) for name in ("name", "title", "operates_fleet", "default_slo_class", "max_concurrent_requests")),
        *(Column(name) for name in ("tokens_per_minute", "time_zone", "active", "created_at")),
        Column("slo_classes", source=lambda row: [each.name for each in row.slo_classes.all()], type=list[str]),
        Column("regions", source=lambda row: [*row.residency], type=list[str]),
    ),
)
