"""What the views of endpoints are made of (`control.views`): stages of instances, use, and demand."""

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from scheduling.compiled import compiled
from scheduling.fleet.arrays import EndpointArrays, FleetArrays, allocate_endpoints, allocate_fleet
from scheduling.routing.regions import filled
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
