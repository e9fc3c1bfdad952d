"""The futures of a what-if as the page shows them: rows, marks, words, from `selectors.comparison` and `progress`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from controlplane.console.formats import duration, goal, percent_fine, points_signed, usd, usd_signed
from controlplane.simulation.whatif import plan
from controlplane.simulation.whatif.models import LETTERS, WhatIfState
from scheduling.compiling import Progress
from scheduling.simulation.measures.comparison import Verdict

Row = dict[str, Any]
COLORS: Final = ("text", "s1", "s3", "s2", "s4", "s5", "s6")
DASHES: Final = ("solid", "solid", "solid", "longdash", "dot", "dashdot", "dash")
"""Of the futures A to G: line style differs as well as colour."""
MARKS: Final = {"ok": "ready", "warning": "warning", "critical": "critical", "info": "loading", "idle": "stopped"}
STATES: Final = {"queued": "info", "running": "info", "done": "ok", "cancelled": "idle", "failed": "critical"}
MEANS: Final = ("slo_met", "ttft_p95_ms", "cost_usd_per_h", "queue_peak")
TONES: Final = {Verdict.CHEAPEST: "ok", Verdict.MEETS: "ok", Verdict.CLOSE: "warning", Verdict.MISSES: "critical"}


class Tag(NamedTuple):
    """A word with its tone; the mark repeats it by shape."""

    tone: str
    text: str

    @property
    def mark(self) -> str:
        return MARKS[self.tone]


def state_of(state: str, text: str = "", *, failed: bool = False) -> Tag:
    """Return the state of a what-if in words; *failed*: some of its futures did."""
    tone = STATES[state]
    return Tag("warning" if failed and tone == "ok" else tone, f"{WhatIfState(state).label}{text}")


def rows_of(compared: Row, progress: Row) -> list[Row]:
    """Return the futures with their comparison and progress."""
    done = {one["letter"]: one for one in progress["futures"]}
    return [
        {
            **one,
            "at": LETTERS.index(one["letter"]),
            "means": {name: (one[name] or {}).get("mean") for name in MEANS},
            "whole": one["seeds_done"] == one["seeds"],
            "state": done[one["letter"]]["state"],
            "progress": done[one["letter"]]["done"],
            "status": status(done[one["letter"]]),
            "verdict": verdict(one, done[one["letter"]]),
            "against": against_now(one),
            "open": open_words(one),
        }
        for one in compared["futures"]
    ]


def against_now(one: Row) -> Row:
    """Describe the difference of the SLO met from that of A: its interval, whether it is sure, and what would make it so."""
    met = one["slo_met"]
    if one["letter"] == "A" or met is None or met["delta"] is None:
        return {}
    interval = f"{points_signed(met['delta_low'])} to {points_signed(met['delta_high'])}"
    sure, needs = one["decides"]["delta"] == one["seeds_done"], plan.needs_of(one, "delta")
    if met["delta_low"] == met["delta_high"]:
        sure, interval = sure or one["seeds_done"] > 1, "the same" * (not met["delta"])
    tone = "" if not sure or not met["delta"] else "ok-text" if met["delta"] > 0 else "crit-text"
    under = "; ".join(filter(None, (interval, "" if sure else needs)))
    return {"text": points_signed(met["delta"]), "under": under, "tone": tone}


def open_words(one: Row) -> str:
    """Say of which classes the verdict is, and what would settle one that is too close."""
    return "; ".join([", ".join(one["breaks"]), *[plan.needs_of(one, "verdict")] * (one["verdict"] == Verdict.CLOSE)])


def runs_of(rows: Sequence[Row]) -> list[tuple[Row, Row, float | None]]:
    """Return each future with its application runs and their share of met deadlines, all together first, by application."""
    made = [(one, of, of["in_time"] / of["due"] if of["due"] else None) for one in rows for of in one["runs"] or ()]
    return sorted(made, key=lambda each: (each[1]["application"] != "all", each[1]["application"]))


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
            return f"{100 * done['done']:.0f}%, repetition {done['seed']} of {done['seeds']}, {done['phase']}"
        case WhatIfState.FAILED:
            return f"failed: {done['error']}" if done["error"] else "failed"
        case WhatIfState.CANCELLED:
            return f"cancelled, {done['seeds_done']} of {done['seeds']} repetitions kept"
    return f"{done['state']}, {done['seeds_done']} of {done['seeds']} repetitions"


def verdict(one: Row, done: Row) -> Tag:
    if done["state"] == WhatIfState.FAILED:
        return Tag("critical", "Failed")
    return Tag(TONES.get(one["verdict"], "info" if one["seeds_done"] else "idle"), one["verdict"])


def sentence(one: Row, compared: Mapping[str, Any]) -> str:
    """Describe the gain of the chosen future over now, and whether it keeps its promises."""
    met, cost = one["slo_met"], one["cost_usd_per_h"]
    if met is None or cost is None:
        return "Nothing of it is simulated yet."
    whose = f" of {compared['slo_class']}" if compared["target"] else ""
    target = f", and {goal(compared['target'])} are promised" if compared["target"] else ""
    words = f"{percent_fine(met['mean'])}{whose} meet the SLO{target}, at {usd(cost['mean'])} an hour"
    if one["letter"] != "A" and met["delta"] is not None:
        by = "at the same cost" if abs(cost["delta"]) < 0.005 else f"{usd_signed(cost['delta'])} an hour"
        words += f": {points_signed(met['delta'])} against now, {by}"
    kept = f" It keeps its promises in {one['holds']} of {one['promised']} repetitions."
    return f"{words}.{kept if one['promised'] and not plan.doubt_of(one) else ''}"
