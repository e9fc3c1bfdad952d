"""Plain Python twins of the dispatch kernels.

Tests compare every kernel with its twin on random fleets; the routing bench measures the speed-up of compiling. Twins
are written from the definition, over lists, and share no code with the kernels.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import ceil

from scheduling.fleet.profile import Profile
from scheduling.routing.regions import COMPUTE_S


@dataclass
class PlainInstance:
    """One instance slot; fields as in `FleetArrays`."""

    endpoint: int = -1
    accepting: bool = False
    running: int = 0
    max_num_seqs: int = 0
    kv_tokens: int = 0
    kv_capacity_tokens: int = 0
    remaining_tokens: int = 0
    queued_prompt_tokens: int = 0
    placed_tokens: int = 0
    memory_tokens: int = 0
    profile: tuple[float, ...] = ()
    ahead_limit: int = 0
    ahead_open: int = 0
    round_trip_s: float = 0.0
    cached_share: float = 0.0
    front_end: tuple[float, ...] = ()
    """Requests and tokens per second, and the margin."""
    given: tuple[float, float] = (0.0, 0.0)
    iterations: int = 100
    memory_above: float = 0.8
    beta: float = 1.0
    trips: list[list[float]] = field(default_factory=list)
    """Times at which requests ended, by trip."""

    def has_room(self, prompt_tokens: int, output_tokens: int) -> bool:
        tokens = prompt_tokens + output_tokens
        with_it = replace(self, running=self.running + 1, kv_tokens=self.kv_tokens + tokens)
        return self.accepting and tokens <= self.kv_capacity_tokens and with_it.requests_ahead() <= self.ahead_open

    def requests_ahead(self) -> int:
        """Return the requests over the limit: by sequences, or by memory if all have the same size."""
        by_memory = 0
        if self.kv_tokens > self.kv_capacity_tokens:
            beyond = Fraction(self.kv_tokens - self.kv_capacity_tokens)
            by_memory = ceil(beyond * self.running / self.kv_tokens)
        return max(self.running - self.at_once(), by_memory, 0)

    def at_once(self) -> int:
        """Return the most requests with which the API process keeps up, times the margin, within `max_num_seqs`."""
        prompt, output = self.given
        if not self.front_end or not output or not any(self.profile):
            return self.max_num_seqs
        requests_per_s, tokens_per_s, margin = self.front_end
        t0, a, b, c, constant, of_sequence, of_context = self.profile
        beyond = max(max(t0, a + b * prompt + c * prompt**2) - constant, 0.0)
        engine = of_sequence + of_context * (prompt + 0.5 * output) + beyond / output
        process = 1.0 / tokens_per_s + 1.0 / (requests_per_s * output)
        if process <= engine:
            return self.max_num_seqs
        return min(self.max_num_seqs, max(1, int(margin * constant / (process - engine))))

    def allowance(self) -> int:
        """Return the allowed requests ahead: as many as end within a round trip."""
        if self.round_trip_s <= 0:
            return 0
        limit = self.at_once() if self.ahead_limit < 0 else min(self.ahead_limit, self.at_once())
        counts = [len(trip) for trip in self.trips[:-1]]
        mean, deviation = float(counts[0]) if counts else 0.0, 0.0
        for count in counts[1:]:
            deviation += 0.25 * (abs(count - mean) - deviation)
            mean += 0.125 * (count - mean)
        return min(limit, max(1, int(mean + 2 * deviation + 0.5)))

    def note_end(self, now_s: float) -> None:
        if self.trips and now_s - self.trips[-1][0] < self.round_trip_s:
            self.trips[-1].append(now_s)
        else:
            self.trips.append([now_s])


@dataclass
class PlainFleet:
    """Instances by slot, and the slot last given work by each endpoint."""

    instances: list[PlainInstance]
    cursor: dict[int, int] = field(default_factory=dict)
    asked: dict[int, tuple[float, float]] = field(default_factory=dict)
    clear_at_s: dict[int, float] = field(default_factory=dict)

    def with_room(self, endpoint: int, prompt_tokens: int, output_tokens: int) -> list[int]:
        return [
            slot
            for slot, instance in enumerate(self.instances)
            if instance.endpoint == endpoint and instance.has_room(prompt_tokens, output_tokens)
        ]

    def round_robin(self, endpoint: int, prompt_tokens: int, output_tokens: int) -> int:
        last = self.cursor.get(endpoint, -1)
        slots = self.with_room(endpoint, prompt_tokens, output_tokens)
        return min(slots, key=lambda slot: (slot <= last, slot), default=-1)

    def least_request(self, endpoint: int, prompt_tokens: int, output_tokens: int) -> int:
        slots = self.with_room(endpoint, prompt_tokens, output_tokens)
        return min(slots, key=lambda slot: self.instances[slot].running, default=-1)

    def minimum_use(self, endpoint: int, prompt_tokens: int, output_tokens: int) -> int:
        slots = self.with_room(endpoint, prompt_tokens, output_tokens)
        return min(
            slots,
            key=lambda slot: Fraction(self.instances[slot].kv_tokens, self.instances[slot].kv_capacity_tokens),
            default=-1,
        )

    def join_shortest_queue(self, endpoint: int, prompt_tokens: int, output_tokens: int) -> int:
        slots = self.with_room(endpoint, prompt_tokens, output_tokens)
        return min(slots, key=lambda slot: self.instances[slot].remaining_tokens, default=-1)

    def dispatch(self, router: Callable[[], int], endpoint: int) -> int:
        """Return the choice of *router* for *endpoint*; without a free instance, choose among those with room for
        requests ahead.
        """
        chosen = router()
        if chosen >= 0:
            return chosen
        members = [instance for instance in self.instances if instance.endpoint == endpoint]
        for instance in members:
            instance.ahead_open = instance.allowance()
        chosen = router()
        for instance in members:
            instance.ahead_open = 0
        return chosen

    def place(self, slot: int, prompt_tokens: int, output_tokens: int) -> None:
        instance = self.instances[slot]
        instance.running += 1
        instance.kv_tokens += prompt_tokens + output_tokens
        instance.remaining_tokens += prompt_tokens + output_tokens
        instance.queued_prompt_tokens += prompt_tokens
        instance.placed_tokens += prompt_tokens + output_tokens
        self.cursor[instance.endpoint] = slot
        weight, (prompt, output) = (1 / 128 if instance.given[1] else 1.0), instance.given
        instance.given = prompt + weight * (prompt_tokens - prompt), output + weight * (output_tokens - output)

    def ask(self, slot: int, prompt_tokens: int, output_tokens: int, now_s: float) -> None:
        """Engine time by endpoint, as (seconds, since when)."""
        instance = self.instances[slot]
        _, _, per_token, per_square, _, of_sequence, of_context = instance.profile or (0.0,) * 7
        new = prompt_tokens * (1 - instance.cached_share)
        work_s = (per_token + per_square * new) * new
        work_s += (of_sequence + of_context * (prompt_tokens + output_tokens / 2)) * output_tokens
        self.asked[instance.endpoint] = (self.asked_work_s(instance.endpoint, now_s) + work_s, now_s)
        accepting = sum(each.accepting for each in self.instances if each.endpoint == instance.endpoint)
        clear_at_s = max(self.clear_at_s.get(instance.endpoint, 0.0), now_s)
        self.clear_at_s[instance.endpoint] = clear_at_s + work_s / max(accepting, 1)

    def asked_work_s(self, endpoint: int, now_s: float) -> float:
        work_s, at_s = self.asked.get(endpoint, (0.0, 0.0))
        return work_s * math.exp((at_s - now_s) / COMPUTE_S)


POLICIES: dict[str, Callable[[PlainFleet, int, int, int], int]] = {
    "round_robin": PlainFleet.round_robin,
    "least_request": PlainFleet.least_request,
    "minimum_use": PlainFleet.minimum_use,
    "join_shortest_queue": PlainFleet.join_shortest_queue,
}
"""Twins of `scheduling.routing.routers.POLICIES`."""


@dataclass
class PlainQueue:
    """Twin of one endpoint's heap: the waiting slots in a sorted list of (key, sequence, slot)."""

    entries: list[tuple[float, int, int]] = field(default_factory=list)

    def push(self, slot: int, key: float, sequence: int) -> None:
        bisect.insort(self.entries, (key, sequence, slot))

    def pop(self) -> int:
        return self.entries.pop(0)[2] if self.entries else -1

    def peek(self) -> int:
        return self.entries[0][2] if self.entries else -1

    def remove(self, slot: int) -> bool:
        kept = [entry for entry in self.entries if entry[2] != slot]
        removed = len(kept) < len(self.entries)
        self.entries = kept
        return removed

    def rekey(self, slot: int, key: float) -> bool:
        sequence = next((entry[1] for entry in self.entries if entry[2] == slot), None)
        if sequence is None:
            return False
        self.remove(slot)
        self.push(slot, key, sequence)
        return True

    def in_order(self) -> list[int]:
        return [entry[2] for entry in self.entries]


def plain_queue_key(
    ordering: str, arrival_s: float, deadline_s: float, priority: int, service_s: float, stretch: float
) -> float:
    """Twin of `scheduling.queueing.ordering.queue_key`, by the ordering's name."""
    due_s = arrival_s + 86_400.0 if deadline_s == float("inf") else deadline_s
    return {
        "fcfs": arrival_s,
        "priority": priority * 1e9 + arrival_s,
        "ssjf": priority * 1e9 + arrival_s + min(stretch * service_s, 1e8),
        "shortest": service_s,
        "sjf": service_s,
        "deadline": due_s,
        "qlm": due_s,
        "slack": max(arrival_s, due_s - service_s),
        # By run: its begin, when it is due, and its remaining service in the place of a request's.
        "application": arrival_s,
        "srpt": priority * 1e9 + arrival_s + min(stretch * service_s, 1e8),
        "hermes": priority * 1e9 + arrival_s + min(stretch * service_s, 1e8),
        "run_deadline": due_s,
        "run_slack": max(arrival_s, due_s - service_s),
        "vtc": service_s,
        "wfq": service_s,
    }[ordering]


def plain_first_due_s(ttft_s: float, end_s: float, profile: Profile, prompt_tokens: int, output_tokens: int) -> float:
    """Twin of `scheduling.queueing.ordering.first_due_s` with `profile.decode_time_s`: steps one by one, with 32
    sequences.
    """
    if end_s == float("inf"):
        return ttft_s
    context = prompt_tokens + output_tokens / 2
    step_s = profile.decode_a_s + 32 * profile.decode_b_s_per_sequence + 32 * profile.decode_c_s_per_token * context
    latest_s = end_s - (output_tokens - 1) * step_s
    return ttft_s if latest_s > ttft_s else max(latest_s, 0.0)


def plain_engine_priority(ordering: str, priority: int, key: float) -> int:
    """Twin of `scheduling.queueing.ordering.engine_priority`."""
    if ordering in ("fcfs", "priority", "vtc", "wfq"):
        return priority
    classes = priority if ordering in ("ssjf", "srpt", "hermes") else 0
    return classes * 10**13 + int((key - classes * 1e9) * 1000.0)
