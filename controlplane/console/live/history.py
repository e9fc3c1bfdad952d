"""Last hour as sampled by the gateway every five seconds: windows, thinned for charts, by time and series.

A sample (`dispatch.monitoring.summary.history_sample`) is `{"ts", "fleet": TILE, "models": {name: TILE}, "kv": {instance:
ratio}, "load": {instance: [running, waiting]}, "pace": {instance: [TTFT p95 in ms, ITL p95 in ms, output tokens/s]}}`.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.utils import timezone

POINTS = 180  # per line: every 5 s for 15 minutes, every 20 s for an hour

Sample = dict[str, Any]
Series = list[float | None]


def window(history: Sequence[Sample], range_s: float, now_s: float) -> list[Sample]:
    """Return the samples of the last *range_s* seconds, thinned evenly to at most POINTS, including the newest."""
    since = now_s - range_s
    samples = [sample for sample in history if sample["ts"] >= since]
    step = -(-len(samples) // POINTS) or 1
    return samples[::-1][::step][::-1]


def times(samples: Sequence[Sample]) -> list[datetime]:
    """Return the times of *samples* in the pages' time zone."""
    zone = timezone.get_current_timezone()
    return [datetime.fromtimestamp(sample["ts"], zone).replace(microsecond=0) for sample in samples]


def tile_of(sample: Sample, model: str = "") -> dict[str, Any]:
    return (sample.get("models") or {}).get(model) or {} if model else sample.get("fleet") or {}


def tile_series(samples: Sequence[Sample], field: str, model: str = "") -> Series:
    """Return one tile number over time, for all models or one."""
    return [tile_of(sample, model).get(field) for sample in samples]


def kv_by_instance(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, Series]:
    """Return KV cache use of each of *names* over time."""
    return {name: [(sample.get("kv") or {}).get(name) for sample in samples] for name in names}


def load_of_instance(samples: Sequence[Sample], name: str) -> tuple[Series, Series]:
    """Return running requests and requests waiting inside one instance over time."""
    pairs = [(sample.get("load") or {}).get(name) or (None, None) for sample in samples]
    return [running for running, _ in pairs], [waiting for _, waiting in pairs]


def pace_of_instance(samples: Sequence[Sample], name: str) -> tuple[Series, Series, Series]:
    """Return p95 of TTFT and ITL in ms, and output tokens per second, of one instance over time."""
    rows = [(sample.get("pace") or {}).get(name) or (None, None, None) for sample in samples]
    return [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows]


def newest_s(history: Sequence[Sample]) -> float:
    """Return the time of the newest sample; 0.0 without any."""
    return history[-1]["ts"] if history else 0.0


def latest(history: Sequence[Sample], minutes: int) -> list[Sample]:
    """Return the last *minutes* before the newest sample."""
    return window(history, 60.0 * minutes, newest_s(history))
