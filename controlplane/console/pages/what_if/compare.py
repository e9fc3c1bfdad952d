"""The futures of a what-if as the page shows them: rows, marks, words, from `selectors.comparison` and `progress`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from django.utils import timezone

from controlplane.console.formats import (
    MINUS,
    NONE,
    count,
    duration,
    milliseconds,
    points_signed,
    signed,
    usd,
    usd_signed,
)
from controlplane.simulation.whatif.models import LETTERS, WhatIf, WhatIfState
from scheduling.compiling import Progress
from scheduling.simulation.measures.comparison import Verdict

Row = dict[str, Any]
COLORS: Final = ("var(--text)", "var(--s1)", "var(--s3)", "var(--s2)", "var(--s4)", "var(--s5)", "var(--s6)")
DASHES: Final = ("solid", "solid", "solid", "longdash", "dot", "dashdot", "dash")
"""Of the futures A to G: line style differs as well as colour."""
MARKS: Final = {"ok": "ready", "warning": "warning", "critical": "critical", "info": "loading", "idle": "stopped"}
STATES: Final = {
    WhatIfState.QUEUED: ("info", "Queued"),
    WhatIfState.RUNNING: ("info", "Running"),
    WhatIfState.DONE: ("ok", "Done"),
    WhatIfState.CANCELLED: ("idle", "Cancelled"),
    WhatIfState.FAILED: ("critical", "Failed"),
}
TONES: Final = {Verdict.CHEAPEST: "ok", Verdict.MEETS: "ok", Verdict.CLOSE: "warning", Verdict.MISSES: "critical"}


class Tag(NamedTuple):
    """A word with its tone; the mark repeats it by shape."""

    tone: str
    text: str

    @property
    def mark(self) -> str:
        return MARKS[self.tone]


@dataclass(frozen=True, slots=True)
class Cell:
    """A number of the table; *change* is against A."""

    text: str
    margin: str = ""
    change: str = ""
    tone: str = ""
    bold: bool = False


def state_of(state: str, text: str = "", *, failed: bool = False) -> Tag:
    """Return the state of a what-if in words; *failed*: some of its futures did."""
    tone, word = STATES[WhatIfState(state)]
    return Tag("warning" if failed and tone == "ok" else tone, f"{word}{text}")


def rows_of(compared: Row, progress: Row) -> list[Row]:
    """Return the futures with their comparison and progress."""
    by_letter = {one["letter"]: one for one in progress["futures"]}
    return [_row(one, by_letter[one["letter"]]) for one in compared["futures"]]


def runs_of(rows: Sequence[Row]) -> list[tuple[Row, Row, float | None]]:
    """Return each future with its application runs and their share of met deadlines, all together first, by application."""
    made = [(one, of, of["in_time"] / of["due"] if of["due"] else None) for one in rows for of in one["runs"] or ()]
    names = dict.fromkeys(of["application"] for _, of, _ in made)
    order = {name: at for at, name in enumerate(sorted(names, key=lambda name: (name != "all", name)))}
    return sorted(made, key=lambda each: order[each[1]["application"]])


def _row(one: Row, done: Row) -> Row:
    at = LETTERS.index(one["letter"])
    whole = one["seeds_done"] == one["seeds"]
    return {
        **one,
        "at": at,
        "partial": not whole,
        "whole": whole,
        "open": done["state"] in (WhatIfState.QUEUED, WhatIfState.RUNNING),
        "state": done["state"],
        "progress": done["done"],
        "status": status(done),
        "words": one["changes"],
        "cells": cells(one, at),
        "verdict": verdict(one, done),
    }


def in_words(done: Row, compiling: Progress | None) -> str:
    """Describe the progress of a what-if: runs, time taken, time left, and whether they wait for kernels."""
    words = [f"{done['runs_done']} of {done['runs']} runs"]
    if done["ahead"]:
        words.append(f"{done['ahead']} other what-if{'s' * (done['ahead'] > 1)} first")
    if done["elapsed_s"] is not None:
        words.append(f"{duration(done['elapsed_s'])} elapsed")
    if compiling and not done["runs_done"]:
        words.append(f"runs wait for the simulator: {compiling}, once for each version")
    if done["eta_s"]:
        words.append(f"about {duration(done['eta_s'])} left. Results below change until all are done")
    return f"{'; '.join(words)}."


def status(done: Row) -> str:
    """Describe the progress of a future."""
    match done["state"]:
        case WhatIfState.DONE:
            return f"done in {duration(done['took_s'])}"
        case WhatIfState.RUNNING:
            return f"{100 * done['done']:.0f}%, seed {done['seed']} of {done['seeds']}, {done['phase']}"
        case WhatIfState.FAILED:
            return f"failed: {done['error']}" if done["error"] else "failed"
        case WhatIfState.CANCELLED:
            return f"cancelled, {done['seeds_done']} of {done['seeds']} seeds kept"
    return f"{done['state']}, {done['seeds_done']} of {done['seeds']} seeds"


def verdict(one: Row, done: Row) -> Tag:
    if done["state"] == WhatIfState.FAILED:
        return Tag("critical", "Failed")
    if one["verdict"] in TONES:
        return Tag(TONES[one["verdict"]], one["verdict"])
    return Tag("info" if one["seeds_done"] else "idle", one["verdict"])


def cells(one: Row, at: int) -> list[Cell]:
    """Return SLO met, TTFT p95, goodput, cost, instance-hours and the highest queue."""
    met = one["slo_met"]
    if met is None:
        return [Cell(NONE)] * 6
    points = None if at == 0 or met["delta"] is None else 100 * met["delta"]
    share = Cell(
        f"{100 * met['mean']:.1f}%",
        f"{100 * met['low']:.1f} to {100 * met['high']:.1f}",
        "" if points is None else points_signed(points / 100),
        "" if points is None or abs(points) < 0.05 else "better" if points > 0 else "worse",
        bold=True,
    )
    cost, hours, good = one["cost_usd_per_h"], one["instance_hours"], one["goodput_tokens_per_s"]
    return [
        share,
        Cell(milliseconds(_mean(one["ttft_p95_ms"]))),
        Cell(
            NONE if good is None else count(round(good["mean"])),
            change=_change(good, at, signed, 0.5),
        ),
        Cell(usd(_mean(cost)), change=_change(cost, at, usd_signed, 0.005)),
        Cell(
            _number(_mean(hours)),
            change=_change(hours, at, lambda by: f"{'+' if by > 0 else MINUS}{abs(by):,.1f}", 0.05),
        ),
        Cell(NONE if one["queue_peak"] is None else count(round(one["queue_peak"]["mean"]))),
    ]


def _mean(interval: Row | None) -> float | None:
    return None if interval is None else interval["mean"]


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.1f}"


def _change(interval: Row | None, at: int, text: Any, least: float) -> str:
    if at == 0 or interval is None or interval["delta"] is None:
        return ""
    return "same" if abs(interval["delta"]) < least else str(text(interval["delta"]))


def sentence(one: Row, target: float) -> str:
    """Describe the gain of the chosen future over now, and whether it holds."""
    met, cost = one["slo_met"], one["cost_usd_per_h"]
    if met is None or cost is None:
        return "Nothing of it is simulated yet."
    if one["at"] == 0:
        return f"As things are, {100 * met['mean']:.1f}% meet the SLO at {usd(cost['mean'])} an hour."
    words = []
    if met["delta"] is not None:
        words.append(f"{points_signed(met['delta'])} SLO met")
    if cost["delta"] is not None:
        by = cost["delta"]
        words.append(
            "at the same cost" if abs(by) < 0.005 else f"for {usd(abs(by))} {'more' if by > 0 else 'less'} an hour"
        )
    against = f"{' '.join(words)} than now. " if words else ""
    if words and words[-1] == "at the same cost":
        against = f"{' '.join(words)} as now. "
    holds = f"It holds {100 * target:g}% in {one['holds']} of {one['seeds_done']} seeds"
    wide = ", twin error included." if met["low"] >= target else "."
    return f"{against}{holds}{wide}"


def facts(row: WhatIf, edits: Sequence[str], requests: float | None, edited: str) -> list[tuple[str, str, str]]:
    """Return five facts about the run: label, value, note."""
    start = row.start or {}
    kinds = {
        "fleet": "Live fleet",
        "ledger": "Ledger",
        "trace": "Trace",
        "synthetic": "Synthetic",
        "scenario": "Scenario",
    }
    error, remarks = row.twin_error, start.get("remarks") or [""]
    at = f"{timezone.localtime(datetime.fromisoformat(start['at'])):%d %b %H:%M:%S}" if start else NONE
    return [
        ("Started from", f"{kinds.get(start.get('kind', ''), NONE)}, {at}", remarks[0]),
        ("Covers", duration(row.horizon_s), f"{count(round(requests))} requests a seed" if requests else "counting"),
        ("Seeds", f"{row.seeds}, paired", "same requests in each"),
        ("Edit of demand", edits[0] if edits else "None", "; ".join(edits[1:]) or edited),
        (
            "Twin error",
            f"±{100 * error['ttft_p95']:.0f}% TTFT p95" if error.get("ttft_p95") is not None else "not measured yet",
            f"±{100 * error['slo_met']:.1f} pt SLO met"
            if error.get("slo_met") is not None
            else "intervals are of seeds alone",
        ),
    ]
