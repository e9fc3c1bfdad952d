"""A simulation that begins with a state."""

from typing import TYPE_CHECKING

from scheduling.simulation.state.groups import resume_reordering
from scheduling.simulation.state.placing import place
from scheduling.simulation.state.records import FleetState

if TYPE_CHECKING:
    from scheduling.simulation.simulator import Simulation


def begin(simulation: "Simulation", state: FleetState) -> None:
    """Let *simulation*, which has just been made, go on from *state*. ValueError if that is of another fleet."""
    simulation.make_room(state.slots)
    place(simulation.lives, state)
    simulation.looked_s = state.now_s
    if state.groups is not None and simulation.scheduling is not None:
        simulation.looked_s = state.groups.looked_s
        resume_reordering(simulation.scheduling.scheduler, state.groups, simulation.waiting.groups.groups.size)
