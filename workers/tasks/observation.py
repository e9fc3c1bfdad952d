"""Observation of servers in addition to the gateway's heartbeats: phases of starts, engines, logs."""

import asyncio
import logging
import re
import time
from datetime import UTC, datetime
from typing import Any

from controlplane.fleet.lifecycle import engine_logs, hosts
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Instance, Launcher
from workers.vllm import engine_log, hardware
from workers.vllm.client import VllmClient, VllmError

logger = logging.getLogger(__name__)
MEASURE_EVERY_S = 60.0
SECRET_FLAG = re.compile(r"^--.*(token$|key$|secret|password)")
ANSWERING = (InstanceState.READY, InstanceState.DRAINING)


def observe_instances() -> int:
    """Note the phase of loading instances, measure serving ones, and shorten logs. Return how many rows changed."""
    rows = Instance.objects.select_related("deployment", "node").exclude(state=InstanceState.STOPPED)
    changed = 0
    due = []
    for instance in rows:
        path = engine_logs.path_of(instance)
        if path is not None and engine_log.shorten(path):
            logger.info("the log of %s was shortened", instance.name)
        if instance.state != InstanceState.LOADING or (path is not None and not hosts.obstacle(instance)):
            changed += engine_logs.note_phase(instance)
        if instance.state in ANSWERING and time.time() - instance.engine.get("measured_at", 0.0) >= MEASURE_EVERY_S:
            due.append(instance)
    for instance, engine in zip(due, asyncio.run(_measure_all(due)), strict=True):
        if engine is not None:
            # Not one that was restarted in between: its old state says nothing of the new one.
            same = Instance.objects.filter(pk=instance.pk, url=instance.url, state__in=ANSWERING)
            changed += same.update(engine=engine)
    return changed


async def _measure_all(instances: list[Instance]) -> list[dict[str, Any] | None]:
    return await asyncio.gather(*(_measure(instance) for instance in instances))


async def _measure(instance: Instance) -> dict[str, Any] | None:
    """Return facts on the server from `/version`, `/metrics` and `/proc`. None if it does not answer."""
    try:
        async with VllmClient(instance.url, api_key=instance.token) as client:
            version, metrics = await client.version(), await client.metrics()
    except VllmError as error:
        logger.debug("%s is not measured: %s", instance.name, error)
        return None
    engine: dict[str, Any] = {
        "measured_at": time.time(),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": version,
        "kv_cache_tokens": metrics.kv_cache_size_tokens,
        "kv_cache_blocks": metrics.num_gpu_blocks,
        "block_size_tokens": metrics.block_size,
    }
    if instance.launcher == Launcher.PROCESS and instance.process_id:
        engine |= _on_this_machine(instance)
    return engine


def _on_this_machine(instance: Instance) -> dict[str, Any]:
    """Return facts that only the server's own machine knows; empty on another one."""
    assert instance.process_id is not None
    processes = hardware.processes_of(instance.process_id)
    if not processes:
        return {}
    return {
        "arguments": _without_secrets(hardware.command_line_of(instance.process_id)),
        "processes": len(processes),
        "memory_bytes": sum(processes.values()),
        "gpu_memory_bytes": hardware.gpu_memory_of(processes),
    }


def _without_secrets(words: list[str]) -> list[str]:
    """Return a command line without the values of flags such as --hf-token."""
    shown = []
    hide = False
    for word in words:
        flag, equals, _ = word.partition("=")
        shown.append("…" if hide else f"{flag}=…" if equals and SECRET_FLAG.search(flag) else word)
        hide = not hide and not equals and bool(SECRET_FLAG.search(word))
    return shown
