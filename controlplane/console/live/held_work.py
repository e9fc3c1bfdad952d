"""Held work as the Batches page shows it: by model with ages, the last releases, and use by model and region."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from django.utils import timezone

from controlplane.console.formats import duration, percent
from scheduling.queueing import held_work

AGES: Final = {
    "under_1h": "under 1 h",
    "under_4h": "1 to 4 h",
    "under_10h": "4 to 10 h",
    "over_10h": "10 h and more: first",
}
Row = dict[str, Any]


def panel(tables: Mapping[str, list[Row]], titles: Mapping[str, str], *, reported: bool) -> dict[str, Any]:
    """Return the context of `console/batches/held.html`; *titles* are those of regions, by name."""
    held = {row["model"]: row for row in tables["held"]}
    signals = tables["signals"]
    gates = [_gate(row, held) for row in signals]
    regions = sorted({row["region"] for row in signals})
    longest = max((row["count"] for row in held.values()), default=0)
    by_place = {(row["model"], row["region"]): {**row, **gate} for row, gate in zip(signals, gates, strict=True)}
    return {
        "reported": reported,
        "ages": AGES,
        "held": [{**row, "bands": _bands(row, longest), "last": _last(row, by_place, titles)} for row in held.values()],
        "releases": [
            {
                **row,
                "time": _time(row["at"]),
                "where": titles.get(row["region"], row["region"]),
                "reason": _reason(row, by_place),
            }
            for row in tables["releases"]
        ],
        "regions": [titles.get(name, name) for name in regions],
        "use": [
            {
                "model": model,
                "cells": [by_place.get((model, region)) for region in regions],
                "reason": held[model]["reason"] if model in held else "Nothing waits",
            }
            for model in sorted({row["model"] for row in signals})
        ],
        "pulling": sum(gate["look"] in ("one", "two") for gate in gates),
        "idle": sum(gate["look"] == "idle" for gate in gates),
        "endpoints": len(signals),
    }


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


def _bands(row: Row, longest: int) -> list[dict[str, Any]]:
    """Return the bar of a model by age, in percent of the longest one."""
    bands, left = [], 0.0
    for name in AGES:
        width = 100 * row[name] / longest if longest else 0.0
        bands.append({"age": name, "x": round(left, 2), "width": round(width, 2)})
        left += width
    return [band for band in bands if band["width"]]


def _gate(row: Row, held: Mapping[str, Row]) -> dict[str, Any]:
    """Return what an endpoint does now: how its bar looks, and the words with it."""
    waits = row["model"] in held
    match row["gate"]:
        case "no_signal":
            look, words = "silent", "no signal, closed"
        case "cooldown":
            look, words = "closed", f"cooldown, {duration(row['quiet_s'])}"
        case "closed":
            look, words = "closed", "closed"
        case _ if not waits:
            look, words = "idle", "room, no work"
        case gate:
            look, words = gate, "pulls" if held[row["model"]]["rule"] != "use" else f"pulls {1 + (gate == 'two')}"
    marks = [round(100 * row[name], 1) for name in ("two_below", "one_below")]
    width = round(100 * min(1.0, row["use_ratio"] or 0.0), 1)
    return {"look": look, "words": words, "marks": marks, "width": width}


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
