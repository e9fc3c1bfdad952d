"""Contested moves: the floor undoes a strategy's move, a strategy an operator's, or an endpoint's instances flap.

Ownership of an endpoint is a rule for both live and simulated time (`scheduling.scaling.owner`); this module reads its
inputs from rows.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING

from django.db.models import Max

from controlplane.planning.models import MoveSource, ScalingMove, ScalingPlan
from controlplane.rows import narrowed

if TYPE_CHECKING:
    from scheduling.scaling.owner import Change

UNDONE_WITHIN = timedelta(minutes=15)
FLAPPING_OVER = timedelta(minutes=15)
FLAPPING_REVERSALS = 4
"""Direction changes of an endpoint within that time from which it counts as flapping."""


@dataclass(frozen=True, slots=True)
class Undone:
    """A move and the later one, by another actor, that undid it."""

    move: ScalingMove
    by: ScalingMove

    @property
    def after_s(self) -> float:
        return (self.by.at - self.move.at).total_seconds()


@dataclass(frozen=True, slots=True)
class Flapping:
    """An endpoint that was repeatedly scaled out and in. *by* counts instances by actor, out then in."""

    model: str
    region: str
    reversals: int
    by: dict[str, tuple[int, int]]


def last_changes(model: str, region: str = "", *, now: datetime) -> dict[str, "Change"]:
    """Return the last move of *model* by region; in *region* alone, or in all."""
    from scheduling.scaling.owner import Change

    rows = narrowed(ScalingMove.objects.filter(model=model), region=region)
    newest = rows.filter(pk__in=rows.order_by().values("region").annotate(last=Max("pk")).values("last"))
    return {
        row.region: Change(
            row.source,
            row.delta,
            (now - row.at).total_seconds(),
            _holds_s(row, now),
        )
        for row in newest.select_related("plan")
    }


def _holds_s(row: ScalingMove, now: datetime) -> float:
    """Return the seconds for which the approved plan of *row* still holds; 0 if it has none."""
    if row.source != MoveSource.PLAN or row.plan is None:
        return 0.0
    return max(0.0, (row.plan.valid_until - now).total_seconds())


def undone(moves: Iterable[ScalingMove]) -> list[Undone]:
    """Return those of *moves* that another actor undid soon after, oldest first; each is undone once."""
    pairs = []
    standing: dict[tuple[str, str], list[ScalingMove]] = defaultdict(list)
    for move in sorted(moves, key=lambda each: each.pk):
        place = move.model, move.region
        others = [
            each
            for each in standing[place]
            if each.delta * move.delta < 0 and each.source != move.source and move.at - each.at <= UNDONE_WITHIN
        ]
        if others:
            standing[place].remove(others[-1])
            pairs.append(Undone(others[-1], move))
        else:
            standing[place].append(move)
    return pairs


def undone_of(plans: Collection[ScalingPlan]) -> dict[int, list[Undone]]:
    """Return the undone moves of each of *plans*, by key; plans without any are left out."""
    own = list(ScalingMove.objects.filter(plan__in=[plan.pk for plan in plans]).order_by("pk"))
    if not own:
        return {}
    around = ScalingMove.objects.filter(
        model__in={move.model for move in own}, at__gte=own[0].at, at__lte=own[-1].at + UNDONE_WITHIN
    )
    pairs: dict[int, list[Undone]] = defaultdict(list)
    keys = {move.pk for move in own}
    for pair in undone(around):
        if pair.move.pk in keys and pair.move.plan_id is not None:
            pairs[pair.move.plan_id].append(pair)
    return dict(pairs)


def flapping(now: datetime) -> list[Flapping]:
    """Return flapping endpoints, worst first."""
    by_place: dict[tuple[str, str], list[ScalingMove]] = defaultdict(list)
    for move in ScalingMove.objects.filter(at__gte=now - FLAPPING_OVER).order_by("pk"):
        by_place[move.model, move.region].append(move)
    made = []
    for (model, region), moves in by_place.items():
        reversals = sum(before.delta * after.delta < 0 for before, after in pairwise(moves))
        if reversals >= FLAPPING_REVERSALS:
            out, back = (Counter(move.source for move in moves if move.delta * sign > 0) for sign in (1, -1))
            by = {str(MoveSource(source).label): (out[source], back[source]) for source in {**out, **back}}
            made.append(Flapping(model, region, reversals, by))
    return sorted(made, key=lambda each: (-each.reversals, each.model, each.region))
