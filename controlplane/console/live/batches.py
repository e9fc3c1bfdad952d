"""Batches as their page keeps them fresh: tiles, the verdict, and the cells of batches that run."""

from collections.abc import Sequence
from typing import Any

from django.db.models import QuerySet
from django.template.loader import render_to_string
from msgspec import Struct

from controlplane.batches import selectors
from controlplane.batches.models import AT_RISK, LATE, Batch
from controlplane.console.live.tiles import Row, Tile, over_slo, readings

CELLS = ("state", "lines", "errors", "end", "slack")


def below_all(value: float, row: Row) -> str:
    return "warning" if value < 1 else ""


def in_danger(value: float, row: Row) -> str:
    return "critical" if row[LATE] else "warning" if value else ""


TILES = (
    Tile(
        "met_ratio",
        "Deadlines met",
        "of_judged",
        below_all,
        "Batches created in the last 7 days: completed over completed and expired",
        "none has ended in 7 days",
    ),
    Tile(
        "in_danger",
        "At risk or late",
        "of_running",
        in_danger,
        "At risk: less slack than a tenth of the time left. Late: the expected end is after the deadline",
    ),
    Tile("lines_per_s", "Lines per second", "of_lines_left", empty="none measured"),
)
FLEET_TILES = (
    *TILES,
    Tile("held", "Held work", "of_announced", empty="no live numbers"),
    Tile(
        "idle_usd",
        "Idle",
        "of_cost",
        rule="Instances while no request used them and they were not donated, at the on-demand price",
        empty="no usage counted today",
    ),
    Tile(
        "spot_usd_per_hour",
        "At spot price",
        "of_today",
        rule="The spot price for each hour donated: what others would ask for it, not paid by anyone",
        empty="price unknown",
    ),
    Tile(
        "ttft_p95_ms",
        "TTFT p95",
        "ttft",
        over_slo,
        "Of the SLO class that does worst against its own promise, in the last minute. Warns above the SLO, critical above "
        "twice the SLO",
        of="ttft_class",
    ),
)


class Reading(Struct, frozen=True, eq=False):
    """Batches that run, the least slack first, and their numbers in sum."""

    running: list[Batch]
    figures: dict[str, Any]


def read(rows: QuerySet[Batch] | None = None) -> Reading:
    """Return the batches of *rows*, or of the whole fleet, as they are now."""
    rows = Batch.objects.all() if rows is None else rows
    running = selectors.running(rows)
    return Reading(running, selectors.figures(rows, running))


def tiles(reading: Reading, fleet: Row | None) -> list[dict[str, Any]]:
    """Return the tiles; *fleet* has the live numbers of the whole fleet, None for a tenant."""
    shown = TILES if fleet is None else FLEET_TILES
    return readings(shown, reading.figures | dict(fleet or {}), "batches")


def verdict(reading: Reading) -> dict[str, Any]:
    """Return the context of the sentence above the list: how many run, and which is worst."""
    figures = reading.figures
    level = "late" if figures[LATE] else "risk" if figures[AT_RISK] else "fine"
    known = [batch for batch in reading.running if batch.slack_s is not None]
    return {"figures": figures, "level": level, "worst": known[0] if known else None}


def html(reading: Reading, fleet: Row) -> dict[str, str]:
    """Return the fragments of the page: tiles, verdict and cells."""
    shown = {each["live"]: each["html"] for each in tiles(reading, fleet)}
    shown["batches/verdict"] = render_to_string("console/batches/verdict.html", verdict(reading))
    for batch in reading.running:
        for name in CELLS:
            shown[f"batch/{batch.pk}/{name}"] = cell(batch, name)
    return shown


def cell(batch: Batch, name: str) -> str:
    return render_to_string(f"console/batches/cells/{name}.html", {"row": batch})


def drawn(reading: Reading) -> Sequence[tuple[int, str, str]]:
    """Return what rows and buttons are made of: a batch that begins, ends or changes its place is drawn by the page."""
    return [(batch.pk, batch.status, batch.risk) for batch in reading.running]
