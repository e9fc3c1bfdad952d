"""Tiles: the numbers at the head of a page, what each shows, when it warns, and its line of the last minutes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.template.loader import render_to_string
from django.utils.safestring import SafeString

from controlplane.console.formats import FORMATS, NONE
from controlplane.fleet.attainment import level_of

Row = Mapping[str, Any]
Level = Callable[[float, Row], str]  # of a tile's value in its row
SPARK_POINTS = 60
SPARK_WIDTH, SPARK_HEIGHT = 120, 20


def beyond(warning: float, critical: float) -> Level:
    """Of a value above these thresholds, or below them where *critical* is the lower one."""
    sign = 1 if critical > warning else -1

    def level(value: float, row: Row) -> str:
        return "critical" if sign * value > sign * critical else "warning" if sign * value > sign * warning else ""

    return level


def over_slo(value: float, row: Row) -> str:
    target = row.get("ttft_slo_ms")
    return beyond(target, 2 * target)(value, row) if target else ""


def below_slo(value: float, row: Row) -> str:
    return slo_level(row)


def slo_level(row: Row) -> str:
    """Return the warning level of a tile's SLO: its worst class against the class's promise."""
    return level_of(row.get("slo_met_ratio"), row.get("slo_objective_ratio"), row.get("slo_burn"))


def not_ready(value: float, row: Row) -> str:
    instances = row.get("instances")
    return "" if not instances or value >= instances else "warning" if value else "critical"


def never(value: float, row: Row) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Tile:
    field: str
    label: str
    format: str
    level: Level = never
    rule: str = ""  # when it warns, for its tooltip
    empty: str = "no traffic"  # what a missing value means
    look: str = ""  # the query of the requests behind it, slowest first
    of: str = ""  # the field with the SLO class that it is of, which its label names

    def level_of(self, row: Row) -> str:
        """`""`, `"warning"` or `"critical"`."""
        value = row.get(self.field)
        return "" if value is None else self.level(value, row)


TILES = (
    Tile("requests_per_s", "Requests", "requests_and_running"),
    Tile("output_tokens_per_s", "Output", "output_and_prompt"),
    Tile(
        "slo_met_ratio",
        "SLO met, 5 min",
        "slo_met",
        below_slo,
        "Of the SLO class that does worst against its own percentile. Burn: misses over those that the percentile allows; "
        "warns above 1, critical from 2 on. Not judged: cancelled requests and the tenant's own mistakes",
        look="slo=missed&hours=1&sort=-ttft_ms",
    ),
    Tile(
        "ttft_p95_ms",
        "TTFT p95",
        "ttft",
        over_slo,
        "Of the SLO class that does worst against its own promise, in the last minute. Warns above the SLO, critical above "
        "twice the SLO",
        look="hours=1&sort=-ttft_ms",
        of="ttft_class",
    ),
    Tile("itl_p95_ms", "ITL p95", "milliseconds", look="hours=1&sort=-itl_ms"),
    Tile("waiting", "Waiting", "waiting_and_held", empty="not reported"),
    Tile(
        "kv_max_ratio",
        "KV cache, max",
        "percent",
        beyond(0.90, 0.98),
        "Warns above 90%, critical above 98%",
        "not reported",
    ),
    Tile(
        "instances_ready",
        "Instances ready",
        "ready_of",
        not_ready,
        "Warns when one is not ready, critical when none is",
        "not reported",
    ),
)


def reading(tile: Tile, row: Row | None) -> SafeString:
    """Label, number and unit of *tile*; *row* is None while there is no live number."""
    text = FORMATS[tile.format]((row or {}).get(tile.field), row or {})
    text, _, more = text.partition("\n")
    number, _, unit = text.partition(" ")
    if text == NONE:
        unit = tile.empty if row else "not reported"
    level = tile.level_of(row) if row else ""
    label = ", ".join(filter(None, (tile.label, (row or {}).get(tile.of))))
    model = (row or {}).get("scope")
    shown = {"tile": tile, "label": label, "number": number, "unit": unit, "more": more, "level": level, "model": model}
    return render_to_string("console/parts/reading.html", shown)


def readings(of: Sequence[Tile], row: Row | None, live: str) -> list[dict[str, Any]]:
    """The tiles *of* for `console/parts/tiles.html`; *live* names their row among the fragments."""
    return [{"tile": tile, "live": f"{live}/{tile.field}", "html": reading(tile, row)} for tile in of]


def spark(values: Sequence[float | None]) -> str:
    """The `points` of an SVG polyline over *values* (oldest first), or `""` with fewer than two of them.

    The line fills the height between the least and the greatest value; a flat series lies in the middle.
    """
    step = max(1, len(values) / SPARK_POINTS)
    picked = [values[int(at * step)] for at in range(min(len(values), SPARK_POINTS))]
    if picked:
        picked[-1] = values[-1]
    known = [value for value in picked if value is not None]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    scale = (SPARK_HEIGHT - 2) / (high - low) if high > low else 0
    across = SPARK_WIDTH / (len(picked) - 1)
    return " ".join(
        f"{at * across:.1f},{SPARK_HEIGHT - 1 - (value - low) * scale if scale else SPARK_HEIGHT / 2:.1f}"
        for at, value in enumerate(picked)
        if value is not None
    )
