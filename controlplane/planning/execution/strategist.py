"""Strategies between plans: each automatic model's strategy reads live load and the plan in force, and moves instances.

A strategy's memory is stored in its policy's row, so that any worker can run any tick. The row is locked for the tick:
two workers never run the same strategy concurrently.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.db import transaction

from controlplane.dispatch.wire import as_inputs
from controlplane.planning import selectors
from controlplane.planning.execution import executor, live_views, plan_rollout, strategies
from controlplane.planning.models import MoveSource, PlanStatus, PolicyMode, ScalingMove, ScalingPlan, ScalingPolicy
from controlplane.tuning.selectors import tuned

if TYPE_CHECKING:
    from scheduling.scaling import Advice, EndpointView
    from scheduling.scaling.endpoint import Move

logger = logging.getLogger(__name__)
TICKED = "ticked at"
"""Memory key of the last tick's time; strategies use endpoint names."""
MISSED_TICKS = 3
"""Missed ticks after which the gateway treats the strategies as dead and only its floor scales."""
GAP_S = 300.0
"""Time without a tick after which the time of low use counts from the next look: nothing was measured meanwhile."""
AS_SPOT = ", lent out as spot once drained"
"""End of a reason, left out where instances are stopped instead (`SPOT_DONATE`)."""


def run_strategies(now: datetime) -> list[ScalingMove]:
    """Run every automatic strategy that is due; return the moves made.

    A strategy that raises costs only its model the tick; the floor takes over when its heartbeat stops. Below an
    operator's approved plan, the floor applies for as long as the plan holds.
    """
    keys = list(ScalingPolicy.objects.filter(mode=PolicyMode.AUTO, model__active=True).values_list("pk", flat=True))
    alive = _approved(now)
    load = live_views.read() if keys or alive else None
    if load is None:
        return []
    made: list[ScalingMove] = []
    longest_s = tuned().STRATEGY_EVERY_S
    for key in keys:
        try:
            model, moves, tick_s = _tick(key, load, now)
        except Exception:
            logger.exception("planning: the strategy of policy %s failed", key)
            continue
        alive.append(model)
        longest_s = max(longest_s, tick_s)
        made += moves
    live_views.send_heartbeat(alive, MISSED_TICKS * longest_s + 5.0)
    return made


def _approved(now: datetime) -> list[str]:
    """Return models with an approved plan that still holds."""
    carried = (PlanStatus.APPROVED, PlanStatus.IN_PROGRESS, PlanStatus.CARRIED_OUT)
    rows = ScalingPlan.objects.filter(status__in=carried, valid_until__gt=now, model__active=True)
    rows = rows.exclude(decided_by__in=("", executor.PLANNER))
    return list(rows.order_by().values_list("model__name", flat=True).distinct())


def _tick(key: int, load: live_views.Load, now: datetime) -> tuple[str, list[ScalingMove], float]:
    """Run one policy's tick; return its model, the moves, and its period in seconds.

    Each move is a separate transaction: SQLite has one writer, and all moves of a model took seconds on a busy machine.
    """
    policy = ScalingPolicy.objects.select_related("model").get(pk=key)
    model, now_s = policy.model.name, now.timestamp()
    memory = dict(policy.memory)
    ticked_s = memory.pop(TICKED, -math.inf)
    if now_s - ticked_s > GAP_S:
        from scheduling.scaling import without_timers

        memory = without_timers(memory)
    strategy = strategies.make(policy.strategy, policy.parameters, tuned(model), memory)
    floored = strategies.floored(strategy, tuned(model))
    # Beat runs every STRATEGY_EVERY_S, with jitter: half of that early is on time.
    if policy.mode != PolicyMode.AUTO or now_s - ticked_s < strategy.tick_s - tuned().STRATEGY_EVERY_S / 2:
        return model, [], strategy.tick_s
    views = live_views.views(model, load, now)
    plan = selectors.plan_in_force(policy.model.name, now) if strategy.uses_advice else None
    advised = [advice(plan, view.region, now) if plan else None for view in views]
    decided = list(floored.decide(now_s, views, advised))
    memory = {name: value for name, value in strategy.memory.items() if math.isfinite(value)}
    if not _taken(policy, memory | {TICKED: now_s}):
        return model, [], strategy.tick_s
    if plan is not None:
        plan_rollout.mark_if_reached(plan, {view.region: view.instances for view in views}, now)
    made: list[ScalingMove] = []
    for wanted in decided:
        view = views[wanted.endpoint]
        made += _carry_out(policy, plan, view, advised[wanted.endpoint], wanted, load)
    return model, made, strategy.tick_s


@transaction.atomic
def _taken(policy: ScalingPolicy, memory: dict[str, float]) -> bool:
    """Claim this tick; return False if another process ticked, or an operator changed *policy*, since it was read."""
    row = ScalingPolicy.objects.select_for_update(of=("self",)).get(pk=policy.pk)
    if (row.mode, row.strategy, row.memory) != (policy.mode, policy.strategy, policy.memory):
        return False
    return bool(ScalingPolicy.objects.filter(pk=policy.pk).update(memory=memory))


def _carry_out(
    policy: ScalingPolicy,
    plan: ScalingPlan | None,
    view: "EndpointView",
    advised: "Advice | None",
    wanted: "Move",
    load: live_views.Load,
) -> list[ScalingMove]:
    inputs: dict[str, Any] = {"view": as_inputs(view)}
    if advised is not None:
        inputs["advice"] = advised._asdict()
    reason = wanted.reason if tuned(view.model).SPOT_DONATE else wanted.reason.replace(AS_SPOT, "")
    why = executor.Why(MoveSource(wanted.by), policy.strategy, reason, inputs, plan)
    made, step = [], 1 if wanted.delta > 0 else -1
    drained = 0
    for _ in range(abs(wanted.delta)):
        move, drains = None, drained < wanted.drains
        # GPU types named by the plan come first.
        for gpu_type in gpu_types(plan, view.region, step):
            try:
                move = executor.move(step, view.model, view.region, why, gpu_type, load=load.left_tokens, drains=drains)
                break
            except executor.Refused:
                continue
        move = move or executor.attempt(step, view.model, view.region, why, load=load.left_tokens, drains=drains)
        if move is None:
            break
        drained += move.inputs["how"] == executor.DRAINED
        why = replace(why, reason=move.reason)  # all of one decision name the mover that the first undoes
        made.append(move)
    return made


def advice(plan: ScalingPlan, region: str, now: datetime) -> "Advice | None":
    """Return the advice of *plan* for *region*; None if it has none."""
    from scheduling.planning.advisor import EndpointPlan
    from scheduling.planning.bursts import UNEVEN_CV

    rows = [row for row in plan.targets if row["region"] == region]
    if not rows:
        return None
    # Older plans have fewer inputs.
    given, made_at_s = plan.inputs, plan.made_at.timestamp()
    windows: Sequence[float] = given.get("demand_tokens_per_s", {}).get(region, [])
    start_at = given.get("start_at")
    return EndpointPlan(
        target_instances=sum(row["target"] for row in rows),
        soon_instances=given.get("soon_instances", {}).get(region, []),
        forecast_tokens_per_s=given.get("forecast_tokens_per_s", {}).get(region, max(windows, default=0.0)),
        start_s=datetime.fromisoformat(start_at).timestamp() if start_at else made_at_s,
        window_s=given.get("window_s", tuned().FORECAST_WINDOW_S),
        made_at_s=made_at_s,
        period_s=given.get("period_s", strategies.plans_for(plan.strategy).period_s),
        valid_until_s=plan.valid_until.timestamp(),
        cv=given.get("model_cv", UNEVEN_CV),
        deferred_tokens_per_s=given.get("deferred_tokens_per_s", {}).get(region, 0.0),
    ).advice(now.timestamp())


def gpu_types(plan: ScalingPlan | None, region: str, step: int) -> list[str]:
    """Return GPU types of *region* on which *plan* adds (*step* 1) or removes (-1) instances, largest change first."""
    if plan is None:
        return []
    here = [row for row in plan.targets if row["region"] == region]
    wanted = [row for row in here if (row["target"] - row["present"]) * step > 0]
    wanted.sort(key=lambda row: (row["present"] - row["target"]) * step)
    return [row["gpu_type"] for row in wanted] if len(here) > 1 else []
