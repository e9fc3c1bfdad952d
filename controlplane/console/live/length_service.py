"""The length service as its gateway reports it."""

from collections.abc import Mapping
from typing import Any

from controlplane.console.formats import percent
from controlplane.console.live.tiles import Tile, beyond

LATE_WARNING, LATE_CRITICAL = 0.01, 0.10  # of the answers
MISCALIBRATED = 0.05  # of requests, more or fewer than 90% within the 0.9 quantile
SOURCES = ("cache", "model", "prior")

TILES = (
    Tile("answered", "Answered", "quantity", empty="not reported"),
    Tile("model_ratio", "By the model", "percent", empty="none yet"),
    Tile("cache_ratio", "Cache", "percent", empty="none yet"),
    Tile("prior_ratio", "By the prior", "percent", empty="none yet"),
    Tile("p50_ms", "Latency p50", "milliseconds", empty="none yet"),
    Tile("p99_ms", "Latency p99", "milliseconds", empty="none yet"),
    Tile(
        "late_ratio",
        "Late answers",
        "percent_fine",
        beyond(LATE_WARNING, LATE_CRITICAL),
        "Answers whose time budget was over, so that the prior answered. Warns above 1%, critical above 10%",
        "none yet",
    ),
)
AS_REPORTED = ("p50_ms", "p99_ms", "cache_entries", "version", "shadow", "failed", "restarts")


def row_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of one gateway's service; what it does not report is None. Forced lengths are not predictions."""
    answered = part.get("answered") or {}
    counts = {source: answered.get(source, 0) for source in SOURCES}
    total = sum(counts.values())
    late = part.get("late")
    return {
        "live": "lengths",
        **{name: part.get(name) for name in AS_REPORTED},
        **{f"{source}_ratio": count / total if total else None for source, count in counts.items()},
        "answered": total if answered else None,
        "late_ratio": late / total if total and late is not None else None,
        "models": [model_of(model) for model in part.get("models") or ()],
    }


def model_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of one length model that answers; the share in time is None before it was asked."""
    asked, in_time = report.get("asked") or 0, report.get("in_time") or 0
    return {**report, "in_time_ratio": in_time / asked if asked else None}


def doubts(service: Mapping[str, Any] | None, coverage_upper: float | None) -> list[str]:
    """Why predictions are not good enough to route and plan by; empty where they are."""
    row, why = service or {}, []
    if (late := row.get("late_ratio") or 0.0) > LATE_CRITICAL:
        why.append(f"{percent(late)} of answers are late")
    if coverage_upper is not None and abs(coverage_upper - 0.9) > MISCALIBRATED:
        why.append(f"the 0.9 quantile holds {percent(coverage_upper)} of lengths")
    return why
