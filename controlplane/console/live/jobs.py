"""Jobs and parts of the stack: rows of the published report, or of this process's own."""

from collections.abc import Mapping
from typing import Any

from controlplane.jobs import monitor


def tables_of(report: Mapping[str, Any] | None) -> dict[str, list[dict[str, Any]]]:
    """Rows `jobs` and `parts` of *report* (of `jobs.monitor`); none without a report."""
    return {name: list((report or {}).get(name, ())) for name in ("jobs", "parts")}


def own_tables() -> dict[str, list[dict[str, Any]]]:
    """Rows that this process knows itself, while nothing is published; empty where it runs no gateway."""
    return tables_of(monitor.current.report()) if monitor.current is not None else {}
