"""One list of what was planned and moved: plans that only follow each other are one, and moves name what they take back."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from controlplane.planning import selectors
from controlplane.planning.models import PLANNER, PlanStatus, ScalingMove, ScalingPlan

READ, SHOWN = 500, 60
TOGETHER = timedelta(minutes=1)
ROUTINE = {PlanStatus.SHADOW, PlanStatus.IN_FORCE, PlanStatus.CARRIED_OUT, PlanStatus.SUPERSEDED, PlanStatus.EXPIRED}
"""States of plans that nobody decided about, which are one row with those before."""


@dataclass(slots=True)
class Entry:
    """A plan with those that it follows, or moves of one kind at a place within a minute: *plan* or *move* is the newest."""

    at: datetime
    since: datetime
    model: str
    more: int = 0
    less: int = 0
    again: int = 0
    """Plans before the newest."""
    plan: ScalingPlan | None = None
    move: ScalingMove | None = None
    takes_back: ScalingMove | None = None
    """The last move there, where it went the other way shortly before."""


def entries(model: str, since: datetime) -> list[Entry]:
    """Return what was planned and moved *since* then, the newest first; of *model*, or of all (empty)."""
    made = [*_plans(model, since), *_moves(model, since)]
    return sorted(made, key=lambda entry: entry.at, reverse=True)[:SHOWN]


def _plans(model: str, since: datetime) -> Iterator[Entry]:
    follows: dict[tuple[int, str], Entry] = {}
    for plan in selectors.plans(model).filter(made_at__gte=since).defer("inputs", "binding")[:READ]:
        key, begun = (plan.model_id, plan.strategy), plan.decided_at or plan.made_at
        routine = plan.status in ROUTINE and plan.decided_by in ("", PLANNER)
        if routine and key in follows:
            follows[key].since = begun
            follows[key].again += 1
            continue
        deltas = [target["target"] - target["present"] for target in plan.targets]
        more, less = (sum(max(sign * delta, 0) for delta in deltas) for sign in (1, -1))
        entry = Entry(plan.made_at, begun, plan.model.name, more, -less, plan=plan)
        if routine:
            follows[key] = entry
        else:
            follows.pop(key, None)
        yield entry


def _moves(model: str, since: datetime) -> Iterator[Entry]:
    last: dict[tuple[str, str, str], Entry] = {}
    for move in reversed(selectors.moves(model).filter(at__gte=since)[:READ]):
        place = move.model, move.region, move.gpu_type
        entry = last.get(place)
        before = entry.move if entry else None
        same = before and (before.delta, before.source, before.plan_id) == (move.delta, move.source, move.plan_id)
        if entry is None or not same or move.at - entry.since > TOGETHER:
            against = before and before.delta * move.delta < 0 and move.at - before.at < selectors.FLAPPING_OVER
            last[place] = entry = Entry(move.at, move.at, move.model, takes_back=before if against else None)
            yield entry
        entry.at, entry.move = move.at, move
        entry.more, entry.less = entry.more + max(move.delta, 0), entry.less + min(move.delta, 0)
