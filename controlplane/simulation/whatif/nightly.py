"""The nightly what-if: the requests of the ledger's last day under each policy bundle, compared with the present policies.

It starts from the present fleet without requests, like any what-if of the ledger, and waits for those that people ask for.
"""

from datetime import datetime, timedelta
from typing import Final

from django.core.exceptions import ValidationError
from django.db.models import QuerySet

from controlplane.fleet.lifecycle.states import ActionError
from controlplane.simulation.selectors import ledger_rows
from controlplane.simulation.whatif import services
from controlplane.simulation.whatif.models import WhatIf, WhatIfState
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
        "title": f"Replay of the ledger, {since:%d %B %H:%M} to {now:%d %B %H:%M}, under each bundle",
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


def _rows() -> QuerySet[WhatIf]:
    return WhatIf.objects.filter(nightly=True).defer("start")
