"""Waiting requests: the tiles of the Queues page, and how a request group is shown in its lane."""

from typing import Any

from django.utils.html import format_html

from controlplane.console.formats import clock, count
from controlplane.console.live.tiles import Level, Row, Tile


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
)


def said(row: dict[str, Any]) -> str:
    """The second line of a block."""
    match row["risk"]:
        case "late":
            return f"late {clock(-row['slack_s'])}"
        case "risk":
            return f"slack {clock(row['slack_s'])}"
    return clock(row["service_s"])


def block(row: dict[str, Any]) -> dict[str, str]:
    """The two lines of a group's block, with the times by which `queues.js` places it, in seconds from now."""
    size = format_html(
        '<b data-start="{}" data-service="{}" data-due="{}">{}</b>',
        row["start_s"] or 0,
        row["service_s"] or 0,
        "" if row["due_s"] is None else row["due_s"],
        count(row["count"]),
    )
    return {"size": size, "said": said(row)}
