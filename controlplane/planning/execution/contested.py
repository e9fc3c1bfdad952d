"""Moves that others undo: the floor takes back what a strategy did, a strategy what an operator approved, and instances of
an endpoint come and go.

Who moved an endpoint owns it for a cooldown: until then neither floor nor strategy takes away what another of them, a plan
or an operator added. To add is never held back, for that somebody waits; it is said afterwards.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from controlplane.planning.models import MoveSource, ScalingMove, ScalingPlan
from controlplane.tuning.selectors import tuned

UNDONE_WITHIN = timedelta(minutes=15)
FLAPPING_OVER = timedelta(minutes=15)
FLAPPING_REVERSALS = 4
"""Changes of direction of an endpoint within that time, from which on it flaps."""
AUTOMATIC = (MoveSource.FLOOR, MoveSource.STRATEGY)


@dataclass(frozen=True, slots=True)
class Undone:
    """A move, and the later one by somebody else that took it back."""

    move: ScalingMove
    by: ScalingMove

    @property
    def after_s(self) -> float:
        return (self.by.at - self.move.at).total_seconds()


@dataclass(frozen=True, slots=True)
class Flapping:
    """An endpoint that was scaled out and in again and again lately. *by* counts instances by who asked, out then in."""

    model: str
    region: str
    reversals: int
    by: dict[str, tuple[int, int]]


def owner(model: str, region: str, source: MoveSource, now: datetime) -> str:
    """Who owns an endpoint against *source*, which would take an instance away, in words; empty if nobody does."""
    if source not in AUTOMATIC:
        return ""
    last = ScalingMove.objects.filter(model=model, region=region).select_related("plan").order_by("-pk").first()
    if last is None or last.delta < 0 or last.source == source:
        return ""
    who, age_s = MoveSource(last.source).label.lower(), (now - last.at).total_seconds()
    if last.source == MoveSource.PLAN and last.plan is not None and now < last.plan.valid_until:
        return f"plan {last.plan_id} added one {age_s:.0f} s ago and holds until {last.plan.valid_until:%H:%M} UTC"
    cooldown_s = tuned(model).FLOOR_COOLDOWN_S
    if age_s < cooldown_s:
        return f"{who} added one {age_s:.0f} s ago, and who else scales waits for {cooldown_s:.0f} s"
    return ""


def undone(moves: Iterable[ScalingMove]) -> list[Undone]:
    """Those of *moves* that somebody else took back soon after, oldest first; each is taken back once."""
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
    """What of each of *plans*, by its key, was taken back by others; those without are left out."""
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
    """Endpoints that flap now, the worst first."""
    by_place: dict[tuple[str, str], list[ScalingMove]] = defaultdict(list)
    for move in ScalingMove.objects.filter(at__gte=now - FLAPPING_OVER).order_by("pk"):
        by_place[move.model, move.region].append(move)
    made = []
    for (model, region), moves in by_place.items():
        reversals = _reversals(moves)
        if reversals >= FLAPPING_REVERSALS:
            out, back = (Counter(move.source for move in moves if move.delta * sign > 0) for sign in (1, -1))
            by = {str(MoveSource(source).label): (out[source], back[source]) for source in {**out, **back}}
            made.append(Flapping(model, region, reversals, by))
    return sorted(made, key=lambda each: (-each.reversals, each.model, each.region))


def _reversals(moves: Sequence[ScalingMove]) -> int:
    return sum(before.delta * after.delta < 0 for before, after in pairwise(moves))
