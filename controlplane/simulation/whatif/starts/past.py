"""Demand of the hour before a what-if, from which its planners forecast as live ones do."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

import numpy as np
from django.db.models import F
from pydantic import BaseModel

from controlplane.fleet.models import SloKind
from controlplane.gateway.models import MinuteRow
from controlplane.gateway.selectors import OWN_REGION
from controlplane.planning.forecasts.demand import ASKED, Endpoint, last_complete, other_classes
from controlplane.planning.models import Quantity
from scheduling.simulation.staging.stage import PastDemand

MINUTES: Final = 60
MINUTE_S: Final = 60


class EndpointDemand(BaseModel):
    """Demand of an endpoint in each of the last minutes, oldest first."""

    model: str
    region: str
    """Of the callers."""
    prompt: list[int] = [0] * MINUTES
    """Tokens of interactive classes, as `output`."""
    output: list[int] = [0] * MINUTES
    requests: list[int] = [0] * MINUTES
    """Of interactive classes."""
    other: list[int] = [0] * MINUTES
    """All tokens of non-interactive classes."""


def past_demand(at: datetime) -> list[EndpointDemand]:
    """Return the demand of each endpoint with requests in the hour before *at*. A minute without a count has none."""
    until = last_complete(at, MINUTE_S)
    since = until - timedelta(minutes=MINUTES)
    separate, opportunistic = set(other_classes()), set(other_classes(SloKind.OPPORTUNISTIC))
    rows = MinuteRow.objects.filter(minute__gte=since, minute__lt=until).order_by().annotate(own=OWN_REGION)
    columns = (ASKED[Quantity.PROMPT], ASKED[Quantity.OUTPUT], F("requests"))
    demand: dict[Endpoint, EndpointDemand] = {}
    for minute, model, region, slo_class, prompt, output, requests in rows.values_list(
        "minute", "model", "own", "slo_class", *columns
    ):
        if slo_class in opportunistic:
            continue  # no plan is made for them
        of = demand.setdefault((model, region), EndpointDemand(model=model, region=region))
        index = int((minute - since).total_seconds()) // MINUTE_S
        if slo_class in separate:
            of.other[index] += prompt + output
            continue
        of.prompt[index] += prompt
        of.output[index] += output
        of.requests[index] += requests
    return [demand[endpoint] for endpoint in sorted(demand)]


def as_arrays(past: Sequence[EndpointDemand], endpoints: Sequence[Endpoint]) -> PastDemand:
    """Return *past* for the *endpoints* of a simulation; zeros where there was none."""
    of = {(each.model, each.region): each for each in past}
    known = [of.get((model, region)) or EndpointDemand(model=model, region=region) for model, region in endpoints]
    prompt, output, requests, other = (
        np.array([getattr(each, name) for each in known], np.float64).reshape(-1, MINUTES)
        for name in ("prompt", "output", "requests", "other")
    )
    return PastDemand(prompt / MINUTE_S, output / MINUTE_S, requests, other / MINUTE_S)
