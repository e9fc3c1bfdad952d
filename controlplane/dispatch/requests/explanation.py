"""Why an instance was chosen, for the decision trace: what the decision saw of each candidate, in the router's own terms.

The format is said in docs/routing.md; the rows are those of `scheduling.routing.candidates`.
"""

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from scheduling.routing import routers
from scheduling.routing.candidates import (
    ACCEPTING,
    AHEAD,
    ALLOWED,
    CACHED,
    DECODE,
    IN_SECONDS,
    INSTANCE,
    KV,
    KV_CAPACITY,
    MEMORY,
    OTHERS,
    PEAK,
    PREFILL,
    QUEUED,
    REMAINING,
    ROOM,
    RUNNING,
    SCORE,
)
from scheduling.routing.routers import JOIN_SHORTEST_QUEUE, LEAST_DELAY, POLICY_CODES, PRESERVE

CANDIDATES = 8  # that a trace shows

Row = list[float]
Parts = dict[str, float]


def explain(
    topology: Topology, endpoint: Endpoint, chosen: Replica, candidates: NDArray[np.float64], pulled: str = ""
) -> dict[str, object]:
    """`seen`, `chosen_because` and what is ahead, of a decision for *chosen* that wrote *candidates*.

    *pulled* says why the instance took it from its virtual queue, where no router was asked.
    """
    policy = JOIN_SHORTEST_QUEUE if pulled else POLICY_CODES[endpoint.spec.policy.routing]
    first, end = topology.arrays.first[endpoint.index : endpoint.index + 2].tolist()
    rows: list[Row] = candidates[: end - first].tolist()
    rows = [row for row in rows if row[INSTANCE] >= 0]  # there is room for more
    by_slot = topology.by_slot
    if policy >= PRESERVE and len(rows) > 1:
        rows.sort(key=lambda row: (row[ROOM] == 0, row[SCORE], row[INSTANCE]))
    seen = []
    for row in rows:
        score: float | None
        if policy >= PRESERVE:
            score, parts = row[SCORE], _ahead_parts(row, policy)
        else:
            score, parts = _load_parts(row, policy)
        seen.append(
            {
                "instance": by_slot[int(row[INSTANCE])].name,
                "accepting": bool(row[ACCEPTING]),
                "room": bool(row[ROOM]),
                "running": int(row[RUNNING]),
                "remaining_tokens": int(row[REMAINING]),
                "kv_tokens": int(row[KV]),
                "score": round(score, 4) if row[ROOM] and score is not None else None,
                "parts": parts,
            }
        )
    if policy < PRESERVE:
        seen.sort(key=lambda each: (each["score"] is None, each["score"] or 0.0))
    because = pulled or _because(endpoint.spec.policy.routing, chosen.name, seen, in_seconds=bool(rows[0][IN_SECONDS]))
    round_trip_ms = topology.round_trip_ms(chosen)
    at_chosen = next(row for row in rows if row[INSTANCE] == chosen.slot)
    ahead = int(at_chosen[AHEAD])
    if ahead and round_trip_ms:  # then no instance had room
        allowed = int(at_chosen[ALLOWED])
        because += (
            f" All instances were full; sent early to hide a round trip of {round_trip_ms:.0f} ms"
            f" ({ahead} of at most {allowed} ahead)."
        )
    return {
        "requests_ahead": ahead,
        "round_trip_ms": None if round_trip_ms is None else round(round_trip_ms, 3),
        "chosen_because": because,
        "seen": seen,
    }


def _ahead_parts(row: Row, policy: int) -> Parts:
    """What makes up the score of a router that looks ahead."""
    peak = round(row[PEAK] / row[KV_CAPACITY], 4) if row[KV_CAPACITY] else 0.0
    if row[IN_SECONDS]:
        return {
            "predicted_ttft_ms": round(row[PREFILL] * 1000, 1),
            "decode_s": round(row[DECODE], 4),
            "others_s": round(row[OTHERS], 4),
            "memory_s": round(row[MEMORY], 4),
            "affinity_tokens": int(row[CACHED]),
            "peak_kv": peak,
        }
    parts: Parts = {
        "prefill_tokens": int(row[PREFILL]),
        "decode_tokens": int(row[DECODE]),
        "memory_tokens": round(row[MEMORY], 1),
        "peak_kv": peak,
    }
    if policy == LEAST_DELAY:
        parts["affinity_tokens"] = int(row[CACHED])
    return parts


def _load_parts(row: Row, policy: int) -> tuple[float | None, Parts]:
    """The score of a router that looks at loads, and what makes it up."""
    match policy:
        case routers.LEAST_REQUEST:
            running = int(row[RUNNING])
            return running, {"requests": running}
        case routers.MINIMUM_USE:
            use = row[KV] / row[KV_CAPACITY] if row[KV_CAPACITY] else 0.0
            return use, {"kv_use": round(use, 4)}
        case routers.JOIN_SHORTEST_QUEUE:
            remaining, queued = int(row[REMAINING]), int(row[QUEUED])
            return remaining, {"prefill_tokens": queued, "decode_tokens": remaining - queued}
    return None, {}


WORDS = {
    "least_request": ("Fewest requests", "{:,.0f}"),
    "minimum_use": ("Least KV use", "{:.1%}"),
    "join_shortest_queue": ("Fewest tokens left to compute", "{:,.0f}"),
    "preserve": ("Least load", "{:,.0f} tokens"),
    "least_delay": ("Least load", "{:,.0f} tokens"),
}


def _because(name: str, chosen: str, seen: list[dict[str, object]], *, in_seconds: bool) -> str:
    with_room = [row for row in seen if row["room"]]
    if len(with_room) == 1:
        return "The only one shown with room." if len(seen) > 1 else "The only instance."
    if name == "round_robin":
        return "The next one with room."
    what, form = ("Least delay", "{:,.2f} s") if in_seconds else WORDS[name]
    by_name = {str(row["instance"]): row["score"] for row in with_room}
    mine = by_name.pop(chosen, None)
    if mine is None:
        return f"{what}."
    others = [(score, other) for other, score in by_name.items() if score is not None]
    next_score, next_name = min(others)
    because = f"{what}, {form.format(mine)}; next is {next_name} with {form.format(next_score)}."
    cached = next((row["parts"] for row in seen if row["instance"] == chosen), {})
    if isinstance(cached, dict) and cached.get("affinity_tokens"):
        because = f"{because[:-1]}. {int(cached['affinity_tokens']):,} tokens of the prompt are likely cached there."
    return because
