"""The live state that pages show: rows of the gateway's published summary, immutable, with its recent history.

Each row that pages keep fresh has a `live` name, under which its fragments are sent (`fragments.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from controlplane.alerts.problems import Known, Problems, find
from controlplane.console.live import jobs, length_service, tiles
from controlplane.console.live.batches import Reading as BatchReading
from controlplane.dispatch.wire import (
    AT_DOOR_COLUMNS,
    ENDPOINT_COLUMNS,
    GROUP_COLUMNS,
    HELD_COLUMNS,
    INSTANCE_COLUMNS,
    LANE_COLUMNS,
    QUEUE_COLUMNS,
    REORDER_COLUMNS,
    SIGNAL_COLUMNS,
)

SATURATED = 0.95  # of its sequences or of its KV cache, whichever is fuller
SILENT_S = 15.0  # a summary older than this says nothing about now

TILE_FIELDS = frozenset(tile.field for tile in tiles.TILES) | {
    "slo_class", "slo_objective_ratio", "slo_burn", "ttft_slo_ms", "ttft_class", "prompt_tokens_per_s", "running", "held",
    "instances", "errors_per_s",
}  # fmt: skip
"""Of a tile that is published: what tiles show, and what their words and warnings are of."""

Row = dict[str, Any]


class Source(StrEnum):
    """State of the connection, shown next to the numbers."""

    LIVE = "live"
    STARTING = "starting"  # this process has not looked yet
    SILENT = "silent"  # Redis answers, and no gateway publishes
    UNREACHABLE = "unreachable"  # Redis does not answer


SOURCE_TEXT = {
    Source.STARTING: "starting",
    Source.SILENT: "the gateway is silent",
    Source.UNREACHABLE: "Redis does not answer",
}


def status_of(
    state: str, reachable: Any, use_ratio: float | None, waiting: float | None, trouble: str | None = None
) -> str:
    """The word that pages show for an instance: its state, or what its last answer says against it."""
    if state in ("ready", "draining") and reachable is False:
        return "unreachable"
    if state == "ready" and trouble:
        return "resting"
    if state == "ready" and ((use_ratio or 0) > SATURATED or (waiting or 0) > 0):
        return "saturated"
    return state


WARMED = {
    "adapter": "LoRA adapters",
    "prefix": "system prompts",
    "model": "sleeping models",
    "container": "containers",
    "dnn": "DNN models",
}


def rows_of(table: Mapping[str, Sequence[Any]], fields: Iterable[str] = (), key: str = "") -> list[Row]:
    """The rows of a columnar *table*.

    With *fields*, exactly those columns: one that is missing, or not as long as the column *key*, is None throughout.
    """
    if fields:
        length = len(table.get(key, ()))
        table = {name: column if len(column := table.get(name, ())) == length else [None] * length for name in fields}
    return [dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)]


def tables_of(summary: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Rows of *summary*, by table; of the tiles, the first is the fleet."""
    scopes: dict[str, Mapping[str, Any]] = {"": summary.get("fleet") or {}}
    scopes.update(sorted((summary.get("models") or {}).items()))
    shown = [
        {"scope": scope, "live": f"tile/{scope}", **{name: tile.get(name) for name in TILE_FIELDS}}
        for scope, tile in scopes.items()
    ]
    instances = rows_of(summary.get("instances") or {}, INSTANCE_COLUMNS, "id")
    for row in instances:
        row["live"] = f"instance/{row['id']}"
        row["status"] = status_of(row["state"], row["reachable"], row["use_ratio"], row["waiting"], row["trouble"])
    endpoints = rows_of(summary.get("endpoints") or {}, ENDPOINT_COLUMNS, "model")
    for row in endpoints:
        row["live"] = f"endpoint/{row['model']}/{row['region']}"
    lengths = summary.get("lengths")
    published = summary.get("queues") or {}
    queues = rows_of(published.get("queues") or {}, QUEUE_COLUMNS, "region")
    for row in queues:
        row["live"] = f"queue/{row['region']}"
    holding = summary.get("held") or {}
    return {
        "tiles": shown,
        "instances": instances,
        "endpoints": endpoints,
        "lengths": [length_service.row_of(lengths)] if lengths else [],
        "queues": queues,
        "groups": rows_of(published.get("groups") or {}, GROUP_COLUMNS, "number"),
        "lanes": rows_of(published.get("lanes") or {}, LANE_COLUMNS, "instance"),
        "held": rows_of(holding.get("models") or {}, HELD_COLUMNS, "model"),
        "signals": rows_of(holding.get("signals") or {}, SIGNAL_COLUMNS, "model"),
        "at_door": rows_of(summary.get("at_door") or {}, AT_DOOR_COLUMNS, "model"),
        "prewarmed": [
            {"kind": WARMED[kind], "warmed": warmed, "used": used}
            for kind, (warmed, used) in (summary.get("prewarmed") or {}).items()
        ],
        "reorders": rows_of(published.get("reorders") or {}, REORDER_COLUMNS, "at"),
        **jobs.tables_of(summary.get("system")),
    }


NO_TABLES = tables_of({})


@dataclass(frozen=True, slots=True)
class LiveState:
    """The state of the fleet at one moment. *ts* is the gateway's clock in epoch seconds, None before the first summary."""

    source: Source = Source.STARTING
    ts: float | None = None
    owner: str = ""
    started_at: float | None = None
    tables: dict[str, list[Row]] = field(default_factory=lambda: NO_TABLES)
    problems: Problems = field(default_factory=Problems)
    # Samples of the last hour, oldest first, one every five seconds: see `history.py`.
    history: tuple[dict[str, Any], ...] = ()
    # Progress of the what-ifs that pages follow, by their number.
    what_ifs: dict[int, Row] = field(default_factory=dict)
    # None while no page follows batches.
    batches: BatchReading | None = None
    # None while no page follows events.
    newest_event_id: int | None = None

    @property
    def known(self) -> bool:
        """Whether there is anything to show."""
        return self.ts is not None

    def tile(self, scope: str = "") -> Row | None:
        """The numbers of the fleet, or of one model."""
        return next((row for row in self.tables["tiles"] if row["scope"] == scope), None) if self.known else None

    def system(self) -> dict[str, list[Row]]:
        """Rows of jobs and of parts: as published, or as this process knows them while nothing is."""
        tables = (jobs.own_tables() if self.source != Source.LIVE else {}) or self.tables
        return {name: tables[name] for name in ("jobs", "parts")}

    def lengths(self) -> Row | None:
        """The numbers of the length service; None while its gateway reports none."""
        return next(iter(self.tables["lengths"]), None)

    def of_region(self, name: str, region: str) -> list[Row]:
        """Rows of the table *name* in *region*."""
        return [row for row in self.tables[name] if row["region"] == region]

    def model_rows(self, limit: int) -> list[Row]:
        """The numbers of the *limit* models with the most output."""
        rows = [row for row in self.tables["tiles"] if row["scope"]]
        busiest = sorted(rows, key=lambda row: -(row["output_tokens_per_s"] or 0))[:limit]
        return sorted(busiest, key=lambda row: row["scope"])

    def instance_rows(self) -> dict[int, Row]:
        """Live rows of instances by their id."""
        return {row["id"]: row for row in self.tables["instances"]}


def without_summaries(state: LiveState, known: Known) -> LiveState:
    """*state* while nothing is published: its numbers stand still, and what this process knows of the system does not."""
    if state.source == Source.LIVE or not (own := jobs.own_tables()):
        return state
    tables = {**state.tables, **own}
    return replace(state, tables=tables, problems=find(tables, known))


def state_of(summary: Mapping[str, Any], known: Known, history: tuple[dict[str, Any], ...]) -> LiveState:
    """The state that *summary* (the gateway's JSON) describes. Raises KeyError, TypeError or ValueError on another form."""
    tables = tables_of(summary)
    return LiveState(
        source=Source.LIVE,
        ts=float(summary["ts"]),
        owner=str(summary.get("owner", "")),
        started_at=summary.get("started_at"),
        tables=tables,
        problems=find(tables, known),
        history=history,
    )
