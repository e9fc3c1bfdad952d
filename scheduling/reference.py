"""Plain Python twins of the kernels: what each of them must decide, said in the shortest way.

Tests compare every kernel with its twin on random fleets, and the routing bench shows what compiling is worth. Twins
are written from the definition, over lists, and share no code with the kernels.
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction


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

    def has_room(self, prompt_tokens: int, output_tokens: int) -> bool:
        return (
            self.accepting
            and self.running < self.max_num_seqs
            and self.kv_tokens + prompt_tokens + output_tokens <= self.kv_capacity_tokens
        )


@dataclass
class PlainFleet:
    """Instances by slot, and the slot that each endpoint gave work to last."""

    instances: list[PlainInstance]
    cursor: dict[int, int] = field(default_factory=dict)

    def with_room(self, endpoint: int, prompt_tokens: int, output_tokens: int) -> list[int]:
        return [
            slot
            for slot, instance in enumerate(self.instances)
            if instance.endpoint == endpoint and instance.has_room(prompt_tokens, output_tokens)
        ]

    def fits_ever(self, endpoint: int, prompt_tokens: int, output_tokens: int) -> bool:
        return any(
            instance.kv_capacity_tokens == 0 or prompt_tokens + output_tokens <= instance.kv_capacity_tokens
            for instance in self.instances
            if instance.endpoint == endpoint
        )

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

    def place(self, slot: int, prompt_tokens: int, output_tokens: int) -> None:
        instance = self.instances[slot]
        instance.running += 1
        instance.kv_tokens += prompt_tokens + output_tokens
        instance.remaining_tokens += prompt_tokens + output_tokens
        instance.queued_prompt_tokens += prompt_tokens
        instance.placed_tokens += prompt_tokens + output_tokens
        self.cursor[instance.endpoint] = slot


POLICIES: dict[str, Callable[[PlainFleet, int, int, int], int]] = {
    "round_robin": PlainFleet.round_robin,
    "least_request": PlainFleet.least_request,
    "minimum_use": PlainFleet.minimum_use,
    "join_shortest_queue": PlainFleet.join_shortest_queue,
}
"""Twins of `scheduling.routing.POLICIES`."""


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
        found = len(kept) < len(self.entries)
        self.entries = kept
        return found

    def rekey(self, slot: int, key: float) -> bool:
        sequence = next((entry[1] for entry in self.entries if entry[2] == slot), None)
        if sequence is None:
            return False
        self.remove(slot)
        self.push(slot, key, sequence)
        return True

    def in_order(self) -> list[int]:
        return [entry[2] for entry in self.entries]


def plain_turn(
    ordering: str, arrival_s: float, deadline_s: float, priority: int, service_s: float, stretch: float
) -> float:
    """Twin of `scheduling.turns.turn_key`, by the ordering's name."""
    due_s = arrival_s + 86_400.0 if deadline_s == float("inf") else deadline_s
    return {
        "fcfs": arrival_s,
        "priority": priority * 1e9 + arrival_s,
        "ssjf": priority * 1e9 + arrival_s + min(stretch * service_s, 1e8),
        "shortest": service_s,
        "sjf": service_s,
        "deadline": due_s,
        "slack": max(arrival_s, due_s - service_s),
    }[ordering]


def plain_engine_priority(ordering: str, priority: int, turn: float) -> int:
    """Twin of `scheduling.turns.engine_priority`."""
    if ordering in ("fcfs", "priority"):
        return priority
    classes = priority if ordering == "ssjf" else 0
    return classes * 10**13 + int((turn - classes * 1e9) * 1000.0)
