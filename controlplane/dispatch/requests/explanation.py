"""Why an instance was chosen, for the decision trace: what each instance looked like to the router, in its own terms.

The format is said in docs/routing.md. It is made after the request was placed: its load is taken off again on the way.
"""

import numpy as np

from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from scheduling.lookahead.maps import LookAhead
from scheduling.routing.predictive import CACHED, COLUMNS, DECODE, MEMORY, OTHERS, PEAK, PREFILL, ROOM, SCORE, explain
from scheduling.routing.prefix_affinity import Affinity
from scheduling.routing.requests_ahead import allowance, close_ahead, open_ahead, requests_ahead
from scheduling.routing.routers import LEAST_DELAY, POLICY_CODES, PRESERVE, has_room

SEEN = 8  # instances that a trace shows

Parts = dict[str, float]


def explained(
    topology: Topology,
    maps: LookAhead,
    affinity: Affinity,
    endpoint: Endpoint,
    chosen: Replica,
    slot: int,
    prompt_tokens: int,
    output_tokens: int,
) -> dict[str, object]:
    """`seen`, `chosen_because` and what is ahead, for a request just placed on *chosen*; *slot* is that of waiting.

    Call it before anything else changes the arrays, and before `affinity.learn`.
    """
    fleet, arrays = topology.fleet, topology.arrays
    first, last = int(arrays.first[endpoint.index]), int(arrays.first[endpoint.index + 1])
    members = arrays.members[first:last].tolist()
    policy, tokens = POLICY_CODES[endpoint.spec.routing_policy], prompt_tokens + output_tokens
    rows, in_seconds = np.zeros((0, COLUMNS)), False
    if policy >= PRESERVE:
        rows = np.zeros((len(members), COLUMNS))
        in_seconds = explain(
            fleet, arrays, maps, affinity, policy, endpoint.index, slot, prompt_tokens, output_tokens, chosen.slot, rows
        )
        order = sorted(range(len(members)), key=lambda at: (rows[at, ROOM] == 0, rows[at, SCORE], at))
        shown = order[:SEEN]
    else:
        shown = list(range(min(len(members), SEEN)))
    ahead = requests_ahead(fleet, chosen.slot)
    if ahead:  # then no instance had room
        open_ahead(fleet, arrays, endpoint.index)
    at_chosen = members.index(chosen.slot)
    if at_chosen not in shown:
        shown[-1] = at_chosen
    seen = []
    for at in shown:
        instance = members[at]
        mine = instance == chosen.slot
        running = int(fleet.running[instance]) - mine
        kv_tokens = int(fleet.kv_tokens[instance]) - mine * tokens
        remaining = int(fleet.remaining_tokens[instance]) - mine * tokens
        queued = int(fleet.queued_prompt_tokens[instance]) - mine * prompt_tokens
        capacity = int(fleet.kv_capacity_tokens[instance])
        accepting = bool(fleet.accepting[instance])
        room = mine or has_room(fleet, instance, prompt_tokens, output_tokens)
        if policy >= PRESERVE:
            score: float | None = float(rows[at, SCORE])
            parts = _foreseen(rows[at], policy, in_seconds, capacity)
        else:
            score, parts = _plain(endpoint.spec.routing_policy, running, kv_tokens, capacity, queued, remaining)
        seen.append(
            {
                "instance": topology.by_slot[instance].name,
                "accepting": accepting,
                "room": bool(room),
                "running": running,
                "remaining_tokens": remaining,
                "kv_tokens": kv_tokens,
                "score": round(score, 4) if room and score is not None else None,
                "parts": parts,
            }
        )
    close_ahead(fleet, arrays, endpoint.index)
    if policy < PRESERVE:
        seen.sort(key=lambda row: (row["score"] is None, row["score"] or 0.0))
    because = _because(endpoint.spec.routing_policy, chosen.name, seen, in_seconds)
    round_trip_ms = topology.round_trip_ms(chosen)
    if ahead and round_trip_ms:
        allowed = allowance(fleet, chosen.slot)
        because += f" All are full: it is {ahead} of {allowed} ahead, for a round trip of {round_trip_ms:.0f} ms."
    return {
        "requests_ahead": ahead,
        "round_trip_ms": None if round_trip_ms is None else round(round_trip_ms, 3),
        "chosen_because": because,
        "seen": seen,
    }


def _foreseen(row: np.ndarray, policy: int, in_seconds: bool, capacity: int) -> Parts:
    peak = round(float(row[PEAK]) / capacity, 4) if capacity else 0.0
    if in_seconds:
        return {
            "predicted_ttft_ms": round(float(row[PREFILL]) * 1000, 1),
            "decode_s": round(float(row[DECODE]), 4),
            "others_s": round(float(row[OTHERS]), 4),
            "memory_s": round(float(row[MEMORY]), 4),
            "affinity_tokens": int(row[CACHED]),
            "peak_kv": peak,
        }
    parts: Parts = {
        "prefill_tokens": int(row[PREFILL]),
        "decode_tokens": int(row[DECODE]),
        "memory_tokens": round(float(row[MEMORY]), 1),
        "peak_kv": peak,
    }
    if policy == LEAST_DELAY:
        parts["affinity_tokens"] = int(row[CACHED])
    return parts


def _plain(
    name: str, running: int, kv_tokens: int, capacity: int, queued: int, remaining: int
) -> tuple[float | None, Parts]:
    match name:
        case "least_request":
            return running, {"requests": running}
        case "minimum_use":
            use = kv_tokens / capacity if capacity else 0.0
            return use, {"kv_use": round(use, 4)}
        case "join_shortest_queue":
            return remaining, {"prefill_tokens": queued, "decode_tokens": remaining - queued}
    return None, {}


WORDS = {
    "least_request": ("Fewest requests", "{:,.0f}"),
    "minimum_use": ("Least KV use", "{:.1%}"),
    "join_shortest_queue": ("Fewest tokens left to compute", "{:,.0f}"),
    "preserve": ("Least load", "{:,.0f} tokens"),
    "least_delay": ("Least load", "{:,.0f} tokens"),
}


def _because(name: str, chosen: str, seen: list[dict[str, object]], in_seconds: bool) -> str:
    with_room = [row for row in seen if row["room"]]
    if len(with_room) == 1:
        return "The only one shown with room." if len(seen) > 1 else "The only instance."
    if name == "round_robin":
        return "The next in turn with room."
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
