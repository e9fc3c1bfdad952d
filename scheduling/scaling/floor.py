"""The reactive floor: whatever a strategy or a plan says, an endpoint that is full gets an instance more.

It needs nothing but the live load, so it works with planner, broker and database down. It only ever adds; taking away is
the strategy's. Its mark lies above those of the strategies, so it acts where they have failed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from scheduling.scaling.endpoint import Advice, EndpointView, Move, Strategy, move, percent, use_words


@dataclass(frozen=True, slots=True)
class Floor:
    """Parameters of the floor."""

    above: float = 1.0
    """Use, once those on the way are there, from which on one more is wanted."""
    cooldown_s: float = 15.0

    def __post_init__(self) -> None:
        if not self.above > 0:
            raise ValueError(f"above must be more than 0, not {self.above}")
        if not self.cooldown_s >= 0:
            raise ValueError(f"cooldown_s must be at least 0, not {self.cooldown_s}")


FLOOR: Final = Floor()


def floor_move(at: int, view: EndpointView, floor: Floor = FLOOR) -> Move | None:
    """What the floor wants of *view*, at place *at*; None for nothing."""
    if view.instances < view.min_instances:
        missing = view.min_instances - view.instances
        return move(at, view, missing, f"Floor: fewer than the {view.min_instances} it must have")
    if view.since_change_s < floor.cooldown_s:
        return None
    if not view.ready or view.use == inf:
        wanted = 1 if view.waiting and not view.coming else 0
        return move(at, view, wanted, f"Floor: {use_words(view).lower()}")
    soon = view.use * view.ready / view.instances
    if soon <= floor.above:
        return None
    on_the_way = f", {percent(soon)} with the {view.coming} on the way" if view.coming else ""
    return move(at, view, 1, f"Floor: {use_words(view).lower()}{on_the_way}, above {percent(floor.above)}")


class Floored:
    """*strategy* with the floor under it: where the floor wants more, the strategy does not get less."""

    def __init__(self, strategy: Strategy, floor: Floor = FLOOR) -> None:
        self.strategy, self.floor = strategy, floor
        self.name, self.tick_s, self.uses_advice = strategy.name, strategy.tick_s, strategy.uses_advice
        self.looks_ahead = strategy.looks_ahead

    def decide(self, now_s: float, views: Sequence[EndpointView], advice: Sequence[Advice | None]) -> list[Move]:
        """As `Strategy.decide`."""
        moves = {each.endpoint: each for each in self.strategy.decide(now_s, views, advice)}
        for at, view in enumerate(views):
            least = floor_move(at, view, self.floor)
            if least is not None and (at not in moves or moves[at].delta < least.delta):
                moves[at] = least
        return [moves[at] for at in sorted(moves)]
