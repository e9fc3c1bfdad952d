"""Instance moves for scaling: add by the first of a fixed order of methods, remove the least loaded, never past a bound.

Every move is one transaction that locks the endpoint's deployments and nodes, recounts and acts, so that scaling, plans
and operators cannot conflict, and repeating an interrupted move is harmless. A move writes a
`ScalingMove` and an event with its inputs; the instance's transitions and commands are written by `fleet.services`.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from controlplane.events.models import Event, Severity
from controlplane.events.services import record
from controlplane.fleet import maintenance, places
from controlplane.fleet import services as fleet
from controlplane.fleet.lifecycle import restarts
from controlplane.fleet.lifecycle.states import PRESENT, STARTING, ActionError, InstanceState
from controlplane.fleet.models import (
    CommandState,
    CommandVerb,
    Deployment,
    DonationState,
    Instance,
    InstanceCommand,
    Launcher,
    Rollout,
    RolloutState,
    Tier,
)
from controlplane.fleet.spot import selectors as spot_selectors
from controlplane.fleet.spot import services as spot
from controlplane.fleet.swaps import times
from controlplane.planning.json_values import plain
from controlplane.planning.models import PLANNER as PLANNER  # noqa: PLC0414 (exported)
from controlplane.planning.models import MoveSource, ScalingMove, ScalingPlan
from controlplane.rows import narrowed
from controlplane.tuning.selectors import tuned

logger = logging.getLogger(__name__)

DRAIN_SETTLE = timedelta(seconds=3)
"""Time until every gateway sees that an instance drains, and its last request has arrived."""
DRAIN_LIMIT = timedelta(minutes=10)
"""Time after which a draining instance is stopped even with running requests."""
STOP_REST = timedelta(minutes=1)
"""Retry period after stopping a drained instance failed."""
DRAINED = "drained"
REFUSAL_REPEATED_AFTER = timedelta(minutes=5)
"""Minimum interval between events for the same refusal of the same endpoint."""


class Refused(ActionError):
    """A move cannot be made; the text says why."""


class Waits(Refused):
    """A move must wait: a failed instance is restarted first, after its back-off."""


@dataclass(frozen=True, slots=True)
class Why:
    """Actor and inputs of a move."""

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
                return f"{STRATEGY_ACTOR}{self.strategy}"
            case _:
                return PLANNER


FLOOR_ACTOR = "safety autoscaler"
STRATEGY_ACTOR = "autoscaler "


def present_count(deployment: Deployment) -> int:
    """Return the number of instances of *deployment* that serve or soon will."""
    return deployment.instances.present().count()


def present(model: str, region: str, gpu_type: str = "") -> int:
    """Return the number of instances at an endpoint (on *gpu_type*, or all) that serve or soon will."""
    rows = Instance.objects.present().filter(
        deployment__model__name=model, deployment__region__name=region, deployment__active=True
    )
    return narrowed(rows, deployment__gpu_type__name=gpu_type).count()


def lock(model: str, region: str = "", gpu_type: str = "") -> list[Deployment]:
    """Return the active deployments of *model*, an endpoint, or one GPU type there, locked by `places.lock`."""
    rows = Deployment.objects.filter(model__name=model, active=True, model__active=True, region__active=True)
    return places.lock(narrowed(rows, region__name=region, gpu_type__name=gpu_type))


@transaction.atomic
def add(model: str, region: str, why: Why, gpu_type: str = "", *, to_minimum: bool = False) -> ScalingMove:
    """Add one instance at an endpoint, on *gpu_type* or (empty) where it is ready soonest, then cheapest.

    Methods by speed (SageServe 6.5): a draining instance is taken back, a donated one reclaimed, a sleeping one woken, a
    donated one of another model redeployed, a stopped one started, a new one created, at last a failed one restarted.
    Below the minimum a failed one precedes a new one, and is waited for; *to_minimum*
    adds nothing above it. Raises Refused, naming the obstacle, or Waits.
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
    model: str,
    region: str,
    why: Why,
    gpu_type: str = "",
    load: Mapping[str, float] | None = None,
    *,
    drains: bool = True,
) -> ScalingMove:
    """Remove one instance at an endpoint: the start farthest from ready is cancelled, else a ready one drains.

    Only a start that automation asked for is cancelled, and only that without *drains*. A drained one is donated or stopped
    by `finish_drain` once nothing runs there: `scheduling.scaling.ranking` picks it, *load* is the tokens left by name,
    among equals the newest goes. Raises Refused, also when bounds or the instance's origin forbid it.
    """
    from scheduling.scaling.ranking import drain_rank

    obstacles: list[str] = []
    load = load or {}
    candidates: list[Instance] = []
    starting: list[Instance] = []
    for deployment in lock(model, region, gpu_type):
        count = present_count(deployment)
        if deployment.region.dark_since:
            obstacles.append(f"{deployment.region} is dark: what is there stays")
            continue
        if count <= deployment.min_instances:
            obstacles.append(
                f"{deployment.gpu_type.name}: {count} instances are there, at least {deployment.min_instances}"
            )
            continue
        rows = deployment.instances.launched().filter(swap_group__isnull=True).select_related("deployment__gpu_type")
        starting += [row for row in rows.filter(state__in=STARTING) if _may_cancel(row)]
        ready = [row for row in rows.filter(state=InstanceState.READY) if fleet.open_command(row) is None]
        if not ready:
            obstacles.append(f"{deployment.gpu_type.name}: none is ready that Pilothouse could start again")
        candidates += ready
    if starting:
        # A server that runs already is nearer than a place for one.
        instance = max(
            starting, key=lambda row: (row.state == InstanceState.PROVISIONING, row.state_changed_at, row.pk)
        )
        fleet.stop(instance, why.actor, f"its start is cancelled: {why.reason}"[:255])
        return _moved(instance, -1, why, "start cancelled")
    if not drains:
        raise Waits("no start that Pilothouse asked for can be cancelled")
    if not candidates:
        raise Refused("; ".join(obstacles) or f"{model} is not deployed in {region}")
    candidates.sort(key=lambda row: -row.pk)
    instance = min(candidates, key=lambda row: drain_rank(_usd(row.deployment), float(load.get(row.name, 0.0))))
    fleet.drain(instance, why.actor, why.reason[:255])
    return _moved(instance, -1, why, DRAINED)


def move(
    delta: int,
    model: str,
    region: str,
    why: Why,
    gpu_type: str = "",
    *,
    load: Mapping[str, float] | None = None,
    to_minimum: bool = False,
    drains: bool = True,
) -> ScalingMove:
    """Call `add` (delta 1) or `remove` (-1, with *drains*)."""
    if delta > 0:
        return add(model, region, why, gpu_type, to_minimum=to_minimum)
    return remove(model, region, why, gpu_type, load, drains=drains)


def attempt(delta: int, model: str, region: str, why: Why, **options: Any) -> ScalingMove | None:
    """Call `move` with *options*; a refusal becomes a rate-limited event, and None is returned."""
    try:
        return move(delta, model, region, why, **options)
    except Waits as waits:
        logger.debug("scaling: %+d %s in %s: %s", delta, model, region, waits)
        return None
    except Refused as refusal:
        refuse(delta, model, region, why, str(refusal))
        return None


def refuse(delta: int, model: str, region: str, why: Why, obstacle: str) -> None:
    """Record the event of a refused move, unless the same one was recorded in the last minutes."""
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
    """Return instances drained by scaling, a rollout, maintenance, for redeployment or to restart: done once idle.

    Those with a pending command are not among them.
    """
    now = timezone.now()
    rows = Instance.objects.launched().filter(state=InstanceState.DRAINING, state_changed_at__lte=now - DRAIN_SETTLE)
    rows = rows.select_related("deployment__model", "deployment__region")
    tried = InstanceCommand.objects.filter(verb=CommandVerb.STOP, finished_at__gt=now - STOP_REST)
    rows = rows.exclude(pk__in=tried.values("instance"))
    rollouts = Rollout.objects.filter(state=RolloutState.IN_PROGRESS, draining__isnull=False)
    theirs = maintenance.leaving().union(rollouts.values_list("draining", flat=True))
    ours = [
        row for row in rows.order_by("name") if row.pk in theirs or _leaves_the_pool(row) or _drained_by_scaling(row)
    ]
    return [row for row in ours if fleet.open_command(row) is None]


def finish_drain(instance: Instance, running: int | None, actor: str) -> bool:
    """Donate or stop a drained *instance* if nothing runs there (None: unknown), or stop it when its time is over.

    Only what scaling let go is donated, by `SPOT_DONATE`. Return whether anything was done.
    """
    waited = timezone.now() - instance.state_changed_at
    if running != 0 and waited < DRAIN_LIMIT:
        return False
    donates = running == 0 and tuned(instance.deployment.model.name).SPOT_DONATE and not _leaves_the_pool(instance)
    if donates and (move := _let_go_by(instance)):
        try:
            spot.donate(instance, actor, move.reason)
        except ActionError as error:
            logger.info("scaling: %s", error)
            return False
        return True
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
    serves_in_s: float = 0.0
    """As measured; 0 where that does not decide (`addition_rank`)."""

    def rank(self) -> tuple[int, float, int, float]:
        from scheduling.scaling.ranking import addition_rank

        return addition_rank(int(self.source), self.serves_in_s, _usd(self.deployment), self.below_minimum)

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
            case InstanceState.DONATED if row.deployment_id != self.deployment.pk:
                return spot.redeploy(row, self.deployment, why.actor, reason), f"redeployed from {row.name}"
            case InstanceState.DONATED:
                return spot.reclaim(row, why.actor, reason), "reclaimed from spot"
            case _:
                if not places.keeps(row):
                    if row.host:  # its processes may still run there
                        raise Refused(f"{row.name} failed on host {row.host} and cannot start elsewhere")
                    row.node = places.pick(self.deployment)
                    row.launcher = row.node.launcher(row.launcher) if row.node else row.launcher
                    row.save(update_fields=["node", "launcher", "changed_at"])
                was = row.get_state_display().lower()
                fleet.start(row, why.actor, reason)
                return row, f"started again ({was})"


def _methods(deployments: Sequence[Deployment]) -> list[_Method]:
    """Return every method; within a deployment, the last changed comes first."""
    from scheduling.scaling.ranking import Source

    reclaim_s = spot_selectors.reclaim_times(timezone.now()).expected_s
    woken, methods = times.read(), []
    for deployment in deployments:
        known_s = {Source.OWN_SPOT: reclaim_s, Source.ASLEEP: woken.load(deployment, Tier.CPU).seconds}
        own = deployment.instances.exclude(state__in=PRESENT)
        rows = list(own.select_related("node", "deployment__model", "deployment__region"))
        rows.sort(key=lambda row: row.state_changed_at, reverse=True)
        missing = max(deployment.min_instances, 1) - present_count(deployment)
        for row in rows:
            source = _source(row)
            if source is not None:
                methods.append(_Method(source, deployment, row, missing > 0, known_s.get(Source(source), 0.0)))
        if (donated := _other_spot(deployment)) is not None:
            takes_s = spot_selectors.redeploy_s(deployment, donated)
            methods.append(_Method(Source.OTHER_SPOT, deployment, donated, missing > 0, takes_s))
        if missing > 0 and (_coming_back(rows) >= missing or _looping(rows) >= deployment.max_instances):
            continue  # they will be restarted; another row would probably fail too
        methods.append(_Method(Source.NEW, deployment, None, missing > 0))
    return methods


def _other_spot(deployment: Deployment) -> Instance | None:
    """Return the donated instance of another model that *deployment* would take by redeployment; None for none."""
    from scheduling.scaling.spot import Donated, first_to_redeploy

    if not tuned(deployment.model.name).SPOT_REDEPLOY or deployment.region.cordoned:
        return None
    rows = [row for row in spot_selectors.redeployable(deployment) if not places.cordon_of(row)]
    if not rows:
        return None
    donated = [Donated(_usd(row.deployment), spot_selectors.redeploy_s(deployment, row)) for row in rows]
    return rows[first_to_redeploy(donated)]


def _coming_back(rows: Sequence[Instance]) -> int:
    """Return how many failed instances of *rows* will be restarted soon: they count for the minimum."""
    return sum(_restartable(row) and not restarts.loops(row) for row in rows)


def _looping(rows: Sequence[Instance]) -> int:
    return sum(_restartable(row) and restarts.loops(row) for row in rows)


def _restartable(row: Instance) -> bool:
    usable = row.node is None or row.node.active
    return row.state == InstanceState.FAILED and row.launcher != Launcher.EXTERNAL and usable


def _source(row: Instance) -> int | None:
    """Return the source that adding *row* counts as; None if it must not be touched."""
    from scheduling.scaling.ranking import Source

    if fleet.open_command(row) != _stop_to_come(row) or places.obstacle(row):
        return None
    if row.swap_group_id is not None and (
        row.state != InstanceState.FAILED or fleet.awake_in(row.swap_group_id).exists()
    ):
        return None  # brought up by a swap
    match row.state:
        case InstanceState.DRAINING:  # unless drained by an operator
            return Source.TAKEN_BACK if _drained_by_scaling(row) else None
        case InstanceState.SLEEPING:
            return Source.ASLEEP
        case InstanceState.DONATED:
            return Source.OWN_SPOT
    if row.launcher == Launcher.EXTERNAL or (row.node is not None and not row.node.active):
        return None
    if row.state == InstanceState.STOPPED:
        return Source.STOPPED
    return Source.FAILED if restarts.is_due(row) else None


def _stop_to_come(row: Instance) -> InstanceCommand | None:
    """Return the stop of a drained *row*, requested by `finish_drain` and not yet begun by a worker; None without one."""
    ours = row.commands.filter(verb=CommandVerb.STOP, state=CommandState.PENDING, actor__in=(FLOOR_ACTOR, PLANNER))
    return ours.first() if row.state == InstanceState.DRAINING else None


def _may_cancel(row: Instance) -> bool:
    """Return whether *row* is starting because automation asked for it: not an operator, a rollout, or a wake."""
    last = row.commands.order_by("pk").last()
    actors = (FLOOR_ACTOR, PLANNER)
    return (
        last is not None
        and last.verb == CommandVerb.START
        and (last.actor in actors or last.actor.startswith(STRATEGY_ACTOR))
    )


def _leaves_the_pool(row: Instance) -> bool:
    """Return whether *row* was donated and drains to be stopped, or so that another model gets its GPUs."""
    return row.donations.filter(state=DonationState.RECLAIMING).exists()


def _drained_by_scaling(row: Instance) -> bool:
    """Return whether the last change of *row* is its removal by scaling."""
    return _let_go_by(row) is not None


def _let_go_by(row: Instance) -> ScalingMove | None:
    """Return the move by which scaling removed *row*, if that is its last change."""
    last = ScalingMove.objects.filter(instance=row.name).aggregate(last=Max("pk"))["last"]
    move = ScalingMove.objects.filter(pk=last).first()
    # The move's row is written just after the instance's; an operator's later drain is newer than both.
    is_last = move is not None and move.delta < 0 and move.at >= row.state_changed_at - timedelta(seconds=1)
    return move if is_last else None


def _usd(deployment: Deployment) -> float:
    """Return the hourly price of one instance."""
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
