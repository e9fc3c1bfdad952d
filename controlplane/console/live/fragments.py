"""HTML fragments that pages keep fresh, rendered once per fleet state for all browsers.

A fragment has a name; elements with `data-fragment=NAME` hold it. Where more than text changes on a page (rows appear,
disappear or move), the topic has a mark, the fragment `drawn/TOPIC`: a page with another mark reloads its regions.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.html import conditional_escape

from controlplane.alerts.models import Condition
from controlplane.alerts.selectors import Unresolved, open_of
from controlplane.console.formats import FORMATS
from controlplane.console.live import batches, capacity, held_work, queues, tiles, what_ifs
from controlplane.console.live.state import LiveState
from controlplane.console.selectors.events import latest_events, newest_event_id
from controlplane.fleet.spot import selectors as spot
from controlplane.resources.instances import INSTANCES
from controlplane.resources.names import place_titles
from controlplane.usage.by_use import dollars_by_use, spot_income_usd

Html = dict[str, str]
EVENTS_SHOWN = 5
OPERATORS_TOPICS = frozenset({"system"})
TABLE_CELLS: Final = (
    *((column.name, column.live) for column in INSTANCES.columns if column.live),
    ("use_ratio", "bar"),
)
PAGE_CELLS: Final = (*TABLE_CELLS, ("running", "count"))
ENDPOINT_CELLS: Final = (("kv_ratio", "percent"), ("output_tokens_per_s", "quantity"))
MODEL_CELLS: Final = (
    ("instances_ready", "ready_of"), ("slo_met_ratio", "percent_fine"), ("ttft_p95_ms", "milliseconds"),
    ("waiting", "waiting_cell"), ("output_tokens_per_s", "quantity"),
)  # fmt: skip
BADGES: Final = {
    "overview": ("open alerts", tuple(Condition)),
    "alerts": ("open", tuple(Condition)),
    "fleet": ("down", (Condition.INSTANCE, Condition.ROLLOUT)),
    "models": ("in trouble", (Condition.SLO_BURN, Condition.ERRORS, Condition.ENDPOINT)),
    "batches": ("at risk or late", (Condition.BATCH,)),
    "scaling": ("to look at", (Condition.PLAN, Condition.FLAPPING)),
    "usage": ("budgets", (Condition.BUDGET,)),
    "system": ("in trouble", (Condition.JOB,)),
}
"""Open alerts that the navigation counts: by section, their word and their conditions."""
SHOWN: Final = 5
"""Of the attention list."""


def badge(alerts: tuple[Unresolved, ...], name: str) -> str:
    word, conditions = BADGES[name]
    number = sum(each["condition"] in conditions for each in open_of(alerts))
    return render_to_string("console/parts/badge.html", {"number": number, "word": word})


def attention_list(alerts: tuple[Unresolved, ...], model: str) -> str:
    """Render the open alerts of one model or of all."""
    found, known = open_of(alerts, model), sum(not each["open"] for each in alerts)
    shown = {"items": found[:SHOWN], "total": len(found), "model": model, "known": known}
    return render_to_string("console/overview/attention.html", shown)


def event_list() -> str:
    return render_to_string("console/overview/events.html", {"events": latest_events(EVENTS_SHOWN)})


def _cells(rows: Iterable[dict[str, Any]], cells: Iterable[tuple[str, str]]) -> Html:
    return {
        f"{row['live']}/{field}:{kind}": conditional_escape(FORMATS[kind](row[field], row))
        for row in rows
        for field, kind in cells
    }


def _tiles(of: tuple[tiles.Tile, ...], row: dict[str, Any] | None, live: str) -> Html:
    return {one["live"]: one["html"] for one in tiles.readings(of, row, live)}


def _everywhere(state: LiveState, _: str) -> Html:
    """Render fragments of every page: navigation badges, and numbers of models."""
    badges = {f"badge/{name}": badge(state.alerts, name) for name in BADGES}
    return badges | _cells((row for row in state.tables["tiles"] if row["scope"]), MODEL_CELLS)


def _overview(state: LiveState, model: str) -> Html:
    html = _tiles(tiles.TILES, state.tile(model), f"tile/{model}")
    html["attention"] = attention_list(state.alerts, model)
    if state.newest_event_id is not None:
        html["events"] = event_list()
    return html


def _instances(state: LiveState, _: str) -> Html:
    tables = state.tables
    return _cells(tables["instances"], TABLE_CELLS) | _cells(tables["endpoints"], ENDPOINT_CELLS)


def _instance(state: LiveState, key: str) -> list[dict[str, Any]]:
    return [row for row in state.tables["instances"] if str(row["id"]) == key]


def _queues(state: LiveState, region: str) -> Html:
    row = next(iter(state.of_region("queues", region)), None)
    html = _tiles(queues.TILES, row, f"queue/{region}")
    for group in state.of_region("groups", region):
        html |= {f"group/{group['number']}/{line}": text for line, text in queues.block(group).items()}
    return html | {"queues/held": render_to_string("console/queues/held_table.html", {"held": held_panel(state)})}


def fleet_figures(state: LiveState) -> dict[str, Any]:
    """Return the numbers of the fleet that stand among those of batches."""
    tile: Mapping[str, Any] = state.tile() or {}
    held = state.tables["held"]
    now = timezone.now()
    today = dollars_by_use(spot.start_of_day(now), now)
    return {
        "held": sum(row["count"] for row in held) if state.known else None,
        "announced": sum(row["announced"] for row in held),
        **{name: tile.get(name) for name in ("ttft_p95_ms", "ttft_slo_ms", "ttft_class", "ttft_all_p95_ms")},
        "spot_usd_per_hour": spot.offered_per_hour(spot.open_donations()),
        "idle_usd": today.idle_usd if today.total_usd else None,
        "cost_usd": today.total_usd,
        "today_usd": spot_income_usd(spot.start_of_day(now), now),
    }


def held_panel(state: LiveState) -> list[dict[str, Any]]:
    return held_work.panel(state.tables["held"], place_titles())


def _batches(state: LiveState, _: str) -> Html:
    return batches.html(state.batches, fleet_figures(state)) if state.batches else {}


def _drawn_batches(state: LiveState, _: str) -> Any:
    return batches.drawn(state.batches or batches.read())


def _drawn_queues(state: LiveState, region: str) -> Any:
    groups = [(row["number"], row["instance"], row["risk"], row["pinned"]) for row in state.of_region("groups", region)]
    lanes = [(row["instance"], row["order"], row["state"]) for row in state.of_region("lanes", region)]
    return groups, lanes, [round(row["at"]) for row in state.tables["reorders"][:1]]


def _drawn_what_if(state: LiveState, number: str) -> Any:
    return what_ifs.drawn(state.what_ifs.get(int(number)) or what_ifs.read(int(number)))


def _nothing(state: LiveState, _: str) -> Any:
    return None


Drawn = Callable[[LiveState, str], Any]
TOPICS: Final[dict[str, tuple[Callable[[LiveState, str], Html], Drawn]]] = {
    "": (_everywhere, _nothing),
    "overview": (_overview, _nothing),
    "instances": (_instances, lambda state, _: [(row["id"], row["status"]) for row in state.tables["instances"]]),
    "instance": (
        lambda state, key: _cells(_instance(state, key), PAGE_CELLS),
        lambda state, key: [row["status"] for row in _instance(state, key)],
    ),
    "queues": (_queues, _drawn_queues),
    "batches": (_batches, _drawn_batches),
    "system": (
        lambda state, _: {},
        lambda state, _: [[row["state"] for row in rows] for rows in state.system().values()],
    ),
    "events": (lambda state, _: {}, lambda state, _: state.newest_event_id),
    "capacity": (lambda _, number: capacity.html(int(number)), lambda _, number: capacity.drawn(int(number))),
    "what-if": (lambda state, number: what_ifs.html(state.what_ifs.get(int(number))), _drawn_what_if),
}
"""Fragments and marks by topic (the part before the colon)."""


def is_topic(topic: str) -> bool:
    kind, _, subject = topic.partition(":")
    return (
        kind in TOPICS and len(subject) <= 200 and (kind not in ("what-if", "capacity") or what_ifs.is_number(subject))
    )


def html_of(state: LiveState, topic: str) -> Html:
    """Return the fragments of *topic*, its mark among them."""
    kind, _, subject = topic.partition(":")
    mark = drawn_of(state, topic)
    return TOPICS[kind][0](state, subject) | ({f"drawn/{topic}": mark} if mark else {})


def drawn_of(state: LiveState, topic: str) -> str:
    """Return the mark of a page with *topic*; empty where fragments cover everything."""
    kind, _, subject = topic.partition(":")
    shown = TOPICS[kind][1](state, subject)
    if kind == "events":
        return "" if shown is None else str(shown)
    return "" if shown is None else hashlib.blake2b(repr(shown).encode(), digest_size=8).hexdigest()


def drawn_by_page(state: LiveState, topics: Iterable[str]) -> dict[str, str]:
    """Return the marks of a page being rendered. That of events is read from the database."""
    marks = {topic: drawn_of(state, topic) for topic in topics}
    if "events" in marks:
        marks["events"] = str(newest_event_id())
    return marks
