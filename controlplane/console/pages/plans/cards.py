"""Plans as pages show them: what would change, what that costs, and why."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime

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
    """A plan as a page shows it: what would change, what that costs, and why."""

    plan: ScalingPlan
    strategy: str
    changes: tuple[InstanceChange, ...]
    expired: bool
    binding: tuple[str, ...] = field(default=())
    short_rows: tuple[str, ...] = ()
    """The rows of the problem that could not hold, in the planner's words."""
    note: str = ""
    load: LoadNow | None = None
    """What its model is asked for now, where it waits to be approved."""

    @property
    def below(self) -> str:
        """Describe how the plan leaves less than is needed now; empty if it does not."""
        return self.load.above(self.plan) if self.load else ""

    @property
    def capacity(self) -> float | None:
        """Return tokens per second that its instances serve."""
        return load_now.capacity_of(self.plan.targets, self.plan.inputs)

    @property
    def forecast(self) -> float:
        """Return the highest planned rate of interactive work, summed over regions."""
        return float(sum((self.plan.inputs.get("forecast_tokens_per_s") or {}).values()))

    @property
    def deferred(self) -> float:
        """Return the planned rate of deferred work."""
        return float(sum((self.plan.inputs.get("deferred_tokens_per_s") or {}).values()))

    @property
    def reserve(self) -> float:
        return float(sum((self.plan.inputs.get("reserve_tokens_per_s") or {}).values()))

    @property
    def more(self) -> int:
        return sum(change.delta for change in self.changes if change.delta > 0)

    @property
    def fewer(self) -> int:
        return -sum(change.delta for change in self.changes if change.delta < 0)

    @property
    def minus(self) -> int:
        return -self.fewer

    @property
    def usd_delta(self) -> float:
        return round(self.plan.cost_usd_per_hour_after - self.plan.cost_usd_per_hour_before, 2)

    @property
    def shortage(self) -> str:
        """Describe the demand that no capacity could meet; empty if there is none."""
        return str(self.plan.inputs.get("shortage", ""))

    @property
    def unmet_if_idle(self) -> float:
        """Return tokens per second that would go unserved if nothing moved."""
        return float(self.plan.inputs.get("do_nothing_unmet_tokens_per_s", 0.0))

    @property
    def progress(self) -> str:
        """Describe the remaining moves of a plan in progress, and what blocks them; empty otherwise."""
        return plan_rollout.not_moved(self.plan) if self.plan.status == PlanStatus.IN_PROGRESS else ""

    @property
    def pace(self) -> str:
        """Describe when the strategy that follows the plan moves instances."""
        return strategies.pace(self.plan.strategy, tuned(self.plan.model.name))

    @property
    def decidable(self) -> bool:
        return self.plan.status == PlanStatus.ADVICE


def without_place(reason: str, model: str) -> str:
    """Return a planner's reason without its beginning `+1 MODEL on … in …: `, for use next to the place."""
    head, colon, rest = reason.partition(": ")
    return rest if colon and head[:1] in "+-" and model in head else reason


def titled(text: str, titles: Mapping[str, str]) -> str:
    """Return *text* of a planner with the titles of its regions and GPU types."""
    names = "|".join(map(re.escape, sorted(titles, key=len, reverse=True)))
    return re.sub(rf"(?<![\w-])(?:{names})(?![\w-])", lambda name: titles[name[0]], text) if titles else text


def card_of(plan: ScalingPlan, titles: Mapping[str, str], now: datetime) -> Card:
    """Return the one card of *plan*."""
    return cards_of([plan], titles, now, judged=True)[0]


def cards_of(
    plans: Collection[ScalingPlan], titles: Mapping[str, str], now: datetime, *, judged: bool = False
) -> list[Card]:
    """Return cards of *plans*, with the instances when each was made.

    *titles* are those of regions and GPU types. *judged*: those that wait are held against the load of now.
    """
    judged = judged and any(plan.status == PlanStatus.ADVICE and plan.valid_until > now for plan in plans)
    loads = load_now.read(now) if judged else {}
    return [_card(plan, titles, now, loads.get(plan.model.name)) for plan in plans]


def _card(
    plan: ScalingPlan,
    titles: Mapping[str, str],
    now: datetime,
    load: LoadNow | None,
) -> Card:
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
    changes.sort(key=lambda change: (-abs(change.delta), change.region, change.gpu_type))
    return Card(
        plan=plan,
        strategy=title_of(plan.strategy),
        changes=tuple(changes),
        expired=plan.valid_until <= now,
        binding=tuple(titled(str(row), titles) for row in plan.binding),
        short_rows=tuple(titled(row, titles) for row in plan.inputs.get("short_rows", ())),
        note=titled(plan.note, titles),
        load=load if plan.status == PlanStatus.ADVICE else None,
    )
