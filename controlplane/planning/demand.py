"""Demand as series: the ledger's minute rows put into windows, with gaps marked where nobody counted."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
from django.db.models import Q, Sum
from numpy.typing import NDArray

from controlplane.fleet.models import Deployment, SloClass, SloKind
from controlplane.gateway.models import MinuteRow
from controlplane.planning.models import Quantity

MINUTE_S = 60
LAG = timedelta(seconds=30)
"""A request is counted in the minute in which it came, but only when it is done: younger windows are not complete."""
COLUMNS = {Quantity.PROMPT: "prompt_tokens", Quantity.OUTPUT: "output_tokens"}

Endpoint = tuple[str, str]
"""(model, region), by name."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Tokens a second by endpoint and quantity in whole windows, oldest first; NaN in windows in which nobody counted."""

    start: datetime
    window_s: int
    tokens_per_s: dict[tuple[Endpoint, Quantity], NDArray[np.float64]]
    known: int
    """Windows in which something was counted."""

    def of(self, endpoint: Endpoint, quantity: Quantity) -> NDArray[np.float64]:
        """The series of *endpoint*; one without any request is measured zeros (and the gaps of all)."""
        return self.tokens_per_s[endpoint, quantity]


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


def read(since: datetime, until: datetime, window_s: int, slo_class: str = "") -> Demand:
    """Demand of every endpoint in the whole windows from *since* to *until*; *slo_class* narrows, empty is all classes.

    A window in which no minute has a row of any series is a gap: nothing tells a quiet minute from one in which the
    gateway did not run. A minute with rows of other series alone is a measured zero. *window_s* is a multiple of 60.
    """
    if window_s % MINUTE_S:
        raise ValueError(f"a window is whole minutes, not {window_s} s")
    start = window_start(since, window_s)
    count = max(0, int((until - start).total_seconds() // window_s))
    keys = [(endpoint, quantity) for endpoint in endpoints() for quantity in Quantity]
    totals = {key: np.zeros(count) for key in keys}
    minutes: list[set[datetime]] = [set() for _ in range(count)]
    for minute, model, region, *tokens in _rows(start, start + timedelta(seconds=count * window_s), slo_class):
        at = int((minute - start).total_seconds() // window_s)
        minutes[at].add(minute)
        for quantity, value in zip(Quantity, tokens, strict=True):
            total = totals.get(((model, region), quantity))
            if total is not None:
                total[at] += value or 0
    known_s = np.array([MINUTE_S * len(found) for found in minutes], np.float64)
    known_s[known_s == 0] = np.nan
    known = int(np.isfinite(known_s).sum())
    return Demand(start, window_s, {key: total / known_s for key, total in totals.items()}, known)


def non_interactive(now: datetime, window_s: int = 3600) -> dict[Endpoint, float]:
    """Tokens a second of the classes that are not interactive, by endpoint, over the last *window_s*."""
    names = list(SloClass.objects.exclude(kind=SloKind.INTERACTIVE).values_list("name", flat=True))
    rows = MinuteRow.objects.filter(minute__gte=now - timedelta(seconds=window_s), minute__lt=now, slo_class__in=names)
    sums = (
        rows.order_by()
        .values_list("model", "region")
        .annotate(prompt=Sum("prompt_tokens"), output=Sum("output_tokens"))
    )
    first = MinuteRow.objects.filter(minute__gte=now - timedelta(seconds=window_s)).order_by("minute").first()
    counted_s = min(window_s, max(MINUTE_S, (now - first.minute).total_seconds())) if first else window_s
    return {(model, region): (prompt + output) / counted_s for model, region, prompt, output in sums}


def _rows(since: datetime, until: datetime, slo_class: str) -> Iterator[tuple]:
    """(minute, model, region, prompt tokens, output tokens) of all series; tokens are None where only others are."""
    rows = MinuteRow.objects.filter(minute__gte=since, minute__lt=until).order_by()
    narrow = Q(slo_class=slo_class) if slo_class else Q()
    sums = {f"sum_{quantity}": Sum(COLUMNS[quantity], filter=narrow) for quantity in Quantity}
    grouped = rows.values_list("minute", "model", "region").annotate(**sums)
    yield from grouped.iterator(chunk_size=5_000)
