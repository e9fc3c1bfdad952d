"""The logs of servers that were started as processes, where this machine has them.

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
    """The last lines of its log; none where there is no log."""
    path = path_of(instance)
    return engine_log.last_lines(path, count) if path else []


def root_error(instance: Instance) -> str:
    """The error that ended the server of *instance*, as its log names it; "" if it does not."""
    path = path_of(instance)
    return engine_log.root_error(engine_log.tail(path)) if path else ""
