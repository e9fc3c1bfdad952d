"""Reads for `/api` of the request ledger and its series."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from django.db.models import Count, Q, QuerySet, Sum
from django.db.models.functions import TruncMinute

from controlplane.accounts.models import Tenant
from controlplane.gateway.models import LedgerRow, MinuteRow, Outcome

SERIES = ("minute", "model", "region", "slo_class")
SUMS = ("requests", "failed", "slo_met", "slo_judged", "prompt_tokens", "output_tokens")
USAGE_COLUMNS = SERIES + SUMS


def requests(tenants: QuerySet[Tenant] | None) -> QuerySet[LedgerRow]:
    """Ledger rows, newest first, of *tenants* (None: of all)."""
    rows = LedgerRow.objects.select_related("tenant").order_by("-pk")
    return rows if tenants is None else rows.filter(tenant__in=tenants)


def fleet_usage(since: datetime, until: datetime, limit: int, **names: str) -> Iterator[dict[str, Any]]:
    """The fleet's minute rows in [since, until), oldest first, at most *limit*; *names* narrows model, region, class."""
    rows = MinuteRow.objects.filter(minute__gte=since, minute__lt=until, **names).order_by(*SERIES)
    found: Iterator[dict[str, Any]] = rows.values(*USAGE_COLUMNS)[:limit].iterator(chunk_size=2_000)
    return found


def tenant_usage(
    tenants: QuerySet[Tenant], since: datetime, until: datetime, limit: int, **names: str
) -> Iterator[dict[str, Any]]:
    """The same columns for *tenants*, counted from the ledger; minute rows know no tenant."""
    sums = {
        "requests": Count("pk"),
        "failed": Count("pk", filter=Q(outcome__in=[Outcome.FAILED, Outcome.REJECTED])),
        "slo_met": Count("pk", filter=Q(slo_met=True)),
        "slo_judged": Count("pk", filter=Q(slo_met__isnull=False)),
        "prompt_tokens": Sum("prompt_tokens"),
        "output_tokens": Sum("output_tokens"),
    }
    rows = LedgerRow.objects.filter(tenant__in=tenants, arrived_at__gte=since, arrived_at__lt=until, **names)
    grouped = rows.order_by().annotate(minute=TruncMinute("arrived_at")).values(*SERIES).order_by(*SERIES)
    # an annotation may not have the name of a column, so the sums are named apart and renamed row by row
    counted = grouped.annotate(**{f"sum_{name}": value for name, value in sums.items()})
    for row in counted[:limit].iterator(chunk_size=2_000):
        yield {name.removeprefix("sum_"): value for name, value in row.items()}
