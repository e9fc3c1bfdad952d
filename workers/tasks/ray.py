"""The Ray cluster: its machines as nodes, and the servers that it keeps, watched by a worker with a RAY_ADDRESS."""

import asyncio
import functools
import logging

from django.conf import settings
from django.utils import timezone

from controlplane.fleet.lifecycle import engine_logs, hosts, ray_nodes
from controlplane.fleet.lifecycle.states import ALIVE, ActionError, InstanceState
from controlplane.fleet.models import Instance, Launcher, Node
from controlplane.fleet.services import move, notify, open_command
from controlplane.jobs.broker import send_task
from workers.celery import app
from workers.ray.launcher import UNKNOWN, RayLauncher, State, machines
from workers.tasks import fleet
from workers.vllm.launcher import LaunchError

logger = logging.getLogger(__name__)
ENDED = (InstanceState.FAILED, InstanceState.STOPPED)


@app.task(autoretry_for=(LaunchError,), max_retries=None, default_retry_delay=10)
def join_ray() -> None:
    """Report the machines of the cluster until one is a node, as a worker on the queue of Ray has begun to listen."""
    if not settings.RAY_ADDRESS:
        logger.warning("this worker listens on the queue %s, and has no RAY_ADDRESS", hosts.RAY)
        return
    watch_ray(forward=False)
    if not Node.objects.exclude(ray={}).exists():
        raise LaunchError("no machine of the cluster is a node yet")


def watch_ray(forward: bool = True) -> int:
    """Report the machines, fail instances whose server Ray has lost, and end what is left of those that failed.

    A worker without a RAY_ADDRESS asks those on the queue `ray`, with *forward*. Return how many instances were failed.
    """
    rows = Instance.objects.filter(launcher=Launcher.RAY)
    if not settings.RAY_ADDRESS:
        if forward and (rows.exists() or Node.objects.exclude(ray={}).exists()):
            send_task(fleet.WATCH_TASK, ["watch-ray"], queue=hosts.RAY, expires_s=fleet.FORWARD_EXPIRES_S)
        return 0
    launcher = RayLauncher(settings.RAY_ADDRESS)
    try:
        problems = ray_nodes.report(machines(settings.RAY_ADDRESS))
        states = launcher.states()
    except LaunchError as error:
        if not ray_nodes.note_error(str(error)):
            raise
        return 0
    failed = 0
    for instance in rows.select_related(
        "deployment__model", "node"
    ):  # read after `states`: a start writes its row first
        state = states.get(instance.name, UNKNOWN)
        try:
            if _is_gone(instance, state):
                _fail(instance, launcher, state)
                failed += 1
                _end(instance, launcher, state)  # what is left of it must not answer heartbeats again
            elif instance.state == InstanceState.LOADING:
                engine_logs.note_phase(instance, launcher.text(instance.name))
            elif instance.state in ENDED and instance.name in states and open_command(instance) is None:
                _end(instance, launcher, state)
        except (ActionError, LaunchError) as error:  # it was moved in the meantime, or its machine is silent
            logger.info("%s: %s", instance.name, error)
    if failed:
        notify()
    if problems and forward:
        raise LaunchError("; ".join(problems))
    _warn("; ".join(problems))
    return failed


@functools.lru_cache(maxsize=1)
def _warn(problems: str) -> None:
    """Log *problems*, once for as long as they are the same."""
    if problems:
        logger.warning("not nodes: %s", problems)


def _is_gone(instance: Instance, state: State) -> bool:
    """Return whether *instance* should have a server and has none. One that Ray does not know, since its head has lost its
    tables, serves on until its raylet ends: heartbeats see that.
    """
    if instance.state not in ALIVE or not state.ended or open_command(instance) is not None:
        return False
    return state != UNKNOWN or instance.state == InstanceState.LOADING


def _fail(instance: Instance, launcher: RayLauncher, state: State) -> None:
    error = launcher.log(instance.name, 0)[2]
    reason = ": ".join(filter(None, ["its server is gone", state.ended, error]))
    move(instance, InstanceState.FAILED, actor=fleet.ACTOR, reason=reason)


def _end(instance: Instance, launcher: RayLauncher, state: State) -> None:
    """End what Ray keeps of the failed or stopped *instance*; a server that runs may only hang, and gets its time."""
    hangs = not state.ended
    if hangs and (timezone.now() - instance.state_changed_at).total_seconds() < fleet.HUNG_S:
        return
    asyncio.run(launcher.stop(instance.name, grace_s=0.0))
    Instance.objects.filter(pk=instance.pk).update(process_id=None)
