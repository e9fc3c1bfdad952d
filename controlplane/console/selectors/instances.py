"""Instances as tables show them, with live numbers where there are some."""

from collections.abc import Iterable
from typing import Any

from controlplane.console.live.state import LiveState, status_of
from controlplane.fleet.models import Instance
from controlplane.resources.instances import STATUSES, with_outdated

SILENT = dict.fromkeys((
    *("reachable", "trouble", "running", "waiting", "requests_ahead", "round_trip_ms", "kv_ratio", "use_ratio"),
    *("output_tokens_per_s", "ttft_p95_ms", "itl_p95_ms", "preemptions_per_min", "prefix_hit_ratio", "cached_blocks"),
    *("cache_unknown", "heartbeat_at"),
))  # fmt: skip
"""The live numbers of an instance of which there are none."""


def instance_row(instance: Instance, live: dict[str, Any] | None) -> dict[str, Any]:
    """An instance as tables show it: its row, with the gateway's live numbers (*live*, or None) laid over it.

    The database is newer on the state itself (an action shows at once), the gateway on how the instance answers.
    """
    known = live is not None
    live = SILENT | (live or {})
    state = str(instance.state)
    gpu_count = int(instance.launched_with.get("tensor_parallel", instance.deployment.tensor_parallel))
    status = status_of(state, live["reachable"], live["use_ratio"], live["waiting"], live["trouble"])
    return {
        **live,
        "live": f"instance/{instance.pk}",
        "id": instance.pk,
        "name": instance.name,
        "model": instance.deployment.model.name,
        "region": instance.deployment.region.name,
        "region_title": instance.deployment.region.title,
        "node": instance.node.name if instance.node else "",
        "gpu_type": instance.deployment.gpu_type.name,
        "gpu_count": gpu_count,
        "gpu_names": instance.gpus,
        "gpus": f"{gpu_count}: {', '.join(instance.gpus)}" if instance.gpus else str(gpu_count),
        "swap_group": instance.swap_group.name if instance.swap_group else "",
        "state": state,
        "status": "held" if instance.held and state == "stopped" else status if known else state,
        "startup": instance.startup,
        "held": instance.held,
        "state_since": instance.state_changed_at.timestamp(),
        "failures": instance.failures,
        "max_num_seqs": instance.max_num_seqs,
    }


def instance_rows(state: LiveState, rows: Iterable[Instance]) -> list[dict[str, Any]]:
    """*rows* with live numbers where there are some."""
    live = state.instance_rows()
    return [instance_row(row, live.get(row.pk)) | {"outdated": row.outdated} for row in with_outdated(list(rows))]


def worst_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return *rows*, unhealthy ones first and stopped ones last; then by load in quarters, then by name."""
    rank = {status: at for at, status in enumerate(STATUSES)}
    return sorted(
        rows, key=lambda row: (rank.get(row["status"], len(rank)), -int(4 * (row["use_ratio"] or 0)), row["name"])
    )
