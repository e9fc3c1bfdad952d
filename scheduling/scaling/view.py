"""The view of an endpoint, built the same way under every clock: from stages of its instances, its load, and times.

The gateway builds it from its fleet arrays, a simulation from the state of its world.
"""

from enum import IntEnum
from math import inf, nan
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduling.compiled import compiled
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, allocate_endpoints, allocate_fleet
from scheduling.routing.regions import filled
from scheduling.scaling.endpoint import EndpointView
from scheduling.scaling.reactive import reactive_move

DEMAND_WINDOW_S: Final = 60
"""Window of the demand rate."""
LEAST_DEMAND_S: Final = 5
"""Least time for a rate, if less than the window has passed."""


class Stage(IntEnum):
    """Role of an instance at its endpoint."""

    AWAY = 0
    """Neither serves nor starts: no machine, failed, or unreachable."""
    COMING = 1
    READY = 2
    DRAINING = 3
    SPARE = 4
    """Lent out as spot, or asleep: back soon."""


class Instances(NamedTuple):
    """The instances of an endpoint by stage."""

    ready: int
    coming: int
    draining: int
    spare: int
    ready_s: float
    """When the last of the ready ones became ready; minus infinity for never."""


class Load(NamedTuple):
    """Load of an endpoint now. See `EndpointView` for each."""

    use: float
    kv_use: float
    waiting: int
    tokens_per_s: float
    overloaded_instances: int = 0
    peak_kv_sum: float = nan
    peak_kv_most: float = nan
    requests_at_once: int = 0


def count_instances(
    endpoint: NDArray[np.integer], stage: NDArray[np.integer], since_s: NDArray[np.float64], endpoints: int
) -> list[Instances]:
    """Return the counts of each of *endpoints*. The arrays have one element per instance:
    endpoint, `Stage` and since when.

    An instance that was ready before time began has minus infinity in *since_s*.
    """
    stages = len(Stage)
    counts = np.bincount(endpoint * stages + stage, minlength=endpoints * stages).reshape(endpoints, stages)
    ready_s = [-inf] * endpoints
    ready = np.flatnonzero(stage == Stage.READY)
    for at, began_s in zip(endpoint[ready].tolist(), since_s[ready].tolist(), strict=True):
        ready_s[at] = max(ready_s[at], began_s)
    return [
        Instances(ready, coming, draining, spare, last_s)
        for (_, coming, ready, draining, spare), last_s in zip(counts.tolist(), ready_s, strict=True)
    ]


def count_of_one(stage: ArrayLike, since_s: ArrayLike) -> Instances:
    """Return `count_instances` of a single endpoint."""
    stages = np.array(stage, np.int64).reshape(-1)
    (counted,) = count_instances(np.zeros_like(stages), stages, np.array(since_s, np.float64).reshape(-1), 1)
    return counted


def endpoint_view(
    model: str,
    region: str,
    instances: Instances,
    bounds: tuple[int, int],
    load: Load,
    now_s: float,
    changed_s: float,
    spot_other: int = 0,
    short_instances: int = 0,
    changed_delta: int = 0,
) -> EndpointView:
    """Return the view of an endpoint at *now_s*.

    *bounds*: minimum and maximum instances. *changed_s*: when scaling last changed it, minus infinity for never, on the
    clock of *now_s*, as is `Instances.ready_s`. *changed_delta*: that change, if known. *spot_other*: spot instances of
    other models that could be redeployed to it. *short_instances*: those that the global scheduler misses.
    """
    return EndpointView(
        model=model,
        region=region,
        ready=instances.ready,
        coming=instances.coming,
        draining=instances.draining,
        spot=instances.spare,
        spot_other=spot_other,
        min_instances=bounds[0],
        max_instances=bounds[1],
        use=load.use,
        waiting=load.waiting,
        kv_use=load.kv_use,
        tokens_per_s=load.tokens_per_s,
        since_change_s=now_s - changed_s,
        overloaded_instances=load.overloaded_instances,
        peak_kv_sum=load.peak_kv_sum,
        peak_kv_most=load.peak_kv_most,
        since_ready_s=now_s - instances.ready_s,
        short_instances=short_instances,
        requests_at_once=load.requests_at_once,
        changed_delta=changed_delta,
    )


@compiled
def use_now(
    fleet: FleetArrays, endpoints: EndpointArrays, endpoint: int, waiting: int, now_s: float
) -> tuple[float, float]:
    """Return `EndpointView.use` and `.kv_use` of *endpoint*, for which *waiting* requests are held."""
    held, capacity = 0, 0
    for at in range(endpoints.first[endpoint], endpoints.first[endpoint + 1]):
        instance = endpoints.members[at]
        if fleet.accepting[instance] != 0:
            held += fleet.kv_tokens[instance]
            capacity += fleet.kv_capacity_tokens[instance]
    return filled(fleet, endpoints, endpoint, waiting, 0.0, now_s), held / capacity if capacity > 0 else 0.0


def demand_seconds(now_s: float) -> tuple[int, int]:
    """Return (first, end) of the whole, completed seconds over which the demand at *now_s* is summed."""
    return max(0, int(now_s) - DEMAND_WINDOW_S), int(now_s)


def demand_rate(tokens: ArrayLike, passed_s: float) -> NDArray[np.float64]:
    """Return tokens per second, of *tokens* requested in `demand_seconds`, *passed_s* after counting began."""
    return np.asarray(tokens, np.float64) / max(min(int(passed_s), DEMAND_WINDOW_S), LEAST_DEMAND_S)


def warm_up() -> None:
    """Load or compile the kernels of the live floor, before serving, so that nothing blocks the event loop."""
    use_now(allocate_fleet(1), allocate_endpoints(1, 1), 0, 0, 0.0)
    reactive_move(0.5, 1, 0, 0, 0.0, 0.0, 0.7, 0.3, 15.0, 0, 20, 60.0)
