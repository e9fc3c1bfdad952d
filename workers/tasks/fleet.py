"""Carrying out instance commands: the only place where servers are started, stopped, put to sleep and woken.

A command is claimed by one update of its row, so that a message delivered twice does nothing the second time; commands
of one instance run one after another, oldest first. `run_pending_commands` (beat) takes up what a message never
reached, and what a worker that died had claimed.
"""

import asyncio
import logging
import shlex
import time
from collections.abc import Callable
from datetime import timedelta

from celery import shared_task
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from controlplane.events.models import Severity
from controlplane.events.services import record
from controlplane.fleet.models import CommandState, CommandVerb, Deployment, Instance, InstanceCommand, Launcher
from controlplane.fleet.services import deliver, move, nudge
from controlplane.fleet.states import ActionError, InstanceState, check_move
from workers.vllm.client import VllmClient, VllmError
from workers.vllm.launcher import EmulatedLauncher, LaunchError, LaunchSpec, ProcessLauncher
from workers.vllm.launcher import Launcher as ServerLauncher

logger = logging.getLogger(__name__)

STOP_GRACE_S = 10.0
SLEEP_WAIT_S = 120.0  # vLLM answers /sleep?mode=wait when the last running request is done
WAKE_WAIT_S = 60.0
EMULATOR_PATIENCE_S = 15.0  # `manage.py up` starts worker and emulator side by side
EMULATED_STARTUP_S = 2.0  # short on purpose: enough to see an instance load
BLOCK_SIZE_TOKENS = 16  # vLLM's default on GPUs
COMMAND_LIMIT_S = 180
STALE_AFTER = timedelta(seconds=COMMAND_LIMIT_S + 60)
REDELIVER_AFTER = timedelta(seconds=5)
ACTOR = "fleet worker"


@shared_task(soft_time_limit=COMMAND_LIMIT_S, time_limit=COMMAND_LIMIT_S + 20)
def run_command(command_id: int) -> None:
    """Carry out one InstanceCommand. Does nothing unless it is pending and first in its instance's line."""
    command = claim(command_id)
    if command is None:
        return
    instance = command.instance
    try:
        VERBS[CommandVerb(command.verb)](instance, command)
    except (LaunchError, VllmError, ActionError) as error:
        _fail(command, str(error))
    except Exception as error:
        logger.exception("command %s: %s %s", command.pk, command.verb, instance.name)
        _fail(command, f"unexpected {type(error).__name__}: {error}")
    else:
        _close(command, CommandState.DONE)
    nudge()
    next_command = instance.commands.filter(state=CommandState.PENDING).order_by("pk").first()
    if next_command is not None:
        deliver(next_command)


@shared_task
def run_pending_commands() -> int:
    """Deliver pending commands again, and give back those whose worker died. Returns how many were delivered."""
    now = timezone.now()
    InstanceCommand.objects.filter(state=CommandState.RUNNING, started_at__lt=now - STALE_AFTER).update(
        state=CommandState.PENDING, started_at=None
    )
    pending = InstanceCommand.objects.filter(state=CommandState.PENDING, created_at__lt=now - REDELIVER_AFTER)
    return sum(deliver(command) for command in pending.order_by("pk"))


@shared_task
def watch_loading() -> int:
    """Fail instances whose server ended while loading: silence is normal then, so heartbeats cannot tell.

    Returns how many were failed.
    """
    failed = 0
    loading = Instance.objects.filter(state=InstanceState.LOADING).exclude(launcher=Launcher.EXTERNAL)
    for instance in loading.select_related("deployment__model"):
        launcher = launcher_for(instance)
        if asyncio.run(launcher.alive(instance.name)):
            continue
        reason = "the server ended while loading"
        if isinstance(launcher, ProcessLauncher):
            reason += f"; its log is {launcher.log_file(instance.name)}"
        try:
            move(instance, InstanceState.FAILED, actor=ACTOR, reason=reason)
        except ActionError:
            continue  # it was moved in the meantime
        failed += 1
    if failed:
        nudge()
    return failed


@transaction.atomic
def claim(command_id: int) -> InstanceCommand | None:
    """The command, marked as running, if it is pending and no older command of its instance is open."""
    rows = InstanceCommand.objects.select_related("instance__deployment__model", "instance__deployment__gpu_type")
    command = rows.select_related("instance__node").filter(pk=command_id, state=CommandState.PENDING).first()
    if command is None:
        return None
    Instance.objects.select_for_update().get(pk=command.instance_id)
    open_states = [CommandState.PENDING, CommandState.RUNNING]
    older = InstanceCommand.objects.filter(instance=command.instance_id, state__in=open_states, pk__lt=command.pk)
    if older.exists():
        return None
    command.started_at = timezone.now()
    claimed = InstanceCommand.objects.filter(pk=command.pk, state=CommandState.PENDING).update(
        state=CommandState.RUNNING, started_at=command.started_at
    )
    command.instance.refresh_from_db()
    return command if claimed else None


def launcher_for(instance: Instance) -> ServerLauncher:
    """Who starts and stops *instance*. Raises LaunchError for one that is started elsewhere."""
    match instance.launcher:
        case Launcher.EMULATED:
            return EmulatedLauncher(f"http://127.0.0.1:{settings.EMULATOR_PORT}")
        case Launcher.PROCESS:
            return ProcessLauncher(settings.VLLM_PYTHON, settings.STATE_DIR / "instances")
        case _:
            raise LaunchError(f"{instance.name} is started elsewhere: Pilothouse cannot start or stop it")


def launch_spec(instance: Instance) -> LaunchSpec:
    """What to start for *instance*, from its deployment's row and, if emulated, the profile measured for it.

    Raises LaunchError when an emulated instance has no profile or its KV cache would be empty.
    """
    deployment: Deployment = instance.deployment
    common = {
        "name": instance.name,
        "model": deployment.model.name,
        "max_num_seqs": deployment.max_num_seqs,
        "max_num_batched_tokens": deployment.max_num_batched_tokens,
        "max_model_len": deployment.model.context_tokens,
        "scheduling_policy": deployment.scheduling_policy,
    }
    if instance.launcher == Launcher.PROCESS:
        return LaunchSpec(
            **common,
            source=deployment.model.source,
            host=instance.node.address if instance.node else "127.0.0.1",
            tensor_parallel=deployment.tensor_parallel,
            gpus=instance.node.gpu_count if instance.node else 0,
            gpu_memory_utilization=deployment.gpu_memory_utilization,
            extra_args=tuple(shlex.split(deployment.vllm_args)),
        )
    row = deployment.profile()
    if row is None:
        raise LaunchError(
            f"there is no performance profile for {deployment}, tensor parallel {deployment.tensor_parallel}"
        )
    kv_blocks = deployment.expected_kv_tokens // BLOCK_SIZE_TOKENS
    if kv_blocks < 1:
        raise LaunchError(f"the weights of {deployment.model} leave no room for a KV cache on {deployment.gpu_type}")
    return LaunchSpec(
        **common,
        profile=row.coefficients(),
        block_size_tokens=BLOCK_SIZE_TOKENS,
        kv_blocks=kv_blocks,
        startup_s=EMULATED_STARTUP_S,
    )


def _start(instance: Instance, command: InstanceCommand) -> None:
    """Provisioning -> loading. The gateway makes it ready when it answers."""
    if instance.state != InstanceState.PROVISIONING:
        return  # an earlier delivery of this command got that far
    launcher, spec = launcher_for(instance), launch_spec(instance)

    async def start() -> tuple[str, int | None]:
        deadline = time.monotonic() + (EMULATOR_PATIENCE_S if instance.launcher == Launcher.EMULATED else 0.0)
        while True:
            try:
                # Whatever of this name still runs (an instance failed because it hung) makes way for a fresh one.
                await launcher.stop(spec.name, grace_s=0.0)
                launched = await launcher.start(spec)
            except LaunchError:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(1.0)
            else:
                return launched.url, launched.process_id

    url, process_id = asyncio.run(start())
    with transaction.atomic():
        row = Instance.objects.select_for_update().get(pk=instance.pk)
        check_move(row.name, row.state, InstanceState.LOADING)
        row.url, row.process_id = url, process_id
        row.save(update_fields=["url", "process_id", "changed_at"])
        move(row, InstanceState.LOADING, actor=ACTOR, reason=command.reason, inputs={"url": url, "command": command.pk})


def _stop(instance: Instance, command: InstanceCommand) -> None:
    if instance.state == InstanceState.STOPPED:
        return
    asyncio.run(launcher_for(instance).stop(instance.name, grace_s=STOP_GRACE_S))
    with transaction.atomic():
        Instance.objects.filter(pk=instance.pk).update(process_id=None)
        move(instance, InstanceState.STOPPED, actor=ACTOR, reason=command.reason, inputs={"command": command.pk})


def _sleep(instance: Instance, command: InstanceCommand) -> None:
    """Draining -> sleeping, when the last running request is done."""
    if instance.state == InstanceState.SLEEPING:
        return
    check_move(instance.name, instance.state, InstanceState.SLEEPING)

    async def sleep() -> None:
        async with VllmClient(instance.url, timeout_s=SLEEP_WAIT_S) as client:
            await client.sleep(level=1, mode="wait")

    asyncio.run(sleep())
    move(instance, InstanceState.SLEEPING, actor=ACTOR, reason=command.reason, inputs={"command": command.pk})


def _wake(instance: Instance, command: InstanceCommand) -> None:
    """Sleeping -> loading. The gateway makes it ready when it answers."""
    if instance.state != InstanceState.SLEEPING:
        return

    async def wake() -> None:
        async with VllmClient(instance.url, timeout_s=WAKE_WAIT_S) as client:
            await client.wake_up()

    asyncio.run(wake())
    move(instance, InstanceState.LOADING, actor=ACTOR, reason=command.reason, inputs={"command": command.pk})


VERBS: dict[CommandVerb, Callable[[Instance, InstanceCommand], None]] = {
    CommandVerb.START: _start,
    CommandVerb.STOP: _stop,
    CommandVerb.SLEEP: _sleep,
    CommandVerb.WAKE: _wake,
}


def _close(command: InstanceCommand, state: CommandState, error: str = "") -> None:
    command.state, command.error, command.finished_at = state, error, timezone.now()
    command.save(update_fields=["state", "error", "finished_at"])


@transaction.atomic
def _fail(command: InstanceCommand, error: str) -> None:
    """The command failed with *error*. A start that failed also fails its instance; other verbs leave it as it is."""
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
