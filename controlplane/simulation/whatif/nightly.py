"""The nightly what-if: the requests of the ledger's last day under each policy bundle, compared with the present policies.

It starts from the present fleet without requests, like any what-if of the ledger, and waits for those that people ask for.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.core.exceptions import ValidationError
from django.db.models import QuerySet

from controlplane.fleet.lifecycle.states import ActionError
from controlplane.simulation.selectors import ledger_rows
from controlplane.simulation.whatif import services
from controlplane.simulation.whatif.models import FutureSeed, WhatIf, WhatIfState
from controlplane.simulation.whatif.starts.begin import Begin, start_of
from controlplane.simulation.whatif.working import OPEN
from controlplane.tuning.selectors import tuned
from scheduling.bundles import BUNDLES

MIN_REQUESTS: Final = 200
KEPT: Final = timedelta(days=30)
BASELINES: Final = ("sageserve-reactive",)
"""Bundles that are left out: one paper's own baseline."""
RETRY_S: Final = 600.0
"""Time in seconds until the next try where every run of the last one failed."""
USD_PER_MISS: Final = 0.005
"""Price of a request that missed its promise, by which futures are compared."""


def due(now: datetime) -> bool:
    """Return whether a nightly what-if is due and the ledger has the requests that it needs."""
    every_s = tuned().NIGHTLY_EVERY_S
    newest = _rows().first()
    if every_s <= 0 or (newest is not None and newest.state in OPEN):
        return False
    if newest is not None and newest.state == WhatIfState.FAILED:
        every_s = min(every_s, RETRY_S)
    if newest is not None and (now - newest.created_at).total_seconds() < every_s:
        return False
    rows = ledger_rows(now - timedelta(seconds=tuned().NIGHTLY_EVERY_S), now)
    return rows[:MIN_REQUESTS].count() == MIN_REQUESTS


def submit(now: datetime) -> WhatIf:
    """Submit the what-if of the time since the last one under every bundle. Raise ActionError if it is impossible."""
    horizon_s = min(tuned().NIGHTLY_EVERY_S, services.MAX_HORIZON_S)
    since = now - timedelta(seconds=horizon_s)
    start = start_of(Begin(kind="ledger", since=since, until=now), horizon_s)
    futures = [services.future_of("", name, ()) for name in BUNDLES if name not in BASELINES]
    values = {
        "title": f"Nightly: {since:%d %B %H:%M} to {now:%d %B %H:%M} under each bundle",
        "start": start.model_dump(mode="json"),
        "horizon_s": horizon_s,
        "seeds": 1,
        "nightly": True,
    }
    prune(now)
    try:
        return services.ask(values, futures, "simulation")
    except ValidationError as error:
        raise ActionError("; ".join(error.messages)) from error


def prune(now: datetime) -> None:
    """Delete nightly what-ifs but the newest done one of each of the last days, and those that became a plan."""
    days = set()
    for row in _rows().filter(plan={}).exclude(state__in=OPEN).order_by("-created_at"):
        day = row.created_at.date()
        if row.state != WhatIfState.DONE or day in days or row.created_at < now - KEPT:
            row.delete()
        else:
            days.add(day)


@dataclass(frozen=True, slots=True)
class Summary:
    """The newest nightly what-if in a sentence, and its number; None before the first is done."""

    sentence: str
    number: int | None = None


def summary() -> Summary:
    """Describe the cheapest future of the newest nightly what-if that is done."""
    row = _rows().filter(state=WhatIfState.DONE).first()
    if row is not None:
        return Summary(_sentence(row), row.pk)
    return Summary(
        f"No nightly what-if is done yet: each needs {MIN_REQUESTS} requests in the ledger, and NIGHTLY_EVERY_S above 0."
    )


def _rows() -> QuerySet[WhatIf]:
    return WhatIf.objects.filter(nightly=True).defer("start")


def _sentence(row: WhatIf) -> str:
    """Name the cheapest future of *row*, with the price of its misses, against the present policies."""
    columns = ("future__letter", "future__name", "result__columns__all__cost_usd", "result__columns__all__missed")
    runs = FutureSeed.objects.filter(future__what_if=row, state=WhatIfState.DONE).order_by("future__letter")
    listed = list(runs.values_list(*columns, "result__unranked"))
    known = [(letter, name, float(usd), int(missed)) for letter, name, usd, missed, why in listed if not why]
    whys = dict.fromkeys(each[4] for each in listed if each[4])
    left = "".join(f" Not ranked: {', '.join(each[1] for each in listed if each[4] == why)}. {why}" for why in whys)
    return f"{_cheapest(row, known)}{left}"


def _cheapest(row: WhatIf, known: list[tuple[str, str, float, int]]) -> str:
    if not known:
        return "No future could be ranked."
    letter, name, usd, missed = min(known, key=lambda one: one[2] + one[3] * USD_PER_MISS)
    was = known[0]
    span = f"Over {_span(row.horizon_s)}"
    if was[0] != "A":
        return f"{span}, {name} would have been cheapest of the bundles."
    if letter == "A" or (usd, missed) == was[2:]:
        return f"{span}, no bundle would have been cheaper than the present policies."
    saved, fewer = was[2] - usd, was[3] - missed
    money = f"${abs(saved):,.2f} {'less' if saved >= 0 else 'more'}"
    misses = f"{abs(fewer):,} {'miss' if abs(fewer) == 1 else 'misses'} {'fewer' if fewer > 0 else 'more'}"
    return f"{span}, {name} would have been cheapest: {money}, {misses if fewer else 'as many misses'}."


def _span(horizon_s: float) -> str:
    minutes = round(horizon_s / 60)
    if minutes < 120:
        return f"the last {minutes} min"
    return "the last day" if minutes == 1440 else f"the last {round(minutes / 60)} h"
