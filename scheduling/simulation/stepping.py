"""The compiled loop as one simulation calls it, at every simulated second of it."""

import math
from collections.abc import Callable

from scheduling.direct import only_entry_point
from scheduling.simulation.cluster import loop
from scheduling.simulation.cluster.state_changes import NOTHING
from scheduling.simulation.cluster.world import World
from scheduling.simulation.engine.state import NONE


class Stepping:
    """`loop.run` and `loop.control` by their entry point, while the world is the same tuple of arrays.

    Numba looks at every array of the world at a call, which takes longer than most simulated seconds do.
    """

    def __init__(self) -> None:
        self._world: World | None = None
        self._enter: Callable[..., int]

    def run(self, world: World, until_s: float) -> int:
        """As `loop.run`."""
        if world is self._world:
            return self._enter(world, float(until_s), NONE, NONE, loop.NOBODY, NOTHING, NONE, NONE)
        reason = loop.run(world, until_s)
        self._note(world)
        return reason

    def control(self, world: World, endpoint: int, request: int, source: int) -> int:
        """As `loop.control`."""
        if world is self._world:
            return self._enter(world, math.inf, int(endpoint), int(request), int(source), NOTHING, NONE, NONE)
        reached = loop.control(world, endpoint, request, source)
        self._note(world)
        return reached

    def _note(self, world: World) -> None:
        """Numba has taken *world*, of which only the numbers in its arrays change."""
        enter = only_entry_point(loop._enter)
        if enter is not None:
            self._world, self._enter = world, enter
