"""Moving instances for scaling: the nearest method to add one, the least loaded to go, and never past a bound.

Every move is one transaction that locks the endpoint's deployments and their nodes, counts again and acts, so that planner,
strategies, floor and operators cannot step on each other, and repeating one that was cut off does no harm. A move writes
a `ScalingMove` and an event with what it was decided from; the instance's own moves and commands are written by
`fleet.services`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from controlplane.events.models import Event, Severity
from controlplane.events.services import record
from controlplane.fleet import places
from controlplane.fleet import services as fleet
from controlplane.fleet.lifecycle import restarts
from controlplane.fleet.lifecycle.states import PRESENT, ActionError, InstanceState
from controlplane.fleet.models import (
    CommandState,
    CommandVerb,
    Deployment,
    Instance,
    InstanceCommand,
    Launcher,
    Rollout,
    RolloutState,
)
from controlplane.planning.execution import contested
from controlplane.planning.json_values import plain
from controlplane.planning.models import MoveSource, ScalingMove, ScalingPlan
from controlplane.rows import narrowed
from controlplane.tuning.selectors import tuned

logger = logging.getLogger(__name__)

DRAIN_SETTLE = timedelta(seconds=3)
"""Until every gateway has seen that an instance drains, and its last request has reached it."""
DRAIN_LIMIT = timedelta(minutes=10)
"""A drained instance is stopped then, whatever still runs on it."""
STOP_REST = timedelta(minutes=1)
"""When stopping a drained instance failed, it is tried again after this."""
REFUSAL_REPEATED_AFTER = timedelta(minutes=5)
"""The same refusal of the same endpoint is an event once in this time."""


class Refused(ActionError):
    """A move cannot be made; the text says why."""


class Waits(Refused):
    """A move is not made yet: an instance that failed is started again first, when its back-off is over."""


@dataclass(frozen=True, slots=True)
class Why:
    """Who asks for a move and what it was decided from."""

    source: MoveSource
    strategy: str
    reason: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    plan: ScalingPlan | None = None

    @property
    def actor(self) -> str:
        match self.source:
            case MoveSource.FLOOR:
                return FLOOR_ACTOR
            case MoveSource.STRATEGY:
                return f"strategy {self.strategy}"
            case _:
                return PLANNER


FLOOR_ACTOR = "reactive floor"
PLANNER = "planner"


def present_count(deployment: Deployment) -> int:
    """Instances of *deployment* that serve or soon will."""
    return deployment.instances.present().count()


def present(model: str, region: str, gpu_type: str = "") -> int:
    """Instances at an endpoint (on *gpu_type*, or all) that serve or soon will."""
    rows = Instance.objects.present().filter(
        deployment__model__name=model, deployment__region__name=region, deployment__active=True
    )
    return narrowed(rows, deployment__gpu_type__name=gpu_type).count()


def lock(model: str, region: str = "", gpu_type: str = "") -> list[Deployment]:
    """The active deployments of *model*, or of an endpoint, or of one GPU type there, locked by `places.lock`."""
    rows = Deployment.objects.filter(model__name=model, active=True, model__active=True, region__active=True)
    return places.lock(narrowed(rows, region__name=region, gpu_type__name=gpu_type))


@transaction.atomic
def add(model: str, region: str, why: Why, gpu_type: str = "", *, to_minimum: bool = False) -> ScalingMove:
    """One instance more at an endpoint, on *gpu_type* or (empty) where it is there soonest, then cheapest.

    The nearest method counts: one that still drains is taken back, a sleeping one woken, a stopped one started, then a new
    one made beside its siblings, at last a failed one started again. Below the minimum a failed one comes before a new one,
    and is waited for; with *to_minimum* nothing is added above it. Raises Refused, which says what stands in the way, or
    Waits.
    """
    obstacles: list[str] = []
    open_to_more = []
    deployments = lock(model, region, gpu_type)
    bounds = places.bounds(deployments)
    for deployment in deployments:
        count, (least, most) = present_count(deployment), bounds[deployment.pk]
        if to_minimum and count >= least:
            continue
        if count < most:
            open_to_more.append(deployment)
        else:
            held = most < deployment.max_instances
            obstacles.append(
                f"{deployment.gpu_type.name}: {count} instances are there, at most {most}"
                f"{' without those that are held or cordoned' if held else ''}"
            )
    for method in sorted(_methods(open_to_more), key=_Method.rank):
        try:
            with transaction.atomic():
                instance, how = method.go(why)
        except (ActionError, ValidationError) as error:
            obstacles.append(f"{method.deployment.gpu_type.name}: {_sentence(error)}")
        else:
            return _moved(instance, +1, why, how)
    if not obstacles and to_minimum and not open_to_more:
        raise Waits("the minimum is there")
    if not obstacles and open_to_more:
        raise Waits("what has failed is started again, each time after a longer wait")
    raise Refused("; ".join(dict.fromkeys(obstacles)) or f"{model} is not deployed in {region}")


@transaction.atomic
def remove(
    model: str, region: str, why: Why, gpu_type: str = "", load: Mapping[str, float] | None = None
) -> ScalingMove:
    """One instance fewer at an endpoint: it drains, and `finish_drains` stops it when nothing runs on it any more.

    Who goes is ranked by `scheduling.scaling.ranking`: *load* are the tokens left to do by name; of equals the newest goes.
    Raises Refused, also when its bounds or who started it do not allow it.
    """
    from scheduling.scaling.ranking import drain_rank

    obstacles: list[str] = []
    load = load or {}
    candidates: list[Instance] = []
    for deployment in lock(model, region, gpu_type):
        count = present_count(deployment)
        if count <= deployment.min_instances:
            obstacles.append(
                f"{deployment.gpu_type.name}: {count} instances are there, at least {deployment.min_instances}"
            )
            continue
        ready = deployment.instances.launched().filter(state=InstanceState.READY, swap_group__isnull=True)
        rows = [row for row in ready.select_related("deployment__gpu_type") if fleet.open_command(row) is None]
        if not rows:
            obstacles.append(f"{deployment.gpu_type.name}: none is ready that Pilothouse could start again")
        candidates += rows
    if not candidates:
        raise Refused("; ".join(obstacles) or f"{model} is not deployed in {region}")
    candidates.sort(key=lambda row: -row.pk)
    instance = min(candidates, key=lambda row: drain_rank(_usd(row.deployment), float(load.get(row.name, 0.0))))
    fleet.drain(instance, why.actor, why.reason[:255])
    return _moved(instance, -1, why, "drained")


def move(
    delta: int,
    model: str,
    region: str,
    why: Why,
    gpu_type: str = "",
    *,
    load: Mapping[str, float] | None = None,
    to_minimum: bool = False,
) -> ScalingMove:
    """`add` (delta 1) or `remove` (-1); Waits while another owns the endpoint (`scheduling.scaling.owner`)."""
    from scheduling.scaling.owner import UNCHANGED, undoing, waits

    last = contested.last_changes(model, region, now=timezone.now()).get(region, UNCHANGED)
    why = replace(why, reason=undoing(why.reason, last, why.source, delta))
    if delta > 0:
        return add(model, region, why, gpu_type, to_minimum=to_minimum)
    if owned := waits(last, why.source, tuned(model).SCALE_COOLDOWN_S):
        raise Waits(owned)
    return remove(model, region, why, gpu_type, load)


def attempt(delta: int, model: str, region: str, why: Why, **options: Any) -> ScalingMove | None:
    """`move`, with its options; a refusal is an event, once in a while, and None."""
    try:
        return move(delta, model, region, why, **options)
    except Waits as waits:
        logger.debug("scaling: %+d %s in %s: %s", delta, model, region, waits)
        return None
    except Refused as refusal:
        refuse(delta, model, region, why, str(refusal))
        return None


def refuse(delta: int, model: str, region: str, why: Why, obstacle: str) -> None:
    """Write down that a move could not be made, unless the same was written down in the last minutes."""
    logger.info("scaling: %+d %s in %s refused: %s", delta, model, region, obstacle)
    subject = {"delta": delta, "model": model, "region": region}
    recent = Event.objects.filter(
        kind="scaling.refused", at__gte=timezone.now() - REFUSAL_REPEATED_AFTER, reason=obstacle, actor=why.actor
    )
    if any(event.after == subject for event in recent):
        return
    record(
        "scaling.refused",
        why.plan,
        actor=why.actor,
        after=subject,
        reason=obstacle,
        inputs={"asked": why.reason, **plain(why.inputs)},
        severity=Severity.WARNING,
    )


def drained() -> list[Instance]:
    """Instances that scaling or a rollout drains, without a command under way: to be stopped when nothing runs there."""
    now = timezone.now()
    rows = Instance.objects.launched().filter(state=InstanceState.DRAINING, state_changed_at__lte=now - DRAIN_SETTLE)
    rows = rows.select_related("deployment__model", "deployment__region")
    tried = InstanceCommand.objects.filter(verb=CommandVerb.STOP, finished_at__gt=now - STOP_REST)
    rows = rows.exclude(pk__in=tried.values("instance"))
    rollouts = Rollout.objects.filter(state=RolloutState.IN_PROGRESS, draining__isnull=False)
    theirs = set(rollouts.values_list("draining", flat=True))
    ours = [row for row in rows.order_by("name") if row.pk in theirs or _drained_by_scaling(row)]
    return [row for row in ours if fleet.open_command(row) is None]


def finish_drain(instance: Instance, running: int | None, actor: str) -> bool:
    """Stop a drained *instance* if nothing runs there (None: it does not say) or its time is over. Returns whether."""
    waited = timezone.now() - instance.state_changed_at
    if running != 0 and waited < DRAIN_LIMIT:
        return False
    reason = "drained: nothing runs on it" if running == 0 else f"drained for {DRAIN_LIMIT.seconds // 60} minutes"
    try:
        fleet.stop(instance, actor, reason)
    except ActionError as error:
        logger.info("scaling: %s", error)
        return False
    return True


# Methods to add an instance


@dataclass(frozen=True, slots=True)
class _Method:
    source: int  # `scheduling.scaling.ranking.Source`
    deployment: Deployment
    instance: Instance | None  # None: a new row
    below_minimum: bool

    def rank(self) -> tuple[int, float]:
        from scheduling.scaling.ranking import addition_rank

        return addition_rank(self.source, _usd(self.deployment), self.below_minimum)

    def go(self, why: Why) -> tuple[Instance, str]:
        row = self.instance
        reason = why.reason[:255]
        if row is None:
            row = places.new_instance(self.deployment)
            fleet.start(row, why.actor, reason)
            return row, "new"
        match row.state:
            case InstanceState.DRAINING:
                fleet.resume(row, why.actor, reason, withdrawn=_stop_to_come(row))
                return row, "taken back while it drained"
            case InstanceState.SLEEPING:
                fleet.wake(row, why.actor, reason)
                return row, "woken"
            case _:
                if not places.keeps(row):
                    if row.host:  # its processes may still run there
                        raise Refused(f"{row.name} failed on host {row.host} and cannot start elsewhere")
                    row.node = places.pick(self.deployment)
                    row.save(update_fields=["node", "changed_at"])
                was = row.get_state_display().lower()
                fleet.start(row, why.actor, reason)
                return row, f"started again ({was})"


def _methods(deployments: Sequence[Deployment]) -> list[_Method]:
    """Every method; of those of one deployment, what changed last comes first."""
    from scheduling.scaling.ranking import Source

    methods = []
    for deployment in deployments:
        own = deployment.instances.exclude(state__in=PRESENT)
        rows = list(own.select_related("node", "deployment__model", "deployment__region"))
        rows.sort(key=lambda row: row.state_changed_at, reverse=True)
        missing = max(deployment.min_instances, 1) - present_count(deployment)
        for row in rows:
            source = _source(row)
            if source is not None:
                methods.append(_Method(source, deployment, row, missing > 0))
        if missing > 0 and (_coming_back(rows) >= missing or _looping(rows) >= deployment.max_instances):
            continue  # they are to come back; one row more would only be one more that fails
        methods.append(_Method(Source.NEW, deployment, None, missing > 0))
    return methods


def _coming_back(rows: Sequence[Instance]) -> int:
    """Of *rows*, those that failed and are started again before long: they count for the minimum."""
    return sum(_restartable(row) and not restarts.loops(row) for row in rows)


def _looping(rows: Sequence[Instance]) -> int:
    return sum(_restartable(row) and restarts.loops(row) for row in rows)


def _restartable(row: Instance) -> bool:
    usable = row.node is None or row.node.active
    return row.state == InstanceState.FAILED and row.launcher != Launcher.EXTERNAL and usable


def _source(row: Instance) -> int | None:
    """From where *row* would be added; None if it is not to be touched."""
    from scheduling.scaling.ranking import Source

    if fleet.open_command(row) != _stop_to_come(row) or places.obstacle(row):
        return None
    if row.swap_group_id is not None and (
        row.state != InstanceState.FAILED or fleet.awake_in(row.swap_group_id).exists()
    ):
        return None  # a swap brings it up
    match row.state:
        case InstanceState.DRAINING:  # not one that an operator drains
            return Source.TAKEN_BACK if _drained_by_scaling(row) else None
        case InstanceState.SLEEPING:
            return Source.ASLEEP
    if row.launcher == Launcher.EXTERNAL or (row.node is not None and not row.node.active):
        return None
    if row.state == InstanceState.STOPPED:
        return Source.STOPPED
    return Source.FAILED if restarts.is_due(row) else None


def _stop_to_come(row: Instance) -> InstanceCommand | None:
    """The stop of a drained *row* that `finish_drain` asked for, and that no worker has begun; None without one."""
    ours = row.commands.filter(verb=CommandVerb.STOP, state=CommandState.PENDING, actor__in=(FLOOR_ACTOR, PLANNER))
    return ours.first() if row.state == InstanceState.DRAINING else None


def _drained_by_scaling(row: Instance) -> bool:
    """Whether the last word about *row* is a move of ours to take it away."""
    last = ScalingMove.objects.filter(instance=row.name).aggregate(last=Max("pk"))["last"]
    move = ScalingMove.objects.filter(pk=last).first()
    # The move's row is written just after the instance's own; an operator's drain since then is later than both.
    return move is not None and move.delta < 0 and move.at >= row.state_changed_at - timedelta(seconds=1)


def _usd(deployment: Deployment) -> float:
    """An hour of one instance."""
    return deployment.tensor_parallel * float(deployment.gpu_type.on_demand_usd_per_hour)


def _moved(instance: Instance, delta: int, why: Why, how: str) -> ScalingMove:
    deployment = instance.deployment
    inputs = {**plain(why.inputs), "how": how}
    move = ScalingMove.objects.create(
        plan=why.plan,
        source=why.source,
        strategy=why.strategy,
        model=deployment.model.name,
        region=deployment.region.name,
        gpu_type=deployment.gpu_type.name,
        instance=instance.name,
        delta=delta,
        reason=why.reason[:255],
        inputs=inputs,
    )
    record(
        "scaling.added" if delta > 0 else "scaling.removed",
        instance,
        actor=why.actor,
        after={
            "delta": delta,
            "move": move.pk,
            "plan": why.plan.pk if why.plan else None,
            "source": str(why.source),
            "strategy": why.strategy,
        },
        reason=why.reason,
        inputs=inputs,
    )
    return move


def _sentence(error: Exception) -> str:
    return " ".join(error.messages) if isinstance(error, ValidationError) else str(error)
