"""Why an instance was chosen, in words: made of the numbers of a decision (`port.Reasons`) when its trace is read.

`docs/papers/routing.md` says what a placement holds then. Ledgers may have older ones, with words: those stay as they are.
"""

from collections.abc import Mapping
from typing import Any

from controlplane.dispatch.port import KV_EVENTS, Asked
from controlplane.gateway.models import LedgerRow
from scheduling.applications.recording import NO_UNIT
from scheduling.routing import candidates as columns

Step = Mapping[str, Any]
Parts = dict[str, float]
LOOK_AHEAD = ("preserve", "least_delay")
WORDS = {
    "least_request": ("Fewest requests", "{:,.0f}"),
    "minimum_use": ("Least KV use", "{:.1%}"),
    "join_shortest_queue": ("Fewest tokens left to compute", "{:,.0f}"),
    "preserve": ("Least load", "{:,.0f} tokens"),
    "least_delay": ("Least load", "{:,.0f} tokens"),
}


def trace_of(row: LedgerRow) -> list[Step]:
    """Return the decision trace of *row* with its placements in words."""
    return [explained(step, row) for step in row.trace]


def explained(step: Step, asked: Asked | LedgerRow) -> Step:
    """Return *step* of a decision trace: of a placement, with names and words for its numbers."""
    seen = step.get("seen")
    if not isinstance(seen, dict):
        return step
    policy = "join_shortest_queue" if step.get("pulled") else step["policy"]
    here, name = seen[step["instance"]], step["instance"]
    candidates = [_candidate(each, row, policy) for each, row in seen.items()]
    candidates.sort(key=lambda one: (one["score"] is None, one["score"] or 0.0))
    in_seconds = policy in LOOK_AHEAD and bool(here[columns.IN_SECONDS])
    words = [_pulled(step["pulled"]) if step.get("pulled") else _because(policy, name, candidates, in_seconds)]
    told = dict(step)
    if step.get("cached_by"):
        cached = {"tokens": step["cached_tokens"], "of": step["prompt_tokens"], "by": step["cached_by"]}
        told["cached"] = cached
        if cached["tokens"] or cached["by"] == KV_EVENTS:
            words.append(_cached(cached))
    if (ahead := int(here[columns.AHEAD])) and step.get("round_trip_ms"):
        words.append(
            f"All instances were full; sent early to hide a round trip of {step['round_trip_ms']:.0f} ms"
            f" ({ahead} of at most {int(here[columns.ALLOWED])} ahead)."
        )
    if run := step.get("run"):
        told["run"] = {"application": asked.application, "run": asked.run, "unit": asked.unit or NO_UNIT} | run
        told["run"]["words"] = _run(told["run"])
    if was := step.get("adapter_was"):
        told["adapter"] = {"name": asked.adapter, "was": was}
    return told | {"requests_ahead": ahead, "chosen_because": " ".join(words), "seen": candidates}


def _candidate(name: str, row: list[float], policy: str) -> dict[str, Any]:
    score, parts = _parts(row, policy)
    room = bool(row[columns.ROOM])
    return {
        "instance": name,
        "accepting": bool(row[columns.ACCEPTING]),
        "room": room,
        "running": int(row[columns.RUNNING]),
        "remaining_tokens": int(row[columns.REMAINING]),
        "kv_tokens": int(row[columns.KV]),
        "score": round(score, 4) if room and score is not None else None,
        "parts": parts,
    }


def _parts(row: list[float], policy: str) -> tuple[float | None, Parts]:
    """Return the score of a candidate by *policy*, and its parts."""
    capacity = row[columns.KV_CAPACITY]
    match policy:
        case "least_request":
            return row[columns.RUNNING], {"requests": int(row[columns.RUNNING])}
        case "minimum_use":
            use = row[columns.KV] / capacity if capacity else 0.0
            return use, {"kv_use": round(use, 4)}
        case "join_shortest_queue":
            queued = int(row[columns.QUEUED])
            parts: Parts = {"prefill_tokens": queued, "decode_tokens": int(row[columns.REMAINING]) - queued}
            return row[columns.REMAINING], parts
        case "round_robin":
            return None, {}
    peak = {"peak_kv": round(row[columns.PEAK] / capacity, 4) if capacity else 0.0}
    affinity = {"affinity_tokens": int(row[columns.CACHED])} if policy == "least_delay" else {}
    if row[columns.IN_SECONDS]:
        seconds = {"decode_s": row[columns.DECODE], "others_s": row[columns.OTHERS], "memory_s": row[columns.MEMORY]}
        return row[columns.SCORE], {
            "predicted_ttft_ms": round(row[columns.PREFILL] * 1000, 1), **seconds, **affinity, **peak
        }  # fmt: skip
    tokens = {"prefill_tokens": int(row[columns.PREFILL]), "decode_tokens": int(row[columns.DECODE])}
    return row[columns.SCORE], {**tokens, "memory_tokens": round(row[columns.MEMORY], 1), **affinity, **peak}


def _because(policy: str, chosen: str, candidates: list[dict[str, Any]], in_seconds: bool) -> str:
    with_room = [one for one in candidates if one["room"]]
    if len(with_room) == 1:
        return "The only one shown with room." if len(candidates) > 1 else "The only instance."
    if policy == "round_robin":
        return "The next one with room."
    what, form = ("Least delay", "{:,.2f} s") if in_seconds else WORDS[policy]
    scores = {one["instance"]: one["score"] for one in with_room}
    mine = scores.pop(chosen, None)
    if mine is None:
        return f"{what}."
    other, score = next(iter(scores.items()))
    return f"{what}, {form.format(mine)}; next is {other} with {form.format(score)}."


def _pulled(why: Step) -> str:
    due_in_s = why["due_in_s"]
    due = f"due in {due_in_s:,.1f} s" if due_in_s >= 0 else f"due {-due_in_s:,.1f} s ago"
    return (
        f"Pulled from its own virtual queue of {why['groups']} request groups: "
        f"group {why['group']}, {why['waiting']} waiting, the first {due}."
    )


def _cached(cached: Step) -> str:
    start = f"{cached['tokens']:,} of {cached['of']:,} prompt tokens"
    return f"{start} cached there (from KV events)." if cached["by"] == KV_EVENTS else f"{start} expected in its cache."


def _run(run: Step) -> str:
    first = "moved first by an operator, " if run["first"] else ""
    return (
        f"Run {run['run']} of {run['application']}: {first}rank {run['rank_s']:,.2f} s. It has had "
        f"{run['attained_s']:,.2f} s of service and is expected to need {run['remaining_s']:,.2f} s more. "
        f"Its path to the end takes {run['worst_s']:,.2f} s at the most."
    )
