"""Reads of plans, moves, policies, comparisons and the instances that they are about. Writing is in `services.py`."""

from collections import Counter, defaultdict
from datetime import datetime, timedelta

from django.db.models import QuerySet
from django.utils import timezone

from controlplane.events.models import Event
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Instance, Model
from controlplane.planning.models import (
    WHAT_IF,
    PlanStatus,
    ScalingMove,
    ScalingPlan,
    ScalingPolicy,
    StrategyComparison,
)
from controlplane.rows import narrowed, newest_of_each

IN_FORCE = (PlanStatus.APPROVED, PlanStatus.IN_PROGRESS, PlanStatus.IN_FORCE, PlanStatus.CARRIED_OUT)
LIVING_PLANS = (PlanStatus.ADVICE, PlanStatus.SHADOW, *IN_FORCE)


# Instances


def ready_over_time(model: str, region: str, since: datetime) -> list[tuple[datetime, Counter[str]]]:
    """Ready instances by GPU type from *since* on, as steps: each moment of a change and what there is from then. Without a
    region, of all regions together.

    Read backwards from the present states through the events of moves, so that it ends at what there is.
    """
    rows = narrowed(Instance.objects.filter(deployment__model__name=model), deployment__region__name=region)
    gpu_types = {str(pk): name for pk, name in rows.values_list("pk", "deployment__gpu_type__name")}
    present = Counter(rows.filter(state=InstanceState.READY).values_list("deployment__gpu_type__name", flat=True))
    moves = Event.objects.filter(
        subject_type="instance", subject_id__in=list(gpu_types), kind="instance.moved", at__gte=since
    ).order_by("-pk")
    steps = []
    for at, subject_id, before, after in moves.values_list("at", "subject_id", "before", "after"):
        was = before.get("state") == InstanceState.READY
        became = after.get("state") == InstanceState.READY
        if was == became:
            continue
        steps.append((at, present.copy()))
        present[gpu_types[subject_id]] += was - became
    steps.append((since, present))
    return steps[::-1]


def instances_by_place() -> dict[tuple[str, str, str], Counter[str]]:
    """Instances of active deployments by (model, region, GPU type) and by state; stopped and failed ones too."""
    counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    rows = Instance.objects.filter(deployment__active=True).values_list(
        "deployment__model__name", "deployment__region__name", "deployment__gpu_type__name", "state"
    )
    for model, region, gpu_type, state in rows:
        counts[model, region, gpu_type][state] += 1
    return counts


# Plans


def plans(model: str = "") -> QuerySet[ScalingPlan]:
    """Plans, newest first; of *model*, or all."""
    return narrowed(ScalingPlan.objects.select_related("model").order_by("-pk"), model__name=model)


def current_plans() -> dict[str, ScalingPlan]:
    """The newest plan of each model that is neither rejected nor replaced nor expired, by the model's name."""
    living = ScalingPlan.objects.select_related("model").filter(status__in=LIVING_PLANS, model__active=True)
    return {row.model.name: row for row in newest_of_each(living, "model").order_by("model__name")}


def plan_in_force(model: str, now: datetime) -> ScalingPlan | None:
    """The newest plan of *model* that is to be carried out or was, while its time lasts; none that a what-if proposed, which
    has no forecast to follow."""
    rows = ScalingPlan.objects.filter(status__in=IN_FORCE, valid_until__gte=now, model__name=model)
    rows = rows.exclude(strategy=WHAT_IF)
    return rows.order_by("-pk").first()


def waiting_plans() -> list[ScalingPlan]:
    """Plans that wait for an operator, by model."""
    return list(
        ScalingPlan.objects.select_related("model").filter(status=PlanStatus.ADVICE).order_by("model__name", "-pk")
    )


def plan_strategies() -> list[str]:
    """Every strategy that has made a plan, for a filter's choices."""
    return list(ScalingPlan.objects.order_by("strategy").values_list("strategy", flat=True).distinct())


def moves(model: str = "") -> QuerySet[ScalingMove]:
    """Moves, newest first; of *model*, or all."""
    return narrowed(ScalingMove.objects.select_related("plan").order_by("-pk"), model=model)


def moves_since(since: datetime, model: str = "") -> int:
    return moves(model).filter(at__gte=since).count()


def policies() -> list[tuple[Model, ScalingPolicy | None]]:
    """Every active model with its policy, by name; None where it has the reactive floor alone."""
    rows = Model.objects.filter(active=True).select_related("scaling_policy").order_by("name")
    return [(row, getattr(row, "scaling_policy", None)) for row in rows]


def latest_comparison() -> StrategyComparison | None:
    return StrategyComparison.objects.order_by("-pk").first()


def hours_ago(hours: float) -> datetime:
    return timezone.now() - timedelta(hours=hours)
