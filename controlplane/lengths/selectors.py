"""Reads of output lengths: errors of predictions, samples and versions.

Every figure is a sum over `LengthMinute` (one row a minute, model, tenant and predictor), so that a week
costs in memory what an hour costs. A shadow counts the requests that another predictor answered, so totals leave shadows
out.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Any

from django.db.models import QuerySet, Sum

from controlplane.lengths.models import LengthMinute, LengthSample, LengthVersion, Measures, VersionState

CACHE, PRIOR, SHADOW = "cache", "prior", "shadow"
"""Values of `LengthMinute.predictor`; a version appears as its `str`, and in shadow as that after SHADOW."""


@dataclass(frozen=True, slots=True)
class Scope:
    """A filter of rows: since when, of which model ("" is all) and of which tenants (None is all)."""

    since: datetime
    model: str = ""
    tenants: frozenset[str] | None = None

    def narrow(self, rows: QuerySet[Any], at: str, tenant: str) -> QuerySet[Any]:
        """Return *rows* within this scope; *at* and *tenant* are the names of their fields."""
        rows = rows.filter(**{f"{at}__gte": self.since})
        if self.model:
            rows = rows.filter(model=self.model)
        if self.tenants is not None:
            rows = rows.filter(**{f"{tenant}__in": self.tenants})
        return rows


def newest_samples(count: int) -> list[LengthSample]:
    """Return the newest samples, oldest first."""
    return list(LengthSample.objects.select_related("tenant").order_by("-pk")[:count])[::-1]


def minutes(scope: Scope, shadows: bool = False) -> QuerySet[LengthMinute]:
    rows = scope.narrow(LengthMinute.objects.order_by(), "minute", "tenant")
    return rows if shadows else rows.exclude(predictor__startswith=SHADOW)


def _summed(rows: QuerySet[LengthMinute], *by: str) -> list[dict[str, Any]]:
    return list(rows.values(*by).annotate(**{name: Sum(name) for name in Measures.NAMES}))


def by(scope: Scope, *names: str, shadows: bool = False) -> dict[Any, Measures]:
    """Return measures by the values of *names*, columns of `LengthMinute`, in order; of *shadows* too, or without them."""
    key = itemgetter(*names)
    return {key(row): Measures.of(row) for row in sorted(_summed(minutes(scope, shadows), *names), key=key)}


# Versions


def versions(most: int | None = None) -> list[LengthVersion]:
    """Return versions, newest first."""
    return list(LengthVersion.objects.order_by("-number")[:most])


def active_version() -> LengthVersion | None:
    return LengthVersion.objects.filter(state=VersionState.ACTIVE).first()


def shadow_version() -> LengthVersion | None:
    return LengthVersion.objects.filter(state=VersionState.SHADOW).order_by("-number").first()


def compared(active: str, shadow: str, scope: Scope) -> tuple[Measures, Measures] | None:
    """Return measures of *active* and *shadow* over the minutes in which both predicted; None without any."""
    lines: dict[str, dict[datetime, Measures]] = {active: {}, shadow: {}}
    for row in _summed(minutes(scope, shadows=True).filter(predictor__in=lines), "minute", "predictor"):
        lines[row["predictor"]][row["minute"]] = Measures.of(row)
    both = lines[active].keys() & lines[shadow].keys()
    if not both:
        return None
    of_active, of_shadow = (total(line[minute] for minute in both) for line in lines.values())
    return of_active, of_shadow


def gain(active: Measures, shadow: Measures) -> float | None:
    """Return the share of the active version's absolute error that the shadow avoids; below 0 it is worse."""
    return 1 - shadow.mae / active.mae if active.mae and shadow.mae is not None else None


def total(measures: Iterable[Measures]) -> Measures:
    return sum(measures, Measures())


def scope_of(now: datetime, hours: float, model: str = "", tenants: Collection[str] | None = None) -> Scope:
    """Return the scope of the last *hours* until *now*."""
    return Scope(now - timedelta(hours=hours), model, None if tenants is None else frozenset(tenants))
