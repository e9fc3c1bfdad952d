"""The endpoint of a request, and its instance: each decision is one compiled call. Also the trace that explains it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.dispatch import kernels
from controlplane.dispatch.adapters import trace_of_adapter
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request, Topology
from controlplane.dispatch.port import ESTIMATE, KV_EVENTS, Asked, Deliver, Placed, Refused
from controlplane.dispatch.prompt_blocks import PromptBlocks
from controlplane.dispatch.token_accounts import TokenAccounts
from controlplane.dispatch.waiting_queue import WaitingQueue
from scheduling.applications.recording import NO_UNIT
from scheduling.applications.standings import FIRST_S
from scheduling.compiled import uncompiled
from scheduling.queueing.running import prefill_s
from scheduling.routing import candidates as columns
from scheduling.routing import routers
from scheduling.routing.routers import JOIN_SHORTEST_QUEUE, LEAST_DELAY, LOOK_AHEAD, POLICY_CODES


@dataclass(eq=False)
class Placement:
    topology: Topology
    queue: WaitingQueue
    accounts: TokenAccounts
    blocks: PromptBlocks
    clock: Callable[[], float]
    deliver: Deliver
    placed: Sequence[Callable[[Request, Replica], None]] = ()
    """Stages that act when an instance gets a request."""

    owns: Callable[[], bool] = lambda: True  # whether this process may place

    def __post_init__(self) -> None:
        self._candidates = np.zeros((CANDIDATES, columns.COLUMNS))  # of the current decision

    def serving(self, candidates: NDArray[np.int32]) -> Endpoint | None:
        """Return the endpoint of *candidates* for a new request, one that serves now; None without."""
        if not candidates.size:
            return None
        topology = self.topology
        spill_above, now_s = topology.endpoints[int(candidates[0])].spec.policy.region_threshold, self.clock()
        index = kernels.choose_region(
            topology.fleet, topology.arrays, candidates, self.queue.arrays.size, spill_above, now_s
        )
        return topology.endpoints[int(index)] if index >= 0 else None

    def choose_endpoint(self, candidates: NDArray[np.int32]) -> Endpoint | None:
        """Return the endpoint of *candidates* that serves, soon will, or can be started, for a new request; None without."""
        if (serving := self.serving(candidates)) is not None:
            return serving
        topology = self.topology
        endpoints = [topology.endpoints[at] for at in candidates.tolist()]
        startable = (endpoint for endpoint in endpoints if endpoint.can_start)
        return next(filter(topology.coming, endpoints), None) or next(startable, None)

    def pump(self, endpoint: Endpoint) -> None:
        """Give out requests of *endpoint*, in order, while an instance has room or may have one more ahead."""
        if not self.owns():
            return
        topology, queue = self.topology, self.queue
        policy, grouped = POLICY_CODES[endpoint.spec.policy.routing], queue.grouped(endpoint)
        while queue.count(endpoint):
            slot, instance, pulled = -1, -1, ""
            if grouped:
                slot, instance, pulled = self._pull(endpoint)
            if slot < 0:
                if grouped and not queue.may_balance(endpoint):
                    break
                slot, instance = self._route(endpoint, policy)
            if slot < 0:
                break
            prompt, output = int(queue.arrays.prompt_tokens[slot]), int(queue.arrays.output_tokens[slot])
            request, replica = queue.take_out(slot), topology.by_slot[instance]
            request.placed_s = self.clock()
            kernels.add_prefill(topology.fleet, topology.arrays, instance, prompt, output, request.placed_s)
            request.attempts += 1
            for placed in self.placed:
                placed(request, replica)
            why = self._explain(request, endpoint, replica, pulled)
            request.cached_tokens = int(self._cached_tokens(instance)) if policy == LEAST_DELAY else 0
            if policy == LEAST_DELAY:
                kernels.learn(topology.fleet, queue.affinity, endpoint.index, slot, instance)
            self.deliver(
                Placed(
                    request.asked.number,
                    request.attempts,
                    replica.spec.name,
                    replica.spec.state_changed_at,
                    replica.spec.url,
                    replica.spec.api_key,
                    endpoint.spec.region,
                    endpoint.spec.policy.ordering,
                    request.queue_key_s,
                    request.placed_s,
                    why,
                    self._first_token_s(request, instance),
                    keep_tokens=grouped or endpoint.is_spot,
                    priority=request.asked.priority,
                    adapter=request.asked.adapter,
                    adapter_source=topology.adapter_source(request.asked.adapter),
                    unload=request.unload,
                )
            )

        if grouped and queue.count(endpoint):
            kernels.insert_loose(topology.fleet, topology.arrays, queue.arrays, endpoint.index)

    def _cached_tokens(self, instance: int) -> float:
        """Return how many tokens of the prompt that was routed last *instance* has by the prefix index."""
        at = np.flatnonzero(self._candidates[:, columns.INSTANCE] == instance)
        return float(self._candidates[at[0], columns.CACHED]) if at.size else 0.0

    def _route(self, endpoint: Endpoint, policy: int) -> tuple[int, int]:
        """Return the first request of *endpoint* and its instance by the router; (-1, -1) if none has room."""
        topology, queue = self.topology, self.queue
        if policy not in LOOK_AHEAD:
            return kernels.dispatch(
                topology.fleet, topology.arrays, queue.arrays, endpoint.index, policy, self._candidates
            )
        known = policy == LEAST_DELAY and endpoint.spec.policy.exact_prefixes and self.blocks.know(endpoint)
        slot, instance = kernels.dispatch_ahead(
            topology.fleet,
            topology.arrays,
            queue.arrays,
            self.accounts.maps,
            queue.affinity,
            endpoint.index,
            policy,
            self._candidates,
        )
        if known:
            self.blocks.forget(endpoint)
        return slot, instance

    def _pull(self, endpoint: Endpoint) -> tuple[int, int, str]:
        """Return the slot that an instance of *endpoint* pulls from its virtual queue, the instance, and the reason."""
        topology, queue = self.topology, self.queue
        now_s = queue.clock()
        slot, instance = kernels.pull(topology.fleet, topology.arrays, queue.arrays, endpoint.index, now_s)
        if slot < 0:
            return -1, -1, ""
        words = queue.why_pulled(slot, now_s)
        self._send(endpoint, slot, instance)
        return slot, instance, words

    def _send(self, endpoint: Endpoint, slot: int, instance: int) -> None:
        topology, waiting = self.topology, self.queue.arrays
        prompt, output = int(waiting.prompt_tokens[slot]), int(waiting.output_tokens[slot])
        kernels.write_loads(topology.fleet, topology.arrays, endpoint.index, prompt, output, instance, self._candidates)
        kernels.send(topology.fleet, topology.arrays, waiting, slot, instance)

    def pump_all(self) -> None:
        self.queue.keep_order()
        for endpoint in self.topology.endpoints:
            if self.queue.count(endpoint):
                self.pump(endpoint)

    def _first_token_s(self, request: Request, instance: int) -> float:
        """Return the time limit of the first token of *request* at *instance*: a long prompt has longer."""
        tuned = self.topology.tuned
        prompt_s = uncompiled(prefill_s)(self.topology.fleet, instance, float(request.asked.prompt_tokens))
        return max(tuned.FIRST_TOKEN_S, tuned.FIRST_TOKEN_FACTOR * prompt_s)

    def _explain(self, request: Request, endpoint: Endpoint, replica: Replica, pulled: str) -> dict[str, object]:
        """Return the decision trace: docs/papers/routing.md."""
        return {
            "instance": replica.spec.name,
            "region": endpoint.spec.region,
            "policy": endpoint.spec.policy.routing,
            "ordering": endpoint.spec.policy.ordering,
            "waited_ms": round((request.placed_s - request.asked.arrived_s) * 1000, 3),
            "waiting": self.queue.count(endpoint),
            **trace_of_run(request),
            **trace_of_adapter(request),
            **explain(self.topology, endpoint, replica, self._candidates, request.asked.prompt_tokens, pulled),
        }


CANDIDATES = 8  # shown in a trace


Row = list[float]
Parts = dict[str, float]


def explain(
    topology: Topology,
    endpoint: Endpoint,
    chosen: Replica,
    candidates: NDArray[np.float64],
    prompt_tokens: int,
    pulled: str = "",
) -> dict[str, object]:
    """Return what a trace says of a decision for *chosen* that wrote *candidates*.

    *prompt_tokens* are those of the request. *pulled* is why the instance took it from its virtual queue, where no router
    was asked.
    """
    policy = JOIN_SHORTEST_QUEUE if pulled else POLICY_CODES[endpoint.spec.policy.routing]
    first, end = topology.arrays.first[endpoint.index : endpoint.index + 2].tolist()
    rows: list[Row] = candidates[: end - first].tolist()
    rows = [row for row in rows if row[columns.INSTANCE] >= 0]  # the array has room for more
    by_slot = topology.by_slot
    if policy in LOOK_AHEAD and len(rows) > 1:
        rows.sort(key=lambda row: (row[columns.ROOM] == 0, row[columns.SCORE], row[columns.INSTANCE]))
    seen = []
    for row in rows:
        score: float | None
        if policy in LOOK_AHEAD:
            score, parts = row[columns.SCORE], _ahead_parts(row, policy)
        else:
            score, parts = _load_parts(row, policy)
        seen.append(
            {
                "instance": by_slot[int(row[columns.INSTANCE])].spec.name,
                "accepting": bool(row[columns.ACCEPTING]),
                "room": bool(row[columns.ROOM]),
                "running": int(row[columns.RUNNING]),
                "remaining_tokens": int(row[columns.REMAINING]),
                "kv_tokens": int(row[columns.KV]),
                "score": round(score, 4) if row[columns.ROOM] and score is not None else None,
                "parts": parts,
            }
        )
    if policy not in LOOK_AHEAD and len(seen) > 1:
        seen.sort(key=lambda each: (each["score"] is None, each["score"] or 0.0))
    because = pulled or _because(
        endpoint.spec.policy.routing, chosen.spec.name, seen, in_seconds=bool(rows[0][columns.IN_SECONDS])
    )
    round_trip_ms = topology.round_trip_ms(chosen)
    at_chosen = next(row for row in rows if row[columns.INSTANCE] == chosen.slot)
    cached = _cached(at_chosen, prompt_tokens) if policy == LEAST_DELAY else None
    if cached and (cached["tokens"] or cached["by"] == KV_EVENTS):
        because += f" {words_of(cached)}"
    ahead = int(at_chosen[columns.AHEAD])
    if ahead and round_trip_ms:  # then no instance had room
        allowed = int(at_chosen[columns.ALLOWED])
        because += (
            f" All instances were full; sent early to hide a round trip of {round_trip_ms:.0f} ms"
            f" ({ahead} of at most {allowed} ahead)."
        )
    return {
        "requests_ahead": ahead,
        "round_trip_ms": None if round_trip_ms is None else round(round_trip_ms, 3),
        "chosen_because": because,
        **({"cached": cached} if cached else {}),
        "seen": seen,
    }


def _cached(row: Row, prompt_tokens: int) -> dict[str, Any]:
    """Return how many tokens of a prompt are cached at the instance of *row*, and by what that is known."""
    by = KV_EVENTS if row[columns.KNOWN] else ESTIMATE
    return {"tokens": int(row[columns.CACHED]), "of": prompt_tokens, "by": by}


def words_of(cached: dict[str, Any]) -> str:
    """Return what a decision trace says of *cached*."""
    start = f"{cached['tokens']:,} of {cached['of']:,} prompt tokens"
    return f"{start} cached there (from KV events)." if cached["by"] == KV_EVENTS else f"{start} expected in its cache."


def _ahead_parts(row: Row, policy: int) -> Parts:
    """Return the parts of the score of a router that looks ahead."""
    peak = round(row[columns.PEAK] / row[columns.KV_CAPACITY], 4) if row[columns.KV_CAPACITY] else 0.0
    if row[columns.IN_SECONDS]:
        return {
            "predicted_ttft_ms": round(row[columns.PREFILL] * 1000, 1),
            "decode_s": round(row[columns.DECODE], 4),
            "others_s": round(row[columns.OTHERS], 4),
            "memory_s": round(row[columns.MEMORY], 4),
            "affinity_tokens": int(row[columns.CACHED]),
            "peak_kv": peak,
        }
    parts: Parts = {
        "prefill_tokens": int(row[columns.PREFILL]),
        "decode_tokens": int(row[columns.DECODE]),
        "memory_tokens": round(row[columns.MEMORY], 1),
        "peak_kv": peak,
    }
    if policy == LEAST_DELAY:
        parts["affinity_tokens"] = int(row[columns.CACHED])
    return parts


def _load_parts(row: Row, policy: int) -> tuple[float | None, Parts]:
    """Return the score of a router by load, and its parts."""
    match policy:
        case routers.LEAST_REQUEST:
            running = int(row[columns.RUNNING])
            return running, {"requests": running}
        case routers.MINIMUM_USE:
            use = row[columns.KV] / row[columns.KV_CAPACITY] if row[columns.KV_CAPACITY] else 0.0
            return use, {"kv_use": round(use, 4)}
        case routers.JOIN_SHORTEST_QUEUE:
            remaining, queued = int(row[columns.REMAINING]), int(row[columns.QUEUED])
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
    return f"{what}, {form.format(mine)}; next is {next_name} with {form.format(next_score)}."


def trace_of_run(request: Request) -> dict[str, object]:
    """Return what the decision trace says of the run of *request*; nothing without a rank."""
    standing = request.standing
    if standing is None:
        return {}
    asked, first = request.asked, "moved first by an operator, " if standing.began_s == FIRST_S else ""
    return {
        "run": {
            "application": asked.application,
            "run": asked.run,
            "unit": asked.unit or NO_UNIT,
            "rank_s": round(standing.rank_s, 4),
            "remaining_s": round(standing.mean_s, 4),
            "worst_s": round(standing.worst_s, 4),
            "attained_s": round(standing.attained_s, 4),
            "words": (
                f"Run {asked.run} of {asked.application}: {first}rank {standing.rank_s:,.2f} s. It has had "
                f"{standing.attained_s:,.2f} s of service and is expected to need {standing.mean_s:,.2f} s more. "
                f"Its path to the end takes {standing.worst_s:,.2f} s at the most."
            ),
        }
    }


def none_serves(asked: Asked) -> Refused:
    return Refused(
        asked.number,
        503,
        "model_unavailable",
        f"No instance of {asked.model!r} is serving or being started.",
        retry_after_s=15,
    )
