"""The live state that pages show: built from the gateway's published summary, immutable, with its recent history."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from controlplane.console.live import attention, jobs, length_service, queues, what_ifs
from controlplane.console.live.deltas import Table, columnar, rows_of
from controlplane.console.live.tiles import levels
from controlplane.dispatch.wire import ENDPOINT_COLUMNS, INSTANCE_COLUMNS

SATURATED = 0.95  # of its sequences or of its KV cache, whichever is fuller
SILENT_S = 15.0  # a summary older than this says nothing about now

TILE_FIELDS = (
    "requests_per_s",
    "output_tokens_per_s",
    "prompt_tokens_per_s",
    "slo_class",
    "slo_met_ratio",
    "slo_objective_ratio",
    "slo_burn",
    "ttft_p50_ms",
    "ttft_p95_ms",
    "ttft_p99_ms",
    "itl_p50_ms",
    "itl_p95_ms",
    "e2e_p95_ms",
    "waiting",
    "running",
    "kv_max_ratio",
    "instances_ready",
    "instances",
    "errors_per_s",
    "ttft_slo_ms",
)
TOPICS = {
    "overview": ("tiles",),
    "instances": ("instances", "endpoints"),
    "lengths": ("lengths",),
    "system": ("jobs", "parts"),
    "events": (),
}
OPERATORS_TOPICS = frozenset({"system"})


def is_topic(name: str) -> bool:
    """Whether there is such a topic: one of TOPICS, `queues:REGION`, or `what-if:ID`."""
    return name in TOPICS or any(of.fullmatch(name) is not None for of in (queues.TOPIC, what_ifs.TOPIC))


def tables_in(topic: str) -> tuple[str, ...]:
    """The tables that *topic* carries."""
    if topic in TOPICS:
        return TOPICS[topic]
    return what_ifs.tables_in(topic) if what_ifs.TOPIC.fullmatch(topic) else queues.tables_in(topic)


class Source(StrEnum):
    """Where the numbers stand: what a page says next to them."""

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


def columns(given: Mapping[str, Sequence[Any]], fields: Iterable[str], key: str) -> Table:
    """*given* with exactly *fields*, in that order; a column that is missing or of another length is all None."""
    length = len(given.get(key, ()))
    table = {}
    for name in fields:
        values = list(given.get(name, ()))
        table[name] = values if len(values) == length else [None] * length
    return table


def tables_of(summary: Mapping[str, Any]) -> dict[str, Table]:
    """Columnar tables `tiles` (first row the fleet, then one a model), `instances`, `endpoints`, `lengths` of *summary*."""
    scopes: dict[str, Mapping[str, Any]] = {"": summary.get("fleet") or {}}
    scopes.update(sorted((summary.get("models") or {}).items()))
    tiles: Table = {"scope": list(scopes), **columnar(scopes.values(), TILE_FIELDS)}
    tiles["levels"] = [levels(tile) for tile in scopes.values()]

    instances = columns(summary.get("instances") or {}, INSTANCE_COLUMNS, "id")
    instances["status"] = [
        status_of(*cells)
        for cells in zip(
            *(instances[name] for name in ("state", "reachable", "use_ratio", "waiting", "trouble")), strict=True
        )
    ]
    endpoints = columns(summary.get("endpoints") or {}, ENDPOINT_COLUMNS, "model")
    keys = [f"{model} {region}" for model, region in zip(endpoints["model"], endpoints["region"], strict=True)]
    return {
        "tiles": tiles,
        "instances": instances,
        "endpoints": {"key": keys, **endpoints},
        "lengths": length_service.table_of(summary),
        **jobs.tables_of(summary.get("system")),
        **queues.tables_of(summary),
    }


NO_TABLES = tables_of({})
NO_ATTENTION: dict[str, Any] = {
    "items": [],
    "total": 0,
    "instances": 0,
    "below": 0,
    "plans": 0,
    "system": 0,
    "queues": 0,
    "models": {"": {"items": [], "total": 0}},
}


@dataclass(frozen=True, slots=True)
class LiveState:
    """What one moment looked like. *ts* is the gateway's clock in epoch seconds, None before the first summary."""

    version: int = 0
    source: Source = Source.STARTING
    ts: float | None = None
    owner: str = ""
    started_at: float | None = None
    tables: dict[str, Table] = field(default_factory=lambda: NO_TABLES)
    attention: dict[str, Any] = field(default_factory=lambda: NO_ATTENTION)
    # Samples of the last hour, oldest first, one every five seconds: see `history.py`.
    history: tuple[dict[str, Any], ...] = ()
    # Tables of the what-ifs that a page follows: see `what_ifs.py`.
    what_ifs: dict[str, Table] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether there is anything to show."""
        return self.ts is not None

    def tile(self, scope: str = "") -> dict[str, Any] | None:
        """The fleet numbers, or those of one model."""
        table = self.tables["tiles"]
        if not self.known or scope not in table["scope"]:
            return None
        at = table["scope"].index(scope)
        return {name: values[at] for name, values in table.items()}

    def system(self) -> dict[str, list[dict[str, Any]]]:
        """Rows of jobs and of parts: as published, or as this process knows them while nothing is."""
        tables = (jobs.own_tables() if self.source != Source.LIVE else {}) or self.tables
        return {name: rows_of(tables[name]) for name in ("jobs", "parts")}

    def lengths(self) -> dict[str, Any] | None:
        """The numbers of the length service; None while its gateway reports none."""
        return next(iter(rows_of(self.tables["lengths"])), None)

    def model_rows(self, limit: int) -> list[dict[str, Any]]:
        """The numbers of the *limit* models with the most output."""
        rows = [row for row in rows_of(self.tables["tiles"]) if row["scope"]]
        busiest = sorted(rows, key=lambda row: -(row["output_tokens_per_s"] or 0))[:limit]
        return sorted(busiest, key=lambda row: row["scope"])

    def instance_rows(self) -> dict[int, dict[str, Any]]:
        """Live rows of instances by their id."""
        return {row["id"]: row for row in rows_of(self.tables["instances"])}

    def project(self, topics: Iterable[str]) -> dict[str, Any]:
        """The part that a connection with *topics* follows, in the form of `deltas`."""
        names = [name for topic in topics for name in tables_in(topic)]
        return {
            "ts": self.ts,
            "source": self.source.value,
            "tables": {name: self.what_ifs.get(name) or self.tables.get(name, {}) for name in names},
            "attention": self.attention if self.known else None,
        }


def without_summaries(state: LiveState, known: attention.Known) -> LiveState:
    """*state* while nothing is published: its numbers stand still, and what this process knows of the system does not."""
    if state.source == Source.LIVE or not (own := jobs.own_tables()):
        return state
    tables = {**state.tables, **own}
    return replace(state, tables=tables, attention=attention.find(tables, known))


def state_of(
    summary: Mapping[str, Any], version: int, known: attention.Known, history: tuple[dict[str, Any], ...]
) -> LiveState:
    """The state that *summary* (the gateway's JSON) describes. Raises KeyError, TypeError or ValueError on another form."""
    tables = tables_of(summary)
    return LiveState(
        version=version,
        source=Source.LIVE,
        ts=float(summary["ts"]),
        owner=str(summary.get("owner", "")),
        started_at=summary.get("started_at"),
        tables=tables,
        attention=attention.find(tables, known),
        history=history,
    )
