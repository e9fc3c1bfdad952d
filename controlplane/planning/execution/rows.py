"""Reads and writes of the scaling loop, each called in a thread of the gateway that waits for no worker.

Moves use the services that operators use. A command that no worker takes in time, since Celery or its broker is down, is
carried out here: claiming it is one update of its row, so a returning worker finds it done.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from django.db import connections
from django.db.models import Q
from django.utils import timezone

from controlplane.dispatch.reordering import Evicted
from controlplane.dispatch.wire import as_inputs
from controlplane.events.services import record
from controlplane.fleet.lifecycle import hosts
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import CommandState, Deployment, Instance, InstanceCommand, Launcher, Model, Swap
from controlplane.fleet.spot.selectors import redeployable
from controlplane.fleet.swaps import services as swaps
from controlplane.planning import selectors
from controlplane.planning.execution import executor, plan_rollout, strategies
from controlplane.planning.models import (
    PLANNER,
    MoveSource,
    PlanStatus,
    PolicyMode,
    ScalingMove,
    ScalingPlan,
    ScalingPolicy,
)
from controlplane.tuning.selectors import tuned

if TYPE_CHECKING:
    from scheduling.planning.advisor import EndpointPlan
    from scheduling.scaling import Advice, EndpointView
    from scheduling.scaling.endpoint import Move

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

COMMAND_PATIENCE = timedelta(seconds=5)
"""Time that a command of scaling waits for a worker before the gateway carries it out."""
AS_SPOT = ", lent out as spot once drained"
"""End of a reason, left out where instances are stopped instead (`SPOT_DONATE`)."""


def in_a_thread(work: Callable[P, T]) -> Callable[P, T]:
    """Wrap *work* to close its thread's database connections."""

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        finally:
            connections.close_all()

    return run


# Read


@dataclass(frozen=True, slots=True)
class Rule:
    """How a model is scaled."""

    strategy: str = ""
    """Empty without an automatic policy."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    plan: ScalingPlan | None = None
    """The plan in force that the strategy follows."""
    plans: "Mapping[str, EndpointPlan]" = field(default_factory=dict)
    """What it says of each region."""
    approved: bool = False
    """Whether an approved plan still holds: nothing is removed without a strategy."""


NO_RULE = Rule()


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules by model, and donated instances of other models that an endpoint could take, by (model, region)."""

    of: Mapping[str, Rule]
    spot_other: Mapping[tuple[str, str], int]


@in_a_thread
def read_rules(present: Mapping[tuple[str, str], int]) -> Rules:
    """Read the rules. Plans in force that *present* instances by (model, region) match are marked as carried out."""
    now = timezone.now()
    carried = (PlanStatus.APPROVED, PlanStatus.IN_PROGRESS, PlanStatus.CARRIED_OUT)
    plans = ScalingPlan.objects.filter(status__in=carried, valid_until__gt=now, model__active=True)
    plans = plans.exclude(decided_by__in=("", PLANNER))
    rules = {name: Rule(approved=True) for name in plans.order_by().values_list("model__name", flat=True).distinct()}
    for policy in ScalingPolicy.objects.filter(mode=PolicyMode.AUTO, model__active=True).select_related("model"):
        model, plan = policy.model.name, None
        if strategies.follows_plans(policy.strategy) and (plan := selectors.plan_in_force(model, now)) is not None:
            here = {region: count for (of, region), count in present.items() if of == model}
            plan_rollout.mark_if_reached(plan, here, now)
        rules[model] = Rule(policy.strategy, policy.parameters, plan, endpoint_plans(plan) if plan else {})
    return Rules(rules, _spot_other())


def _spot_other() -> dict[tuple[str, str], int]:
    if not Instance.objects.filter(state=InstanceState.DONATED).exists():
        return {}
    rows = Deployment.objects.filter(active=True, model__active=True, region__active=True)
    counts: dict[tuple[str, str], int] = {}
    for row in rows.select_related("model", "region"):
        if tuned(row.model.name).SPOT_REDEPLOY:
            place = row.model.name, row.region.name
            counts[place] = counts.get(place, 0) + redeployable(row).count()
    return counts


def endpoint_plans(plan: ScalingPlan) -> "dict[str, EndpointPlan]":
    """Return what *plan* says of each region."""
    from scheduling.planning.advisor import EndpointPlan
    from scheduling.planning.bursts import UNEVEN_CV

    # Older plans have fewer inputs.
    given, made_at_s = plan.inputs, plan.made_at.timestamp()
    start_at = given.get("start_at")
    made = {}
    for region, target in plan_rollout.wanted_by_region(plan).items():
        windows: Sequence[float] = given.get("demand_tokens_per_s", {}).get(region, [])
        made[region] = EndpointPlan(
            target_instances=target,
            soon_instances=given.get("soon_instances", {}).get(region, []),
            forecast_tokens_per_s=given.get("forecast_tokens_per_s", {}).get(region, max(windows, default=0.0)),
            start_s=datetime.fromisoformat(start_at).timestamp() if start_at else made_at_s,
            window_s=given.get("window_s", tuned().FORECAST_WINDOW_S),
            made_at_s=made_at_s,
            period_s=given.get("period_s", strategies.plans_for(plan.strategy).period_s),
            valid_until_s=plan.valid_until.timestamp(),
            cv=given.get("model_cv", UNEVEN_CV),
            deferred_tokens_per_s=given.get("deferred_tokens_per_s", {}).get(region, 0.0),
        )
    return made


# Write


@in_a_thread
def carry_out(
    wanted: "Move",
    view: "EndpointView",
    rule: Rule,
    advised: "Advice | None",
    load: Mapping[str, float],
    minimum: int,
) -> list[ScalingMove]:
    """Make the move *wanted* at the endpoint of *view*, one instance at a time, up to an obstacle.

    *load*: tokens left by instance; *minimum* of the deployments, without schedules. GPU types named by the plan come first.
    """
    inputs: dict[str, Any] = {"view": as_inputs(view)}
    if advised is not None:
        inputs["advice"] = advised._asdict()
    reason = wanted.reason if tuned(view.model).SPOT_DONATE else wanted.reason.replace(AS_SPOT, "")
    source = MoveSource(wanted.by)
    strategy = rule.strategy if source == MoveSource.STRATEGY else MoveSource.FLOOR
    why = executor.Why(source, strategy, reason, inputs, rule.plan)
    to_minimum = view.instances < min(minimum, view.min_instances)
    made: list[ScalingMove] = []
    step = 1 if wanted.delta > 0 else -1
    while len(made) < abs(wanted.delta):
        drained = sum(move.inputs["how"] == executor.DRAINED for move in made)
        options: dict[str, Any] = {"load": load, "to_minimum": to_minimum, "drains": drained < wanted.drains}
        move = None
        for gpu_type in gpu_types(rule.plan, view.region, step):
            with suppress(executor.Refused):
                move = executor.move(step, view.model, view.region, why, gpu_type, **options)
                break
        if (move := move or executor.attempt(step, view.model, view.region, why, **options)) is None:
            break
        made.append(move)
    return made


def gpu_types(plan: ScalingPlan | None, region: str, step: int) -> list[str]:
    """Return GPU types of *region* on which *plan* adds (*step* 1) or removes (-1) instances, largest change first."""
    if plan is None:
        return []
    here = [row for row in plan.targets if row["region"] == region]
    wanted = [row for row in here if (row["target"] - row["present"]) * step > 0]
    wanted.sort(key=lambda row: (row["present"] - row["target"]) * step)
    return [row["gpu_type"] for row in wanted] if len(here) > 1 else []


@in_a_thread
def swap(instance_id: int, reason: str) -> Swap | None:
    """Swap the instance onto its shared GPUs; None if impossible at the moment."""
    try:
        return swaps.request(Instance.objects.get(pk=instance_id), executor.FLOOR_ACTOR, reason)
    except (ActionError, Instance.DoesNotExist) as error:
        logger.info("scaling: no swap: %s", error)
        return None


@in_a_thread
def record_evictions(evictions: Sequence[Evicted]) -> None:
    """Record an event per eviction: the group it is for, its gain and its cost."""
    for one in evictions:
        record(
            "queue.evicted",
            Model.objects.filter(name=one.model).first(),
            actor="global scheduler",
            reason=f"{one.reason}. {one.what}.",
            after={"evicted_requests": one.evicted_requests, "lost_tokens": one.lost_tokens},
            inputs=asdict(one),
        )


@in_a_thread
def apply_plans(load: Mapping[str, float]) -> list[ScalingMove]:
    """Make one pass over approved plans; *load* is the tokens left by instance."""
    return plan_rollout.apply_plans(timezone.now(), load)


@in_a_thread
def run_commands() -> int:
    """Carry out commands of scaling that no worker took in time. Return their number.

    Commands of other hosts are left to them, and those for Ray to its workers: this process does not connect to it.
    Leftovers of failed servers on this host are ended too.
    """
    from workers.tasks.fleet import STALE_AFTER, end_failed, run_command, waits_for_gpus

    now = timezone.now()
    own = InstanceCommand.objects.filter(
        Q(actor__in=(executor.FLOOR_ACTOR, PLANNER)) | Q(actor__startswith=executor.STRATEGY_ACTOR)
    )
    # A worker may have died while holding one.
    own.filter(state=CommandState.RUNNING, started_at__lt=now - STALE_AFTER).update(
        state=CommandState.PENDING, started_at=None
    )
    waiting = own.filter(state=CommandState.PENDING, created_at__lt=now - COMMAND_PATIENCE).order_by("pk")
    rows = waiting.exclude(instance__launcher=Launcher.RAY).select_related("instance__node", "instance__takes_over")
    keys = [row.pk for row in rows if not hosts.obstacle(row.instance) and not waits_for_gpus(row)]
    for key in keys:
        logger.warning("scaling: no worker took command %s; the gateway carries it out", key)
        run_command(key)
    end_failed(forward=False)
    return len(keys)


@in_a_thread
def finish_drains(running: Mapping[str, int]) -> int:
    """Donate or stop drained instances on which nothing runs. Return their number.

    *running*: requests by instance, of callers and of its server; those of others are unknown.
    """
    return sum(executor.finish_drain(row, running.get(row.name), PLANNER) for row in executor.drained())
