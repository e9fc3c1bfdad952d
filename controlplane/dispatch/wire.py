"""Published state in Redis: keys, channels, expiry times, names of columns.

Writers and readers of all apps import it from here, so it imports nothing of theirs.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

SUMMARY_KEY = "pilothouse:summary"
LIVE_CHANNEL = "pilothouse:live"
HISTORY_KEY = "pilothouse:history"
SUMMARY_EXPIRES_S = 15
HISTORY_EVERY_S = 5.0
HISTORY_LENGTH = 720  # one hour

WAITING_KEY = "pilothouse:waiting"
"""Waiting requests with position and expected wait; each tenant sees its own."""

VIEWS_KEY = "pilothouse:endpoints"
"""Views of every endpoint, for the strategies; they expire soon after the gateway stops."""
VIEWS_EXPIRE_S = 10
STRATEGIST_KEY = "pilothouse:strategies"
"""Names of the models whose strategy ran lately; written by the workers, expiring soon after they stop."""

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
    "heartbeat_at",
    "state_since",
    "failures",
)
GROUP_COLUMNS = (
    "number",
    "region",
    "instance",
    "model",
    "place",  # in its virtual queue, from 1
    "slo_class",
    "count",
    "tokens",
    "start_s",  # from now, as the global scheduler predicts; null where nothing serves it
    "service_s",
    "due_s",  # from now, its deadline; null without one
    "slack_s",  # until it would be late; null without a deadline
    "pinned",
    "hold_s",  # from now; 0 for one that is not held
    "risk",  # "", "risk" or "late"
)
"""Columns of waiting request groups, by region, instance and place."""
LANE_COLUMNS = ("instance", "region", "model", "order", "state", "running", "kv_ratio", "waiting", "service_s")
"""Columns of instances: the order of their endpoint, and with request groups what waits in their virtual queue."""
QUEUE_COLUMNS = (
    "region",
    "waiting",
    "groups",
    "queues",
    "at_risk",
    "late",
    "late_requests",
    "oldest_wait_s",
    "attainment_ratio",
    "fcfs_ratio",
    "gap_ratio",  # share of the last order's lateness, over all regions, that the best order saves at most, as proved
    "solved_ms",
    "solved_at",
    "pending_s",
    "fallbacks",
)
"""Columns of regions: waiting requests, predictions for this order and for FCFS, and the state of the global scheduler."""


@dataclass(frozen=True, slots=True)
class QueueChange:
    """A change of the queues' order by the global scheduler or an operator, with predicted attainment and lateness."""

    at: float  # epoch seconds
    by: str
    why: str
    what: str
    before_ratio: float | None = None
    after_ratio: float | None = None
    before_late_s: float | None = None  # mean per request
    after_late_s: float | None = None
    took_ms: float | None = None
    undo: int | None = None  # the group that an operator changed


REORDER_COLUMNS = tuple(field.name for field in fields(QueueChange))
"""Columns of changes, newest first."""

HELD_COLUMNS = (
    "model",
    "count",  # held requests
    "announced",  # lines of batches that are not held yet
    "opportunistic",  # of those held
    "under_1h",  # of those held, by age of their work
    "under_4h",
    "under_10h",
    "over_10h",
    "slack_s",  # the least until one has to start; null where no deadline releases them
    "next_s",  # until the next release, expected; null while unknown
    "reason",
    "rule",  # `scheduling.queueing.release_rule.RELEASES`
)
"""Columns of models with held or announced work."""
RELEASE_COLUMNS = ("at", "model", "region", "count", "why", "use_ratio", "priority", "held_s")
"""Columns of the last releases, newest first: those of one look, endpoint and reason together (`held_work.Release`)."""
SIGNAL_COLUMNS = (
    "model",
    "region",
    "use_ratio",  # of KV memory or of sequences by interactive requests; null where no instance accepts work
    "other_ratio",  # of KV memory by released work
    "one_below",
    "two_below",
    "quiet_s",  # cooldown after scaling that is left
    "gate",  # two, one, closed, cooldown or no_signal
)
"""Columns of endpoints as the queue manager sees them."""

AT_DOOR_COLUMNS = ("model", "region", "slo_class", "late", "degraded", "refused")
"""Columns of requests whose promise was unreachable on arrival, by the class that they asked for: of the last hour, or since
the gateway started."""

HISTORY_ENDPOINT_COLUMNS = ("model", "region", "requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s")


def as_inputs(view: Any) -> dict[str, Any]:
    """Return an endpoint's view (`scheduling.scaling.EndpointView`) as JSON: null for what is infinite or unknown."""
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in as_published(view).items()}


def as_published(view: Any) -> dict[str, Any]:
    """Return the view in full precision, for strategies that decide by it."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in view._asdict().items()
    }
