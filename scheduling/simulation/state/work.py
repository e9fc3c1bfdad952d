"""The engine's own kernels, for engines whose work in progress nobody can read."""

from scheduling.compiled import compiled
from scheduling.simulation.cluster.event_queue import set_time
from scheduling.simulation.cluster.world import World
from scheduling.simulation.engine.batch import begin, give


@compiled
def begin_work(world: World, instance: int, at_s: float) -> None:
    """Let *instance*, which is between two iterations, begin the next ones at *at_s*."""
    set_time(world.events, instance, begin(world.engines, instance, at_s, world.outcomes))


@compiled
def give_work(world: World, instance: int, sequence: int, at_s: float) -> None:
    """*sequence* has reached *instance* at *at_s*, while it computes."""
    event_s = give(world.fleet, world.engines, instance, sequence, at_s, True)
    if event_s >= 0.0:
        set_time(world.events, instance, event_s)


def warm_up(world: World) -> None:
    """Load both kernels, or compile them (ten seconds, once). *world* must have a request, and be used for nothing else."""
    begin_work(world, 0, 0.0)
    give_work(world, 0, 0, 0.0)
