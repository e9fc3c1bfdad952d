"""Reads of usage: sums of its hours, by what is asked for.

*tenants* are those whose usage is read; None is the whole fleet's, with what was idle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from django.db.models import F, Q, QuerySet, Sum
from django.db.models.functions import TruncDay

from controlplane.accounts.models import Tenant
from controlplane.rows import narrowed
from controlplane.usage.models import SUMS, UsageHour, UsageMark


@dataclass(frozen=True, slots=True)
class Asked:
    """Which usage: hours in [since, until), of *tenants* (None: the fleet's), narrowed by names that are not empty."""

    since: datetime
    until: datetime
    tenants: QuerySet[Tenant] | None
    names: dict[str, str] = field(default_factory=dict)

    def rows(self) -> QuerySet[UsageHour]:
        rows = UsageHour.objects.filter(hour__gte=self.since, hour__lt=self.until)
        if self.tenants is not None:
            rows = rows.filter(tenant__in=self.tenants)
        return narrowed(rows, **self.names)


SHOWN: dict[str, dict[str, Any]] = {
    "day": {"day": TruncDay("hour", tzinfo=UTC)},
    "tenant": {"tenant_name": F("tenant__name"), "tenant_title": F("tenant__title")},
    "key": {"key": F("api_key"), "key_name": F("api_key__name"), "key_prefix": F("api_key__prefix")},
}
"""Fields of rows for the groups that are no columns."""


def usage(asked: Asked, by: Sequence[str] = ()) -> "QuerySet[UsageHour, dict[str, Any]]":
    """Sums by *by*, of day, hour (both in UTC), tenant, key, model and slo_class, in their order.

    Idle time is a separate row, with `idle` true and no tenant. A key is its id, with `key_name` and
    `key_prefix`.
    """
    values = {name: value for group in by for name, value in SHOWN.get(group, {}).items()}
    plain = [group for group in by if group not in SHOWN]
    rows = asked.rows().order_by().annotate(idle=Q(tenant=None)).values(*plain, "idle", **values)
    order = [name for group in by for name in [*SHOWN.get(group, [group])][:1]]
    # an annotation may not have the name of a column, so each sum has another one
    sums: dict[str, Any] = {f"sum_{name}": Sum(name) for name in SUMS}
    grouped: QuerySet[UsageHour, dict[str, Any]] = rows.annotate(**sums).order_by(*order, "idle")
    return grouped


def summed(row: dict[str, Any]) -> dict[str, Any]:
    """*row* of `usage` with sums by the names of `SUMS`."""
    return {name.removeprefix("sum_"): value for name, value in row.items()}


def used_models(tenants: QuerySet[Tenant] | None) -> list[str]:
    """Names of the models that *tenants* have ever used."""
    rows = UsageHour.objects.all() if tenants is None else UsageHour.objects.filter(tenant__in=tenants)
    return list(rows.order_by("model").values_list("model", flat=True).distinct())


def counted_until() -> datetime | None:
    """Time up to which usage is counted; None before the first count."""
    return UsageMark.objects.values_list("counted_until", flat=True).first()
