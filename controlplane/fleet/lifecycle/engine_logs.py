"""Logs of servers started as processes on this machine.

They are on the machine whose worker started the server. Another machine finds no file, and says so.
"""

from pathlib import Path

from django.conf import settings

from controlplane.fleet.models import Instance, Launcher
from workers.vllm import engine_log


def path_of(instance: Instance) -> Path | None:
    """Return the path of the log, existing or not; None for a server that Pilothouse did not start as a process."""
    if instance.launcher != Launcher.PROCESS:
        return None
    return settings.STATE_DIR / "instances" / f"{instance.name}.log"


def last_lines(instance: Instance, count: int) -> list[str]:
    """Return the last lines of its log; none without a log."""
    path = path_of(instance)
    return engine_log.last_lines(path, count) if path else []


def root_error(instance: Instance) -> str:
    """Return the error in the log that ended the server of *instance*; "" if there is none."""
    path = path_of(instance)
    return engine_log.root_error(engine_log.tail(path)) if path else ""
