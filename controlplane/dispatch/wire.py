"""Published state in Redis: keys, channels, expiry times, tables.

Writers and readers of all apps import it from here, so it imports nothing of theirs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

Row = dict[str, Any]
Table = dict[str, list[Any]]


def columns(rows: Sequence[Row]) -> Table:
    """Return *rows*, which have the same names, by column; nothing without rows."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


@dataclass(frozen=True, slots=True)
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


def as_inputs(view: Any) -> dict[str, Any]:
    """Return an endpoint's view (`scheduling.scaling.EndpointView`) as JSON: null for what is infinite or unknown."""
    return {
        name: value if not isinstance(value, float) else round(value, 4) if math.isfinite(value) else None
        for name, value in view._asdict().items()
    }
