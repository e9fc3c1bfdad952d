"""Rows that live numbers are compared with: bounds of endpoints, plans that wait, rollouts that failed."""

from django.db.models import Sum
from django.utils import timezone

from controlplane.alerts.models import Alert
from controlplane.batches.models import AT_RISK, LATE
from controlplane.batches.selectors import running
from controlplane.console.formats import MINUS, duration
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, Instance
from controlplane.fleet.rollouts.selectors import failed
from controlplane.planning.models import PlanStatus, ScalingPlan
from controlplane.planning.selectors import FLAPPING_OVER, flapping
from controlplane.resources.alerts import by_state


def queue_bounds() -> dict[tuple[str, str], int]:
    """Requests that each endpoint (model, region) holds at most: the sum over its active deployments."""
    rows = Deployment.objects.filter(active=True).values_list("model__name", "region__name")
    return {(model, region): bound for model, region, bound in rows.annotate(Sum("queue_bound")).order_by()}


def min_instances() -> dict[tuple[str, str], int]:
    """Instances that each endpoint (model, region) is to have at least: the sum over its active deployments."""
    active = Deployment.objects.filter(active=True, model__active=True, region__active=True)
    rows = active.values_list("model__name", "region__name")
    return {(model, region): least for model, region, least in rows.annotate(Sum("min_instances")).order_by()}


def held() -> dict[tuple[str, str], str]:
    """Of each endpoint (model, region) with held instances, who holds one of them, and why."""
    rows = Instance.objects.exclude(held="").filter(state=InstanceState.STOPPED)
    names = rows.values_list("deployment__model__name", "deployment__region__name", "held")
    return {(model, region): by_whom for model, region, by_whom in names.order_by("name")}


def endpoints_flapping() -> tuple[tuple[str, str, str], ...]:
    """(model, region, who moved what) of endpoints that are scaled out and in again and again."""
    return tuple(
        (
            each.model,
            each.region,
            f"{each.reversals} reversals in {duration(FLAPPING_OVER.total_seconds())}: "
            + ", ".join(f"{who.lower()} +{out} {MINUS}{back}" for who, (out, back) in sorted(each.by.items())),
        )
        for each in flapping(timezone.now())
    )


def plans_waiting() -> tuple[str, ...]:
    """Models of the plans that wait for an operator and can still be approved."""
    rows = ScalingPlan.objects.filter(status=PlanStatus.ADVICE, valid_until__gt=timezone.now())
    return tuple(rows.values_list("model__name", flat=True).order_by("pk"))


def batches_at_risk() -> tuple[tuple[str, str, str], ...]:
    """(severity, title, model) of running batches that miss their deadline at their pace, or may miss it."""
    titles = {
        LATE: ("critical", "{} will be late by {}"),
        AT_RISK: ("warning", "{} is at risk: {} of slack"),
    }
    return tuple(
        (severity, title.format(batch.short_id, duration(abs(batch.slack_s or 0.0))), batch.model)
        for batch in running()
        if batch.risk
        for severity, title in [titles[batch.risk]]
    )


def rollouts_failed() -> tuple[tuple[str, str, str], ...]:
    """(model, region, message) of deployments whose last rollout failed and that still have outdated instances."""
    return tuple(
        (status.deployment.model.name, status.deployment.region.name, status.rollout.message)
        for status in failed()
        if status.rollout is not None
    )


def alerts_open() -> int:
    """Open alerts that are neither acknowledged nor silenced."""
    return by_state(Alert.objects.all(), "open").count()
