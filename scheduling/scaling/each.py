"""Base of all strategies: endpoints are judged one by one, within their bounds, by use if there is no advice."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, isinf
from typing import ClassVar

from scheduling.scaling.endpoint import GRACE_S, Advice, EndpointView, Move, Mover, PlansFor, Wish, move, valid
from scheduling.scaling.reactive import PATIENCE_S, Reactive, is_easy, reactive_wish
from scheduling.scaling.starts import cancelled

UNCOUNTED = 2.0
"""Present demand over that of a plan, above which the plan removes nothing that present load fills."""
_reactive = lru_cache(maxsize=1024)(Reactive)
"""Return the rule, validated once rather than at every endpoint and tick."""


def without_timers(memory: Mapping[str, float]) -> dict[str, float]:
    """Return the *memory* of a strategy or floor without what it has timed: no view was taken for a while."""
    return {name: value for name, value in memory.items() if not name.endswith("since_s")}


@dataclass(kw_only=True)
class ByEndpoint(ABC):
    """A strategy that judges one endpoint at a time.

    Thresholds and cooldown are SageServe's reactive heuristic (section 4), the fallback of every strategy without valid
    advice: a failed planner costs look-ahead, not scaling.
    """

    plans_for: ClassVar[PlansFor] = PlansFor()
    by: ClassVar[str] = Mover.STRATEGY
    name: str = field(default="", init=False)
    uses_advice: bool = field(default=True, init=False)
    looks_ahead: bool = field(default=False, init=False)
    """Whether it reads the look-ahead figures of a view, which are costly to compute."""
    tick_s: float = 15.0
    out_above: float = 0.7
    in_below: float = 0.3
    cooldown_s: float = 15.0
    patience_s: float = PATIENCE_S
    """Patience of the heuristic where it decides alone (`Reactive.patience_s`)."""
    memory: dict[str, float] = field(default_factory=dict)
    """Its memory between ticks: plain numbers, so that a caller may keep them elsewhere."""

    def __post_init__(self) -> None:
        if not 0 <= self.in_below < self.out_above:
            raise ValueError(f"in_below ({self.in_below}) must be at least 0 and below out_above ({self.out_above})")
        for what in ("tick_s", "cooldown_s", "patience_s"):
            if not 0 <= getattr(self, what) < float("inf"):
                raise ValueError(f"{what} must be a number from 0 up, not {getattr(self, what)}")
        if self.tick_s == 0:
            raise ValueError("tick_s must be above 0")

    @property
    def pace(self) -> str:
        """When it moves instances to a plan's targets, in words that follow its name."""
        return "moves an instance when load asks for it"

    def decide(self, now_s: float, views: Sequence[EndpointView], advice: Sequence[Advice | None]) -> list[Move]:
        """Implement `Strategy.decide`."""
        moves = []
        for at, (view, advised) in enumerate(zip(views, advice, strict=True)):
            spare, too_many = self._spare_starts(now_s, view, advised)
            delta, why = self._bounds(view) or self._unless_new(now_s, view, advised)
            made = move(at, view, spare, too_many, drains=False) if delta <= 0 and spare else None
            if made := made or move(at, view, delta, why):
                moves.append(made)
        return moves

    @staticmethod
    def _bounds(view: EndpointView) -> Wish | None:
        """Return the move that brings an endpoint back within its bounds, which comes first."""
        if view.instances < view.min_instances:
            return view.min_instances - view.instances, f"Below its minimum of {view.min_instances}"
        if view.instances > view.max_instances:
            return view.max_instances - view.instances, f"Above its maximum of {view.max_instances}"
        return None

    def _spare_starts(self, now_s: float, view: EndpointView, advice: Advice | None) -> Wish:
        kept = advice.target_instances if advice is not None and valid(advice, now_s) else 0
        return cancelled(view, now_s, self.memory, self.patience_s, kept=kept)

    def _unless_new(self, now_s: float, view: EndpointView, advice: Advice | None) -> Wish:
        """Return the move, but no removal within the cooldown of an addition or the grace period of the newest instance,
        and none of what the present load fills where the plan rests on demand that was not counted.

        A refused wish is made again later.
        """
        remembered = dict(self.memory)
        wish, why = self._judge(now_s, view, advice)
        delta = max(wish, -_idle(view)) if wish < 0 and _uncounted(view, advice) else wish
        added = view.changed_delta > 0 and view.since_change_s < self.cooldown_s
        if wish >= 0 or (delta < 0 and view.since_ready_s >= GRACE_S and not added):
            return delta, why
        self.memory.clear()
        self.memory.update(remembered)
        return 0, ""

    def _judge(self, now_s: float, view: EndpointView, advice: Advice | None) -> Wish:
        if advice is None or not valid(advice, now_s):
            delta, why = self._patient(now_s, view)
            return delta, why + (" (no plan in force)" if self.uses_advice else "")
        return self._advised(now_s, view, advice)

    @abstractmethod
    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        """Return the wish, given valid *advice*; 0 for none."""

    def _by_use(self, view: EndpointView) -> Wish:
        """Return the paper's move: one out above the one threshold, one in below the other, never within the cooldown."""
        return reactive_wish(view, self._marks(view, 0.0), 0.0)

    def _marks(self, view: EndpointView, patience_s: float) -> Reactive:
        bounds = view.min_instances, view.max_instances
        return _reactive(self.out_above, self.in_below, self.cooldown_s, *bounds, patience_s)

    def _patient(self, now_s: float, view: EndpointView) -> Wish:
        """Return the same with patience, where use decides alone."""
        marks = self._marks(view, self.patience_s)
        key = f"{view.key}|easy_since_s"
        if not is_easy(view, marks):
            self.memory.pop(key, None)
            return reactive_wish(view, marks, 0.0)
        return reactive_wish(view, marks, now_s - self.memory.setdefault(key, now_s))

    def _first_sight(self, what: str, view: EndpointView, advice: Advice) -> bool:
        """Whether *what* is still to be done once for this *advice*; marks it as done."""
        key = f"{view.key}|{what}"
        if self.memory.get(key, float("-inf")) >= advice.made_at_s:
            return False
        self.memory[key] = advice.made_at_s
        return True


def _uncounted(view: EndpointView, advice: Advice | None) -> bool:
    """Whether the plan's forecast is less than half of present demand, as when rows of the ledger are late."""
    return advice is not None and view.tokens_per_s > UNCOUNTED * advice.forecast_tokens_per_s


def _idle(view: EndpointView) -> int:
    """Return the instances of *view* without which the others would just be full."""
    if not view.ready or isinf(view.use):
        return 0
    return max(0, view.instances - ceil(view.use * view.ready - 1e-9))


def forecast_words(advice: Advice) -> str:
    deferred = f" and {advice.deferred_tokens_per_s:,.0f} deferred" if advice.deferred_tokens_per_s else ""
    return f"forecast of {advice.forecast_tokens_per_s:,.0f} tok/s{deferred}"
