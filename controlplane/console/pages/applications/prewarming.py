"""What was prewarmed for a run or an application, and what became of it, for the panel of their pages."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.db.models import Count, DurationField, F, QuerySet, Sum

from controlplane.applications.models import ApplicationRun, PrewarmRow
from controlplane.applications.selectors import prewarms_of
from controlplane.console.live.next_to_warm import KINDS
from controlplane.console.pages.applications.timeline import AXIS

SHOWN: Final = 30
FROM_QUEUE: Final = "A request with it waits"
"""Begins why something was warmed for the waiting queue alone."""
FATES: Final = {
    "": "not used yet",
    "hit": "hit",
    "late": "late: still being warmed",
    "miss": "miss: it was cold",
    "waste": "unused",
    "failed": "failed",
}

DRAWN: Final = ("hit", "late", "miss", "waste", "failed")


@dataclass(frozen=True)
class Bar:
    """A part of the life of one, on an axis of `AXIS` units."""

    part: str
    x: float
    width: float


@dataclass(frozen=True)
class Life:
    row: PrewarmRow
    kind: str
    fate: str
    at_s: float
    bars: list[Bar]


def _life(row: PrewarmRow, began_at: datetime, duration_s: float, now: datetime) -> Life:
    at_s = (row.began_at - began_at).total_seconds()
    end_at, warm_at = row.settled_at or now, row.warm_at or row.settled_at or now
    bars = []
    for part, start, end in (("warming", row.began_at, warm_at), ("ready", warm_at, end_at)):
        left, right = ((each - began_at).total_seconds() / max(duration_s, 1e-3) for each in (start, end))
        left, right = max(0.0, left), min(1.0, right)
        if right > left or (part == "warming" and left < 1.0):
            bars.append(Bar(part, round(AXIS * left, 1), round(max(4.0, AXIS * (right - left)), 1)))
    return Life(row, KINDS.get(row.kind, row.kind), FATES.get(row.fate, row.fate), at_s, bars)


def prewarming_of_run(run: ApplicationRun, duration_s: float, now: datetime) -> dict[str, Any]:
    """Return the context of the panel of a run, on its time axis of *duration_s*."""
    return {"prewarmed": [_life(row, run.began_at, duration_s, now) for row in prewarms_of(run)[:SHOWN]]}


def prewarming_of(rows: QuerySet[PrewarmRow]) -> dict[str, Any]:
    """Return the context of the panel of one application or of several, with their *rows*: by kind, and the latest."""
    counts: dict[str, dict[str, int]] = {}
    for kind, fate, count in rows.order_by().values_list("kind", "fate").annotate(count=Count("pk")):
        counts.setdefault(kind, {})[fate or "open"] = count
    by_kind = [
        {"kind": title, "parts": _parts(fates), "ratio": _ratio(fates), "words": _words(fates)}
        for kind, title in KINDS.items()
        if (fates := counts.get(kind))
    ]
    latest = [
        {"row": row, "kind": KINDS.get(row.kind, row.kind), "fate": FATES.get(row.fate, row.fate)}
        for row in rows.order_by("-began_at", "-pk")[:10]
    ]
    calls = sum(fates.get(each, 0) for fates in counts.values() for each in ("hit", "late", "miss"))
    hits = sum(fates.get("hit", 0) for fates in counts.values())
    return {
        "prewarmed_kinds": by_kind,
        "prewarmed_latest": latest,
        "fates": [(fate, FATES[fate]) for fate in DRAWN],
        "prewarmed_calls": calls,
        "prewarmed_hits": hits,
        "prewarmed_hit_ratio": hits / calls if calls else None,
        "prewarmed": sum(sum(fates.values()) - fates.get("miss", 0) for fates in counts.values()),
        "prewarmed_saved_s": _started_s(rows, "hit"),
        "prewarmed_unused_s": _started_s(rows, "waste"),
        "prewarmed_from_queue": rows.filter(why__startswith=FROM_QUEUE).count(),
    }


def _started_s(rows: QuerySet[PrewarmRow], fate: str) -> float:
    """Return for how long the backends of *fate* were being warmed, together."""
    took = Sum(F("warm_at") - F("began_at"), output_field=DurationField())
    whole = rows.order_by().filter(fate=fate, warm_at__isnull=False).aggregate(took=took)["took"]
    return whole.total_seconds() if whole else 0.0


def _ratio(fates: dict[str, int]) -> float | None:
    calls = sum(fates.get(each, 0) for each in ("hit", "late", "miss"))
    return fates.get("hit", 0) / calls if calls else None


def _words(fates: dict[str, int]) -> str:
    """Return the counts in words, without those of nothing."""
    words = {
        "hit": "hit",
        "late": "late",
        "waste": "unused",
        "failed": "failed",
        "open": "not used yet",
        "miss": "missed",
    }
    return ", ".join(f"{fates[fate]:,} {word}" for fate, word in words.items() if fates.get(fate))


def _parts(fates: dict[str, int]) -> list[Bar]:
    """Return the bar of a kind: what came in time, late or not, and what was not used."""
    shown = [(fate, fates.get(fate, 0)) for fate in DRAWN]
    whole, at, bars = sum(count for _, count in shown) or 1, 0.0, []
    for fate, count in shown:
        if count:
            bars.append(Bar(fate, round(at, 1), round(AXIS * count / whole, 1)))
            at += AXIS * count / whole
    return bars
