"""Demand of the hour before a what-if, from which its planners forecast as live ones do."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
from pydantic import BaseModel

from controlplane.planning.forecasts import demand
from controlplane.planning.forecasts.demand import MINUTE_S, Endpoint
from controlplane.planning.models import Quantity
from scheduling.simulation.staging.demand_minutes import DemandMinutes

MINUTES: Final = 60


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
    until = demand.last_complete(at, MINUTE_S)
    known = demand.read(until - timedelta(minutes=MINUTES), until, MINUTE_S)

    def counts(values: Any) -> list[int]:
        return [round(value) for value in np.nan_to_num(values).tolist()]

    past = []
    for model, region in known.requests:
        prompt, output, *others = (
            MINUTE_S * known.of((model, region), quantity, group)
            for group in ("", demand.DEFERRED)
            for quantity in Quantity
        )
        of = {"prompt": prompt, "output": output, "requests": known.requests[model, region], "other": sum(others)}
        past.append(EndpointDemand(model=model, region=region, **{name: counts(each) for name, each in of.items()}))
    return [each for each in past if any(each.requests) or any(each.other)]


def as_arrays(past: Sequence[EndpointDemand], endpoints: Sequence[Endpoint]) -> tuple[DemandMinutes, DemandMinutes]:
    """Return *past*, interactive and other, for the *endpoints* of a simulation; zeros where there was none."""
    of = {(each.model, each.region): each for each in past}
    known = [of.get((model, region)) or EndpointDemand(model=model, region=region) for model, region in endpoints]
    prompt, output, requests, other = (
        np.array([getattr(each, name) for each in known], np.float64).reshape(-1, MINUTES)
        for name in ("prompt", "output", "requests", "other")
    )
    none = np.zeros_like(other)
    return DemandMinutes(prompt / MINUTE_S, output / MINUTE_S, requests), DemandMinutes(other / MINUTE_S, none, none)
