"""The live state that pages show: rows of the gateway's published summary, immutable, with its recent history.

Each row that pages keep fresh has a `live` name, under which its fragments are sent (`fragments.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from controlplane.alerts.selectors import Unresolved
from controlplane.console.live import jobs
from controlplane.console.live.batches import Reading as BatchReading

SATURATED = 0.95  # of its sequences or of its KV cache, whichever is fuller
SILENT_S = 15.0  # a summary older than this says nothing about now


class Row(dict[str, Any]):
    """Published row; what it does not have, as from a gateway of another version, is None."""

    def __missing__(self, name: str) -> None:
        return None


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


def rows_of(table: Mapping[str, Sequence[Any]] | None, *live: str) -> list[Row]:
    """Return the rows of a columnar *table*; their name for fragments is made of *live*, a word and columns."""
    columns = table or {}
    rows = [Row(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    if live:
        for row in rows:
            row["live"] = "/".join([live[0], *(str(row[name]) for name in live[1:])])
    return rows


def tables_of(summary: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the rows of *summary*, by table; of the tiles, the first is the fleet."""
    scopes: dict[str, Mapping[str, Any]] = {"": summary.get("fleet") or {}}
    scopes.update(sorted((summary.get("models") or {}).items()))
    instances = rows_of(summary.get("instances"), "instance", "id")
    for row in instances:
        row["status"] = status_of(row["state"], row["reachable"], row["use_ratio"], row["waiting"], row["trouble"])
    queues = summary.get("queues") or {}
    return {
        "tiles": [Row(tile, scope=scope, live=f"tile/{scope}") for scope, tile in scopes.items()],
        "instances": instances,
        "endpoints": rows_of(summary.get("endpoints"), "endpoint", "model", "region"),
        "queues": rows_of(queues.get("queues"), "queue", "region"),
        **{name: rows_of(queues.get(name)) for name in ("groups", "lanes", "reorders")},
        "held": rows_of(summary.get("held")),
        "prewarmed": [
            Row(kind=WARMED[kind], warmed=warmed, used=used)
            for kind, (warmed, used) in (summary.get("prewarmed") or {}).items()
        ],
        "relays": list(summary.get("relays") or ()),
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
    tables: dict[str, list[Any]] = field(default_factory=lambda: NO_TABLES)
    alerts: tuple[Unresolved, ...] = ()
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

    def system(self) -> dict[str, list[Any]]:
        """Rows of jobs and of parts: as published, or as this process knows them while nothing is."""
        tables = (jobs.own_tables() if self.source != Source.LIVE else {}) or self.tables
        return {name: tables[name] for name in ("jobs", "parts")}

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


def without_summaries(state: LiveState) -> LiveState:
    """*state* while nothing is published: its numbers stand still, and what this process knows of the system does not."""
    if state.source == Source.LIVE or not (own := jobs.own_tables()):
        return state
    return replace(state, tables={**state.tables, **own})


def state_of(summary: Mapping[str, Any], history: tuple[dict[str, Any], ...]) -> LiveState:
    """The state that *summary* (the gateway's JSON) describes. Raises KeyError, TypeError or ValueError on another form."""
    return LiveState(
        source=Source.LIVE,
        ts=float(summary["ts"]),
        owner=str(summary.get("owner", "")),
        started_at=summary.get("started_at"),
        tables=tables_of(summary),
        history=history,
    )
