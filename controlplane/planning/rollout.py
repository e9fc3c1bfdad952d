"""Carrying out plans that an operator approved: instances are moved to the plan's targets, in one go or as GPUs come free.

What is still to be added is kept in the plan (`left` of a target), so that a pass that was cut off, or met a full node,
is taken up by the next one; what is to be taken away goes at the first pass.
"""

import logging
from datetime import datetime
from typing import Any

from django.db import transaction

from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.planning import executor, live
from controlplane.planning.models import MoveSource, PlanStatus, ScalingMove, ScalingPlan

logger = logging.getLogger(__name__)
ACTOR = "planner"


def apply_plans(now: datetime) -> list[ScalingMove]:
    """One pass over all approved plans: first what is taken away, so that its GPUs are free, then what is added."""
    keys = list(ScalingPlan.objects.filter(status=PlanStatus.APPROVED).order_by("pk").values_list("pk", flat=True))
    if not keys:
        return []
    load = live.read()
    made = []
    for key in keys:
        made += apply_plan(ScalingPlan(pk=key), now, load)
    return made


@transaction.atomic
def apply_plan(plan: ScalingPlan, now: datetime, load: live.Load | None = None) -> list[ScalingMove]:
    """One pass over *plan*; nothing unless it is approved. It ends as applied, or as failed when nothing could be moved.

    Targets are numbers of instances, not differences: what others moved since the plan was made is not moved again.
    """
    # Its key stays free: whoever writes a move for this plan refers to it, with places locked that are wanted here.
    rows = ScalingPlan.objects.select_for_update(of=("self",), no_key=True).select_related("model")
    row = rows.get(pk=plan.pk)
    if row.status != PlanStatus.APPROVED:
        return []
    executor.lock(row.model.name)
    late = row.valid_until <= now
    made: list[ScalingMove] = []
    first = row.applied_at is None
    if first:
        row.applied_at = now
        for target in row.targets:
            made += _first_pass(row, target, load)
    if not late:
        for target in row.targets:
            made += _add_left(row, target)
    left = sum(target["left"] for target in row.targets)
    moved = row.moves.count()
    if not left:
        row.status = PlanStatus.APPLIED
    elif late:
        row.status = PlanStatus.APPLIED if moved else PlanStatus.FAILED
        row.note = f"{left} instance{'s' if left > 1 else ''} could not be added in time. {row.note}"[:255]
    row.save(update_fields=["status", "applied_at", "targets", "note"])
    if row.status != PlanStatus.APPROVED:
        record(
            f"plan.{row.status}",
            row,
            actor=ACTOR,
            before={"status": PlanStatus.APPROVED},
            after={"status": row.status, "moves": moved, "left": left},
            reason=row.note if left else f"approved by {row.decided_by}",
            severity=Severity.WARNING if left else Severity.INFO,
        )
    return made


def _first_pass(plan: ScalingPlan, target: dict[str, Any], load: live.Load | None) -> list[ScalingMove]:
    """Take away what is too much at *target*, and note what is to be added."""
    model, region, gpu_type = plan.model.name, target["region"], target["gpu_type"]
    change = target["target"] - executor.present(model, region, gpu_type)
    target["left"] = max(0, change)
    made = []
    for _ in range(max(0, -change)):
        running = load.running if load else None
        move = executor.attempt(-1, model, region, _why(plan, target), gpu_type=gpu_type, load=running)
        if move is None:
            break
        made.append(move)
    return made


def _add_left(plan: ScalingPlan, target: dict[str, Any]) -> list[ScalingMove]:
    made = []
    while target["left"]:
        move = executor.attempt(1, plan.model.name, target["region"], _why(plan, target), gpu_type=target["gpu_type"])
        if move is None:
            break
        target["left"] -= 1
        made.append(move)
    return made


def _why(plan: ScalingPlan, target: dict[str, Any]) -> executor.Why:
    inputs = {"plan": plan.pk, "approved_by": plan.decided_by, "target": {**target}}
    said = target.get("reason", "")
    reason = (
        said if said and target["target"] != target["present"] else f"The plan asks for {target['target']} instances."
    )
    return executor.Why(MoveSource.PLAN, plan.strategy, reason, inputs, plan)
