"""Published state in Redis: keys, channels, expiry times, names of columns.

Writers and readers of all apps import it from here, so it imports nothing of theirs.
"""

import math
from dataclasses import fields
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.dataclasses import dataclass

SUMMARY_KEY = "pilothouse:summary"
HISTORY_KEY = "pilothouse:history"
SUMMARY_EXPIRES_S = 15
PART_KEY = "pilothouse:part:"
"""Followed by a shard that is not the first: what its owner adds to the summary and to the waiting requests."""
PART_EXPIRES_S = 3
HISTORY_EVERY_S = 5.0
HISTORY_LENGTH = 720  # one hour

WAITING_KEY = "pilothouse:waiting"
"""Waiting requests with position and expected wait; each tenant sees its own."""

ENDPOINT_COLUMNS = (
    "model",
    "region",
    "running",
    "waiting",
    "oldest_wait_s",
    "estimated_wait_s",
    "requests_per_s",
    "prompt_tokens_per_s",
    "output_tokens_per_s",
    "kv_ratio",
    "instances_ready",
    "instances",
)
INSTANCE_COLUMNS = (
    "id",
    "name",
    "model",
    "region",
    "gpu_type",
    "state",
    "reachable",
    "trouble",
    "running",
    "waiting",
    "requests_ahead",
    "round_trip_ms",
    "max_num_seqs",
    "kv_ratio",
    "use_ratio",
    "output_tokens_per_s",
    "ttft_p95_ms",
    "itl_p95_ms",
    "preemptions_per_min",
    "prefix_hit_ratio",
    "cached_blocks",
    "cache_unknown",
    "heartbeat_at",
    "state_since",
    "failures",
)


class PublishedRow(BaseModel):
    """Row that is published as columns, and returned by `/api` as it is."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class QueuedGroup(PublishedRow):
    """Waiting request group; rows are in order of region, instance and place."""

    number: int
    """Unique number, never reused."""
    region: str
    instance: str
    model: str
    place: int
    """Position in its virtual queue, from 1."""
    slo_class: str
    count: int
    tokens: int
    """Prompt and expected output tokens of all its requests."""
    start_s: float | None
    """Seconds from now, as estimated by the global scheduler; null if nothing serves it."""
    service_s: float | None
    due_s: float | None
    """Seconds from now; null without a deadline."""
    slack_s: float | None
    """Time until its last request's first token would be late; negative: it will be late."""
    pinned: bool
    risk: str
    """`late`, `risk` below 15 s of slack, or empty."""


class QueueInstance(PublishedRow):
    """Instance that takes from the queues."""

    instance: str
    region: str
    model: str
    order: str
    """Order of the endpoint. Only `qlm` has request groups."""
    state: str
    running: int
    kv_ratio: float | None
    waiting: int | None
    """Requests in its virtual queue; null under another order, where requests wait for the endpoint."""
    service_s: float | None


class QueueRegion(PublishedRow):
    """Queues of a region: what waits, predictions for this order and for FCFS, and the global scheduler."""

    region: str
    waiting: int
    groups: int
    queues: int
    at_risk: int
    late: int
    late_requests: int
    oldest_wait_s: float
    attainment_ratio: float | None
    """Share of grouped requests predicted to be in time."""
    fcfs_ratio: float | None
    """The same in order of arrival, over all regions."""
    solved_ms: float | None
    solved_at: float | None


@dataclass(frozen=True, config=PublishedRow.model_config)
class QueueChange:
    """Change of the queues' order by the global scheduler or an operator, with predicted attainment and lateness."""

    at: float
    """Epoch seconds."""
    by: str
    why: str
    what: str
    before_ratio: float | None = None
    after_ratio: float | None = None
    before_late_s: float | None = None
    """Mean per request."""
    after_late_s: float | None = None
    took_ms: float | None = None


GROUP_COLUMNS, LANE_COLUMNS, QUEUE_COLUMNS = (
    tuple(row.model_fields) for row in (QueuedGroup, QueueInstance, QueueRegion)
)
REORDER_COLUMNS = tuple(field.name for field in fields(QueueChange))
"""Columns of changes, newest first."""

HELD_COLUMNS = (
    "model",
    "count",  # held requests
    "announced",  # lines of batches that are not held yet
    "opportunistic",  # of those held
    "oldest_s",  # age of the oldest of those held
    "due_s",  # from now, the earliest deadline of those held; null where none has one
    "slack_s",  # the least until one has to start; null where no deadline releases them
    "last",  # its last release: at, region, why and use_ratio (`held_work.Release`); null while none is known
    "next_s",  # until the next release, expected; null while unknown
    "reason",
)
"""Columns of models with held or announced work."""


def as_inputs(view: Any) -> dict[str, Any]:
    """Return an endpoint's view (`scheduling.scaling.EndpointView`) as JSON: null for what is infinite or unknown."""
    return {
        name: value if not isinstance(value, float) else round(value, 4) if math.isfinite(value) else None
        for name, value in view._asdict().items()
    }
