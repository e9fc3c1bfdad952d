"""What PreServe is compared with (section 5.3), where instances queue themselves: scaling by the KV memory in use.

The paper's baselines look at "the current instance status (i.e., KV memory usage)", and 3.2.1 names a mark of 95 %. It does
not say whose use: of all instances together or of any one; nor when they scale down. Here both are measured; down goes one
below 30 %, the paper's mark for PreServe, and `hybrid` not below its plan: memory alone would take it far below.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from scheduling.scaling import Advice, ByEndpoint, EndpointView, Hybrid
from scheduling.scaling.endpoint import Wish
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.engine.lookahead import memory_held
from scheduling.simulation.result import Result
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.strategies import Advisor, Bounds, Control
from scheduling.simulation.workload.requests import Requests

OUT_ABOVE: Final = 0.95
TICK_S: Final = 5.0
"""As often as PreServe's own second tier looks."""


@dataclass(kw_only=True)
class ReactiveByMemory(ByEndpoint):
    """One out above 95 % of memory, one in below 30 %, at most one in 15 s."""

    name: str = field(default="reactive", init=False)
    uses_advice: bool = field(default=False, init=False)
    tick_s: float = TICK_S
    out_above: float = OUT_ABOVE

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        return self._by_use(view)


@dataclass(kw_only=True)
class HybridByMemory(Hybrid):
    """The plan at the begin of each window, and the same marks within it, never below the plan."""

    tick_s: float = TICK_S
    out_above: float = OUT_ABOVE

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        delta, why = super()._advised(now_s, view, advice)
        if delta < 0 and view.instances + delta < advice.target_instances:
            return 0, ""
        return delta, why


class MemoryControl(Control):
    """Give a strategy KV memory as use: that of the fullest instance, or of all together."""

    fullest = True

    def views(self, simulation: Simulation) -> list[EndpointView]:
        views = super().views(simulation)
        mean, most = np.zeros(len(views)), np.zeros(len(views))
        world = simulation.world
        memory_held(world.fleet, world.endpoints, world.engines, mean, most)
        use = most if self.fullest else mean
        return [view._replace(use=float(use[at])) for at, view in enumerate(views)]


def run_by_memory(
    cluster: Cluster,
    requests: Requests,
    strategy: ByEndpoint,
    *,
    fullest: bool,
    bounds: Bounds,
    advisor: Advisor | None,
    seed: int,
    until_s: float,
    progress: Callable[[int, int], None],
) -> Result:
    """Simulate *requests* on *cluster* scaled by *strategy*, which sees memory."""
    simulation = Simulation(cluster, requests, seed=seed)
    control = MemoryControl(simulation, strategy, bounds=bounds, advisor=advisor)
    control.fullest = fullest
    control(simulation)
    return simulation.run(control, strategy.tick_s, until_s, progress)
