"""Jobs and parts of the stack: rows of the published report, or of this process's own."""

import time
from collections.abc import Mapping
from typing import Any

from controlplane.jobs import monitor

PART_TITLES = {
    "web": "Gateway and web",
    "redis": "Redis",
    "database": "Database",
    "celery": "Celery workers",
    "beat": "Celery beat",
    "instances": "Instances",
    "lengths": "Length service",
    "kernels": "Compiled kernels",
    "emulator": "Emulated fleet",
    "traffic": "Demo traffic",
}


def tables_of(report: Mapping[str, Any] | None) -> dict[str, list[dict[str, Any]]]:
    """Rows `jobs` and `parts` of *report* (of `jobs.monitor`); none without a report."""
    return {name: list((report or {}).get(name, ())) for name in ("jobs", "parts")}


def own_tables() -> dict[str, list[dict[str, Any]]]:
    """Rows that this process knows itself, while nothing is published; empty where it runs no gateway."""
    return tables_of(monitor.current.report()) if monitor.current is not None else {}


def job_title(name: str) -> str:
    return name.replace("-", " ").capitalize()


def part_title(name: str) -> str:
    return PART_TITLES.get(name, name.capitalize())


def trouble(job: Mapping[str, Any]) -> str:
    """The trouble of a job, in a sentence."""
    failures = job["failures_in_a_row"]
    if failures:
        return f"{job['last_error']} ({failures} times in a row)" if failures > 1 else str(job["last_error"])
    if job["last_success_at"] is None:
        return "It has not run yet."
    return f"It was last done {time.time() - job['last_success_at']:.0f} s ago, and is due every {job['period_s']:g} s."
