"""A plan as the page shows it: what would change, what that costs and why, beside demand, use and service now."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from controlplane.planning import selectors
from controlplane.planning.execution import plan_rollout, strategies
from controlplane.planning.models import PlanStatus, ScalingPlan
from controlplane.planning.plans import load_now
from controlplane.planning.plans.load_now import LoadNow
from controlplane.planning.titles import title_of
from controlplane.tuning.selectors import tuned


@dataclass(frozen=True, slots=True)
class InstanceChange:
    """One place whose number of instances a plan changes."""

    region: str
    gpu_type: str
    present: int
    target: int
    reason: str

    @property
    def delta(self) -> int:
        return self.target - self.present


@dataclass(frozen=True, slots=True)
class Card:
    plan: ScalingPlan
    strategy: str
    changes: tuple[InstanceChange, ...]
    expired: bool
    limits: tuple[str, ...]
    """The limits reached, in the planner's words, and what could not hold."""
    note: str
    load: LoadNow | None
    """What its model is asked for now, while the plan is for the time that is now."""
    newer: ScalingPlan | None
    """The newest plan of its model, where that replaced it."""

    @property
    def below(self) -> str:
        """Describe how a plan that waits leaves less than is needed now; empty if it does not."""
        return self.load.above(self.plan) if self.load and self.decidable else ""

    @property
    def capacity(self) -> float | None:
        """Return tokens per second that its instances serve."""
        return load_now.capacity_of(self.plan.targets, self.plan.inputs)

    @property
    def use(self) -> float | None:
        """Return demand now as a share of what the instances served that were there when it was made."""
        able = load_now.capacity_of(self.plan.targets, self.plan.inputs, "present")
        return (self.load.interactive + self.load.deferred) / able if able and self.load else None

    def _sum(self, name: str) -> float:
        return float(sum((self.plan.inputs.get(name) or {}).values()))

    @property
    def forecast(self) -> float:
        """Return the highest planned rate of interactive work, summed over regions."""
        return self._sum("forecast_tokens_per_s")

    @property
    def deferred(self) -> float:
        return self._sum("deferred_tokens_per_s")

    @property
    def expected(self) -> float:
        return self.forecast + self.deferred

    @property
    def reserve(self) -> float:
        return self._sum("reserve_tokens_per_s")

    @property
    def more(self) -> int:
        return sum(change.delta for change in self.changes if change.delta > 0)

    @property
    def fewer(self) -> int:
        return -sum(change.delta for change in self.changes if change.delta < 0)

    @property
    def usd_delta(self) -> float:
        return round(self.plan.cost_usd_per_hour_after - self.plan.cost_usd_per_hour_before, 2)

    @property
    def short(self) -> bool:
        """Return whether there is demand that no capacity could meet."""
        return bool(self.plan.inputs.get("shortage"))

    @property
    def progress(self) -> str:
        """Describe the remaining moves of a plan in progress, or when its autoscaler moves instances; empty otherwise."""
        if self.plan.status == PlanStatus.IN_FORCE and self.changes:
            return strategies.pace(self.plan.strategy, tuned(self.plan.model.name))
        return plan_rollout.not_moved(self.plan) if self.plan.status == PlanStatus.IN_PROGRESS else ""

    @property
    def decidable(self) -> bool:
        return self.plan.status == PlanStatus.ADVICE and not self.expired


def without_place(reason: str, model: str) -> str:
    """Return a planner's reason without its beginning `+1 MODEL on … in …: `, for use next to the place."""
    head, colon, rest = reason.partition(": ")
    return rest if colon and head[:1] in "+-" and model in head else reason


def titled(text: str, titles: Mapping[str, str]) -> str:
    """Return *text* of a planner with the titles of its regions and GPU types."""
    names = "|".join(map(re.escape, sorted(titles, key=len, reverse=True)))
    return re.sub(rf"(?<![\w-])(?:{names})(?![\w-])", lambda name: titles[name[0]], text) if titles else text


def card_of(plan: ScalingPlan, titles: Mapping[str, str], now: datetime) -> Card:
    """Return the card of *plan*; *titles* are those of regions and GPU types."""
    changes = [
        InstanceChange(
            region=titles.get(target["region"], target["region"]),
            gpu_type=titles.get(target["gpu_type"], target["gpu_type"]),
            present=target["present"],
            target=target["target"],
            reason=titled(without_place(target.get("reason") or "", plan.model.name), titles),
        )
        for target in plan.targets
        if target["target"] != target["present"]
    ]
    expired = plan.valid_until <= now
    return Card(
        plan=plan,
        strategy=title_of(plan.strategy),
        changes=tuple(sorted(changes, key=lambda change: (-abs(change.delta), change.region, change.gpu_type))),
        expired=expired,
        limits=tuple(titled(str(row), titles) for row in (*plan.binding, *plan.inputs.get("short_rows", ()))),
        note=titled(plan.note, titles),
        load=None if expired else load_now.read(now).get(plan.model.name, LoadNow()),
        newer=selectors.replaced_by(plan),
    )
