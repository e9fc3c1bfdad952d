"""SageServe's reactive trigger, as the kernel that is asked on every arrival."""

from dataclasses import dataclass

from scheduling.compiled import compiled
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.routing.regions import pressure


@dataclass(frozen=True, slots=True)
class Reactive:
    """SageServe's reactive heuristic (section 4): on every arrival, out above one mark of use, in below another.

    Use is the endpoint's pressure (`scheduling.routing.regions`): memory or sequences, whichever is fuller, and the queue.
    """

    out_above: float = 0.7
    in_below: float = 0.3
    cooldown_s: float = 15.0
    """Least time between two changes at one endpoint."""
    min_instances: int = 2
    max_instances: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.in_below < self.out_above:
            raise ValueError(f"in_below ({self.in_below}) must be at least 0 and below out_above ({self.out_above})")
        if not self.cooldown_s >= 0:
            raise ValueError(f"cooldown_s must be at least 0, not {self.cooldown_s}")
        if not 0 <= self.min_instances <= self.max_instances:
            raise ValueError(
                f"min_instances ({self.min_instances}) must be from 0 to max_instances ({self.max_instances})"
            )


@compiled
def reactive_trigger(
    fleet: FleetArrays,
    endpoints: EndpointArrays,
    endpoint: int,
    waiting: int,
    instances: int,
    since_change_s: float,
    out_above: float,
    in_below: float,
    cooldown_s: float,
    min_instances: int,
    max_instances: int,
) -> int:
    """1 to add an instance to *endpoint*, -1 to take one away, else 0.

    *instances* serve it or will soon; *waiting* requests are held for it. The last parameters are those of `Reactive`.
    """
    if since_change_s < cooldown_s:
        return 0
    use = pressure(fleet, endpoints, endpoint, waiting)
    return reactive_wish(use, instances, out_above, in_below, min_instances, max_instances)


@compiled
def reactive_wish(
    use: float, instances: int, out_above: float, in_below: float, min_instances: int, max_instances: int
) -> int:
    """What `reactive_trigger` says of an endpoint whose pressure is *use*, where the last change is long enough ago."""
    if instances < min_instances:
        return 1
    if use > out_above and instances < max_instances:
        return 1
    if use < in_below and instances > min_instances:
        return -1
    return 0
