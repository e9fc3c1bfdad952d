"""Our own strategy: capacity for the next minutes by plan, corrected by the pooled load of all regions of a model.

From SageServe it takes the plan over regions, from PreServe the short window and the proportional response. Its
additions: the plan looks little further ahead than an instance takes to start, so nothing is held for the peak of an
hour. An instance is removed when no plan for the next 50 minutes needs it, even towards the upper end of the forecast's
band, so it is unlikely to be needed again soon. Load is read over all regions of a model, smoothed over a minute: the
router sends one region's overflow to another, so a burst in one region is no shortage. If QLM's global scheduler finds
that no order of the waiting requests is in time, as many instances are added as are missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp, inf
from typing import ClassVar

from scheduling.scaling.each import ByEndpoint, forecast_words
from scheduling.scaling.endpoint import Advice, EndpointView, Move, PlansFor, Wish, percent


@dataclass(kw_only=True)
class Pilothouse(ByEndpoint):
    """Plan and pooled load together, for each endpoint.

    Instances are added for the advice's soon target, and kept for its highest.
    """

    plans_for: ClassVar[PlansFor] = PlansFor(
        soon=0.5, kept=0.7, two_plans=True, period_s=1200.0, horizon_s=3000.0, by_unevenness=True
    )
    """An instance that comes late costs answers, so more than the mean is planned for, most under uneven arrivals."""
    name: str = field(default="pilothouse", init=False)
    out_above: float = 0.9
    """Smoothed use, at the endpoint and over all regions, above which instances are added whatever the plan."""
    aim: float = 0.75
    """Target use when adding for that reason, and the use that the rest must stay below when some are removed under uneven
    arrivals; under calm ones *out_above*.
    """
    confirm_above: float = 0.5
    """Use, at the endpoint or over all regions, below which a plan's increase is not followed yet."""
    smooth_s: float = 60.0
    hold_s: float = 120.0
    """Least time between a change and a removal."""
    _pools: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)
    """By model, over all regions: smoothed load in instances, and the number of instances."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.aim <= self.out_above:
            raise ValueError(f"aim ({self.aim}) must be above 0 and at most out_above ({self.out_above})")
        if not 0 <= self.confirm_above < self.out_above:
            raise ValueError(f"confirm_above ({self.confirm_above}) must be from 0 to below out_above")
        for what in ("smooth_s", "hold_s"):
            if not 0 < getattr(self, what) < inf:
                raise ValueError(f"{what} must be a number above 0, not {getattr(self, what)}")

    def decide(self, now_s: float, views: Sequence[EndpointView], advice: Sequence[Advice | None]) -> list[Move]:
        """Implement `Strategy.decide`."""
        self._pools = {}
        for view in views:
            pool = self._pools.setdefault(view.model, [0.0, 0.0])
            pool[0] += self._smoothed(now_s, view)
            pool[1] += view.instances
        return super().decide(now_s, views, advice)

    def _judge(self, now_s: float, view: EndpointView, advice: Advice | None) -> Wish:
        missing = self._missing(view)
        if missing > 0 and view.ready:
            coming = f", {view.coming} on the way" if view.coming else ""
            count = f"{missing + view.coming} more instance{'s' if missing + view.coming > 1 else ''}"
            return missing, f"No order of the queue is in time without {count}{coming}"
        return super()._judge(now_s, view, advice)

    def _missing(self, view: EndpointView) -> int:
        """Return the instances that the global scheduler misses at two successive ticks, less those that are starting.

        A shortage that ends by the next tick ends before an instance could start.
        """
        key = f"{view.key}|short"
        short = min(self.memory.get(key, 0.0), view.short_instances if view.waiting else 0)
        self.memory[key] = float(view.short_instances if view.waiting else 0)
        return int(short) - view.coming

    def _advised(self, now_s: float, view: EndpointView, advice: Advice) -> Wish:
        if not view.ready or view.use == inf:
            return 0, ""  # starting instances decide, and the floor
        busy, instances = self.memory[f"{view.key}|busy"], view.instances
        pool_busy, pool_instances = self._pools[view.model]
        own, pool = busy / instances, pool_busy / pool_instances
        if min(own, pool) > self.out_above and view.since_change_s >= self.cooldown_s:
            return max(1, ceil(busy / self._aim(advice)) - instances), (
                f"Use is {percent(own)}, {percent(pool)} over all regions, above {percent(self.out_above)}"
            )
        soon = advice.target_instances if advice.soon_instances is None else advice.soon_instances
        if instances < soon:
            if max(own, pool) <= self.confirm_above:
                return 0, ""
            return soon - instances, (
                f"{forecast_words(advice).capitalize()} needs {soon} within minutes, and use is {percent(own)}"
            )
        return self._fewer(view, advice, busy)

    def _aim(self, advice: Advice) -> float:
        """Return *aim* under uneven arrivals, *out_above* under calm ones."""
        return self.out_above - advice.unevenness * (self.out_above - self.aim)

    def _fewer(self, view: EndpointView, advice: Advice, busy: float) -> Wish:
        if view.coming or view.short_instances or view.since_change_s < self.hold_s:
            return 0, ""
        needed = max(advice.target_instances, 1)
        pool_busy, pool_instances = self._pools[view.model]
        spare = min(
            view.instances - needed,
            view.instances - ceil(busy / self.out_above),
            int(pool_instances - pool_busy / self._aim(advice)),
        )
        if spare < 1:
            return 0, ""
        self._pools[view.model][1] -= spare  # so that another region does not count on them too
        return -spare, (f"{forecast_words(advice).capitalize()} needs {needed}, and current load equals {busy:.1f}")

    def _smoothed(self, now_s: float, view: EndpointView) -> float:
        """Return the load of *view* in instances, smoothed; remembers it."""
        key, when = f"{view.key}|busy", f"{view.key}|at"
        busy = view.use * view.ready if view.ready and view.use < inf else float(view.instances)
        since_s = max(0.0, now_s - self.memory.get(when, now_s))
        keep = exp(-since_s / self.smooth_s)
        smoothed = keep * self.memory.get(key, busy) + (1 - keep) * busy
        self.memory[key], self.memory[when] = smoothed, now_s
        return smoothed
