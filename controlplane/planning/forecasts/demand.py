"""Demand series: the ledger's minute rows as windows, with gaps where nothing was counted.

Interactive demand is answered at once, deferred demand (of the non-interactive classes) by its deadline; opportunistic work
has what these leave, and no plan counts it.

Demand is counted by the callers' region: including requests that another region served, and those refused, expired
or cancelled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from django.db.models import CharField, F, Q, QuerySet, Sum
from django.db.models.functions import Cast
from numpy.typing import NDArray

from controlplane.fleet.models import Deployment, SloClass, SloKind
from controlplane.gateway.models import MinuteRow
from controlplane.gateway.selectors import OWN_REGION
from controlplane.planning.models import Quantity

MINUTE_S = 60
LAG = timedelta(seconds=30)
"""Requests are counted in their arrival minute, but only once done: younger windows are incomplete."""
COLUMNS = {Quantity.PROMPT: "prompt_tokens", Quantity.OUTPUT: "output_tokens"}
ASKED = {quantity: F(column) + F(f"unserved_{column}") for quantity, column in COLUMNS.items()}
"""Tokens asked for in a minute row: served, and of unserved requests as predicted."""

TOKENS = "tokens"
"""Prompt plus output tokens, the unit of capacity, in addition to the quantities."""
DEFERRED, EVERY_CLASS = "+", "*"
"""Used instead of an SLO class name: all non-interactive classes together; interactive and deferred, as plans count."""

BURSTS_OVER = timedelta(hours=4)
Endpoint = tuple[str, str]
"""(model, region) names."""
Key = tuple[Endpoint, Quantity, str]
"""Endpoint, quantity and SLO classes of a series: "" all interactive ones together, which plans use, `DEFERRED` all
non-interactive ones."""
Totals = tuple[list[int], list[int]]
"""Prompt and output tokens by window."""


@dataclass(frozen=True, slots=True)
class DemandSeries:
    """Tokens per second of series in whole windows, oldest first; NaN where nothing was counted."""

    start: datetime
    window_s: int
    tokens_per_s: dict[Key, NDArray[np.float64]]
    """Series of all interactive and of all deferred classes together for every endpoint."""
    known: int
    """Number of windows with counts."""

    def of(self, endpoint: Endpoint, quantity: Quantity, slo_class: str = "") -> NDArray[np.float64]:
        """Return the series of *endpoint*; without requests, zeros with the common gaps."""
        series = self.tokens_per_s.get((endpoint, quantity, slo_class))
        return series if series is not None else 0.0 * self.tokens_per_s[endpoint, quantity, ""]


def endpoints() -> list[Endpoint]:
    """Return (model, region) of every active deployment, sorted."""
    rows = Deployment.objects.filter(active=True, model__active=True, region__active=True)
    return sorted(set(rows.values_list("model__name", "region__name")))


def window_start(moment: datetime, window_s: int) -> datetime:
    """Return the start of the window containing *moment*; windows are whole multiples of their length since the epoch."""
    return datetime.fromtimestamp(int(moment.timestamp()) // window_s * window_s, UTC)


def last_complete(now: datetime, window_s: int) -> datetime:
    """Return the end of the newest window whose finished requests are all counted by *now*: the start of the forecast."""
    return window_start(now - LAG, window_s)


def read(since: datetime, until: datetime, window_s: int) -> DemandSeries:
    """Read demand of every endpoint in the whole windows from *since* to *until*, of interactive and of deferred SLO
    classes together.

    A window in which no minute has a row of any series is a gap: a quiet minute looks the same as one without a running
    gateway. A minute with rows of other series only is a measured zero. *window_s* is a multiple of 60.
    """
    if window_s % MINUTE_S:
        raise ValueError(f"a window is whole minutes, not {window_s} s")
    start = window_start(since, window_s)
    count = max(0, int((until - start).total_seconds() // window_s))
    width = window_s // MINUTE_S
    counted = np.zeros(count * width, bool)
    together = {(endpoint, group): _nothing(count) for endpoint in endpoints() for group in ("", DEFERRED)}
    groups = {
        name: DEFERRED if kind == SloKind.NON_INTERACTIVE else None
        for name, kind in SloClass.objects.exclude(kind=SloKind.INTERACTIVE).values_list("name", "kind")
    }
    indexes: dict[str, int] = {}
    adds: dict[tuple[str, str, str], Totals | None] = {}
    for minute, model, served_in, own_region, slo_class, prompt, output in _rows(
        start, start + timedelta(seconds=count * window_s)
    ):
        region = own_region or served_in
        index = indexes.get(minute)
        if index is None:
            index = indexes[minute] = int((_moment(minute) - start).total_seconds()) // MINUTE_S
            counted[index] = True
        key = model, region, slo_class
        if key not in adds:
            group = groups.get(slo_class, "")
            adds[key] = None if group is None else together.get(((model, region), group))
        if (totals := adds[key]) is not None:
            totals[0][index // width] += prompt
            totals[1][index // width] += output
    known_s = MINUTE_S * counted.reshape(count, width).sum(axis=1, dtype=np.float64)
    known_s[known_s == 0] = np.nan
    series = {
        (endpoint, quantity, slo_class): np.array(tokens, np.float64) / known_s
        for (endpoint, slo_class), total in together.items()
        for quantity, tokens in zip(Quantity, total, strict=True)
    }
    return DemandSeries(start, window_s, series, int(np.isfinite(known_s).sum()))


def _nothing(count: int) -> Totals:
    return [0] * count, [0] * count


def other_classes(*kinds: SloKind) -> QuerySet[SloClass, str]:
    """Return names of SLO classes of *kinds*, by default all non-interactive ones and unknown ones."""
    rows = SloClass.objects.filter(kind__in=kinds) if kinds else SloClass.objects.exclude(kind=SloKind.INTERACTIVE)
    return rows.values_list("name", flat=True)


def deferred_over_s() -> float:
    """Return the period over which deferred demand is averaged."""
    from scheduling.planning.capacity import arrivals_over_s

    deadlines = SloClass.objects.filter(kind=SloKind.NON_INTERACTIVE, deadline_s__isnull=False)
    return arrivals_over_s(filter(None, deadlines.values_list("deadline_s", flat=True)))


def deferred(now: datetime) -> dict[Endpoint, float]:
    """Return tokens per second of the non-interactive classes, by endpoint, over the counted minutes of `deferred_over_s`.

    Opportunistic classes use leftover capacity and are not planned for.
    """
    rows = MinuteRow.objects.filter(minute__gte=now - timedelta(seconds=deferred_over_s()), minute__lt=now).order_by()
    counted_s = MINUTE_S * rows.values("minute").distinct().count()
    sums = (
        rows.filter(slo_class__in=other_classes(SloKind.NON_INTERACTIVE))
        .annotate(own=OWN_REGION)
        .values_list("model", "own")
        .annotate(tokens=Sum(ASKED[Quantity.PROMPT] + ASKED[Quantity.OUTPUT]))
    )
    return {(model, region): tokens / counted_s for model, region, tokens in sums}


def arrival_cvs(now: datetime) -> dict[Endpoint, float]:
    """Return the CV of interactive arrivals over the last hours, by callers' endpoint, from minute counts."""
    from scheduling.planning.bursts import arrival_cv

    start = window_start(now - BURSTS_OVER, MINUTE_S)
    count = int((now - start).total_seconds()) // MINUTE_S
    rows = MinuteRow.objects.filter(minute__gte=start, minute__lt=start + timedelta(seconds=count * MINUTE_S))
    counts: dict[Endpoint, NDArray[np.float64]] = {}
    asked = rows.exclude(slo_class__in=other_classes()).order_by().annotate(own=OWN_REGION)
    sums = asked.values_list("model", "own", "minute").annotate(asked=Sum("requests"))
    for model, region, minute, requests in sums:
        by_minute = counts.setdefault((model, region), np.zeros(count))
        by_minute[int((minute - start).total_seconds()) // MINUTE_S] += requests
    # As for demand, a minute without any counts is a gap.
    counted = np.any(list(counts.values()), axis=0)
    return {endpoint: arrival_cv(np.where(counted, by_minute, np.nan)) for endpoint, by_minute in counts.items()}


def _rows(since: datetime, until: datetime) -> Iterator[tuple[Any, ...]]:
    """Yield (minute as text, model, region, own region, SLO class, prompt tokens, output tokens), one row of each."""
    rows = MinuteRow.objects.filter(minute__gte=since, minute__lt=until).order_by()
    # Half a million rows cover some ten thousand minutes: a datetime per row would be half the cost.
    texts = rows.annotate(text=Cast("minute", CharField()), **{quantity.name: ASKED[quantity] for quantity in Quantity})
    columns = ("text", "model", "region", "own_region", "slo_class", *(quantity.name for quantity in Quantity))
    yield from texts.values_list(*columns).iterator(chunk_size=5_000)


def asked_from(region: str) -> Q:
    """Return a filter for minute rows of callers in *region*."""
    return Q(own_region=region) | Q(own_region="", region=region)


def _moment(text: str) -> datetime:
    """Parse a time written by the database; SQLite omits the time zone, which is UTC."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
