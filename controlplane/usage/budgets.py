"""The month's dollars of each budget, from the hours of usage; what a token of it costs; how much is used."""

from datetime import UTC, datetime, timedelta

from django.db.models import F, Q, Sum
from django.utils import timezone

from controlplane.accounts.models import Budget, BudgetKind
from controlplane.batches.budgets import waiting_lines
from controlplane.dispatch.allowances.budgets import ALERT_EVERY, month_of
from controlplane.usage.models import UsageHour, UsageMark

PRICED_OVER = timedelta(days=7)
"""Usage from which the price of a token is computed."""


def count_budgets(now: datetime) -> None:
    """Write what was charged this month, until usage was counted last, to the row of each budget of dollars."""
    mark = UsageMark.objects.first()
    if mark is None:
        return
    for row in Budget.objects.filter(kind=BudgetKind.USD).select_related("tenant"):
        begin = month_of(now.timestamp(), row.zone)
        hours = UsageHour.objects.filter(scope_of(row))
        spent = hours.filter(hour__gte=begin).aggregate(usd=Sum("charged_usd"))["usd"]
        Budget.objects.filter(pk=row.pk).update(
            spent_usd=spent or 0.0,
            spent_until=mark.counted_until.astimezone(UTC),
            usd_per_token=usd_per_token(scope_of(row), now),
        )


def scope_of(row: Budget) -> Q:
    """Return the condition for hours of usage that count towards *row*."""
    scope = Q(tenant__isnull=False)
    scope &= Q(tenant_id=row.tenant_id) if row.tenant_id is not None else Q()
    scope &= Q(api_key_id=row.api_key_id) if row.api_key_id is not None else Q()
    return scope & (Q(model=row.model) if row.model else Q())


def usd_per_token(scope: Q, now: datetime) -> float:
    """Return the mean charge of a token of *scope* lately; of the whole fleet where the scope used nothing, else 0."""
    lately = UsageHour.objects.filter(hour__gte=now - PRICED_OVER, tenant__isnull=False)
    for hours in (lately.filter(scope), lately):
        sums = hours.aggregate(usd=Sum("charged_usd"), tokens=Sum(F("prompt_tokens") + F("output_tokens")))
        if sums["tokens"]:
            return float(sums["usd"] or 0.0) / float(sums["tokens"])
    return 0.0


def used(row: Budget) -> float | None:
    """Return what is used of the budget, in its unit; None for budgets by the minute, which the gateway counts in memory."""
    match BudgetKind(row.kind):
        case BudgetKind.USD:
            known = row.spent_until is not None and row.spent_until >= month_of(timezone.now().timestamp(), row.zone)
            return row.spent_usd if known else 0.0
        case BudgetKind.BATCH_LINES:
            lines = getattr(row, "waiting", None)
            return float(waiting_lines(row) if lines is None else lines)
    return None


def used_share(row: Budget, now: datetime) -> float | None:
    """Return the used share of the hard limit, else of the soft one; None if there is nothing to compare with.

    Of a budget by the minute: what its last alert or stop says, for as long as the gateway repeats neither.
    """
    limit = row.hard if row.hard is not None else row.soft
    if not limit:
        return None
    if (so_far := used(row)) is not None:
        return so_far / limit
    for at, mark in ((row.stopped_at, row.hard), (row.alerted_at, row.soft)):
        if at is not None and mark is not None and now - at < ALERT_EVERY:
            return mark / limit
    return 0.0
