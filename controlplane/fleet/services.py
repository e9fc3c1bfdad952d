"""Writes to the inventory. Every move of an instance, and every operator's action, is an event in the same transaction.

Moves that need no process (drain, resume) happen at once. Where a process must act, an `InstanceCommand` row is written
and a Celery worker carries it out (`workers/tasks/fleet.py`). The row is the promise, the message only a notification: when
the broker is down the row stays pending, `delivered` on the returned command is False, and `run_pending_commands` takes
it up later.
"""

import logging
from datetime import datetime, timedelta
from functools import partial

import redis
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.events.models import Event, Severity
from controlplane.events.services import record
from controlplane.fleet import places
from controlplane.fleet.lifecycle import engine_logs, hosts, restarts
from controlplane.fleet.lifecycle.states import (
    AWAKE,
    PRESENT,
    Action,
    ActionError,
    InstanceState,
    check_action,
    check_move,
)
from controlplane.fleet.models import (
    CommandState,
    CommandVerb,
    Deployment,
    Gpu,
    Instance,
    InstanceCommand,
    Launcher,
    Model,
    Node,
    Region,
    Rollout,
    RolloutState,
    ScheduledMinimum,
    SwapGroup,
)
from controlplane.jobs.broker import impatient_redis, send_task

logger = logging.getLogger(__name__)

OF_ONE_SERVER = ("url", "process_id", "kv_capacity_tokens", "startup", "engine", "launched_with", "api_key")
"""Fields of an instance that are reset for its next server."""
INVENTORY_CHANNEL = "pilothouse:inventory"
RUN_COMMAND_TASK = "workers.tasks.fleet.run_command"
UNREADABLE = "scheduled_minimum.unreadable"
TICK_TASK = "workers.tasks.tick.tick"

SWAPS_EXPIRE_S = 5.0

# Where a superseded command would leave an instance is decided by the command that supersedes it.
_SUPERSEDES = {CommandVerb.STOP: {CommandVerb.START, CommandVerb.SLEEP, CommandVerb.WAKE}}


@transaction.atomic
def move(
    instance: Instance, to: InstanceState, *, actor: User | str, reason: str, inputs: dict[str, object] | None = None
) -> Instance:
    """Move *instance* to state *to* and record the event; the row is locked and read again first.

    Raises IllegalMove, naming both states, when the state machine does not allow it, and ActionError when another instance
    is awake on GPUs that *instance* shares.
    """
    row = Instance.objects.select_for_update().get(pk=instance.pk)
    before, now = row.state, timezone.now()
    check_move(row.name, before, to)
    if row.swap_group_id is not None:
        if to in AWAKE and before not in AWAKE and (other := awake_in(row.swap_group_id).first()) is not None:
            raise ActionError(f"{row.name} cannot become {to}: its GPUs are those of {other.name}, {other.state}")
        transaction.on_commit(advance_swaps)
    if to == InstanceState.FAILED:
        if error := engine_logs.root_error(row):
            inputs = {**(inputs or {}), "error": error}
            reason = f"{reason}: {error}" if error not in reason else reason
        reason = _count_failure(row, reason, now)
    row.state, row.state_reason, row.state_changed_at = to, reason[:255], now
    row.save(update_fields=["state", "state_reason", "state_changed_at", "failures", "changed_at"])
    _follow_up(row, before, to, now)
    record(
        "instance.moved",
        row,
        actor=actor,
        before={"state": before},
        after={"state": to},
        reason=reason,
        inputs=inputs,
        severity=Severity.CRITICAL if to == InstanceState.FAILED else Severity.INFO,
    )
    if to == InstanceState.FAILED and row.failures == restarts.CRASH_LOOP:
        record("instance.crash_loop", row, actor=actor, reason=reason, severity=Severity.CRITICAL)
    return _moved(instance, row)


def _follow_up(row: Instance, before: str, to: InstanceState, now: datetime) -> None:
    """Note what a move means for the spot pool, for weights by region, for GPUs, and for a rollout in progress."""
    from controlplane.fleet.lifecycle import gpu_health
    from controlplane.fleet.spot import services as spot
    from controlplane.fleet.weights import record_ready

    spot.close(row, to, now)
    if before == InstanceState.LOADING and to == InstanceState.READY and row.launcher != Launcher.EXTERNAL:
        record_ready(row)
        gpu_health.record_ready(row)
    if before in PRESENT and to == InstanceState.DRAINING:  # a rollout keeps no more than scaling leaves
        left = Instance.objects.launched().filter(deployment=row.deployment_id, state__in=PRESENT).count()
        Rollout.objects.filter(deployment=row.deployment_id, state=RolloutState.IN_PROGRESS, total__gt=left).update(
            total=left
        )
    if row.takes_over_id is not None and to in (InstanceState.LOADING, InstanceState.STOPPED, InstanceState.FAILED):
        row.takes_over = None
        row.save(update_fields=["takes_over"])
    if to == InstanceState.FAILED:
        free_for_taker(row)
    if to == InstanceState.STOPPED:
        for command in InstanceCommand.objects.open().filter(instance__takes_over=row):
            transaction.on_commit(partial(deliver, command))


def free_for_taker(donor: Instance) -> bool:
    """Stop the failed *donor* if another instance waits for its GPUs; return whether one does."""
    taker = Instance.objects.filter(takes_over=donor).first()
    if taker is not None:
        stop(donor, "spot pool", f"it failed, and {taker.name} waits for its GPUs")
    return taker is not None


def _count_failure(row: Instance, reason: str, now: datetime) -> str:
    """Count a failure of *row* before it moves; return *reason* with the consequence."""
    ready_for = now - row.state_changed_at if row.state == InstanceState.READY else timedelta(0)
    row.failures = 1 if ready_for >= restarts.SETTLED else row.failures + 1
    if row.failures < restarts.CRASH_LOOP:
        return reason
    wait = f"{restarts.backoff(row.failures).total_seconds():.0f} s"
    return f"Crash loop: failed {row.failures} times in a row, the next start waits {wait}. {reason}"


@transaction.atomic
def drain(instance: Instance, actor: User | str, reason: str) -> Instance:
    """Drain *instance*: it finishes what it runs and gets nothing new. Raises ActionError unless it is ready."""
    row = _lock(instance, Action.DRAIN)
    transaction.on_commit(notify)
    return _moved(instance, move(row, InstanceState.DRAINING, actor=actor, reason=reason))


@transaction.atomic
def resume(instance: Instance, actor: User | str, reason: str, withdrawn: InstanceCommand | None = None) -> Instance:
    """Return a draining *instance* to service. Raises ActionError, also while a stop or sleep is under way.

    A command that is *withdrawn* does not count, unless a worker has begun it meanwhile.
    """
    row = _lock(instance, Action.RESUME)
    if withdrawn is not None:
        _withdraw(withdrawn, "superseded by resume")
    if taker := Instance.objects.filter(takes_over=row).first():
        raise ActionError(f"{row.name} cannot resume: {taker.name} gets its GPUs")
    under_way = open_command(row)
    if under_way is not None:
        raise ActionError(f"{row.name} cannot resume: a {under_way.verb} is {under_way.state}")
    Instance.objects.filter(pk=row.pk).update(restart="")
    transaction.on_commit(notify)
    return _moved(instance, move(row, InstanceState.READY, actor=actor, reason=reason))


@transaction.atomic
def start(instance: Instance, actor: User | str, reason: str) -> InstanceCommand | None:
    """Start the server behind *instance*; it is ready when it answers.

    Returns the command, or None for a server started elsewhere, which is only probed again. Idempotent. Raises ActionError
    when the state does not allow it, or the inventory no longer has a place for it.
    """
    places.lock(Deployment.objects.filter(instances=instance.pk))
    _check_gpus_are_free(instance)
    row = _lock(instance, Action.START)
    _check_may_start(row, actor)
    before = row.state
    if before != InstanceState.PROVISIONING and row.launcher != Launcher.EXTERNAL:
        # The launcher gives a new address; the old one may be another instance's by now.
        for field in Instance._meta.concrete_fields:
            if field.name in OF_ONE_SERVER:
                setattr(row, field.name, field.get_default())
    row.state = InstanceState.PROVISIONING
    try:
        row.clean()  # its GPUs, address or profile may have gone while it was stopped
    except ValidationError as error:
        raise ActionError(f"{row.name} cannot start: {' '.join(error.messages)}") from error
    if isinstance(actor, User):
        row.failures = 0  # who starts it by hand has seen to its cause
    if before != InstanceState.PROVISIONING:
        row.held = row.restart = ""
        row.save(update_fields=[*OF_ONE_SERVER, "failures", "held", "restart", "changed_at"])
        row = move(row, InstanceState.PROVISIONING, actor=actor, reason=reason)
    if row.launcher == Launcher.EXTERNAL:
        row = move(row, InstanceState.LOADING, actor=actor, reason="started elsewhere: waiting for its first answer")
        transaction.on_commit(notify)
        _moved(instance, row)
        return None
    _moved(instance, row)
    return _command(row, CommandVerb.START, actor, reason)


@transaction.atomic
def stop(instance: Instance, actor: User | str, reason: str) -> InstanceCommand | None:
    """Stop the server behind *instance*, aborting its requests (drain first to spare them).

    A ready instance gets no new requests from this moment on. An instance stopped by a user is held: only a user can start
    it again. Returns the command, or None for a server started elsewhere, which is only taken out of service. Idempotent.
    """
    row = _lock(instance, Action.STOP)
    if isinstance(actor, User):
        row.held, row.restart = by_whom(actor, reason), ""
        row.save(update_fields=["held", "restart", "changed_at"])
    if row.launcher == Launcher.EXTERNAL:
        transaction.on_commit(notify)
        _moved(instance, move(row, InstanceState.STOPPED, actor=actor, reason=reason))
        return None
    if row.state in (InstanceState.READY, InstanceState.DONATED, InstanceState.RECLAIMING):
        row = move(row, InstanceState.DRAINING, actor=actor, reason=f"to be stopped: {reason}")
    _moved(instance, row)
    return _command(row, CommandVerb.STOP, actor, reason)


@transaction.atomic
def restart(instance: Instance, actor: User | str, reason: str) -> Instance:
    """Restart the server behind *instance* once what it runs has finished: it drains, stops and starts again."""
    row = _lock(instance, Action.RESTART)
    if why := places.cordon_of(row):
        raise ActionError(f"{row.name} would not start again: {why}")
    if row.launcher == Launcher.EXTERNAL:
        raise ActionError(f"{row.name} was started elsewhere: restart it there")
    row.restart = by_whom(actor, reason)
    row.save(update_fields=["restart", "changed_at"])
    if row.state == InstanceState.READY:
        row = move(row, InstanceState.DRAINING, actor=actor, reason=f"to restart: {reason}")
        transaction.on_commit(notify)
    elif row.state == InstanceState.LOADING:  # nothing runs on it
        _command(row, CommandVerb.STOP, actor, f"to restart: {reason}")
    return _moved(instance, row)


@transaction.atomic
def sleep(instance: Instance, actor: User | str, reason: str, level: int = 1) -> InstanceCommand:
    """Put *instance* to sleep once it has finished what it runs; waking is faster than starting.

    *level* is vLLM's: 1 keeps the weights in CPU memory, 2 discards them.
    """
    row = _lock(instance, Action.SLEEP)
    if row.state == InstanceState.READY:
        row = move(row, InstanceState.DRAINING, actor=actor, reason=f"to sleep: {reason}")
    _moved(instance, row)
    return _command(row, CommandVerb.SLEEP, actor, reason, sleep_level=level)


@transaction.atomic
def wake(instance: Instance, actor: User | str, reason: str) -> InstanceCommand:
    """Wake a sleeping *instance*; it is ready once it answers."""
    _check_gpus_are_free(instance)
    row = _lock(instance, Action.WAKE)
    _check_may_start(row, actor)
    _moved(instance, row)
    return _command(row, CommandVerb.WAKE, actor, reason)


@transaction.atomic
def cordon(place: Node | Region | Gpu, actor: User | str, reason: str) -> str:
    """Cordon *place*: nothing new is started there, running instances stay. Return a sentence for the operator."""
    return _cordon(place, by_whom(actor, reason), "cordoned", actor, reason)


@transaction.atomic
def uncordon(place: Node | Region | Gpu, actor: User | str, reason: str) -> str:
    """Uncordon *place*. Return a sentence for the operator. Maintenance that is under way there ends with its window."""
    if not isinstance(place, Gpu):
        window = place.maintenance.under_way().exclude(cordon="").first()
        if window is not None and window.cordon == place.cordoned:
            raise ActionError(f"{place} is in maintenance until {window.until:%d %b %H:%M} UTC: end that")
    return _cordon(place, "", "uncordoned", actor, reason)


def _cordon(place: Node | Region | Gpu, cordoned: str, word: str, actor: User | str, reason: str) -> str:
    row = type(place).objects.select_for_update().get(pk=place.pk)
    if bool(row.cordoned) == bool(cordoned):
        raise ActionError(f"{row} is {f'cordoned already, by {row.cordoned}' if cordoned else 'not cordoned'}")
    before, row.cordoned = row.cordoned, cordoned
    row.save(update_fields=["cordoned"])
    if isinstance(row, Gpu) and not cordoned:  # it is trusted again
        Gpu.objects.filter(pk=row.pk).update(failed_starts={})
    record(
        f"{row._meta.model_name}.{word}",
        row,
        actor=actor,
        before={"cordoned": before},
        after={"cordoned": cordoned},
        reason=reason,
        severity=Severity.CRITICAL if isinstance(row, Gpu) and not isinstance(actor, User) else Severity.INFO,
    )
    transaction.on_commit(notify)
    place.cordoned = cordoned
    return f"{row} is {word}: {'nothing is started there' if cordoned else 'instances may be started there again'}"


@transaction.atomic
def undeploy(deployment: Deployment, actor: User | str, reason: str) -> str:
    """Take *deployment* out of service and stop its instances, cutting what they run; rows, moves and events stay.

    Says so in one sentence. Active again, its instances are started one by one, or by the floor.
    """
    (row,) = places.lock(Deployment.objects.filter(pk=deployment.pk))
    if not row.active:
        raise ActionError(f"{row} is not active")
    row.active = deployment.active = False
    row.save(update_fields=["active"])
    stopped = 0
    for instance in row.instances.exclude(state=InstanceState.STOPPED).order_by("pk"):
        stop(instance, actor if isinstance(actor, str) else actor.get_username(), f"undeployed: {reason}"[:255])
        stopped += 1
    record(
        "deployment.undeployed",
        row,
        actor=actor,
        before={"active": True},
        after={"active": False, "stopped": stopped},
        reason=reason,
    )
    transaction.on_commit(notify)
    return f"{row} is undeployed: {stopped} instances stop"


@transaction.atomic
def retire(model: Model, actor: User | str, reason: str) -> str:
    """Undeploy *model* everywhere and stop offering it; its history stays. Return a sentence for the operator."""
    row = Model.objects.select_for_update(no_key=True).get(pk=model.pk)
    if not row.active:
        raise ActionError(f"{row} is retired already")
    for deployment in row.deployments.filter(active=True).order_by("pk"):
        undeploy(deployment, actor, reason)
    row.active = model.active = False
    row.save(update_fields=["active"])
    record("model.retired", row, actor=actor, before={"active": True}, after={"active": False}, reason=reason)
    transaction.on_commit(notify)
    return f"{row} is retired: it is offered no more, and its history stays"


@transaction.atomic
def activate(row: Model | Deployment, actor: User | str, reason: str) -> str:
    """Set a retired model or an undeployed deployment active again, this with its model. Return a sentence for the operator.

    Nothing is started: the floor does that, or an operator.
    """
    rows: list[Model | Deployment] = [row.model, row] if isinstance(row, Deployment) else [row]
    in_use = [type(each).objects.select_for_update(no_key=True, of=("self",)).get(pk=each.pk).active for each in rows]
    resting = [each for each, active in zip(rows, in_use, strict=True) if not active]
    if not resting:
        raise ActionError(f"{row} is active already")
    for each in resting:
        each.active = True
        each.save(update_fields=["active"])
        kind = f"{each._meta.model_name}.activated"
        record(kind, each, actor=actor, before={"active": False}, after={"active": True}, reason=reason)
    transaction.on_commit(notify)
    return f"{' and '.join(map(str, resting))} {'is' if len(resting) == 1 else 'are'} active again"


def report_unreadable() -> None:
    """Record an event, once for each fault, of scheduled minimums that cannot be read; the others hold meanwhile."""
    for row in ScheduledMinimum.objects.filter(active=True):
        said = Event.objects.filter(kind=UNREADABLE, subject_type=row._meta.model_name, subject_id=row.pk)
        if (why := row.unreadable) and not said.filter(reason=why).exists():
            logger.warning("the scheduled minimum %s does not hold: %s", row, why)
            record(UNREADABLE, row, actor="gateway", reason=why, severity=Severity.WARNING)


def by_whom(actor: User | str, reason: str) -> str:
    """Return who holds or cordons something, and why, in words for pages."""
    name = actor if isinstance(actor, str) else actor.get_username()
    return f"{name}{f', {reason}' if reason else ''} ({timezone.now():%d %b %H:%M} UTC)"[:255]


def reclaim(instance: Instance, actor: User | str, reason: str) -> Instance:
    """Take a donated *instance* back for its own model (`spot.services`)."""
    from controlplane.fleet.spot.services import reclaim as act

    return act(instance, actor, reason)


ACTIONS = {
    Action.DRAIN: drain,
    Action.RESUME: resume,
    Action.START: start,
    Action.STOP: stop,
    Action.RESTART: restart,
    Action.SLEEP: sleep,
    Action.WAKE: wake,
    Action.RECLAIM: reclaim,
}


def act(action: Action, instance: Instance, actor: User | str, reason: str) -> str:
    """Carry out *action*. Return the result in one sentence.

    Raises ActionError with a sentence to show when the instance's state does not allow it.
    """
    outcome = ACTIONS[action](instance, actor, reason)
    if isinstance(outcome, InstanceCommand):
        if outcome.delivered is False:
            return f"{instance.name}: {action} is noted; the broker does not answer, so it begins when a worker is back"
        return f"{instance.name}: {action} is in progress"
    return f"{instance.name} is {instance.get_state_display().lower()}"


def open_command(instance: Instance) -> InstanceCommand | None:
    """Return the oldest pending or running command for *instance*."""
    return instance.commands.open().first()


def deliver(command: InstanceCommand) -> bool:
    """Notify the Celery workers of *command*; False, in under a second, if the broker does not answer.

    Where another host acts for its instance, the worker of that host's queue is notified.
    """
    instance = command.instance
    queue = hosts.queue_of(instance) if hosts.obstacle(instance) else ""
    command.delivered = send_task(RUN_COMMAND_TASK, command.pk, queue=queue)
    return command.delivered


def awake_in(swap_group: int) -> QuerySet[Instance]:
    """Instances of the group with that key that are awake: one at most."""
    return Instance.objects.filter(swap_group=swap_group, state__in=AWAKE)


def advance_swaps() -> bool:
    """Make the next move of swaps in progress immediately instead of at beat's next check. Never raises."""
    return send_task(TICK_TASK, "advance-swaps", expires_s=SWAPS_EXPIRE_S)


def notify() -> bool:
    """Make the gateways read the inventory immediately, not within a second. Never raises."""
    try:
        with impatient_redis() as client:
            client.publish(INVENTORY_CHANNEL, "inventory")
    except (redis.RedisError, OSError) as error:
        logger.debug("notification not sent: %s", error)
        return False
    return True


def _lock(instance: Instance, action: Action) -> Instance:
    row = Instance.objects.select_for_update().get(pk=instance.pk)
    check_action(row.name, action, row.state)
    return row


def _check_may_start(row: Instance, actor: User | str) -> None:
    """Raise ActionError where *actor* may not start *row*."""
    why = places.cordon_of(row) if isinstance(actor, User) else places.obstacle(row)
    if why:
        raise ActionError(f"{row.name} cannot start: {why}")


def _check_gpus_are_free(instance: Instance) -> None:
    """Lock its swap group. Raise ActionError if another member has the shared GPUs or is about to."""
    if instance.swap_group_id is None:
        return
    SwapGroup.objects.select_for_update().get(pk=instance.swap_group_id)
    to_come = InstanceCommand.objects.open().filter(verb__in=(CommandVerb.START, CommandVerb.WAKE))
    others = Instance.objects.filter(Q(state__in=AWAKE) | Q(commands__in=to_come), swap_group=instance.swap_group_id)
    other = others.exclude(pk=instance.pk).first()
    if other is not None:
        raise ActionError(
            f"{instance.name} shares its GPUs with {other.name}, which is {other.state}: swap to {instance.name}"
        )


def _moved(instance: Instance, row: Instance) -> Instance:
    """Refresh the caller's *instance* from the database."""
    for name in (
        "state",
        "state_reason",
        "state_changed_at",
        "failures",
        "held",
        "restart",
        "url",
        "process_id",
        "kv_capacity_tokens",
    ):
        setattr(instance, name, getattr(row, name))
    return row


def _withdraw(command: InstanceCommand, why: str) -> None:
    """Withdraw *command* unless a worker has begun it. Its instance is locked."""
    InstanceCommand.objects.filter(pk=command.pk, state=CommandState.PENDING).update(
        state=CommandState.FAILED, error=why, finished_at=timezone.now()
    )


def _command(
    instance: Instance, verb: CommandVerb, actor: User | str, reason: str, sleep_level: int = 1
) -> InstanceCommand:
    """Return the open command *verb* for *instance*, or a new one, delivered on commit."""
    for other in instance.commands.open():
        if other.verb == verb:
            transaction.on_commit(partial(deliver, other))
            return other
        if other.state == CommandState.PENDING and other.verb in _SUPERSEDES.get(verb, ()):
            _withdraw(other, f"superseded by {verb}")
        elif verb != CommandVerb.STOP:
            raise ActionError(f"{instance.name}: a {other.verb} is {other.state}; {verb} has to wait for it")
    command = InstanceCommand.objects.create(
        instance=instance,
        verb=verb,
        sleep_level=sleep_level,
        actor=actor.get_username() if isinstance(actor, User) else actor,
        reason=reason[:255],
    )
    record(
        f"instance.{verb}_requested",
        instance,
        actor=actor,
        before={"state": instance.state},
        after={"command": command.pk},
        reason=reason,
    )
    transaction.on_commit(notify)
    transaction.on_commit(partial(deliver, command))
    return command
