"""`/api/budgets`: limits on the use of tenants, API keys and models."""

from typing import cast

from django.shortcuts import get_object_or_404
from ninja import Field, Router, Status

from controlplane.accounts.models import ApiKey, Budget, BudgetKind, Role, Tenant
from controlplane.accounts.services import delete_budget, save_budget
from controlplane.api import conditions
from controlplane.api.callers import PEOPLE_AND_KEYS, VIEWERS, ApiRequest
from controlplane.api.conditions import IfMatch
from controlplane.api.errors import ApiError
from controlplane.api.resources import add_list, schema_of
from controlplane.api.schemas import ActionIn, Strict
from controlplane.resources.budgets import BUDGETS

router = Router(auth=PEOPLE_AND_KEYS, tags=["Tenants"])

BudgetOut = schema_of(BUDGETS, "BudgetOut")


class BudgetIn(Strict):
    tenant: str | None = None
    """Name; without it the budget is of a model over all tenants."""
    api_key: str | None = None
    """First characters of a key, as lists show them."""
    model: str = Field("", max_length=160)
    kind: BudgetKind
    soft: float | None = Field(None, ge=0)
    """An event and a header from here on."""
    hard: float | None = Field(None, ge=0)
    """Refused with 429 from here on."""
    reason: str = Field("", max_length=255)


class BudgetChange(Strict):
    soft: float | None = Field(None, ge=0)
    hard: float | None = Field(None, ge=0)
    reason: str = Field("", max_length=255)


add_list(router, BUDGETS, BudgetOut, "Budgets: all for the fleet's people, their own for others.", paged=False)


@router.post("/budgets", response={201: BudgetOut}, auth=VIEWERS)
def create_budget(request: ApiRequest, body: BudgetIn) -> Status[Budget]:
    """Create a budget of a tenant, an API key, a model, or a combination. Needs the role admin."""
    user = request.auth.require(Role.ADMIN)
    tenant = Tenant.objects.filter(name=body.tenant).first() if body.tenant else None
    if body.tenant and tenant is None:
        raise ApiError(422, "invalid", f"There is no tenant {body.tenant!r}.", "tenant")
    key = ApiKey.objects.filter(prefix=body.api_key).first() if body.api_key else None
    if body.api_key and key is None:
        raise ApiError(422, "invalid", f"There is no key {body.api_key!r}.", "api_key")
    budget = Budget(tenant=tenant, api_key=key, model=body.model, kind=body.kind, soft=body.soft, hard=body.hard)
    return Status(201, save_budget(budget, user, body.reason))


@router.get("/budgets/{int:budget_id}", response=BudgetOut)
def get_budget(request: ApiRequest, budget_id: int) -> Budget:
    """One budget, with its `ETag`."""
    return cast(Budget, conditions.read(request, BUDGETS.rows(request.auth), pk=budget_id))


@router.patch("/budgets/{int:budget_id}", response=BudgetOut, auth=VIEWERS)
def change_budget(request: ApiRequest, budget_id: int, body: BudgetChange, if_match: str = IfMatch) -> Budget:
    """Change the limits of a budget; a limit that is null is taken away. Needs the role admin."""
    user = request.auth.require(Role.ADMIN)
    budget = get_object_or_404(Budget, pk=budget_id)
    conditions.check(request, if_match, budget)
    for name, value in body.model_dump(exclude_unset=True, exclude={"reason"}).items():
        setattr(budget, name, value)
    return save_budget(budget, user, body.reason)


@router.delete("/budgets/{int:budget_id}", response={204: None}, auth=VIEWERS)
def remove_budget(request: ApiRequest, budget_id: int, body: ActionIn, if_match: str = IfMatch) -> Status[None]:
    """Delete a budget. Needs the role admin."""
    user, budget = request.auth.require(Role.ADMIN), get_object_or_404(Budget, pk=budget_id)
    conditions.check(request, if_match, budget)
    delete_budget(budget, user, body.reason)
    return Status(204, None)
