"""Jobs and parts of the stack: rows of the published report, or of this process's own."""

from collections.abc import Mapping
from typing import Any

from controlplane.jobs import monitor
from controlplane.resources.jobs import JOBS, PARTS

JOB_FIELDS = (*(column.name for column in JOBS.columns), "quiet")
PART_FIELDS = tuple(column.name for column in PARTS.columns)


def tables_of(report: Mapping[str, Any] | None) -> dict[str, list[dict[str, Any]]]:
    """Rows `jobs` and `parts` of *report* (of `jobs.monitor`); none without a report."""
    report = report or {}
    return {
        name: [{field: row.get(field) for field in fields} for row in report.get(name, ())]
        for name, fields in (("jobs", JOB_FIELDS), ("parts", PART_FIELDS))
    }


def own_tables() -> dict[str, list[dict[str, Any]]]:
    """Rows that this process knows itself, while nothing is published; empty where it runs no gateway."""
    return tables_of(monitor.current.report()) if monitor.current is not None else {}
