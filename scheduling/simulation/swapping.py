"""Swaps in a simulation, each time the floor runs: the rules of `scaling.swapping` on simulated groups."""

from collections.abc import Iterator
from typing import Any, Final

from scheduling.fleet.sleep_level import IN_MEMORY, sleep_level
from scheduling.queueing.groups import NONE
from scheduling.queueing.swapping.sharing import Swap, share_queues
from scheduling.queueing.virtual_queues import reassign
from scheduling.scaling.swapping import Holder, Resting, has_groups, swap_by_queue, swap_wanted
from scheduling.simulation.cluster.state_changes import COMING, WITHOUT_GPUS
from scheduling.simulation.cluster.world import State
from scheduling.simulation.simulator import Simulation

AT_REST: Final = (State.ASLEEP, State.EMPTY)
AWAY: Final = (State.FAILED, State.SPOT, State.LOST)
"""States from which no swap brings an instance up."""


class Swapping:
    """Call it with the simulation each time the floor runs; it does nothing where no GPUs are shared.

    Instances of endpoints with request groups share a virtual queue, whose order decides the swaps. For other endpoints, and
    groups with an instance that has `swap_by_queue` off, demand decides.
    """

    def __init__(self, simulation: Simulation) -> None:
        groups: dict[int, list[int]] = {}
        for instance, group in enumerate(simulation.world.lives.instances["swap_group"].tolist()):
            if group >= 0:
                groups.setdefault(group, []).append(instance)
        cluster = simulation.cluster
        self._groups, self._by_queue = groups, [cluster.policy(key).swap_by_queue for key in cluster.endpoints]
        self._share(simulation)

    def __call__(self, simulation: Simulation) -> None:
        self._share(simulation)
        arrays = simulation.waiting.groups
        for group, members in self._groups.items():
            shared = [instance for instance in members if arrays.swap_s[instance] < float("inf")]
            if shared:
                wanted = _by_queue(simulation, group, shared)
            else:
                wanted = swap_wanted(_resting(simulation, members), _holder(simulation, members))
            if wanted:
                simulation.lives.swap_to(wanted[0])

    def _share(self, simulation: Simulation) -> None:
        """Assign virtual queues to the instances that swaps can bring up."""
        arrays, endpoints, sharing = simulation.waiting.groups, simulation.fleet.endpoint, []
        for members in self._groups.values():
            up = [instance for instance in members if simulation.states[instance] not in AWAY]
            theirs = [int(endpoints[instance]) for instance in up]
            if all(self._by_queue[endpoint] and arrays.limit[endpoint] > 0 for endpoint in theirs):
                sharing.append({instance: _swap(simulation, instance) for instance in up})
        if sharing and share_queues(arrays, sharing):
            reassign(simulation.fleet, simulation.endpoints, simulation.waiting)


def _by_queue(simulation: Simulation, group: int, members: list[int]) -> tuple[int, str] | None:
    world, arrays, endpoints = simulation.world, simulation.waiting.groups, simulation.fleet.endpoint
    queue, serves = int(arrays.queue_of[members[0]]), int(world.lives.groups["target"][group])
    at_rest = {int(endpoints[each]): each for each in members if simulation.states[each] in AT_REST}
    having = _having(simulation, members)
    serves = having if serves == NONE else serves

    def resting(endpoint: int) -> Resting | None:
        return _as_resting(simulation, at_rest[endpoint], having) if endpoint in at_rest else None

    holder = None
    if having != NONE:
        serving = int(endpoints[having])
        idle = not simulation.fleet.running[having] and not has_groups(arrays, queue, serving)
        holder = _as_holder(simulation, having, idle)
    endpoint = NONE if serves == NONE else int(endpoints[serves])
    fleet, waiting = simulation.fleet, simulation.waiting
    wanted = swap_by_queue(fleet, waiting, queue, endpoint, holder, resting, simulation.now_s)
    if wanted is None and endpoint != NONE and world.waiting.size[endpoint]:
        simulation.control(endpoint)  # its groups may be first again
    return wanted


def _resting(simulation: Simulation, members: list[int]) -> Iterator[Resting]:
    world, states, having = simulation.world, simulation.states, _having(simulation, members)
    for instance in members:
        endpoint = int(simulation.fleet.endpoint[instance])
        if not world.waiting.size[endpoint] or states[instance] not in AT_REST:
            continue
        first, last = world.endpoints.first[endpoint : endpoint + 2].tolist()
        if any(COMING >> int(states[other]) & 1 for other in world.endpoints.members[first:last]):
            continue
        yield _as_resting(simulation, instance, having)


def _as_resting(simulation: Simulation, instance: int, having: int) -> Resting:
    """Return *instance* as `Resting`; *having* holds the GPUs, -1 for none."""
    endpoint = int(simulation.fleet.endpoint[instance])
    model, _ = simulation.cluster.endpoints[endpoint]
    sleep_s = 0.0 if having == NONE else _swap(simulation, having).sleep_s
    swap_s = sleep_s + _swap(simulation, instance).load_s
    return Resting(instance, str(instance), model, int(simulation.waiting.size[endpoint]), swap_s)


def _swap(simulation: Simulation, instance: int) -> Swap:
    """Return the time for *instance* to leave its GPUs, and to return from the tier of its weights."""
    lives = simulation.world.lives
    life: Any = lives.instances[instance]
    group: Any = lives.groups[life.swap_group]
    state = simulation.states[instance]
    if state == State.EMPTY:
        return Swap(float(life.sleep_s), float(life.local_weights_s))
    if state == State.ASLEEP:
        in_memory = bool(life.in_memory)
    else:
        level = sleep_level(float(life.weights_bytes), float(group.held_bytes), float(group.memory_bytes))
        in_memory = level == IN_MEMORY
    return Swap(float(life.sleep_s), float(life.wake_s if in_memory else life.reload_s))


def _having(simulation: Simulation, members: list[int]) -> int:
    """Return the instance that holds the GPUs; -1 for none."""
    return next((each for each in members if not WITHOUT_GPUS >> int(simulation.states[each]) & 1), NONE)


def _holder(simulation: Simulation, members: list[int]) -> Holder | None:
    instance = _having(simulation, members)
    if instance == NONE:
        return None
    waiting = int(simulation.waiting.size[simulation.fleet.endpoint[instance]])
    return _as_holder(simulation, instance, not waiting and not simulation.fleet.running[instance])


def _as_holder(simulation: Simulation, instance: int, idle: bool) -> Holder:
    since_s = float(simulation.world.lives.instances[instance]["since_s"])
    is_ready = simulation.states[instance] == State.READY
    return Holder(str(instance), is_ready, idle, simulation.now_s - since_s)
