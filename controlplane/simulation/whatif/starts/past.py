"""Demand of the hour before a what-if starts: its planners forecast from the start as live ones do."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
from django.db.models import F

from controlplane.fleet.models import SloKind
from controlplane.gateway.models import MinuteRow
from controlplane.gateway.selectors import OWN_REGION
from controlplane.planning.forecasts.demand import ASKED, Endpoint, last_complete, other_classes
from controlplane.planning.models import Quantity
from scheduling.simulation.staging.stage import PastDemand

MINUTES: Final = 60
MINUTE_S: Final = 60
SERIES: Final = ("prompt", "output", "requests", "other")


def past_demand(at: datetime) -> list[dict[str, Any]]:
    """Of each endpoint with requests, by its callers' region: `model`, `region`, and for each of the last minutes before
    *at* the tokens of prompts and outputs and the number of requests of interactive classes, and all tokens of `other`
    (non-interactive) ones; as JSON. A minute that was not counted has none."""
    until = last_complete(at, MINUTE_S)
    since = until - timedelta(minutes=MINUTES)
    separate, opportunistic = set(other_classes()), set(other_classes(SloKind.OPPORTUNISTIC))
    rows = MinuteRow.objects.filter(minute__gte=since, minute__lt=until).order_by().annotate(own=OWN_REGION)
    columns = (ASKED[Quantity.PROMPT], ASKED[Quantity.OUTPUT], F("requests") - F("repeated"))
    asked: dict[Endpoint, dict[str, Any]] = {}
    for minute, model, region, slo_class, prompt, output, requests in rows.values_list(
        "minute", "model", "own", "slo_class", *columns
    ):
        if slo_class in opportunistic:
            continue  # plans leave them out
        of = asked.setdefault(
            (model, region), {"model": model, "region": region} | {name: [0] * MINUTES for name in SERIES}
        )
        index = int((minute - since).total_seconds()) // MINUTE_S
        if slo_class in separate:
            of["other"][index] += prompt + output
            continue
        for name, value in zip(SERIES, (prompt, output, requests), strict=False):
            of[name][index] += value
    return [asked[endpoint] for endpoint in sorted(asked)]


def as_arrays(past: Sequence[dict[str, Any]], endpoints: Sequence[Endpoint]) -> PastDemand:
    """*past*, that of `past_demand`, for the *endpoints* of a simulation; zeros where nothing was asked."""
    of = {(row["model"], row["region"]): row for row in past}
    prompt, output, requests, other = (
        np.array([of[key][name] if key in of else [0] * MINUTES for key in endpoints], np.float64).reshape(-1, MINUTES)
        for name in SERIES
    )
    return PastDemand(prompt / MINUTE_S, output / MINUTE_S, requests, other / MINUTE_S)
