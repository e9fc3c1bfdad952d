"""`/api`: tenants and their keys."""

from datetime import datetime
from typing import Any, TypedDict, cast

from django.shortcuts import get_object_or_404
from django_stubs_ext import WithAnnotations
from ninja import Field, Router, Status

from controlplane.accounts.models import ApiKey, Role, Tenant
from controlplane.accounts.selectors import manageable_api_keys, tenants_with_managed_keys
from controlplane.accounts.services import create_api_key, revoke_api_key
from controlplane.api.callers import PEOPLE, PEOPLE_AND_KEYS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.schemas import ActionIn, Described, Items, RowSchema, Strict
from controlplane.rows import narrowed

router = Router(auth=PEOPLE_AND_KEYS, tags=["Tenants"])


class TenantOut(RowSchema):
    class Meta:
        model = Tenant
        fields = ("name", "title", "operates_fleet", "default_slo_class", "max_concurrent_requests",
                  "tokens_per_minute", "active", "created_at")  # fmt: skip

    slo_classes: list[str]

    @staticmethod
    def resolve_slo_classes(row: Tenant) -> list[str]:
        return [slo_class.name for slo_class in row.slo_classes.all()]


class KeyOut(RowSchema):
    class Meta:
        model = ApiKey
        fields = ("id", "tenant", "name", "prefix", "created_at", "expires_at", "revoked_at", "last_used_at")

    usable: bool
    role: Role | None
    """Of a service key: what it may do over the fleet."""
    created_by: str | None

    @staticmethod
    def resolve_created_by(row: ApiKey) -> str | None:
        return row.created_by.get_username() if row.created_by else None


class KeyIn(Strict):
    tenant: str
    name: str = Field(min_length=1, max_length=80)
    expires_at: datetime | None = None
    """A service key needs it, within 366 days."""
    role: Role | None = None
    """Makes a service key of a tenant that operates the fleet: it may do on `/api` what this role may. At most your own."""


class NewKey(KeyOut):
    secret: str
    """Shown in this answer and never again."""


class RevokeIn(ActionIn):
    pass


class MeOut(Described):
    user: str | None
    """Of a service key: its account, as events name it."""
    tenant: str | None
    """Of the API key."""
    fleet_role: Role | None
    tenants: list[str]


class Shown(TypedDict):
    secret: str


@router.get("/me", response=MeOut)
def get_me(request: ApiRequest) -> dict[str, Any]:
    """Who the caller is, and which tenants they see."""
    caller = request.auth
    return {
        "user": caller.user.get_username() if caller.user else None,
        "tenant": caller.key.tenant.name if caller.key else None,
        "fleet_role": caller.fleet_role,
        "tenants": list(caller.tenants().order_by("name").values_list("name", flat=True)),
    }


@router.get("/tenants", response=Items[TenantOut])
def list_tenants(request: ApiRequest) -> dict[str, Any]:
    """All tenants for the fleet's people, their own for others."""
    rows = request.auth.tenants().select_related("default_slo_class").prefetch_related("slo_classes")
    return {"items": list(rows)}


@router.get("/keys", response=Items[KeyOut])
def list_keys(request: ApiRequest, tenant: str = "") -> dict[str, Any]:
    """API keys, newest first, without their secrets."""
    rows = request.auth.api_keys()
    return {"items": list(narrowed(rows, tenant__name=tenant))}


@router.post("/keys", response={201: NewKey}, auth=PEOPLE)
def create_key(request: ApiRequest, body: KeyIn) -> Status[ApiKey]:
    """A new key. The secret is in this answer and nowhere else. Needs the role operator, in the tenant or over the fleet."""
    user = request.auth.person
    tenant = tenants_with_managed_keys(user).filter(name=body.tenant).first()
    if tenant is None:
        raise ApiError(403, "forbidden", "You do not manage the keys of such a tenant.", "tenant")
    key, secret = create_api_key(tenant, body.name, user, expires_at=body.expires_at, role=body.role)
    cast("WithAnnotations[ApiKey, Shown]", key).secret = secret
    return Status(201, key)


@router.post("/keys/{int:key_id}/revoke", response=KeyOut, auth=PEOPLE)
def revoke_key(request: ApiRequest, key_id: int, body: RevokeIn) -> ApiKey:
    """End a key for good. Requests with it are refused within seconds."""
    user = request.auth.person
    if not request.auth.api_keys().filter(pk=key_id).exists():
        raise ApiError(404, "not_found", "There is no such key that you may see.")
    key = get_object_or_404(manageable_api_keys(user), pk=key_id)
    return revoke_api_key(key, user, body.reason)
