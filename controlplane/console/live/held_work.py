"""Held work as the Queues page shows it: by model, with what released the last of it."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from django.utils import timezone

from controlplane.console.formats import percent
from scheduling.queueing import held_work

Row = dict[str, Any]


def panel(tables: Mapping[str, list[Row]], titles: Mapping[str, str]) -> list[Row]:
    """Return the rows of `console/queues/held_table.html`; *titles* are those of regions, by name."""
    by_place = {(row["model"], row["region"]): row for row in tables["signals"]}
    return [row | {"last": _last(row, by_place, titles)} for row in tables["held"]]


def totals(tables: Mapping[str, list[Row]]) -> dict[str, Any]:
    """Return the numbers of the tile: what is held in all, and lines that are still to come."""
    rows = tables["held"]
    return {"held": sum(row["count"] for row in rows), "announced": sum(row["announced"] for row in rows)}


def _last(row: Row, by_place: Mapping[tuple[str, str], Row], titles: Mapping[str, str]) -> Row | None:
    """Return when, where and why a request of a model was released last; None while that is not known."""
    if (last := row["last"]) is None:
        return None
    where = titles.get(last["region"], last["region"])
    return {"time": _time(last["at"]), "where": where, "reason": _reason({**last, "model": row["model"]}, by_place)}


def _time(at_s: float) -> str:
    return f"{timezone.localtime(datetime.fromtimestamp(at_s, UTC)):%H:%M:%S}"


def _reason(row: Row, by_place: Mapping[tuple[str, str], Row]) -> str:
    """Return why a release was made, in words."""
    use, place = percent(row["use_ratio"]), by_place.get((row["model"], row["region"]))
    one, two = (percent(place[name]) if place else "the mark" for name in ("one_below", "two_below"))
    below = two if place and row["use_ratio"] is not None and row["use_ratio"] < place["two_below"] else one
    reasons: dict[str, str] = {
        held_work.USED: f"Use {use}, below {below}",
        held_work.TROUGH: f"Use {use}: as many as fit below {one}",
        held_work.PACE: f"At the pace that keeps the deadlines; use {use}",
        held_work.DUE: f"Slack used up; use {use} overruled",
        held_work.OFF: "At once: nothing is held by rule",
    }
    return reasons.get(row["why"], str(row["why"]))
