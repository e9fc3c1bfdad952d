"""Jobs and parts of the stack as pages show them: tables of the published report, or of this process's own."""

import time
from collections.abc import Mapping
from typing import Any

from controlplane.console.live.deltas import Table, columnar
from controlplane.jobs import monitor

JOB_FIELDS = (
    "name",
    "kind",
    "state",
    "period_s",
    "last_success_at",
    "last_error",
    "last_error_at",
    "failures_in_a_row",
    "failures_total",
    "last_duration_s",
    "due_at",
    "quiet",
)
PART_FIELDS = ("name", "state", "detail", "since", "restarts", "process_id")
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


def tables_of(report: Mapping[str, Any] | None) -> dict[str, Table]:
    """The columnar tables `jobs` and `parts` of *report* (of `jobs.monitor`); empty ones where there is none."""
    report = report or {}
    return {
        "jobs": columnar(report.get("jobs", ()), JOB_FIELDS),
        "parts": columnar(report.get("parts", ()), PART_FIELDS),
    }


def own_tables() -> dict[str, Table]:
    """What this process knows by itself, for as long as nothing is published; no tables where no gateway runs in it."""
    return tables_of(monitor.current.report()) if monitor.current is not None else {}


def job_title(name: str) -> str:
    return name.replace("-", " ").capitalize()


def part_title(name: str) -> str:
    return PART_TITLES.get(name, name.capitalize())


def trouble(job: Mapping[str, Any]) -> str:
    """What is wrong with a row of the table `jobs`, in a sentence."""
    failures = job["failures_in_a_row"]
    if failures:
        return f"{job['last_error']} ({failures} times in a row)" if failures > 1 else str(job["last_error"])
    if job["last_success_at"] is None:
        return "It has not run yet."
    return f"It was last done {time.time() - job['last_success_at']:.0f} s ago, and is due every {job['period_s']:g} s."
