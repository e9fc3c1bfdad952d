"""Budgets of batch lines that wait: checked when a batch is created, and exactly when its lines are known."""

from django.db.models import F, OuterRef, Q, QuerySet, Subquery, Sum, Value
from django.db.models.functions import Coalesce, NullIf

from controlplane.accounts.models import Budget, BudgetKind, Tenant
from controlplane.batches.models import ENDED, Batch
from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.gateway.errors import ApiError, too_many

CODE = "batch_lines_exceeded"
RETRY_S = 60.0


def waiting_lines(budget: Budget, but: int = 0) -> int:
    """Return the lines without an answer of batches that count towards *budget*, except those of batch *but*."""
    rows = Batch.objects.exclude(status__in=ENDED).exclude(pk=but)
    scope = Q(tenant_id=budget.tenant_id) if budget.tenant_id is not None else Q()
    scope &= Q(api_key_id=budget.api_key_id) if budget.api_key_id is not None else Q()
    scope &= Q(model=budget.model) if budget.model else Q()
    sums = rows.filter(scope).aggregate(lines=Sum(F("total") - F("completed") - F("failed")))
    return int(sums["lines"] or 0)


def with_waiting_lines(budgets: QuerySet[Budget]) -> QuerySet[Budget]:
    """Add `waiting` to each, what `waiting_lines` counts, in the same query."""
    rows = Batch.objects.exclude(status__in=ENDED).order_by().alias(key=Coalesce("api_key_id", 0))
    rows = rows.filter(
        tenant_id=Coalesce(OuterRef("tenant_id"), F("tenant_id")),
        key=Coalesce(OuterRef("api_key_id"), F("key")),
        model=Coalesce(NullIf(OuterRef("model"), Value("")), F("model")),
    )
    lines = rows.values(all=Value(1)).annotate(left=Sum(F("total") - F("completed") - F("failed"))).values("left")
    return budgets.annotate(waiting=Coalesce(Subquery(lines), 0))


def check_lines_budget(batch: Batch, lines: int) -> None:
    """Raise ApiError 429 if *lines* of *batch* exceed a budget; note a soft limit.

    In a transaction the budgets stay locked until it ends, so that of two batches one alone takes the last lines.
    """
    scope = Q(tenant=None) | Q(tenant_id=batch.tenant_id)
    scope &= Q(api_key=None) | Q(api_key_id=batch.api_key_id)
    scope &= Q(model="") | Q(model=batch.model)
    rows = Budget.objects.filter(scope, kind=BudgetKind.BATCH_LINES).order_by("pk").select_for_update()
    for row in rows:
        waiting = waiting_lines(row, but=batch.pk)
        if row.hard is not None and waiting + lines > row.hard:
            raise _refused(row, waiting, lines)
        if row.soft is not None and waiting <= row.soft < waiting + lines:
            after = {"soft": row.soft, "lines": waiting + lines}
            record("budget.nearly_reached", row, actor="batches", after=after, severity=Severity.WARNING)


def _refused(row: Budget, waiting: int, lines: int) -> ApiError:
    error = too_many(
        f"The budget of {row.scope}, {row.amount}, does not hold {lines:,} more: {waiting:,} wait already."
        " Create the batch again when they are answered.",
        code=CODE,
        retry_after_s=RETRY_S,
    )
    error.extra_headers = ((b"x-budget", f"{row.scope}: {row.amount}".encode("ascii", "replace")),)
    return error


def spent_budgets(tenants: QuerySet[Tenant]) -> list[str]:
    """Return why lines of *tenants* wait, for each budget of dollars that is spent."""
    rows = Budget.objects.filter(kind=BudgetKind.USD, stopped_at__isnull=False, tenant__in=tenants)
    rows = rows.select_related("tenant", "api_key")
    return [f"{row.scope}'s budget of ${row.hard or 0:,.0f} is spent; lines wait" for row in rows]
