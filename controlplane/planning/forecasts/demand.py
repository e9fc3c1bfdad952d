"""Demand series: the ledger's minute rows as windows, with gaps where nothing was counted.

Interactive demand is answered at once, deferred demand (of the non-interactive classes) by its deadline; opportunistic work
has what these leave, and no plan counts it.

Demand is counted by the callers' region: including requests that another region served, and those refused, expired
or cancelled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from django.db.models import CharField, F, Q, QuerySet
from django.db.models.functions import Cast
from numpy.typing import NDArray

from controlplane.fleet.models import Deployment, SloClass, SloKind
from controlplane.gateway.models import MinuteRow
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
Totals = tuple[list[int], list[int], list[int]]
"""Prompt tokens, output tokens and requests by window."""


@dataclass(frozen=True, slots=True)
class DemandSeries:
    """Tokens per second of series in whole windows, oldest first; NaN where nothing was counted."""

    start: datetime
    window_s: int
    tokens_per_s: dict[Key, NDArray[np.float64]]
    """Series of all interactive and of all deferred classes together for every endpoint."""
    requests: dict[Endpoint, NDArray[np.float64]]
    """Of the interactive classes, by window."""
    known: int
    """Number of windows with counts."""

    def of(self, endpoint: Endpoint, quantity: Quantity, slo_class: str = "") -> NDArray[np.float64]:
        """Return the series of *endpoint*; without requests, zeros with the common gaps."""
        series = self.tokens_per_s.get((endpoint, quantity, slo_class))
        return series if series is not None else 0.0 * self.tokens_per_s[endpoint, quantity, ""]

    def rate(self, endpoint: Endpoint, over_s: float, slo_class: str = "") -> float:
        """Return tokens per second of *endpoint* over the counted windows of the last *over_s*; 0 without any."""
        both = sum(self.of(endpoint, quantity, slo_class)[-round(over_s / self.window_s) :] for quantity in Quantity)
        return float(np.nanmean(both)) if np.isfinite(both).any() else 0.0

    def arrival_cv(self, endpoint: Endpoint) -> float:
        """Return the CV of interactive arrivals over the last `BURSTS_OVER`."""
        from scheduling.planning.bursts import arrival_cv

        return arrival_cv(self.requests[endpoint][-round(BURSTS_OVER.total_seconds() / self.window_s) :])


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


def read(since: datetime, until: datetime, window_s: int, places: Sequence[Endpoint] | None = None) -> DemandSeries:
    """Read demand of *places* (None: every endpoint) in the whole windows from *since* to *until*, of interactive and of
    deferred SLO classes together.

    A window in which no minute has a row of any series is a gap: a quiet minute looks the same as one without a running
    gateway. A minute with rows of other series only is a measured zero. *window_s* is a multiple of 60.
    """
    if window_s % MINUTE_S:
        raise ValueError(f"a window is whole minutes, not {window_s} s")
    start = window_start(since, window_s)
    count = max(0, int((until - start).total_seconds() // window_s))
    width = window_s // MINUTE_S
    counted = np.zeros(count * width, bool)
    together = {(endpoint, group): _nothing(count) for endpoint in places or endpoints() for group in ("", DEFERRED)}
    groups = {
        name: DEFERRED if kind == SloKind.NON_INTERACTIVE else None
        for name, kind in SloClass.objects.exclude(kind=SloKind.INTERACTIVE).values_list("name", "kind")
    }
    indexes: dict[str, int] = {}
    adds: dict[tuple[str, str, str], Totals | None] = {}
    for minute, model, served_in, own_region, slo_class, requests, *tokens in _rows(
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
            for sums, value in zip(totals, (*tokens, requests), strict=True):
                sums[index // width] += value
    known_s = MINUTE_S * counted.reshape(count, width).sum(axis=1, dtype=np.float64)
    known_s[known_s == 0] = np.nan
    series = {
        (endpoint, quantity, slo_class): np.array(total, np.float64) / known_s
        for (endpoint, slo_class), totals in together.items()
        for quantity, total in zip(Quantity, totals[:2], strict=True)
    }
    counts = {
        endpoint: np.where(np.isnan(known_s), np.nan, totals[2])
        for (endpoint, slo_class), totals in together.items()
        if not slo_class
    }
    return DemandSeries(start, window_s, series, counts, int(np.isfinite(known_s).sum()))


def _nothing(count: int) -> Totals:
    return [0] * count, [0] * count, [0] * count


def other_classes(*kinds: SloKind) -> QuerySet[SloClass, str]:
    """Return names of SLO classes of *kinds*, by default all non-interactive ones and unknown ones."""
    rows = SloClass.objects.filter(kind__in=kinds) if kinds else SloClass.objects.exclude(kind=SloKind.INTERACTIVE)
    return rows.values_list("name", flat=True)


def deferred_over_s() -> float:
    """Return the period over which deferred demand is averaged."""
    from scheduling.planning.capacity import arrivals_over_s

    deadlines = SloClass.objects.filter(kind=SloKind.NON_INTERACTIVE, deadline_s__isnull=False)
    return arrivals_over_s(filter(None, deadlines.values_list("deadline_s", flat=True)))


def _rows(since: datetime, until: datetime) -> Iterator[tuple[Any, ...]]:
    """Yield (minute as text, model, region, own region, SLO class, requests, prompt and output tokens), one row of each."""
    rows = MinuteRow.objects.filter(minute__gte=since, minute__lt=until).order_by()
    # Half a million rows cover some ten thousand minutes: a datetime per row would be half the cost.
    texts = rows.annotate(text=Cast("minute", CharField()), **{quantity.name: ASKED[quantity] for quantity in Quantity})
    columns = ("text", "model", "region", "own_region", "slo_class", "requests", *(each.name for each in Quantity))
    yield from texts.values_list(*columns).iterator(chunk_size=5_000)


def asked_from(region: str) -> Q:
    """Return a filter for minute rows of callers in *region*."""
    return Q(own_region=region) | Q(own_region="", region=region)


def _moment(text: str) -> datetime:
    """Parse a time written by the database; SQLite omits the time zone, which is UTC."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
