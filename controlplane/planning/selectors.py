"""Reads of plans, moves, policies and their instances. Writes are in `services.py`."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from django.db.models import QuerySet

from controlplane.fleet.models import Instance, Model
from controlplane.planning.models import (
    PLANNER,
    WHAT_IF,
    MoveSource,
    PlanStatus,
    ScalingMove,
    ScalingPlan,
    ScalingPolicy,
)
from controlplane.rows import narrowed, newest_of_each

IN_FORCE = (PlanStatus.APPROVED, PlanStatus.IN_PROGRESS, PlanStatus.IN_FORCE, PlanStatus.CARRIED_OUT)
FLAPPING_OVER = timedelta(minutes=15)
FLAPPING_REVERSALS = 4
"""Direction changes of an endpoint within that time from which it counts as flapping."""
LIVING_PLANS = (PlanStatus.ADVICE, PlanStatus.SHADOW, *IN_FORCE)


# Instances


def instances_by_place() -> dict[tuple[str, str, str], Counter[str]]:
    """Return instances of active deployments by (model, region, GPU type) and state, including stopped and failed."""
    counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    rows = Instance.objects.filter(deployment__active=True).values_list(
        "deployment__model__name", "deployment__region__name", "deployment__gpu_type__name", "state"
    )
    for model, region, gpu_type, state in rows:
        counts[model, region, gpu_type][state] += 1
    return counts


# Plans


def last_approved() -> QuerySet[ScalingPlan]:
    """Return each model's last plan that an operator approved: what can be undone."""
    states = (PlanStatus.APPROVED, PlanStatus.IN_PROGRESS, PlanStatus.CARRIED_OUT)
    by_operators = ScalingPlan.objects.filter(status__in=states).exclude(decided_by__in=("", PLANNER))
    return newest_of_each(by_operators, "model")


def plans(model: str = "") -> QuerySet[ScalingPlan]:
    """Return plans of *model* (empty: all), newest first."""
    return narrowed(ScalingPlan.objects.select_related("model").order_by("-pk"), model__name=model)


def current_plans() -> dict[str, ScalingPlan]:
    """Return each model's newest plan that is not rejected, replaced or expired, by model name."""
    living = ScalingPlan.objects.select_related("model").filter(status__in=LIVING_PLANS, model__active=True)
    return {row.model.name: row for row in newest_of_each(living, "model").order_by("model__name")}


def plan_in_force(model: str, now: datetime) -> ScalingPlan | None:
    """Return the newest unexpired plan of *model* that is to be, or was, carried out.

    Excludes plans proposed by a what-if, which have no forecast to follow.
    """
    rows = ScalingPlan.objects.filter(status__in=IN_FORCE, valid_until__gte=now, model__name=model)
    rows = rows.exclude(strategy=WHAT_IF)
    return rows.order_by("-pk").first()


def waiting_plans() -> list[ScalingPlan]:
    """Return plans waiting for an operator, by model."""
    return list(
        ScalingPlan.objects.select_related("model").filter(status=PlanStatus.ADVICE).order_by("model__name", "-pk")
    )


def replaced_by(plan: ScalingPlan) -> ScalingPlan | None:
    """Return the newest plan of its model if that came in the place of *plan*; None while *plan* stands, or was decided."""
    if plan.status not in (PlanStatus.SUPERSEDED, PlanStatus.EXPIRED):
        return None
    return plans(plan.model.name).filter(pk__gt=plan.pk).exclude(strategy=WHAT_IF).first()


def moves(model: str = "") -> QuerySet[ScalingMove]:
    """Return moves of *model* (empty: all), newest first."""
    return narrowed(ScalingMove.objects.select_related("plan").order_by("-pk"), model=model)


@dataclass(frozen=True, slots=True)
class Flapping:
    """An endpoint that was repeatedly scaled out and in. *by* counts instances by source, out then in."""

    model: str
    region: str
    reversals: int
    by: dict[str, tuple[int, int]]


def flapping(now: datetime) -> list[Flapping]:
    """Return flapping endpoints, worst first."""
    by_place: dict[tuple[str, str], list[ScalingMove]] = defaultdict(list)
    for move in ScalingMove.objects.filter(at__gte=now - FLAPPING_OVER).order_by("pk"):
        by_place[move.model, move.region].append(move)
    made = []
    for (model, region), own in by_place.items():
        reversals = sum(before.delta * after.delta < 0 for before, after in pairwise(own))
        if reversals >= FLAPPING_REVERSALS:
            out, back = (Counter(move.source for move in own if move.delta * sign > 0) for sign in (1, -1))
            by = {str(MoveSource(source).label): (out[source], back[source]) for source in {**out, **back}}
            made.append(Flapping(model, region, reversals, by))
    return sorted(made, key=lambda each: (-each.reversals, each.model, each.region))


def policies() -> list[tuple[Model, ScalingPolicy | None]]:
    """Return every active model with its policy, by name; None where only the reactive floor scales it."""
    rows = Model.objects.filter(active=True).select_related("scaling_policy").order_by("name")
    return [(row, getattr(row, "scaling_policy", None)) for row in rows]
