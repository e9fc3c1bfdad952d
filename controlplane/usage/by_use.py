"""What the fleet's dollars work for: interactive, non-interactive and spot work, or nothing (SageServe section 4).

Counted from the stored hours of usage, so that past dollars stay as they were.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from django.db.models import Sum

from controlplane.fleet.models import SloClass, SloKind
from controlplane.fleet.spot.selectors import donated_time
from controlplane.usage.models import UsageHour


class DollarsByUse(NamedTuple):
    """Dollars of all instances at the on-demand price, by use; `non_interactive` includes classes that were deleted."""

    interactive_usd: float
    non_interactive_usd: float
    spot_usd: float
    """Of opportunistic requests, and of donated instances while nothing ran there: those are sold at the spot price."""
    idle_usd: float

    @property
    def total_usd(self) -> float:
        return sum(self)


def by_use(cost_usd: Iterable[tuple[str | None, float]], kinds: Mapping[str, str], donated_usd: float) -> DollarsByUse:
    """Return *cost_usd*, pairs of an SLO class (None: idle) and dollars, by use.

    *kinds* are those of the classes. *donated_usd* is the cost of donated instances: what exceeds that of opportunistic
    requests was idle, but donated.
    """
    usd = {SloKind.INTERACTIVE: 0.0, SloKind.NON_INTERACTIVE: 0.0, SloKind.OPPORTUNISTIC: 0.0}
    idle_usd = 0.0
    for slo_class, cost in cost_usd:
        if slo_class is None:
            idle_usd += cost
        else:
            usd[SloKind(kinds.get(slo_class, SloKind.NON_INTERACTIVE))] += cost
    donated_idle_usd = min(idle_usd, max(0.0, donated_usd - usd[SloKind.OPPORTUNISTIC]))
    return DollarsByUse(
        usd[SloKind.INTERACTIVE],
        usd[SloKind.NON_INTERACTIVE],
        usd[SloKind.OPPORTUNISTIC] + donated_idle_usd,
        idle_usd - donated_idle_usd,
    )


def dollars_by_use(since: datetime, until: datetime) -> DollarsByUse:
    """Return the dollars of the hours that begin in [since, until), by use; of the running hour, what is counted."""
    rows = UsageHour.objects.filter(hour__gte=since, hour__lt=until).order_by().values_list("tenant", "slo_class")
    costs = [(None if tenant is None else name, usd) for tenant, name, usd in rows.annotate(usd=Sum("cost_usd"))]
    kinds = dict(SloClass.objects.values_list("name", "kind"))
    return by_use(costs, kinds, sum(each.cost_usd for each in donated_time(since, until)))


def spot_income_usd(since: datetime, until: datetime) -> float:
    """Return what tenants were charged for the opportunistic requests of the hours that begin in [since, until)."""
    names = SloClass.objects.filter(kind=SloKind.OPPORTUNISTIC).values_list("name", flat=True)
    rows = UsageHour.objects.filter(hour__gte=since, hour__lt=until, slo_class__in=list(names))
    return float(rows.aggregate(usd=Sum("charged_usd"))["usd"] or 0.0)
