"""PreServe's scaler (section 4.3.2) and its baselines (5.3): the plan alone, and the plan with reactive thresholds.

Advice is for the next window of ten minutes, made at the start of each (tier 1).
"""

from dataclasses import dataclass, field
from math import floor, isnan
from typing import ClassVar

from scheduling.scaling.each import ByEndpoint, forecast_words
from scheduling.scaling.endpoint import Advice, EndpointView, PlansFor, Wish, percent, valid

WINDOW_S = 600.0


@dataclass(kw_only=True)
class Proactive(ByEndpoint):
    """Tier 1 alone: the number for the forecast of the next window, applied at the start of each window."""

    plans_for: ClassVar[PlansFor] = PlansFor(by_capability=True, period_s=WINDOW_S, horizon_s=2 * WINDOW_S)
    name: str = field(default="proactive", init=False)

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        if not self._first_sight("acted", view, advice):
            return 0, ""
        return advice.target_instances - view.instances, (
            f"{forecast_words(advice).capitalize()} needs {advice.target_instances} in the next window"
        )


@dataclass(kw_only=True)
class Hybrid(Proactive):
    """The plan at the start of each window, and the reactive thresholds within it."""

    name: str = field(default="hybrid", init=False)

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        delta, why = super()._advised(now_s, view, advice)
        return (delta, why) if delta else self._by_use(view)


@dataclass(kw_only=True)
class PreServe(Proactive):
    """Tier 1, and tier 2 in between: one out per instance that its look-ahead map shows overloaded; in once a window.

    A starting instance answers for an overloaded one, so that a cold start does not count again at every tick.
    Instances are removed that are not needed to keep the peaks of the maps at *ease_below*, once all of them have been
    below it for *ease_after_s*, but never below the plan. The paper's rule has neither this time nor the plan as a
    bound. But maps know only memory: if compute is the bottleneck, as with long prompts, memory is almost empty just
    before an overload, and a single look would remove five of six instances.
    """

    name: str = field(default="preserve", init=False)
    looks_ahead: bool = field(default=True, init=False)
    tick_s: float = 5.0
    ease_below: float = 0.3
    ease_after_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ease_below < 1:
            raise ValueError(f"ease_below must be between 0 and 1, not {self.ease_below}")
        if not 0 <= self.ease_after_s < WINDOW_S:
            raise ValueError(f"ease_after_s must be at least 0 and below {WINDOW_S:g}, not {self.ease_after_s}")

    def _judge(self, now_s: float, view: EndpointView, advice: Advice | None) -> Wish:
        low_s, peaks = self._low(now_s, view)
        delta, why = 0, ""
        if advice is not None and valid(advice, now_s):
            delta, why = self._advised(now_s, view, advice)
            least = advice.target_instances
        else:
            # The map needs no plan, only a window to scale in once.
            window_s, least = now_s // WINDOW_S * WINDOW_S, view.min_instances
            advice = Advice(least, 0.0, window_s, window_s + WINDOW_S)
        more = view.overloaded_instances - view.coming
        if more > max(delta, 0):
            return more, (
                f"The look-ahead map predicts overload on {view.overloaded_instances} of {view.ready} instances,"
                f" {view.coming} on the way"
            )
        if delta or low_s < self.ease_after_s:
            return delta, why
        spare = min(floor(view.instances - peaks / self.ease_below), view.instances - least)
        if bounded_by_least(view, spare) < 1 or not self._first_sight("eased", view, advice):
            return 0, ""
        return -spare, (
            f"The look-ahead map has predicted KV use below {percent(self.ease_below)} on all instances"
            f" for {low_s:.0f} s"
        )

    def _low(self, now_s: float, view: EndpointView) -> tuple[float, float]:
        """Return (seconds without a wish and all maps below *ease_below*, else -1; the highest sum of peaks since)."""
        peaks, highest = view.peak_kv_sum, view.peak_kv_most
        if isnan(peaks):  # without a map: the current KV use
            peaks, highest = view.kv_use * view.ready, view.kv_use
        since, most = f"{view.key}|low_since_s", f"{view.key}|low_peaks"
        if view.waiting or view.coming or not highest < self.ease_below:
            self.memory.pop(since, None)
            self.memory.pop(most, None)
            return -1.0, peaks
        self.memory[most] = max(self.memory.get(most, 0.0), peaks)
        return now_s - self.memory.setdefault(since, now_s), self.memory[most]


def bounded_by_least(view: EndpointView, spare: int) -> int:
    """Return how many of *spare* could be removed."""
    return min(spare, view.ready - view.min_instances)
