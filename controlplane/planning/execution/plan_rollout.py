"""Rollout of plans: instances are moved to the targets of approved plans.

Remaining moves are stored in the plan (`left` of a target, with the last `obstacle`), so that the next pass continues
after an interruption or a full node. A plan ends as carried out, superseded or expired; its note says what was not moved,
and why.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.db import transaction

from controlplane.events.models import Event, Severity
from controlplane.events.services import record
from controlplane.planning.execution import executor, strategies
from controlplane.planning.models import MoveSource, PlanStatus, ScalingMove, ScalingPlan
from controlplane.tuning.selectors import tuned

ACTOR = "planner"
TO_CARRY_OUT = (PlanStatus.APPROVED, PlanStatus.IN_PROGRESS)


def apply_plans(now: datetime, load: Mapping[str, float] | None = None) -> list[ScalingMove]:
    """Make one pass over all approved plans: removals first, to free their GPUs, then additions.

    Expires advice and plans in force whose time is over. *load*: tokens left by instance.
    """
    for row in ScalingPlan.objects.filter(status__in=[PlanStatus.ADVICE, PlanStatus.IN_FORCE], valid_until__lte=now):
        end(row, PlanStatus.EXPIRED, now)
    made = []
    for key in ScalingPlan.objects.filter(status__in=TO_CARRY_OUT).order_by("pk").values_list("pk", flat=True):
        made += apply_plan(ScalingPlan(pk=key), now, load)
    return made


@transaction.atomic
def apply_plan(plan: ScalingPlan, now: datetime, load: Mapping[str, float] | None = None) -> list[ScalingMove]:
    """Make one pass over *plan* if it is approved. It is carried out once nothing is left to move.

    Targets are instance counts, not differences: moves by others since the plan was made are not repeated.
    """
    # Its key stays unlocked: a concurrent move for this plan refers to it, and its writer has places locked.
    rows = ScalingPlan.objects.select_for_update(of=("self",), no_key=True).select_related("model")
    row = rows.get(pk=plan.pk)
    if row.status not in TO_CARRY_OUT:
        return []
    executor.lock(row.model.name)
    for target in row.targets:
        _count_left(row, target)
    made: list[ScalingMove] = []
    late = row.valid_until <= now
    if not late:
        for step in (-1, 1):
            for target in row.targets:
                made += _move(row, target, step, load)
    left = any(target["left"] for target in row.targets)
    if not left:
        row.status, row.carried_out_at = PlanStatus.CARRIED_OUT, now
    elif late:
        row.status = PlanStatus.EXPIRED
        row.note = _with_note(row, not_moved(row))
    else:
        row.status = PlanStatus.IN_PROGRESS
    row.save(update_fields=["status", "carried_out_at", "targets", "note"])
    if row.status not in TO_CARRY_OUT:
        _ended(row, PlanStatus.APPROVED, row.note if left else f"approved by {row.decided_by}", bool(left))
    return made


def mark_if_reached(plan: ScalingPlan, instances: Mapping[str, int], now: datetime) -> bool:
    """Mark the followed *plan* as carried out if *instances* by region match it; return whether they do."""
    wanted = wanted_by_region(plan)
    if plan.status != PlanStatus.IN_FORCE or any(instances.get(region, 0) != wanted[region] for region in wanted):
        return False
    plan.status, plan.carried_out_at = PlanStatus.CARRIED_OUT, now
    rows = ScalingPlan.objects.filter(pk=plan.pk, status=PlanStatus.IN_FORCE)
    if rows.update(status=plan.status, carried_out_at=now):
        _ended(plan, PlanStatus.IN_FORCE, f"{plan.strategy} has reached its targets", short=False)
    return True


def end(plan: ScalingPlan, status: PlanStatus, now: datetime) -> None:
    """End the unfinished *plan* as superseded or expired; its note says what was moved, and why not all."""
    note, was = plan.note, plan.status
    if was == PlanStatus.IN_FORCE:
        present = {region: executor.present(plan.model.name, region) for region in wanted_by_region(plan)}
        if mark_if_reached(plan, present, now):
            return
        note = _with_note(plan, _followed(plan))
    elif was in TO_CARRY_OUT:
        for target in plan.targets:
            _count_left(plan, target)
        note = _with_note(plan, not_moved(plan))
    elif was == PlanStatus.ADVICE and status == PlanStatus.EXPIRED:
        note = _with_note(plan, "No operator decided about it in time")
    plan.status, plan.note = status, note
    changed = ScalingPlan.objects.filter(pk=plan.pk, status=was).update(status=status, note=note)
    if changed and was != PlanStatus.IN_FORCE:  # a strategy moves to the next plan each time; that is no event
        _ended(plan, was, note, short=was in TO_CARRY_OUT)


def wanted_by_region(plan: ScalingPlan) -> dict[str, int]:
    wanted: Counter[str] = Counter()
    for target in plan.targets:
        wanted[target["region"]] += target["target"]
    return dict(wanted)


def _ended(plan: ScalingPlan, was: str, reason: str, short: bool) -> None:
    record(
        f"plan.{plan.status}",
        plan,
        actor=ACTOR,
        before={"status": was},
        after={"status": plan.status, "moves": plan.moves.count()},
        reason=reason,
        severity=Severity.WARNING if short else Severity.INFO,
    )


def _count_left(plan: ScalingPlan, target: dict[str, Any]) -> None:
    """Update what is left at *target*: at most as much as at the last pass, and nothing in the other direction."""
    change = target["target"] - executor.present(plan.model.name, target["region"], target["gpu_type"])
    left = target.get("left", change)
    target["left"] = min(max(change, 0), left) if left > 0 else max(min(change, 0), left)


def _move(plan: ScalingPlan, target: dict[str, Any], step: int, load: Mapping[str, float] | None) -> list[ScalingMove]:
    """Move what is left at *target* in the direction of *step*, up to an obstacle."""
    model, region, gpu_type = plan.model.name, target["region"], target["gpu_type"]
    made = []
    while target["left"] * step > 0:
        why = _why(plan, target)
        try:
            move = executor.move(step, model, region, why, gpu_type, load=load)
        except executor.Refused as refusal:
            target["obstacle"] = str(refusal)
            executor.refuse(step, model, region, why, str(refusal))
            break
        target["left"] -= step
        made.append(move)
    return made


def not_moved(plan: ScalingPlan) -> str:
    """Describe what an approved plan did not move, and the obstacles."""
    parts = []
    for target in plan.targets:
        if left := target.get("left", target["target"] - target["present"]):
            what = f"{abs(left)} instance{'s' if abs(left) > 1 else ''} not {'added' if left > 0 else 'taken away'}"
            parts.append(f"{what} in {target['region']}: {target.get('obstacle') or 'not tried yet'}")
    return "; ".join(parts)


def _followed(plan: ScalingPlan) -> str:
    """Describe the progress of a followed plan, and what stopped it."""
    changed = {target["region"] for target in plan.targets if target["target"] != target["present"]}
    wanted = sum(abs(target["target"] - target["present"]) for target in plan.targets)
    moved = plan.moves.filter(region__in=changed).count()
    since = plan.made_at - executor.REFUSAL_REPEATED_AFTER  # a repeated refusal is no new event
    refused = Event.objects.filter(kind="scaling.refused", at__gte=since, after__model=plan.model.name)
    obstacle = refused.order_by("-pk").values_list("reason", flat=True).first()
    why = f"refused: {obstacle}" if obstacle else strategies.pace(plan.strategy, tuned(plan.model.name))
    return f"{min(moved, wanted)} of {wanted} moves made; {why}"


def _with_note(plan: ScalingPlan, words: str) -> str:
    return ". ".join(filter(None, (words, plan.note)))[:255]


def _why(plan: ScalingPlan, target: dict[str, Any]) -> executor.Why:
    inputs = {"plan": plan.pk, "approved_by": plan.decided_by, "target": {**target}}
    reason = target.get("reason") if target["target"] != target["present"] else ""
    reason = reason or f"The plan asks for {target['target']} instances."
    return executor.Why(MoveSource.PLAN, plan.strategy, reason, inputs, plan)
