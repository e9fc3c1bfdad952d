"""Swaps on demand in a simulation, at the floor's looks: the rule of `scaling.swapping` on simulated groups."""

from collections.abc import Iterator
from typing import Any

from scheduling.scaling.swapping import Holder, Resting, swap_wanted
from scheduling.simulation.cluster.state_changes import COMING, WITHOUT_GPUS
from scheduling.simulation.cluster.world import State
from scheduling.simulation.simulator import Simulation

AT_REST = (State.ASLEEP, State.EMPTY)


class SwapOnDemand:
    """Call it with the simulation at every look; it does nothing where no GPUs are shared."""

    def __init__(self, simulation: Simulation) -> None:
        groups: dict[int, list[int]] = {}
        for instance, group in enumerate(simulation.world.lives.instances["swap_group"].tolist()):
            if group >= 0:
                groups.setdefault(group, []).append(instance)
        self._groups = list(groups.values())

    def __call__(self, simulation: Simulation) -> None:
        for members in self._groups:
            if wanted := swap_wanted(_resting(simulation, members), _holder(simulation, members)):
                simulation.lives.swap_to(wanted[0])


def _resting(simulation: Simulation, members: list[int]) -> Iterator[Resting]:
    world, states = simulation.world, simulation.states
    for instance in members:
        endpoint = int(simulation.fleet.endpoint[instance])
        waiting = int(world.waiting.size[endpoint])
        if not waiting or states[instance] not in AT_REST:
            continue
        first, last = world.endpoints.first[endpoint : endpoint + 2].tolist()
        if any(COMING >> int(states[other]) & 1 for other in world.endpoints.members[first:last]):
            continue
        life: Any = world.lives.instances[instance]
        load_s = life.local_weights_s if states[instance] == State.EMPTY else life.wake_s
        if states[instance] == State.ASLEEP and not life.in_memory:
            load_s = life.reload_s
        model, _ = simulation.cluster.endpoints[endpoint]
        yield Resting(instance, str(instance), model, waiting, float(life.sleep_s + load_s))


def _holder(simulation: Simulation, members: list[int]) -> Holder | None:
    world, states = simulation.world, simulation.states
    for instance in members:
        if not WITHOUT_GPUS >> int(states[instance]) & 1:
            waiting = int(world.waiting.size[simulation.fleet.endpoint[instance]])
            idle = not waiting and not simulation.fleet.running[instance]
            since_s = float(world.lives.instances[instance]["since_s"])
            return Holder(str(instance), states[instance] == State.READY, idle, simulation.now_s - since_s)
    return None
