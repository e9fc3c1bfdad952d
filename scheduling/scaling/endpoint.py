"""Input and output of a scaling strategy: its view of an endpoint, advice, and moves. The same under both clocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite, nan
from typing import NamedTuple, Protocol

GRACE_S = 60.0
"""A new instance is not scaled in before this: load takes a while to reach it."""


class Mover(StrEnum):
    """What asks for a move."""

    FLOOR = "floor"
    STRATEGY = "strategy"


class EndpointView(NamedTuple):
    """One endpoint (a model in a region) at a tick."""

    model: str
    region: str
    ready: int = 0
    """Instances that take work."""
    coming: int = 0
    """Instances that are starting: provisioning, loading, being reclaimed or redeployed."""
    draining: int = 0
    spot: int = 0
    """Instances of this model lent out here as spot, which can be reclaimed in about a minute."""
    spot_other: int = 0
    """Spot instances of other models in this region, which can be redeployed to this one in about ten."""
    min_instances: int = 0
    max_instances: int = 0
    use: float = 0.0
    """`scheduling.routing.regions.pressure`: 0 idle, 1 full, more with requests waiting, infinity if nothing is ready.
    """
    waiting: int = 0
    """Requests held for it."""
    kv_use: float = 0.0
    """KV tokens reserved or held, as a share of the ready instances' room."""
    tokens_per_s: float = 0.0
    """Interactive demand of its callers over the last minute: prompt and (predicted) output tokens."""
    since_change_s: float = inf
    """Seconds since scaling last changed it; infinity for never."""
    overloaded_instances: int = 0
    """By the look-ahead map: more than 95 % KV use in more than 10 % of the next 100 iterations (`LookAheadRule`)."""
    peak_kv_sum: float = nan
    """Sum over the ready instances of their peak KV use in those iterations; nan without maps."""
    peak_kv_most: float = nan
    """The highest of those peaks."""
    since_ready_s: float = inf
    """Seconds since the last of its instances became ready; infinity for never."""
    short_instances: int = 0
    """Missing instances, without which no order of its virtual queues is in time (`queueing.global_scheduler`)."""
    requests_at_once: int = 0
    """Requests that one of its instances runs at once (vLLM's `max_num_seqs`); 0 if unknown."""

    by_memory: bool = False
    """Whether SageServe's strategies read `kv_use` in place of `use` (`EndpointPolicy.scale_by`)."""
    signal: str = "Use"
    """Name of `use` in reasons."""
    changed_delta: int = 0
    """The last change in instances; 0 if unknown."""
    due: tuple[tuple[float, float], ...] = ()
    """Non-interactive work of its model that waits, in all regions: (deadline on the clock of the tick, tokens)."""

    @property
    def instances(self) -> int:
        """Instances that serve it or soon will."""
        return self.ready + self.coming

    @property
    def key(self) -> str:
        return f"{self.model}|{self.region}"


class Advice(NamedTuple):
    """Target of the slow planner for an endpoint. Times are seconds of the clock that ticks are given in."""

    target_instances: int
    forecast_tokens_per_s: float
    """Highest expected rate of interactive work while the advice is valid."""
    made_at_s: float
    valid_until_s: float
    soon_instances: int | None = None
    """Target for demand while instances start (`advisor.STARTS_AHEAD`), if the planner separates it."""
    next_plan_s: float | None = None
    """When the next plan is due, if this one is valid for longer in case the next is late."""
    unevenness: float = 1.0
    """How uneven arrivals are, from 0 to 1 (`planning.bursts`)."""
    deferred_tokens_per_s: float = 0.0
    """Planned rate of deferred work."""

    @property
    def window_ends_s(self) -> float:
        """End of the decision window of this plan."""
        return self.valid_until_s if self.next_plan_s is None else min(self.valid_until_s, self.next_plan_s)


class PlansFor(NamedTuple):
    """Forecast level, period and horizon of a strategy's plans. Levels: 0 is the mean, 1 the upper end of the 80% band."""

    soon: float = 0.0
    """Level for adding, over the next minutes: twice the time of a start."""
    kept: float = 0.0
    """Level for keeping, over the whole plan. Not below `soon`, or instances would come and go."""
    two_plans: bool = False
    """Whether adding has a separate plan from keeping."""
    by_capability: bool = False
    """Whether instances are PreServe's N (Algorithm 2) for the coming windows, instead of SageServe's programme."""
    period_s: float = 3600.0
    """Time from one plan to the next: an hour, as in SageServe."""
    horizon_s: float = 3600.0
    """Horizon of the plan for what is kept."""
    by_unevenness: bool = False
    """Whether levels fall to the mean and the horizon to the period as arrivals become calm."""

    def at(self, unevenness: float) -> "PlansFor":
        """Return it for arrivals of *unevenness*, from 0 (Poisson) to 1."""
        if not self.by_unevenness:
            return self
        horizon_s = self.period_s + unevenness * (self.horizon_s - self.period_s)
        return self._replace(soon=unevenness * self.soon, kept=unevenness * self.kept, horizon_s=horizon_s)


@dataclass(frozen=True, slots=True)
class Move:
    """Change the endpoint at index *endpoint* of the views by *delta* instances; *reason* is a sentence for operators."""

    endpoint: int
    delta: int
    reason: str
    by: str = Mover.STRATEGY
    drains: int = 0
    """Ready instances among those removed, at most: starts are cancelled first, those farthest from ready before others."""


Wish = tuple[int, str]
"""Number of instances, and the reason."""


class Strategy(Protocol):
    """A scaling strategy: pure decisions, no clock and no I/O. It keeps its state between ticks itself."""

    name: str
    tick_s: float
    """Time between two calls of `decide`."""
    uses_advice: bool
    looks_ahead: bool
    """Whether it reads the look-ahead figures of the views, which are costly to compute."""

    def decide(self, now_s: float, views: Sequence[EndpointView], advice: Sequence[Advice | None]) -> list[Move]:
        """Return at most one move per endpoint, within its bounds. *advice* matches *views*; None if there is none yet."""
        ...


class Sources(NamedTuple):
    """Sources of added instances, in the order in which they are taken (SageServe 6.5)."""

    draining: int
    own_spot: int
    other_spot: int
    new: int

    def words(self) -> str:
        named = (
            (self.draining, "from draining instances"),
            (self.own_spot, "from own spot"),
            (self.other_spot, "from other models' spot"),
            (self.new, "on free GPUs"),
        )
        return " and ".join(words if count == sum(self) else f"{count} {words}" for count, words in named if count)


def sources(view: EndpointView, count: int) -> Sources:
    """Return the sources of *count* more instances: draining, own spot, spot of other models, then free GPUs."""
    drain = min(count, view.draining)
    own = min(count - drain, view.spot)
    other = min(count - drain - own, view.spot_other)
    return Sources(drain, own, other, count - drain - own - other)


def move(
    at: int, view: EndpointView, delta: int, why: str, by: str = Mover.STRATEGY, *, drains: bool = True
) -> Move | None:
    """Return the move by *delta*, cut to the bounds, with *why* as a sentence; None if nothing is left of it.

    A removal without *drains* only cancels starts.
    """
    if delta > 0:
        delta = max(0, min(delta, view.max_instances - view.instances))
        end = f", {sources(view, delta).words()}"
        drained = 0
    else:
        drained = max(0, min(-delta, view.ready - view.min_instances)) if drains else 0
        delta = -max(0, min(-delta, view.coming + drained, view.instances - view.min_instances))
        starts = min(-delta, view.coming)
        end = f", {starts} of them cancelled while starting" if starts < -delta else ", cancelled while starting"
        end = (end if starts else "") + (", lent out as spot once drained" if starts < -delta else "")
    if not delta:
        return None
    return Move(at, delta, f"{why}: {view.instances} → {view.instances + delta} instances{end}.", by, drained)


def valid(advice: Advice | None, now_s: float) -> bool:
    """Whether there is advice that has not expired."""
    return advice is not None and now_s <= advice.valid_until_s


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if isfinite(share) else "infinite"


def use_words(view: EndpointView) -> str:
    """Return a text such as `Use is 82% with 3 waiting`."""
    if view.use == inf:
        return f"Nothing is ready, {view.waiting} waiting"
    return f"{view.signal} is {percent(view.use)}" + (f" with {view.waiting} waiting" if view.waiting else "")
