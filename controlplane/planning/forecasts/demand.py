"""Demand as series: the ledger's minute rows put into windows, with gaps marked where nobody counted.

Demand is what was asked for, by the region of the callers: what another region served, and what the fleet refused, or held
until it expired or was cancelled, is in it, once however often its client tried again.
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
"""A request is counted in the minute in which it came, but only when it is done: younger windows are not complete."""
COLUMNS = {Quantity.PROMPT: "prompt_tokens", Quantity.OUTPUT: "output_tokens"}
ASKED = {
    quantity: F(column) + F(f"unserved_{column}") - F(f"repeated_{column}") for quantity, column in COLUMNS.items()
}
"""Tokens of a minute row that were asked for: those served, and of requests that got none, as counted and predicted; not
those of their retries, which are demand that is counted."""

TOKENS = "tokens"
"""Prompt and output tokens together, the unit in which capacity is counted; beside the quantities."""
EVERY_CLASS = "*"
"""In place of the name of an SLO class."""

BURSTS_OVER = timedelta(hours=4)
Endpoint = tuple[str, str]
"""(model, region), by name."""
Key = tuple[Endpoint, Quantity, str]
"""Of one series: endpoint, quantity, and SLO class by name; "" is all interactive classes together, which plans are for."""
Totals = tuple[list[int], list[int]]
"""Prompt and output tokens by window."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Tokens a second of series in whole windows, oldest first; NaN in windows in which nobody counted."""

    start: datetime
    window_s: int
    tokens_per_s: dict[Key, NDArray[np.float64]]
    """Of every endpoint all interactive classes together, and each class of which anything was counted."""
    known: int
    """Windows in which something was counted."""

    def of(self, endpoint: Endpoint, quantity: Quantity, slo_class: str = "") -> NDArray[np.float64]:
        """The series of *endpoint*; one without any request is measured zeros (and the gaps of all)."""
        series = self.tokens_per_s.get((endpoint, quantity, slo_class))
        return series if series is not None else 0.0 * self.tokens_per_s[endpoint, quantity, ""]

    def by_class(self) -> list[Key]:
        """Every series of a single class that has any token."""
        return [key for key, series in self.tokens_per_s.items() if key[2] and np.nansum(series) > 0]


def endpoints() -> list[Endpoint]:
    """(model, region) of every active deployment, by name."""
    rows = Deployment.objects.filter(active=True, model__active=True, region__active=True)
    return sorted(set(rows.values_list("model__name", "region__name")))


def window_start(moment: datetime, window_s: int) -> datetime:
    """Begin of the window in which *moment* lies; windows are whole multiples of their length since the epoch."""
    return datetime.fromtimestamp(int(moment.timestamp()) // window_s * window_s, UTC)


def last_complete(now: datetime, window_s: int) -> datetime:
    """End of the newest window of which every request that is done by *now* is known: begin of the first to forecast."""
    return window_start(now - LAG, window_s)


def read(since: datetime, until: datetime, window_s: int) -> Demand:
    """Demand of every endpoint in the whole windows from *since* to *until*, of the interactive SLO classes together and of
    each class.

    A window in which no minute has a row of any series is a gap: a quiet minute looks the same as one in which the
    gateway did not run. A minute with rows of other series alone is a measured zero. *window_s* is a multiple of 60.
    """
    if window_s % MINUTE_S:
        raise ValueError(f"a window is whole minutes, not {window_s} s")
    start = window_start(since, window_s)
    count = max(0, int((until - start).total_seconds() // window_s))
    width = window_s // MINUTE_S
    counted = np.zeros(count * width, bool)
    together = {endpoint: _nothing(count) for endpoint in endpoints()}
    separate = set(other_classes())
    totals: dict[tuple[Endpoint, str], Totals] = {}
    indexes: dict[str, int] = {}
    adds: dict[tuple[str, str, str], list[Totals]] = {}
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
            endpoint = model, region
            adds[key] = []
            if endpoint in together:
                own = totals.setdefault((endpoint, slo_class), _nothing(count))
                adds[key] = [own] if slo_class in separate else [own, together[endpoint]]
        at = index // width
        for prompts, outputs in adds[key]:
            prompts[at] += prompt
            outputs[at] += output
    totals |= {(endpoint, ""): total for endpoint, total in together.items()}
    known_s = MINUTE_S * counted.reshape(count, width).sum(axis=1, dtype=np.float64)
    known_s[known_s == 0] = np.nan
    series = {
        (endpoint, quantity, slo_class): np.array(tokens, np.float64) / known_s
        for (endpoint, slo_class), total in totals.items()
        for quantity, tokens in zip(Quantity, total, strict=True)
    }
    return Demand(start, window_s, series, int(np.isfinite(known_s).sum()))


def _nothing(count: int) -> Totals:
    return [0] * count, [0] * count


def other_classes(*kinds: SloKind) -> QuerySet[SloClass, str]:
    """Names of the SLO classes of *kinds*, by default of all that are not interactive. One not known any more is."""
    rows = SloClass.objects.filter(kind__in=kinds) if kinds else SloClass.objects.exclude(kind=SloKind.INTERACTIVE)
    return rows.values_list("name", flat=True)


def non_interactive(now: datetime, window_s: int = 3600) -> dict[Endpoint, float]:
    """Tokens a second of the non-interactive classes, by endpoint, over the last *window_s*; the opportunistic ones, which
    take what is left, are planned for by nobody.
    """
    names = other_classes(SloKind.NON_INTERACTIVE)
    rows = MinuteRow.objects.filter(minute__gte=now - timedelta(seconds=window_s), minute__lt=now, slo_class__in=names)
    sums = (
        rows.order_by()
        .annotate(own=OWN_REGION)
        .values_list("model", "own")
        .annotate(prompt=Sum(ASKED[Quantity.PROMPT]), output=Sum(ASKED[Quantity.OUTPUT]))
    )
    first = MinuteRow.objects.filter(minute__gte=now - timedelta(seconds=window_s)).order_by("minute").first()
    counted_s = min(window_s, max(MINUTE_S, (now - first.minute).total_seconds())) if first else window_s
    return {(model, region): (prompt + output) / counted_s for model, region, prompt, output in sums}


def arrival_cvs(now: datetime) -> dict[Endpoint, float]:
    """CV of the arrivals of interactive requests over the last hours, by endpoint of the callers, by their minutes."""
    from scheduling.planning.bursts import arrival_cv

    start = window_start(now - BURSTS_OVER, MINUTE_S)
    count = int((now - start).total_seconds()) // MINUTE_S
    rows = MinuteRow.objects.filter(minute__gte=start, minute__lt=start + timedelta(seconds=count * MINUTE_S))
    counts: dict[Endpoint, NDArray[np.float64]] = {}
    asked = rows.exclude(slo_class__in=other_classes()).order_by().annotate(own=OWN_REGION)
    sums = asked.values_list("model", "own", "minute").annotate(asked=Sum(F("requests") - F("repeated")))
    for model, region, minute, requests in sums:
        by_minute = counts.setdefault((model, region), np.zeros(count))
        by_minute[int((minute - start).total_seconds()) // MINUTE_S] += requests
    # As for demand: a minute of which nothing is known at all is a gap.
    counted = np.any(list(counts.values()), axis=0)
    return {endpoint: arrival_cv(np.where(counted, by_minute, np.nan)) for endpoint, by_minute in counts.items()}


def _rows(since: datetime, until: datetime) -> Iterator[tuple[Any, ...]]:
    """(minute as text, model, region, own region, SLO class, prompt tokens, output tokens): there is one row of each."""
    rows = MinuteRow.objects.filter(minute__gte=since, minute__lt=until).order_by()
    # Half a million rows have some ten thousand minutes: a datetime for each row would be half the cost.
    texts = rows.annotate(text=Cast("minute", CharField()), **{quantity.name: ASKED[quantity] for quantity in Quantity})
    columns = ("text", "model", "region", "own_region", "slo_class", *(quantity.name for quantity in Quantity))
    yield from texts.values_list(*columns).iterator(chunk_size=5_000)


def asked_from(region: str) -> Q:
    """Minute rows of callers in *region*."""
    return Q(own_region=region) | Q(own_region="", region=region)


def _moment(text: str) -> datetime:
    """The time that a database wrote as *text*: SQLite does without the time zone, which is UTC."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
