"""The reactive floor: a full endpoint gets another instance, whatever a strategy or a plan says.

It needs only the live load, so it works with planner, broker and database down. Under a strategy it only adds; removal is
up to the strategy. Its mark lies above those of the strategies, so it acts when they have failed. Where a model has no
strategy it is one (`FloorAlone`): SageServe's reactive heuristic with patience.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, Final, TypeAlias

from scheduling.scaling.each import ByEndpoint
from scheduling.scaling.endpoint import (
    GRACE_S,
    Advice,
    EndpointView,
    Move,
    Mover,
    Strategy,
    Wish,
    move,
    percent,
    use_words,
)
from scheduling.scaling.reactive import Reactive, is_easy, reactive_wish, soon_words
from scheduling.scaling.starts import cancelled


@dataclass(frozen=True, slots=True)
class Floor:
    """Parameters of the floor."""

    above: float = 1.0
    """Use, counting starting instances, from which one more is wanted."""
    cooldown_s: float = 15.0
    period_s: float = 1.0
    """Period of the check under every clock; strategies tick less often."""

    def __post_init__(self) -> None:
        for what in ("above", "period_s"):
            if not 0 < getattr(self, what) < inf:
                raise ValueError(f"{what} must be a number above 0, not {getattr(self, what)}")
        if not self.cooldown_s >= 0:
            raise ValueError(f"cooldown_s must be at least 0, not {self.cooldown_s}")


FLOOR: Final = Floor()
Floors: TypeAlias = Floor | Mapping[tuple[str, str], Floor]
"""For all endpoints, or by (model, region)."""


def floor_of(floors: Floors, endpoint: tuple[str, str]) -> Floor:
    """Return the rule of *endpoint*, (model, region)."""
    return floors[endpoint] if isinstance(floors, Mapping) else floors


def look_s(floors: Floors) -> float:
    """Return the period of the check of all endpoints. Raise ValueError if it differs between them."""
    periods = {each.period_s for each in (floors.values() if isinstance(floors, Mapping) else [floors])}
    if len(periods) != 1:
        raise ValueError(f"floors must have one period_s, not {len(periods)}")
    return periods.pop()


def floor_move(at: int, view: EndpointView, floor: Floor = FLOOR, *, served_elsewhere: bool = False) -> Move | None:
    """Return the floor's move for *view*, at index *at*; None for nothing.

    *served_elsewhere*: another region has ready instances of the model. If this one has none, that one grows when full.
    """
    if view.instances < view.min_instances:
        missing = view.min_instances - view.instances
        return move(at, view, missing, f"Safety autoscaler: below its minimum of {view.min_instances}", Mover.FLOOR)
    cooled = view.since_change_s >= floor.cooldown_s
    if not view.ready:
        asked_for = view.waiting or (view.tokens_per_s > 0 and cooled)
        # As many as what waits fills: one after the other, the last would come many starts late.
        needed = max(1, math.ceil(view.waiting / (view.requests_at_once or math.inf))) if asked_for else 0
        wanted = max(0, needed - view.coming) if not served_elsewhere else 0
        why = f"Safety autoscaler: {view.model} is asked for and no instance of it is ready anywhere"
        return move(at, view, wanted, why, Mover.FLOOR)
    if cooled and view.waiting and view.short_instances > view.coming:
        count = f"{view.short_instances} more instance{'s' if view.short_instances > 1 else ''}"
        return move(at, view, 1, f"Safety autoscaler: no order of the queue is in time without {count}", Mover.FLOOR)
    if not cooled or view.use * view.ready / view.instances <= floor.above:
        return None
    on_the_way = f", {soon_words(view)}" if view.coming else ""
    return move(
        at,
        view,
        1,
        f"Safety autoscaler: {use_words(view).lower()}{on_the_way}, above {percent(floor.above)}",
        Mover.FLOOR,
    )


def floor_moves(views: Sequence[EndpointView], floors: Floors) -> list[Move]:
    """Return `floor_move` of each of *views*."""
    served = {view.model for view in views if view.ready}
    wanted = (
        floor_move(at, view, floor_of(floors, (view.model, view.region)), served_elsewhere=view.model in served)
        for at, view in enumerate(views)
    )
    return [each for each in wanted if each is not None]


def _alone_move(at: int, view: EndpointView, rule: Reactive, now_s: float, memory: dict[str, float]) -> Move | None:
    """Return the move of *rule* for *view*, at index *at*, if an instance is ready.

    None is removed while the newest is in its grace period. *memory* is the caller's, between checks.
    """
    key = f"{view.key}|easy_since_s"
    spare, too_many = cancelled(view, now_s, memory, rule.patience_s)
    easy_s = 0.0
    if is_easy(view, rule):
        easy_s = now_s - memory.setdefault(key, now_s)
    else:
        memory.pop(key, None)
    delta, why = reactive_wish(view, rule.within(view), easy_s) if view.ready else (0, "")
    if delta <= 0 and spare:
        return move(
            at, view, spare, f"Safety autoscaler: {too_many[:1].lower()}{too_many[1:]}", Mover.FLOOR, drains=False
        )
    if delta < 0 and view.since_ready_s < GRACE_S:
        return None
    return move(at, view, delta, f"Safety autoscaler: {why[:1].lower()}{why[1:]}", Mover.FLOOR)


@dataclass(kw_only=True)
class FloorAlone(ByEndpoint):
    """The floor as a strategy, for models without one. It checks every second."""

    by: ClassVar[str] = Mover.FLOOR
    name: str = field(default="floor", init=False)
    uses_advice: bool = field(default=False, init=False)
    tick_s: float = FLOOR.period_s

    def decide(self, now_s: float, views: Sequence[EndpointView], advice: Sequence[Advice | None]) -> list[Move]:
        """Implement `Strategy.decide`. If nothing is ready, or instances are missing, `Floored` acts."""
        rule = Reactive(self.out_above, self.in_below, self.cooldown_s, 0, patience_s=self.patience_s)
        moves = (_alone_move(at, view, rule, now_s, self.memory) for at, view in enumerate(views))
        return [made for made in moves if made is not None]

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        return 0, ""  # no plan is made for it


class Floored:
    """*strategy* with the floor beneath it: if the floor adds, the strategy adds no less.

    Between the strategy's ticks only the floor is checked (`floor_moves`).
    """

    def __init__(self, strategy: Strategy, floor: Floors = FLOOR) -> None:
        self.strategy, self.floor = strategy, floor
        self.name, self.tick_s, self.uses_advice = strategy.name, strategy.tick_s, strategy.uses_advice
        self.looks_ahead = strategy.looks_ahead

    def decide(self, now_s: float, views: Sequence[EndpointView], advice: Sequence[Advice | None]) -> list[Move]:
        """Implement `Strategy.decide`."""
        moves = {each.endpoint: each for each in self.strategy.decide(now_s, views, advice)}
        for least in floor_moves(views, self.floor):
            at = least.endpoint
            if at not in moves or moves[at].delta < least.delta:
                moves[at] = least
        return [moves[at] for at in sorted(moves)]
