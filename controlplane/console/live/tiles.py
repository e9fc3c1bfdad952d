"""The eight numbers at the head of the overview: what each shows, when it warns, and its line of the last minutes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.console.formats import FORMATS, NONE
from controlplane.console.live.attention import SLO_CRITICAL, SLO_WARNING

Row = Mapping[str, Any]
SPARK_POINTS = 60
SPARK_WIDTH, SPARK_HEIGHT = 120, 20


def above(field: str, warning: float, critical: float) -> Callable[[Row], str]:
    def level(row: Row) -> str:
        value = row.get(field)
        if value is None or value <= warning:
            return ""
        return "critical" if value > critical else "warning"

    return level


def below(field: str, warning: float, critical: float) -> Callable[[Row], str]:
    def level(row: Row) -> str:
        value = row.get(field)
        if value is None or value >= warning:
            return ""
        return "critical" if value < critical else "warning"

    return level


def over_slo(row: Row) -> str:
    value, target = row.get("ttft_p95_ms"), row.get("ttft_slo_ms")
    if value is None or not target or value <= target:
        return ""
    return "critical" if value > 2 * target else "warning"


def not_ready(row: Row) -> str:
    ready, instances = row.get("instances_ready"), row.get("instances")
    if not instances or ready is None or ready >= instances:
        return ""
    return "critical" if ready == 0 else "warning"


def never(row: Row) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Tile:
    field: str
    label: str
    format: str
    level: Callable[[Row], str] = never
    rule: str = ""  # when it warns, for its tooltip
    empty: str = "no traffic"  # what a missing value means


TILES = (
    Tile("requests_per_s", "Requests", "per_second"),
    Tile("output_tokens_per_s", "Output", "tokens_per_second"),
    Tile(
        "slo_met_ratio",
        "SLO met, 5 min",
        "slo_met",
        below("slo_met_ratio", SLO_WARNING, SLO_CRITICAL),
        "Warns below 99 %, critical below 90 %. Of those that could be judged/all that ended. Not judged: cancelled "
        "requests, the tenant's own mistakes, and answers that are not streamed where the class has no end-to-end target",
    ),
    Tile("ttft_p95_ms", "TTFT p95", "milliseconds", over_slo, "Warns above the SLO, critical above twice the SLO"),
    Tile("itl_p95_ms", "ITL p95", "milliseconds"),
    Tile("waiting", "Waiting", "requests", empty="not reported"),
    Tile(
        "kv_max_ratio",
        "KV cache, max",
        "share",
        above("kv_max_ratio", 0.90, 0.98),
        "Warns above 90 %, critical above 98 %",
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


def levels(row: Row, of: Sequence[Tile] = TILES) -> list[str]:
    """`""`, `"warning"` or `"critical"` for each tile, in their order."""
    return [tile.level(row) for tile in of]


def shown(row: Row | None, of: Sequence[Tile] = TILES) -> list[dict[str, Any]]:
    """The tiles for a template: number and unit on their own, so that the unit can be set smaller."""
    tiles = []
    for tile in of:
        text = FORMATS[tile.format]((row or {}).get(tile.field), row or {})
        number, _, unit = text.partition(" ")
        tiles.append(
            {
                "tile": tile,
                "number": number,
                "unit": (tile.empty if row else "not connected") if text == NONE else unit,
                "level": tile.level(row) if row else "",
            }
        )
    return tiles


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
