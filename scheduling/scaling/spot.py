"""The spot pool (SageServe 6.5): how it serves, which instance leaves it for an endpoint that grows, how long that takes.

An endpoint takes its own donated instances first, then those of other models by redeployment, at last new ones
(`ranking.Source`). Its donated instances have their own queue, which only opportunistic requests enter. The live fleet and
simulations ask here alike.
"""

from collections.abc import Sequence
from typing import NamedTuple

from scheduling.policy import EndpointPolicy


class Donated(NamedTuple):
    """A donated instance of another model that has the GPUs an endpoint asks for."""

    usd_per_hour: float
    redeploy_s: float
    """Time until it would serve the endpoint's model (`redeploy_s`)."""
    running: int = 0
    """Opportunistic requests there, which would be evicted."""


def spot_policy(own: EndpointPolicy) -> EndpointPolicy:
    """Return the policy of the donated instances of an endpoint with the policy *own*: no request groups, no look-ahead."""
    return EndpointPolicy(
        ordering="priority",
        region_threshold=own.region_threshold,
        requests_ahead_limit=own.requests_ahead_limit,
        dispatch_round_trip_ms=own.dispatch_round_trip_ms,
    )


def first_to_redeploy(donated: Sequence[Donated]) -> int:
    """Return the index to redeploy: soonest, cheapest, fewest requests, first. Raises ValueError for none."""
    if not donated:
        raise ValueError("no instance is donated that could be redeployed")
    return min(range(len(donated)), key=lambda at: (donated[at].redeploy_s, *donated[at][::2], at))


def redeploy_s(local_weights_s: float, same_architecture_s: float | None = None, pull_s: float = 0.0) -> float:
    """Return the seconds to bring another model up on a donated instance.

    *local_weights_s* with its weights in the region (SageServe 7.1: 10 minutes); *same_architecture_s* where only the
    weights of one architecture change, None for another; *pull_s* to pull the weights first (2 hours in all).
    """
    load_s = local_weights_s if same_architecture_s is None else min(same_architecture_s, local_weights_s)
    return pull_s + load_s
