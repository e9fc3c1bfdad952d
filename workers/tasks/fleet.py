"""Tasks that carry out instance commands: the only place where servers are started, stopped, put to sleep and woken.

A command is claimed by one update of its row, so that a message delivered twice does nothing the second time; commands
of one instance run one after another, oldest first. `run_pending_commands` (beat) delivers commands whose message was
lost or whose worker died.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet import places
from controlplane.fleet.lifecycle import engine_logs, gpu_health, hosts
from controlplane.fleet.lifecycle.launching import start_spec
from controlplane.fleet.lifecycle.states import ActionError, InstanceState, check_move
from controlplane.fleet.models import CommandState, CommandVerb, Instance, InstanceCommand, Launcher
from controlplane.fleet.rollouts import revisions
from controlplane.fleet.services import advance_swaps, deliver, free_for_taker, move, notify
from controlplane.jobs.broker import send_task
from workers.celery import app
from workers.ray.launcher import RayLauncher, unreachable
from workers.vllm import engine_log, gpu_faults, hardware, processes
from workers.vllm.client import VllmClient, VllmError
from workers.vllm.launcher import EmulatedLauncher, Launched, LaunchError, ProcessLauncher
from workers.vllm.launcher import Launcher as ServerLauncher

logger = logging.getLogger(__name__)

STOP_GRACE_S = 10.0  # of the API server; what follows it has its own (workers.vllm.processes)
SLEEP_WAIT_S = 120.0  # vLLM answers /sleep?mode=wait when the last running request is done
WAKE_WAIT_S = 60.0
DISCARDED = 2  # vLLM's sleep level that keeps no weights
SLEEP_PROOF_S = 10.0  # for is_sleeping to say the same
DRAIN_POLL_S = 0.05
EMULATOR_PATIENCE_S = 15.0  # `manage.py up` starts worker and emulator side by side
COMMAND_LIMIT_S = 180
STALE_AFTER = timedelta(seconds=COMMAND_LIMIT_S + 60)
REDELIVER_AFTER = timedelta(seconds=5)
HUNG_S = 15.0
FORWARD_EXPIRES_S = 5.0
WATCH_TASK = "workers.tasks.tick.watch_host"
ACTOR = "fleet worker"


@app.task(soft_time_limit=COMMAND_LIMIT_S, time_limit=COMMAND_LIMIT_S + 20)
def run_command(command_id: int) -> None:
    """Carry out one InstanceCommand, if it is pending and first in its instance's line.

    One that belongs to another host is left pending with the reason, and passed on to that host's queue.
    """
    rows = InstanceCommand.objects.select_related("instance__node").filter(state=CommandState.PENDING)
    pending = rows.filter(pk=command_id).first()
    if pending is None:
        return
    if waits_for_gpus(pending):
        return  # delivered again when they are free
    if why := hosts.obstacle(pending.instance) or head_away(pending.instance):
        _pass_on(pending, why)
        return
    command = claim(command_id)
    if command is None:
        return
    instance = command.instance
    try:
        VERBS[CommandVerb(command.verb)](instance, command)
    except (LaunchError, VllmError, ActionError) as error:
        if why := head_away(instance):  # it went while the command ran
            InstanceCommand.objects.filter(pk=command.pk).update(state=CommandState.PENDING, started_at=None)
            _pass_on(command, why)
            return
        _fail(command, str(error))
    except Exception as error:
        logger.exception("command %s: %s %s", command.pk, command.verb, instance.name)
        _fail(command, f"unexpected {type(error).__name__}: {error}")
    else:
        _close(command, CommandState.DONE)
    notify()
    next_command = instance.commands.filter(state=CommandState.PENDING).order_by("pk").first()
    if next_command is not None:
        deliver(next_command)


def run_pending_commands() -> int:
    """Deliver pending commands again, and give back those whose worker died. Return how many were delivered.

    A failed instance whose GPUs another waits for is stopped, unless that was tried within `STALE_AFTER`.
    """
    now = timezone.now()
    tried = InstanceCommand.objects.filter(verb=CommandVerb.STOP, created_at__gte=now - STALE_AFTER)
    failed = Instance.objects.filter(state=InstanceState.FAILED, taken_over_by__isnull=False)
    for donor in failed.exclude(pk__in=tried.values("instance")):
        try:
            free_for_taker(donor)
        except ActionError as error:
            logger.warning("%s failed, and its GPUs cannot be given away: %s", donor.name, error)
    InstanceCommand.objects.filter(state=CommandState.RUNNING, started_at__lt=now - STALE_AFTER).update(
        state=CommandState.PENDING, started_at=None
    )
    pending = InstanceCommand.objects.filter(state=CommandState.PENDING, created_at__lt=now - REDELIVER_AFTER)
    return sum(deliver(command) for command in pending.select_related("instance__node").order_by("pk"))


def watch_loading(forward: bool = True) -> int:
    """Fail instances whose server ended while loading: silence is normal then, so heartbeats do not show it.

    This host checks the servers that it started; with *forward*, the workers of other hosts are sent the same task.
    Return how many were failed.
    """
    failed = 0
    loading = Instance.objects.launched().filter(state=InstanceState.LOADING).exclude(launcher=Launcher.RAY)
    for instance in _of_this_host(loading.select_related("deployment__model", "node"), "watch-loading", forward):
        launcher = launcher_for(instance)
        if asyncio.run(launcher.alive(instance.name)):
            engine_logs.note_phase(instance)
            continue
        reason, how = "the server ended while loading", ""
        if isinstance(launcher, ProcessLauncher):
            if how := launcher.how_it_ended(instance.name):
                reason += f": {how}"
            reason += f"; its log is {launcher.log_file(instance.name)}"
        try:
            move(instance, InstanceState.FAILED, actor=ACTOR, reason=reason)
        except ActionError:
            continue  # it was moved in the meantime
        _judge_gpus(instance, launcher, how)
        failed += 1
    if failed:
        notify()
    return failed


def end_failed(forward: bool = True) -> int:
    """End the remaining processes of servers whose instances failed or stopped: an engine holds its GPU until it is
    gone.

    A server whose API process still lives may only hang, and gets `HUNG_S` to answer again. Return how many were ended.
    """
    ended = 0
    rows = Instance.objects.filter(launcher=Launcher.PROCESS, state__in=[InstanceState.FAILED, InstanceState.STOPPED])
    for instance in _of_this_host(rows.select_related("node"), "end-failed", forward):
        launcher = launcher_for(instance)
        if not isinstance(launcher, ProcessLauncher) or (seen := launcher.record(instance.name)) is None:
            continue
        # Read again: the record names the start, and a start writes its row's state before it.
        instance.refresh_from_db(fields=["state", "state_changed_at", "gpus"])
        if instance.state not in (InstanceState.FAILED, InstanceState.STOPPED):
            continue
        hangs = asyncio.run(launcher.alive(instance.name))
        if hangs and (timezone.now() - instance.state_changed_at).total_seconds() < HUNG_S:
            continue
        how = launcher.how_it_ended(instance.name)
        _judge_gpus(instance, launcher, how)
        if asyncio.run(launcher.end_failed(instance.name, seen)):
            _say_ended(instance, how, "what was left of it is ended")
            ended += 1
        if instance.host and not places.keeps(instance) and launcher.is_gone(instance.name):
            Instance.objects.filter(pk=instance.pk).update(host="")  # it may start elsewhere
    return ended


def _judge_gpus(instance: Instance, launcher: ServerLauncher, how: str) -> None:
    """Judge the GPUs of the failed *instance* by the last words of its server, which ended as *how* says."""
    if instance.gpus and instance.node and isinstance(launcher, ProcessLauncher):
        addresses, record = gpu_health.addresses(instance.node), launcher.record(instance.name)
        log = engine_log.tail(launcher.log_file(instance.name))
        if addresses and record is not None:  # what the driver has said since its start counts as its words
            log += gpu_faults.about(hardware.driver_messages(processes.started_s(record)), instance.gpus, addresses)
        gpu_health.judge(instance, gpu_faults.judge(log, instance.gpus, addresses, how))


FORWARDED = {"watch-loading": watch_loading, "end-failed": end_failed}
"""Work of the host that started a server, by the names of their jobs."""


def _say_ended(instance: Instance, how: str, then: str) -> None:
    """Record how the server of *instance* ended, and what was done *then* about the processes that it left."""
    Instance.objects.filter(pk=instance.pk).update(process_id=None)
    reason = (
        f"its server on {settings.HOST} was {how}" if how.startswith("killed") else f"its server {how}" if how else ""
    )
    record("instance.ended", instance, actor=ACTOR, reason="; ".join(filter(None, [reason, then])))


def _of_this_host(rows: QuerySet[Instance], step: str, forward: bool) -> Iterator[Instance]:
    """Yield those of *rows* for which this host acts; with *forward*, send *step* to the hosts of the others."""
    others = set()
    for instance in rows:
        if not hosts.obstacle(instance):
            yield instance
        elif forward:
            others.add(hosts.queue_of(instance))
    for queue in sorted(others):
        send_task(WATCH_TASK, [step], queue=queue, expires_s=FORWARD_EXPIRES_S)


@transaction.atomic
def claim(command_id: int) -> InstanceCommand | None:
    """Return the command, marked as running, if it is pending and no older command of its instance is open."""
    rows = InstanceCommand.objects.select_related("instance__deployment__model", "instance__deployment__gpu_type")
    command = rows.select_related("instance__node").filter(pk=command_id, state=CommandState.PENDING).first()
    if command is None:
        return None
    Instance.objects.select_for_update().get(pk=command.instance_id)
    if InstanceCommand.objects.open().filter(instance=command.instance_id, pk__lt=command.pk).exists():
        return None
    command.started_at = timezone.now()
    claimed = InstanceCommand.objects.filter(pk=command.pk, state=CommandState.PENDING).update(
        state=CommandState.RUNNING, started_at=command.started_at
    )
    command.instance.refresh_from_db()
    return command if claimed else None


def head_away(instance: Instance) -> str:
    """Return why the head of Ray's cluster cannot be asked, where *instance* needs it: its commands wait; else ""."""
    return unreachable(settings.RAY_ADDRESS) if instance.launcher == Launcher.RAY else ""


def waits_for_gpus(command: InstanceCommand) -> bool:
    """Whether *command* starts an instance on the GPUs of a donated one that has not stopped yet."""
    donated = command.instance.takes_over
    return command.verb == CommandVerb.START and donated is not None and donated.state != InstanceState.STOPPED


def launcher_for(instance: Instance) -> ServerLauncher:
    """Return the launcher of *instance*. Raises LaunchError for one that is started elsewhere."""
    match instance.launcher:
        case Launcher.EMULATED:
            return EmulatedLauncher(f"http://127.0.0.1:{settings.EMULATOR_PORT}")
        case Launcher.PROCESS:
            return ProcessLauncher(settings.VLLM_PYTHON, settings.STATE_DIR / "instances")
        case Launcher.RAY:
            return RayLauncher(settings.RAY_ADDRESS)
        case _:
            raise LaunchError(f"{instance.name} is started elsewhere: Pilothouse cannot start or stop it")


def _start(instance: Instance, command: InstanceCommand) -> None:
    """Move the instance from provisioning to loading. The gateway makes it ready when it answers."""
    if instance.state != InstanceState.PROVISIONING:
        return  # an earlier delivery of this command got that far
    launcher = launcher_for(instance)
    if isinstance(launcher, ProcessLauncher):
        how = launcher.how_it_ended(instance.name)
        _judge_gpus(instance, launcher, how)  # if nobody has, the next start overwrites its log
        if how:
            _say_ended(instance, how, "what is left of it is ended before the next start")
    spec = start_spec(instance)

    async def start() -> Launched:
        deadline = time.monotonic() + (EMULATOR_PATIENCE_S if instance.launcher == Launcher.EMULATED else 0.0)
        while True:
            try:
                # Whatever of this name still runs (an instance failed because it hung) makes way for a fresh one.
                await launcher.stop(spec.name, grace_s=0.0)
                return await launcher.start(spec)
            except LaunchError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(1.0)

    launched = asyncio.run(start())
    with transaction.atomic():
        row = Instance.objects.select_for_update().get(pk=instance.pk)
        check_move(row.name, row.state, InstanceState.LOADING)
        row.url, row.process_id, row.gpus = launched.url, launched.process_id, list(launched.gpus)
        row.host = settings.HOST if row.launcher == Launcher.PROCESS else ""
        row.launched_with, row.api_key = revisions.launched_with(instance.deployment, spec), spec.api_key
        row.save(update_fields=["url", "process_id", "host", "gpus", "launched_with", "api_key", "changed_at"])
        inputs = {"url": launched.url, "command": command.pk}
        move(row, InstanceState.LOADING, actor=ACTOR, reason=command.reason, inputs=inputs)


def _stop(instance: Instance, command: InstanceCommand) -> None:
    if instance.state == InstanceState.STOPPED:
        return
    asyncio.run(launcher_for(instance).stop(instance.name, grace_s=STOP_GRACE_S))
    with transaction.atomic():
        Instance.objects.filter(pk=instance.pk).update(process_id=None, host="", gpus=[])
        move(instance, InstanceState.STOPPED, actor=ACTOR, reason=command.reason, inputs={"command": command.pk})


def _sleep(instance: Instance, command: InstanceCommand) -> None:
    """Move the instance from draining to sleeping, when the last running request is done."""
    if instance.state == InstanceState.SLEEPING:
        return
    check_move(instance.name, instance.state, InstanceState.SLEEPING)

    server = _client(instance, SLEEP_WAIT_S)

    async def sleep() -> datetime:
        async with server as client:
            await _until_idle(client)
            drained_at = timezone.now()
            await client.sleep(level=command.sleep_level, mode="wait")
            await _until_sleeping(client, True)
        return drained_at

    command.drained_at = asyncio.run(sleep())
    with transaction.atomic():
        command.save(update_fields=["drained_at"])
        Instance.objects.filter(pk=instance.pk).update(sleep_level=command.sleep_level)
        move(
            instance,
            InstanceState.SLEEPING,
            actor=ACTOR,
            reason=command.reason,
            inputs={"command": command.pk, "level": command.sleep_level},
        )


def _client(instance: Instance, timeout_s: float) -> VllmClient:
    return VllmClient(instance.url, api_key=instance.token, timeout_s=timeout_s)


async def _until_idle(client: VllmClient) -> None:
    """Wait until nothing runs or waits on the server. The sleep itself waits for requests that come later."""
    deadline = time.monotonic() + SLEEP_WAIT_S
    while (seen := await client.metrics()).running or seen.waiting:
        if time.monotonic() > deadline:
            raise VllmError(f"{client.url} still runs {seen.running} requests ({SLEEP_WAIT_S:g} s)")
        await asyncio.sleep(DRAIN_POLL_S)


async def _until_sleeping(client: VllmClient, wanted: bool) -> None:
    """Wait until the server itself reports the state; the answer to the call is no proof. Raises VllmError."""
    deadline = time.monotonic() + SLEEP_PROOF_S
    while await client.is_sleeping() != wanted:
        if time.monotonic() > deadline:
            raise VllmError(
                f"{client.url} says that it is {'awake' if wanted else 'still asleep'} ({SLEEP_PROOF_S:g} s)"
            )
        await asyncio.sleep(0.2)


def _wake(instance: Instance, command: InstanceCommand) -> None:
    """Move the instance from sleeping to loading. The gateway makes it ready when it answers."""
    if instance.state != InstanceState.SLEEPING:
        return

    server = _client(instance, WAKE_WAIT_S)

    async def wake() -> None:
        async with server as client:
            if instance.sleep_level == DISCARDED:  # vLLM's order: room for the weights, the weights, room for the cache
                await client.wake_up(["weights"])
                await client.reload_weights()
                await client.wake_up(["kv_cache"])
                await client.reset_prefix_cache()
            else:
                await client.wake_up()
            await _until_sleeping(client, False)

    asyncio.run(wake())
    with transaction.atomic():
        Instance.objects.filter(pk=instance.pk).update(sleep_level=None)
        move(instance, InstanceState.LOADING, actor=ACTOR, reason=command.reason, inputs={"command": command.pk})


VERBS: dict[CommandVerb, Callable[[Instance, InstanceCommand], None]] = {
    CommandVerb.START: _start,
    CommandVerb.STOP: _stop,
    CommandVerb.SLEEP: _sleep,
    CommandVerb.WAKE: _wake,
}


def _pass_on(command: InstanceCommand, why: str) -> None:
    """Leave *command* to its host: note that on its row and once as an event, and notify that host.

    Only `run_pending_commands` delivers it again: a worker that listens on another host's queue must not spin.
    """
    if command.error == why:
        return
    InstanceCommand.objects.filter(pk=command.pk, state=CommandState.PENDING).update(error=why)
    record(
        f"instance.{command.verb}_passed_on",
        command.instance,
        actor=ACTOR,
        after={"command": command.pk, "queue": hosts.queue_of(command.instance)},
        reason=why,
    )
    deliver(command)


def _close(command: InstanceCommand, state: CommandState, error: str = "") -> None:
    command.state, command.error, command.finished_at = state, error, timezone.now()
    command.save(update_fields=["state", "error", "finished_at"])


@transaction.atomic
def _fail(command: InstanceCommand, error: str) -> None:
    """Fail *command* with *error*. A failed start also fails its instance; other verbs leave it as it is."""
    logger.warning("%s %s: %s", command.verb, command.instance.name, error)
    _close(command, CommandState.FAILED, error)
    if command.verb == CommandVerb.START:
        try:
            move(command.instance, InstanceState.FAILED, actor=ACTOR, reason=error, inputs={"command": command.pk})
        except ActionError:
            pass  # stopped in the meantime
        else:
            return
    record(
        f"instance.{command.verb}_failed",
        command.instance,
        actor=ACTOR,
        after={"command": command.pk},
        reason=error,
        severity=Severity.WARNING,
    )
    if command.instance.swap_group_id is not None:
        transaction.on_commit(advance_swaps)
