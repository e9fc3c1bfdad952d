"""Writes of planning: what operators decide about plans and policies, and the results of backtests.

Approving is a row like any other promise: a Celery worker is told at once, and when no broker answers, beat finds the
approved plan within seconds. What the planners write is in modules of their own, and what others call of it is named here
too: `forecasts`, `plans`, `rollout` (approved plans), `strategist` (between plans), `executor` (instances),
`comparison` (strategies simulated).
"""

from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.audit import record_change, record_creation, snapshot
from controlplane.events.services import record
from controlplane.fleet.models import Model
from controlplane.fleet.services import tell_workers
from controlplane.fleet.states import ActionError
from controlplane.planning.comparison import compare_strategies
from controlplane.planning.forecasts import make_forecasts
from controlplane.planning.json_values import plain
from controlplane.planning.models import Backtest, PlanStatus, ScalingPlan, ScalingPolicy
from controlplane.planning.plans import make_plans
from controlplane.planning.rollout import apply_plan, apply_plans
from controlplane.planning.strategist import run_strategies

__all__ = [
    "apply_plan",
    "apply_plans",
    "approve",
    "compare_strategies",
    "make_forecasts",
    "make_plans",
    "reject",
    "run_strategies",
    "set_policy",
    "store_backtest",
]

APPLY_PLANS_TASK = "workers.tasks.planning.apply_plans"


@transaction.atomic
def approve(plan: ScalingPlan, actor: User, reason: str = "") -> ScalingPlan:
    """Have *plan* carried out; a worker moves the instances. Raises ActionError unless it is advice and still valid."""
    row = _in_advice(plan, "approved")
    if row.valid_until <= timezone.now():
        raise ActionError(
            f"This plan for {row.model} was for the time until {row.valid_until:%F %H:%M} UTC: approve a newer one."
        )
    _decide(row, PlanStatus.APPROVED, actor, reason)
    transaction.on_commit(hurry)
    return _shown(plan, row)


@transaction.atomic
def reject(plan: ScalingPlan, actor: User, reason: str = "") -> ScalingPlan:
    """Lay *plan* aside. Raises ActionError unless it is advice."""
    row = _in_advice(plan, "rejected")
    _decide(row, PlanStatus.REJECTED, actor, reason)
    return _shown(plan, row)


@transaction.atomic
def set_policy(
    model: Model, strategy: str, mode: str, parameters: dict[str, Any], actor: User | str, reason: str = ""
) -> ScalingPolicy:
    """How *model* is scaled from now on. Raises ValidationError naming the field that cannot be.

    Plans that waited for approval under another strategy or mode are superseded, and a new strategy remembers nothing.
    """
    row = ScalingPolicy.objects.select_for_update().filter(model=model).first()
    before = snapshot(row) if row else None
    row = row or ScalingPolicy(model=model)
    if row.strategy != strategy:
        row.memory = {}
    row.strategy, row.mode, row.parameters = strategy, mode, parameters
    row.full_clean()
    row.save()
    if before is None:
        record_creation(row, actor, reason=reason)
    elif record_change(row, before, actor, reason=reason) is not None:
        supersede_open(model)
    return row


def supersede_open(model: Model) -> int:
    """Plans of *model* that nobody decided about are of no use any more; returns how many there were."""
    open_plans = ScalingPlan.objects.filter(model=model, status__in=[PlanStatus.ADVICE, PlanStatus.SHADOW])
    return open_plans.update(status=PlanStatus.SUPERSEDED)


def store_backtest(source: str, window_s: int, horizon_windows: int, rows: Sequence[dict[str, Any]]) -> Backtest:
    """Keep the result of one backtest; *rows* as `forecasting.workload.backtest` gives them. Raises ValidationError."""
    values = {
        "source": source[:160],
        "window_s": window_s,
        "horizon_windows": horizon_windows,
        "rows": plain(list(rows)),
    }
    row = Backtest(**values)
    row.full_clean()
    row.save()
    return row


def hurry(task: str = APPLY_PLANS_TASK) -> bool:
    """Tell the workers to look at the rows now; False, in under a second, if the broker does not answer."""
    return tell_workers(task, expires_s=60)


def _in_advice(plan: ScalingPlan, wanted: str) -> ScalingPlan:
    row = ScalingPlan.objects.select_for_update(of=("self",)).select_related("model").get(pk=plan.pk)
    if row.status != PlanStatus.ADVICE:
        raise ActionError(f"This plan for {row.model} is {row.status}; only advice can be {wanted}.")
    return row


def _decide(row: ScalingPlan, status: PlanStatus, actor: User, reason: str) -> None:
    before = row.status
    row.status, row.decided_by, row.decided_at = status, actor.get_username(), timezone.now()
    row.save(update_fields=["status", "decided_by", "decided_at"])
    record(
        f"plan.{status}",
        row,
        actor=actor,
        before={"status": before},
        after={"status": status, "round": str(row.round), "targets": row.targets},
        reason=reason,
    )


def _shown(plan: ScalingPlan, row: ScalingPlan) -> ScalingPlan:
    """Let the caller's *plan* show what is now in the database."""
    plan.status, plan.decided_by, plan.decided_at = row.status, row.decided_by, row.decided_at
    return plan
