"""Swaps in a simulation, each time the floor runs: `control.swaps` on its groups, which it carries out at once."""

from scheduling.control.swaps import Swaps
from scheduling.queueing.virtual_queues import reassign
from scheduling.simulation.simulator import Simulation


class Swapping:
    """Call it with the simulation each time the floor runs; it does nothing where no GPUs are shared.

    Instances of endpoints with request groups share a virtual queue, whose order decides the swaps. For other endpoints, and
    groups with an instance that has `swap_by_queue` off, demand decides.
    """

    def __init__(self, simulation: Simulation) -> None:
        prewarming = simulation.prewarming
        self._swaps = Swaps(simulation.bound, prewarming.control.early) if prewarming else Swaps(simulation.bound)
        self._share(simulation)

    def __call__(self, simulation: Simulation) -> None:
        self._share(simulation)
        for instance, _ in self._swaps.wanted():
            simulation.lives.swap_to(instance)

    def _share(self, simulation: Simulation) -> None:
        if simulation.bound.share_queues():
            reassign(simulation.fleet, simulation.endpoints, simulation.waiting)
