"""Waiting requests as pages follow them: the published `queues` of a summary, region by region."""

import re
from collections.abc import Mapping
from typing import Any

from controlplane.console.live.deltas import Table, columnar, rows_of
from controlplane.console.live.tiles import Level, Row, Tile, levels
from controlplane.dispatch.wire import GROUP_COLUMNS, LANE_COLUMNS, QUEUE_COLUMNS, REORDER_COLUMNS

TOPIC = re.compile(r"queues:[-a-zA-Z0-9_]{1,80}")


def some(level: str) -> Level:
    """Of a count: *level* as soon as there is one."""

    def of(value: float, row: Row) -> str:
        return level if value else ""

    return of


FCFS_MARGIN = 5e-4  # of the share in time: what is less rounds to the same number


def worse_than_fcfs(value: float, row: Row) -> str:
    """A warning where what waits would keep more in time if it were served as it came."""
    fcfs = row.get("fcfs_ratio")
    return "warning" if fcfs is not None and value < fcfs - FCFS_MARGIN else ""


TILES = (
    Tile("waiting", "Waiting", "requests", empty="not reported"),
    Tile("groups", "Groups", "count", empty="not reported"),
    Tile("at_risk", "At risk", "count", some("warning"), "Groups with less than 15 s of slack", "not reported"),
    Tile("late", "Late", "count", some("critical"), "Groups of which some requests will be late", "not reported"),
    Tile("oldest_wait_s", "Oldest wait", "duration", empty="not reported"),
    Tile(
        "attainment_ratio",
        "SLO met, this order",
        "percent_fine",
        level=worse_than_fcfs,
        rule="Share of what waits in groups, of all regions, that is predicted to be in time; warns below that of FCFS",
        empty="nothing grouped",
    ),
    Tile(
        "fcfs_ratio",
        "SLO met, if FCFS",
        "percent_fine",
        rule="The same if groups were served as they came, by the instance that is free first",
        empty="not computed",
    ),
    Tile(
        "gap_ratio",
        "Proved gap",
        "percent_fine",
        rule="How much of the lateness that is left another order might spare, at the most; 0%: none is better. Proved of"
        " few groups, for all regions together",
        empty="not proved",
    ),
)


def tables_in(topic: str) -> tuple[str, ...]:
    """The tables of `queues:REGION`."""
    region = topic.partition(":")[2]
    return f"groups:{region}", f"lanes:{region}", "queues", "reorders"


def tables_of(summary: Mapping[str, Any]) -> dict[str, Table]:
    """`queues` (a row a region), `reorders`, and for each region `groups:REGION` and `lanes:REGION`."""
    given = summary.get("queues") or {}
    queues = [_fields(row, QUEUE_COLUMNS) for row in rows_of(given.get("queues") or {})]
    tables: dict[str, Table] = {
        "queues": {**columnar(queues, QUEUE_COLUMNS), "levels": [levels(row, TILES) for row in queues]},
        "reorders": columnar(rows_of(given.get("reorders") or {}), REORDER_COLUMNS),
    }
    groups, lanes = rows_of(given.get("groups") or {}), rows_of(given.get("lanes") or {})
    for region in [row["region"] for row in queues]:
        tables[f"groups:{region}"] = columnar([row for row in groups if row["region"] == region], GROUP_COLUMNS)
        tables[f"lanes:{region}"] = columnar([row for row in lanes if row["region"] == region], LANE_COLUMNS)
    return tables


def _fields(row: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: row.get(name) for name in names}
