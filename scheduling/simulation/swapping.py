"""Swaps in a simulation, each time the floor runs: `control.swaps` on its groups, which it carries out at once."""

from typing import Final

from scheduling.control.swaps import Swaps
from scheduling.queueing.swapping.sharing import share_queues
from scheduling.queueing.virtual_queues import reassign
from scheduling.simulation.cluster.world import State
from scheduling.simulation.simulator import Simulation

AWAY: Final = (State.FAILED, State.SPOT, State.LOST)
"""States from which no swap brings an instance up."""


class Swapping:
    """Call it with the simulation each time the floor runs; it does nothing where no GPUs are shared.

    Instances of endpoints with request groups share a virtual queue, whose order decides the swaps. For other endpoints, and
    groups with an instance that has `swap_by_queue` off, demand decides.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._swaps = Swaps(simulation.bound)
        self._share(simulation)

    def __call__(self, simulation: Simulation) -> None:
        self._share(simulation)
        for instance, _ in self._swaps.wanted():
            simulation.lives.swap_to(instance)

    def _share(self, simulation: Simulation) -> None:
        """Assign virtual queues to the instances that swaps can bring up."""
        fleet, arrays, sharing = simulation.bound, simulation.waiting.groups, []
        for members in fleet.sharing.values():
            up = [instance for instance in members if simulation.states[instance] not in AWAY]
            endpoints = [int(simulation.fleet.endpoint[instance]) for instance in up]
            if all(fleet.endpoints[one].policy.swap_by_queue and arrays.limit[one] > 0 for one in endpoints):
                sharing.append({instance: fleet.swap_times(instance) for instance in up})
        if sharing and share_queues(arrays, sharing):
            reassign(simulation.fleet, simulation.endpoints, simulation.waiting)
