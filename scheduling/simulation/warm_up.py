"""Loading the kernels of simulations before the first is asked for: once, by a process that others are forked from."""

from collections.abc import Sequence

from scheduling.fleet.profile import USUAL
from scheduling.scaling import Advice, EndpointView, make_strategy
from scheduling.simulation.cluster.description import Cluster, InstanceSpec
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.strategies import Bounds, run_strategy
from scheduling.simulation.workload.requests import make_requests

STRATEGIES = ("reactive", "preserve")
"""Of which one asks for the load of endpoints, and the other for their look-ahead maps too."""


class Silent:
    """A planner that advises nothing."""

    def advise(self, now_s: float, views: Sequence[EndpointView]) -> list[Advice | None]:
        return [None] * len(views)


def warm_up() -> None:
    """Load the simulator's loop and what its strategies see from the cache, or compile it (a minute or two, once)."""
    engine = EngineConfig(
        max_num_seqs=8,
        max_num_batched_tokens=1000,
        block_size_tokens=4,
        kv_blocks=1000,
        policy="fcfs",
        max_model_len=1000,
        profile=USUAL,
    )
    cluster = Cluster([InstanceSpec("model", "region", engine)])
    requests = make_requests([0.0, 0.1], [100, 100], [20, 20])
    for name in STRATEGIES:
        strategy = make_strategy(name)
        advisor = Silent() if strategy.plans_for else None
        run_strategy(cluster, requests, strategy, bounds=Bounds(1, 2), advisor=advisor, until_s=60.0)
