"""`/api/budgets`: limits on the use of tenants, API keys and models."""

from ninja import Router

from controlplane.api.callers import PEOPLE_AND_KEYS
from controlplane.api.resources import mount, schema_of
from controlplane.resources.budgets import BUDGETS

router = Router(auth=PEOPLE_AND_KEYS, tags=["Tenants"])
mount(router, BUDGETS, schema_of(BUDGETS, "BudgetOut"), "Budgets: all for the fleet's people, their own for others.")
