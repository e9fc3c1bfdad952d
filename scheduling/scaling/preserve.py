"""PreServe's scaler (section 4.3.2) and what it is compared with (5.3): the plan alone, and the plan with reactive marks.

Advice is for the next window of ten minutes, made at the begin of each (tier 1).
"""

from dataclasses import dataclass, field
from math import floor, isnan

from scheduling.scaling.each import ByEndpoint, Wish, forecast_words
from scheduling.scaling.endpoint import Advice, EndpointView, percent, valid

WINDOW_S = 600.0


@dataclass(kw_only=True)
class Proactive(ByEndpoint):
    """Tier 1 alone: the number that the forecast of the next window asks for, taken up at the begin of each window."""

    name: str = field(default="proactive", init=False)

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        if not self._first_sight("acted", view, advice):
            return 0, ""
        return advice.target_instances - view.instances, (
            f"The next window asks for {advice.target_instances} at a {forecast_words(advice)}"
        )


@dataclass(kw_only=True)
class Hybrid(Proactive):
    """The plan at the begin of each window, and the reactive marks within it."""

    name: str = field(default="hybrid", init=False)

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        delta, why = super()._advised(now_s, view, advice)
        return (delta, why) if delta else self._by_use(view)


@dataclass(kw_only=True)
class PreServe(Proactive):
    """Tier 1, and tier 2 between: one instance up for each that its look-ahead map shows overloaded; down once a window.

    An instance on the way answers for one that is overloaded, so that a cold start does not count again at every tick.
    Down goes what is not needed to keep the peaks of the maps at *ease_below*, when all of them lie below it.
    """

    name: str = field(default="preserve", init=False)
    looks_ahead: bool = field(default=True, init=False)
    tick_s: float = 5.0
    ease_below: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ease_below < 1:
            raise ValueError(f"ease_below must be between 0 and 1, not {self.ease_below}")

    def _judge(self, now_s: float, view: EndpointView, advice: Advice | None) -> Wish:
        if advice is None or not valid(advice, now_s):
            # The map needs no plan, only a window to ease once in.
            window_s = now_s // WINDOW_S * WINDOW_S
            advice = Advice(view.instances, 0.0, window_s, window_s + WINDOW_S)
        return self._advised(now_s, view, advice)

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        more = view.overloaded_instances - view.coming
        delta, why = super()._advised(now_s, view, advice)
        if more > max(delta, 0):
            return more, (
                f"{view.overloaded_instances} of {view.ready} instances will be above 95 % KV in the next 100"
                f" iterations, {view.coming} on the way"
            )
        if delta:
            return delta, why
        peaks, highest = view.peak_kv_sum, view.peak_kv_most
        if isnan(peaks):  # no map: what is held now
            peaks, highest = view.kv_use * view.ready, view.kv_use
        spare = floor(view.instances - peaks / self.ease_below)
        if view.waiting or view.coming or spare < 1 or not highest < self.ease_below:
            return 0, ""
        if bounded_by_least(view, spare) < 1 or not self._first_sight("eased", view, advice):
            return 0, ""
        return -spare, f"KV use stays below {percent(highest)} on all instances in the next 100 iterations"


def bounded_by_least(view: EndpointView, spare: int) -> int:
    """How many of *spare* could go."""
    return min(spare, view.ready - view.min_instances)
