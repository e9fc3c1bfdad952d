"""Reads of usage: sums of its hours, by what is asked for.

*tenants* are those whose usage is read; None is the whole fleet's, with what was idle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db.models import F, Q, QuerySet, Sum
from django.db.models.functions import TruncDay, TruncHour

from controlplane.accounts.models import Tenant
from controlplane.rows import narrowed
from controlplane.usage.models import SUMS, InstanceHour, UsageHour, UsageMark, Work

UTC = ZoneInfo("UTC")


@dataclass(frozen=True, slots=True)
class UsageScope:
    """Which usage: quarters of an hour in [since, until), of *tenants* (None: the fleet's), narrowed by names that are not
    empty. Days are those of *zone*.
    """

    since: datetime
    until: datetime
    tenants: QuerySet[Tenant] | None
    names: dict[str, str] = field(default_factory=dict)
    zone: ZoneInfo = UTC

    def rows(self, by_instance: bool = False) -> "QuerySet[Any]":
        """Return the rows; *by_instance* those of instances, which know no tenant and no key."""
        model: Any = InstanceHour if by_instance else UsageHour
        rows: QuerySet[Any] = model.objects.filter(hour__gte=self.since, hour__lt=self.until)
        if self.tenants is not None:
            rows = rows.filter(tenant__in=self.tenants)
        return narrowed(rows, **self.names)


def zone_of(tenants: QuerySet[Tenant] | None, name: str) -> ZoneInfo:
    """Return the zone of the days of a report: that of the tenant called *name*, or the only one of *tenants* (None: the
    fleet's), else that of all pages.
    """
    rows = Tenant.objects.all() if tenants is None else tenants
    known = list(rows.filter(name=name)) if name else list(rows[:2]) if tenants is not None else []
    return known[0].zone if len(known) == 1 else ZoneInfo(settings.TIME_ZONE)


def _shown(zone: ZoneInfo, since: datetime) -> dict[str, dict[str, Any]]:
    """Return the fields of rows for the groups that are no columns. An hour that *zone* has twice is two."""
    minutes = (since.astimezone(zone).utcoffset() or timedelta()) % timedelta(hours=1)
    return {
        "day": {"day": TruncDay("hour", tzinfo=zone)},
        "hour": {"whole_hour": TruncHour("hour", tzinfo=timezone(minutes))},
        "tenant": {"tenant_name": F("tenant__name"), "tenant_title": F("tenant__title")},
        "key": {
            "key": F("api_key"),
            "key_name": F("api_key__name"),
            "key_prefix": F("api_key__prefix"),
            "key_revoked_at": F("api_key__revoked_at"),
        },
    }


def usage(asked: UsageScope, by: Sequence[str] = ()) -> "QuerySet[Any, dict[str, Any]]":
    """Sums by *by*, of day (the zone's), hour, tenant, key, model, slo_class, work, application, batch, gpu_type and
    instance, in their order.

    Idle time is a separate row, with `idle` true and no tenant. A key is its id, with `key_name`, `key_prefix` and
    `key_revoked_at`.
    """
    by_instance, shown = "instance" in by, _shown(asked.zone, asked.since)
    values = {name: value for group in by for name, value in shown.get(group, {}).items()}
    plain = [group for group in by if group not in shown]
    idle = Q(work=Work.IDLE) if by_instance else Q(tenant=None)
    rows = asked.rows(by_instance).order_by().annotate(idle=idle).values(*plain, "idle", **values)
    order = [name for group in by for name in [*shown.get(group, [group])][:1]]
    # an annotation may not have the name of a column, so each sum has another one
    sums: dict[str, Any] = {f"sum_{name}": Sum(name) for name in SUMS}
    grouped: QuerySet[Any, dict[str, Any]] = rows.annotate(**sums).order_by(*order, "idle")
    return grouped


def summed(row: dict[str, Any]) -> dict[str, Any]:
    """*row* of `usage` with sums by the names of `SUMS`, and the hour as `hour`."""
    return {"hour" if name == "whole_hour" else name.removeprefix("sum_"): value for name, value in row.items()}


def used_models(tenants: QuerySet[Tenant] | None) -> list[str]:
    """Names of the models that *tenants* have ever used."""
    rows = UsageHour.objects.all() if tenants is None else UsageHour.objects.filter(tenant__in=tenants)
    return list(rows.order_by("model").values_list("model", flat=True).distinct())


def counted_until() -> datetime | None:
    """Time up to which usage is counted; None before the first count."""
    return UsageMark.objects.values_list("counted_until", flat=True).first()
