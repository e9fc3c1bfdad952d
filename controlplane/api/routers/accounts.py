"""`/api`: tenants, their API keys and budgets."""

from typing import Any, Literal, TypedDict, cast

from django.db import transaction
from django.shortcuts import get_object_or_404
from django_stubs_ext import WithAnnotations
from ninja import Field, Router, Status

from controlplane.accounts.models import ApiKey, Role
from controlplane.accounts.selectors import manageable_api_keys, tenants_with_managed_keys
from controlplane.accounts.services import allow_models, create_api_key, revoke_api_key
from controlplane.api.callers import PEOPLE, PEOPLE_AND_KEYS, ApiRequest
from controlplane.api.errors import ApiError
from controlplane.api.resources import add_changes, add_list, schema_of
from controlplane.api.schemas import ActionIn, Described, Strict
from controlplane.fleet.selectors import allowed_models
from controlplane.resources.budgets import BUDGETS
from controlplane.resources.keys import KEYS, TENANTS, visible_keys
from controlplane.resources.resource import Column
from controlplane.resources.users import MEMBERSHIPS, USERS
from controlplane.rows import Instant

router = Router(auth=PEOPLE_AND_KEYS, tags=["Tenants"])


TenantOut = schema_of(TENANTS, "TenantOut")
KeyOut = schema_of(KEYS, "KeyOut")
NewKey = schema_of(KEYS, "NewKey", "", Column("secret", type=str, about="Shown in this answer and never again."))


class KeyIn(Strict):
    tenant: str
    name: str = Field(min_length=1, max_length=80)
    expires_at: Instant | None = None
    """Required for a service key, at most 366 days ahead."""
    role: Role | None = None
    """Creates a service key of an operator tenant with this role on `/api`. At most your own role."""
    allowed_models: list[str] = []
    """Names that its requests may ask for: of models, adapters and weighted targets; none allows all."""


class KeyChange(ActionIn):
    allowed_models: list[str] | None = None
    """Names of models, adapters and weighted targets; an empty list allows all, null changes nothing."""
    revoked: Literal[True] | None = None
    """Revokes it permanently: requests with it are refused within seconds."""


class MeOut(Described):
    user: str | None
    """Account of a service key, as named in events."""
    tenant: str | None
    """Tenant of the API key."""
    fleet_role: Role | None
    tenants: list[str]


class Shown(TypedDict):
    secret: str


@router.get("/me", response=MeOut)
def get_me(request: ApiRequest) -> dict[str, Any]:
    """Return the caller and the tenants visible to it."""
    caller = request.auth
    return {
        "user": caller.user.get_username() if caller.user else None,
        "tenant": caller.key.tenant.name if caller.key else None,
        "fleet_role": caller.fleet_role,
        "tenants": list(caller.tenants().order_by("name").values_list("name", flat=True)),
    }


add_list(router, TENANTS, TenantOut, "All tenants for the fleet's people, their own for others.", paged=False)
add_list(router, KEYS, KeyOut, "API keys, newest first, without their secrets.", paged=False)
BudgetOut = schema_of(BUDGETS, "BudgetOut")
add_list(router, BUDGETS, BudgetOut, "Budgets: all for the fleet's people, their own for others.", paged=False)
add_changes(router, BUDGETS, BudgetOut)
for people, name in ((USERS, "User"), (MEMBERSHIPS, "Membership")):
    person_out = schema_of(people, f"{name}Out")
    about = f"{people.plural.capitalize()}. Needs the role admin."
    add_list(router, people, person_out, about, paged=False, check=lambda caller, given: caller.check(Role.ADMIN))
    add_changes(router, people, person_out)


@router.post("/keys", response={201: NewKey}, auth=PEOPLE)
def create_key(request: ApiRequest, body: KeyIn) -> Status[ApiKey]:
    """Create a key. The secret is only in this response. Requires the role operator, in the tenant or over the fleet."""
    user = request.auth.person
    tenant = tenants_with_managed_keys(user).filter(name=body.tenant).first()
    if tenant is None:
        raise ApiError(403, "forbidden", "You do not manage the keys of such a tenant.", "tenant")
    key, secret = create_api_key(
        tenant,
        body.name,
        user,
        expires_at=body.expires_at,
        role=body.role,
        allowed_models=allowed_models(body.allowed_models, tenant.pk),
    )
    cast("WithAnnotations[ApiKey, Shown]", key).secret = secret
    return Status(201, key)


@router.patch("/keys/{int:key_id}", response=KeyOut, auth=PEOPLE)
@transaction.atomic
def change_key(request: ApiRequest, key_id: int, body: KeyChange) -> ApiKey:
    """Revoke a key, or set the models that requests with it may ask for."""
    key, person = _managed(request, key_id), request.auth.person
    if body.allowed_models is not None:
        key = allow_models(key, allowed_models(body.allowed_models, key.tenant_id), person, body.reason)
    return revoke_api_key(key, person, body.reason) if body.revoked else key


def _managed(request: ApiRequest, key_id: int) -> ApiKey:
    """Return the key. Raises ApiError or Http404 for one that the caller may not see, or not manage."""
    if not visible_keys(request.auth).filter(pk=key_id).exists():
        raise ApiError(404, "not_found", "There is no such key that you may see.")
    return get_object_or_404(manageable_api_keys(request.auth.person), pk=key_id)
