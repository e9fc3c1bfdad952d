"""SageServe's strategies (sections 4 and 6.5): reactive over silos or one pool, and three ways to follow an hourly plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from scheduling.scaling.each import ByEndpoint, forecast_words
from scheduling.scaling.endpoint import Advice, EndpointView, Move, Wish, percent
from scheduling.scaling.reactive import Reactive


class BySignal(ByEndpoint):
    """A strategy that scales by use: that of effective memory alone, as in the paper, where the policy says so."""

    def decide(self, now_s: float, views: Sequence[EndpointView], advice: Sequence[Advice | None]) -> list[Move]:
        """Implement `Strategy.decide`."""
        seen = [
            view._replace(use=view.kv_use, signal="Memory use") if view.by_memory and view.ready else view
            for view in views
        ]
        return super().decide(now_s, seen, advice)


@dataclass(kw_only=True)
class Unified(BySignal):
    """Reactive over one pool of all models and classes: one out above 70%, one in below 30%, at most every 15 s.

    Called at ticks it sees less than the paper's, which decides at every arrival and without
    patience, as `per_arrival` does.
    """

    name: str = field(default="reactive", init=False)
    uses_advice: bool = field(default=False, init=False)
    shares_spot: bool = field(default=True, init=False)
    """Whether spot instances of other models may be redeployed."""

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        return self._patient(now_s, view)

    def per_arrival(self, min_instances: int, max_instances: int) -> Reactive:
        """Return the paper's form: the same thresholds for the kernel that the dispatcher calls on every arrival."""
        return Reactive(self.out_above, self.in_below, self.cooldown_s, min_instances, max_instances)


@dataclass(kw_only=True)
class Siloed(Unified):
    """Reactive in silos: interactive and other work have separate pools (two endpoints), and so has each model."""

    name: str = field(default="siloed", init=False)
    shares_spot: bool = field(default=False, init=False)


@dataclass(kw_only=True)
class LongTermImmediate(ByEndpoint):
    """LT-I: go to the planned number at once, each time a plan is made."""

    name: str = field(default="lt_i", init=False)

    @property
    def pace(self) -> str:
        return "moves once, when a plan is made"

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        if not self._first_sight("acted", view, advice):
            return 0, ""
        return advice.target_instances - view.instances, (
            f"Plan targets {advice.target_instances} at a {forecast_words(advice)}"
        )


@dataclass(kw_only=True)
class LongTermByUse(BySignal):
    """LT-U: go to the planned number one by one, out only while use is above 70%, in only while it is below 30%."""

    name: str = field(default="lt_u", init=False)

    @property
    def pace(self) -> str:
        return f"adds only while use is above {percent(self.out_above)}, and takes away only below {percent(self.in_below)}"

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        delta, why = self._by_use(view)
        missing = advice.target_instances - view.instances
        if delta * missing <= 0:
            return 0, ""
        return delta, f"{why}, and the plan targets {advice.target_instances} at a {forecast_words(advice)}"


@dataclass(kw_only=True)
class LongTermByUseAndGap(LongTermByUse):
    """LT-UA: like LT-U; once there, in the last 20 minutes of a plan, traffic far from the forecast moves it further.

    Out at 5 times the forecast or more, in at half of it or less, one by one. The paper's 20 minutes are a third of its
    decision window, an hour; of a shorter window it is a third too. Not in the paper: no such move is made that use
    would undo at the next tick, as when half of the forecast is still more than one instance fewer could serve.
    """

    name: str = field(default="lt_ua", init=False)
    gap_out: float = 5.0
    gap_in: float = 0.5
    gap_last_s: float = 1200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.gap_in < self.gap_out:
            raise ValueError(f"gap_in ({self.gap_in}) must be at least 0 and below gap_out ({self.gap_out})")
        if not self.gap_last_s >= 0:
            raise ValueError(f"gap_last_s must be at least 0, not {self.gap_last_s}")

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        delta, why = super()._advised(now_s, view, advice)
        if delta or not self._last_third(now_s, advice) or view.since_change_s < self.cooldown_s:
            return delta, why
        seen, expected = view.tokens_per_s, advice.forecast_tokens_per_s
        missing = advice.target_instances - view.instances
        if seen > 0 and seen >= self.gap_out * expected and missing <= 0 and self._use_with(view, 1) >= self.in_below:
            return 1, f"{_gap(seen, expected)}, at least {self.gap_out:g} times, and the plan is reached"
        if seen <= self.gap_in * expected and missing >= 0 and self._use_with(view, -1) <= self.out_above:
            return -1, f"{_gap(seen, expected)}, at most {self.gap_in:g} times, and the plan is reached"
        return 0, ""

    def _last_third(self, now_s: float, advice: Advice) -> bool:
        last_s = min(self.gap_last_s, (advice.window_ends_s - advice.made_at_s) / 3)
        return advice.window_ends_s - now_s <= last_s

    @staticmethod
    def _use_with(view: EndpointView, delta: int) -> float:
        """Return the use of the endpoint if the same load ran on *delta* instances more."""
        ready = view.ready + delta
        if not isfinite(view.use) or ready < 1:
            return inf if view.use > 0 else 0.0
        return view.use * view.ready / ready


def _gap(seen: float, expected: float) -> str:
    times = f"{seen / expected:.1f} times" if expected > 0 else "against"
    return f"Demand is {seen:,.0f} tok/s, {times} the {expected:,.0f} forecast"
