"""Budgets, and how much of each is used."""

from django.db.models import Q, QuerySet

from controlplane.accounts.models import Budget, BudgetKind
from controlplane.batches.budgets import with_waiting_lines
from controlplane.fleet.inventory.kinds import BUDGET
from controlplane.resources.resource import Column, Filter, Resource, Viewer, of_choice
from controlplane.usage.budgets import used

AMOUNT = "console/budgets/amount_cell.html"


def visible_budgets(viewer: Viewer) -> QuerySet[Budget]:
    """Budgets of the viewer's tenants; those of a model over all tenants are for those who see the fleet."""
    rows = with_waiting_lines(Budget.objects.select_related("tenant", "api_key"))
    return rows if viewer.sees_fleet else rows.filter(Q(tenant__in=viewer.tenants()))


def state(row: Budget) -> str:
    """`spent`, `near`, or `free`."""
    so_far = used(row)
    if so_far is not None:
        if row.hard is not None and so_far >= row.hard:
            return "spent"
        return "near" if row.soft is not None and so_far > row.soft else "free"
    return "free"


def _zone(row: Budget) -> str | None:
    return str(row.zone) if row.kind == BudgetKind.USD else None


BUDGETS = Resource(
    name="budgets",
    noun="budget",
    model=Budget,
    kind=BUDGET,
    rows=visible_budgets,
    columns=(
        Column("id"),
        Column(
            "scope",
            "Scope",
            type=str,
            draw="console/budgets/scope_cell.html",
            about="Tenant, API key and model, as far as the budget is of one.",
        ),
        Column("tenant", "Tenant", "tenant.name", type=str | None),
        Column("api_key", "API key", "api_key.prefix", type=str | None, about="First characters of the key."),
        Column("model", "Model"),
        Column("kind", "Kind", type=BudgetKind),
        Column("unit", label="Limits", source=lambda row: row.get_kind_display(), rest=False),
        Column("used", "Used (in its unit)", used, type=float | None, draw=AMOUNT, kind="num"),
        Column("soft", "Soft (in its unit)", label="Warn at", draw=AMOUNT, kind="num"),
        Column("hard", "Hard (in its unit)", label="Stop at", draw=AMOUNT, kind="num"),
        Column(
            "state",
            "State",
            state,
            type=str,
            draw="console/budgets/state_cell.html",
            about="`spent`, `near` or `free`.",
        ),
        Column("months_in", "Months in", _zone, type=str | None, about="Time zone of its months; null for others."),
        Column("alerted_at", "Last alert (UTC)", draw="moment"),
        Column("stopped_at", "Last stop (UTC)", draw="moment"),
    ),
    filters=(
        Filter("tenant", "tenant__name"),
        of_choice("kind", BudgetKind, "kinds"),
        Filter("model"),
    ),
    page=("scope", "unit", "used", "soft", "hard", "state", "months_in", "alerted_at", "stopped_at"),
)
