"""Our own strategy: capacity for the next minutes by plan, corrections by what is seen, and no instance let go too soon.

From SageServe it takes the plan over regions and the guard by traffic, from PreServe the short window and the proportional
answer to an overload. What is its own: the plan looks only as far ahead as an instance needs to come, so nothing is held
for the peak of an hour; instances are filled to *aim*, where SageServe keeps what is above 30 %; and what the last
minutes' peak needed is kept, so an instance does not go while it would be back within minutes.
"""

from dataclasses import dataclass, field
from math import ceil, inf

from scheduling.scaling.each import ByEndpoint, Wish, forecast_words
from scheduling.scaling.endpoint import Advice, EndpointView, percent, use_words


@dataclass(kw_only=True)
class Pilothouse(ByEndpoint):
    """Plan, traffic and use together, for each endpoint."""

    name: str = field(default="pilothouse", init=False)
    out_above: float = 0.8
    aim: float = 0.7
    """Use that instances are added for, and that one fewer must stay below."""
    confirm_above: float = 0.4
    """Use below which a plan's or the traffic's wish for more is not believed yet."""
    hold_s: float = 300.0
    """What was needed in the last one to two of these is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.aim <= self.out_above:
            raise ValueError(f"aim ({self.aim}) must be above 0 and at most out_above ({self.out_above})")
        if not 0 <= self.confirm_above < self.out_above:
            raise ValueError(f"confirm_above ({self.confirm_above}) must be from 0 to below out_above")
        if not 0 < self.hold_s < inf:
            raise ValueError(f"hold_s must be a number above 0, not {self.hold_s}")

    def _judge(self, now_s: float, view: EndpointView, advice: Advice | None) -> Wish:
        self._note(now_s, view)
        return super()._judge(now_s, view, advice)

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        if not view.ready or view.use == inf:
            return 0, ""  # nothing ready: what is on the way decides, and the floor
        busy = view.use * view.ready
        delta, why = self._more(view, advice, busy)
        if delta > 0:
            return delta, why
        return self._fewer(now_s, view, advice)

    def _more(self, view: EndpointView, advice: Advice, busy: float) -> Wish:
        wanted, why = view.instances, ""
        if busy > self.out_above * view.instances and view.since_change_s >= self.cooldown_s:
            wanted = max(wanted + 1, ceil(busy / self.aim))
            why = f"{use_words(view)}, above {percent(self.out_above)} with those on the way"
        if view.use > self.confirm_above:
            if advice.target_instances > wanted:
                wanted = advice.target_instances
                why = f"The next minutes ask for {wanted} at a {forecast_words(advice)}"
            each = advice.tokens_per_s_per_instance
            if each > 0 and view.tokens_per_s > each * wanted and view.since_change_s >= self.cooldown_s:
                wanted = ceil(view.tokens_per_s / each)
                why = f"Demand is {view.tokens_per_s:,.0f} tokens/s, what {wanted} instances serve"
        return wanted - view.instances, why

    def _fewer(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        if view.coming or view.waiting or view.since_change_s < self.hold_s:
            return 0, ""
        peak = self._peak(view)
        needed = max(advice.target_instances, advice.later_instances, ceil(peak / self.aim), 1)
        if needed >= view.instances:
            return 0, ""
        return needed - view.instances, (
            f"The last minutes' peak filled {peak:.1f} instances, and the plan asks for {advice.target_instances}"
        )

    def _note(self, now_s: float, view: EndpointView) -> None:
        """Remember the highest load, in instances' worth, of this hold and of the one before."""
        hold = float(now_s // self.hold_s)
        busy = view.use * view.ready if view.use < inf else float(view.instances)
        now_key, before_key, hold_key = (f"{view.key}|{what}" for what in ("peak", "before", "hold"))
        if self.memory.get(hold_key) != hold:
            last = self.memory.get(hold_key, -inf)
            self.memory[before_key] = self.memory.get(now_key, 0.0) if last == hold - 1 else 0.0
            self.memory[now_key], self.memory[hold_key] = 0.0, hold
        self.memory[now_key] = max(self.memory[now_key], busy)

    def _peak(self, view: EndpointView) -> float:
        return max(self.memory[f"{view.key}|peak"], self.memory[f"{view.key}|before"])
