"""Logs of servers started as processes: on the machine whose worker started the server, and read from any other.

Another machine asks the agent of the instance's node, which answers by a Redis list; without an answer, the log says so.
For what Ray started, a worker that is connected to Ray is asked.
"""

import uuid
from pathlib import Path

import msgspec
import redis
from django.conf import settings

from controlplane.fleet.lifecycle import hosts
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Instance, Launcher
from controlplane.fleet.models.instances import OF_VLLM
from controlplane.jobs.broker import send_task
from workers.ray.launcher import RayLauncher
from workers.vllm import engine_log
from workers.vllm.launcher import LaunchError

SEND_TASK = "workers.tasks.nodes.send_log"
ANSWER_S = 2.0
KEPT_S = 30


class Log(msgspec.Struct, frozen=True):
    """The end of a log, oldest line first; *error* is what ended the server, or why the log cannot be read."""

    file: str = ""
    lines: list[str] = []
    error: str = ""
    host: str = ""
    """Where it is; empty for here."""


def path_of(instance: Instance) -> Path | None:
    """Return the path of the log, existing or not; None for a server that was not started as a process of its node."""
    if instance.launcher != Launcher.PROCESS:
        return None
    return settings.STATE_DIR / "instances" / f"{instance.name}.log"


def read(instance: Instance, count: int) -> Log:
    """Return the last *count* lines of its log, in two seconds at most; an empty log for one that has none."""
    if instance.launcher not in OF_VLLM:
        return Log()
    queue, host, agent = hosts.queue_of(instance), instance.host or (instance.node.host if instance.node else ""), ""
    if instance.launcher == Launcher.RAY:
        queue, host = "" if settings.RAY_ADDRESS else queue, str(instance.node or "")
        agent = "worker that is connected to Ray"
    elif host in ("", settings.HOST):
        return _read_here(instance, count)
    reply, silent = f"pilothouse:log:{uuid.uuid4().hex}", f"The {agent or f'agent on {host}'} does not answer."
    if not send_task(SEND_TASK, instance.name, count, reply, queue=queue, expires_s=ANSWER_S):
        return Log(error=silent, host=host)
    try:
        with redis.Redis.from_url(settings.REDIS_URL, socket_timeout=ANSWER_S + 1) as client:
            answer = client.blpop([reply], timeout=ANSWER_S)
    except (redis.RedisError, OSError):
        answer = None
    if answer is None:
        return Log(error=silent, host=host)
    return msgspec.structs.replace(msgspec.json.decode(answer[1], type=Log), host=host)


def send(instance: Instance, count: int, reply: str) -> None:
    """Answer `read` elsewhere with the log that is here, or that Ray reads."""
    with redis.Redis.from_url(settings.REDIS_URL, socket_timeout=ANSWER_S) as client:
        by_ray = instance.launcher == Launcher.RAY
        log = _read_by_ray(instance, count) if by_ray else _read_here(instance, count)
        client.rpush(reply, msgspec.json.encode(log))
        client.expire(reply, KEPT_S)


def _read_here(instance: Instance, count: int) -> Log:
    path = path_of(instance)
    error = root_error(instance) if instance.state == InstanceState.FAILED else ""
    return Log(str(path), engine_log.last_lines(path, count), error) if path else Log()


def _read_by_ray(instance: Instance, count: int) -> Log:
    try:
        return Log(*RayLauncher(settings.RAY_ADDRESS).log(instance.name, count))
    except LaunchError as error:
        return Log(error=str(error))


def note_phase(instance: Instance, text: str = "") -> int:
    """Note the phase of the start of *instance*, by *text* or its log here; return 1 if it has changed, else 0."""
    path = path_of(instance) if instance.state == InstanceState.LOADING else None
    text = text or (engine_log.tail(path) if path else "")
    phase = engine_log.startup(text) if path or text else ""
    if phase == instance.startup:
        return 0
    return Instance.objects.filter(pk=instance.pk, state=instance.state).update(startup=phase)


def root_error(instance: Instance) -> str:
    """Return the error in the log on this machine that ended the server of *instance*; "" if there is none."""
    path = path_of(instance)
    return engine_log.root_error(engine_log.tail(path)) if path else ""
