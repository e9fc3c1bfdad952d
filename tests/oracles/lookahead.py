"""Plain twins of the predictive routers (`predictive`), the maps (`maps`) and the index (`prefix_affinity`).

Written from the definitions, over dictionaries: a map is a list of requests, peaks are searched in every iteration, and
the index is unbounded.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scheduling.lookahead.maps import LookAhead, project
from tests.oracles.dispatch import PlainFleet

HOLDERS = 8
FORGOTTEN_TOKENS = 1 << 40


@dataclass
class PlainMap:
    """One instance's look-ahead map: start and expected end iteration of each request."""

    clock: int = 0
    requests: dict[Hashable, list[int]] = field(default_factory=dict)
    """prompt, began, expected."""

    def enter(self, request: Hashable, prompt_tokens: int, predicted_tokens: int) -> None:
        self.requests[request] = [prompt_tokens, self.clock, self.clock + max(predicted_tokens, 1)]

    def leave(self, request: Hashable) -> None:
        self.requests.pop(request, None)

    def token(self, request: Hashable, produced_tokens: int) -> None:
        """Record that *request* has produced *produced_tokens* beyond its first; advance the clock if it is the
        furthest.
        """
        while self.clock < self.requests[request][1] + produced_tokens:
            self.advance()

    def advance(self) -> None:
        """One iteration; what runs over is expected to take a fifth of what it produced more."""
        self.clock += 1
        for each in self.requests.values():
            if each[2] <= self.clock:
                each[2] = self.clock + -(-(self.clock - each[1]) // 5)

    def tokens(self, i: int = 0) -> int:
        """Return the KV tokens *i* iterations from now."""
        now = self.clock + i
        return sum(prompt + now - began for prompt, began, expected in self.requests.values() if now < expected)

    def peak(self, prompt_tokens: int, output_tokens: int, iterations: int) -> int:
        """Return the peak over the next *iterations*, with one more request."""
        more = [prompt_tokens + i if i < output_tokens else 0 for i in range(iterations)]
        return max(self.tokens(i) + more[i] for i in range(iterations))


def noted_places(blocks: int) -> list[int]:
    """Return the noted ones of *blocks*: sixteen one by one, then every second, fourth and eighth."""
    places = [
        at
        for level in range(4)
        for at in range(16 * (2**level - 1) + 2**level, 16 * (2 ** (level + 1) - 1) + 1, 2**level)
    ]
    return [place for place in places if place <= blocks]


@dataclass
class PlainIndex:
    """Instances that were given each prompt prefix, at most HOLDERS per prefix."""

    holders: dict[tuple[int, int], list[list[int] | None]] = field(default_factory=dict)
    """By endpoint and hash: (instance, its placed tokens at that time)."""

    def learn(self, fleet: PlainFleet, endpoint: int, hashes: Sequence[int], instance: int) -> None:
        placed = [each.placed_tokens for each in fleet.instances]
        for place in noted_places(len(hashes)):
            holders = self.holders.setdefault((endpoint, hashes[place - 1]), [None] * HOLDERS)
            entry = next((holder for holder in holders if holder and holder[0] == instance), None)
            if entry:
                entry[1] = placed[instance]
                continue

            def age(at: int, holders: list[list[int] | None] = holders) -> int:
                holder = holders[at]
                passed = -1 if holder is None else placed[holder[0]] - holder[1]
                return passed if 0 <= passed < FORGOTTEN_TOKENS else FORGOTTEN_TOKENS

            holders[max(range(HOLDERS), key=age)] = [instance, placed[instance]]

    def cached_tokens(
        self,
        fleet: PlainFleet,
        endpoint: int,
        hashes: Sequence[int],
        block_tokens: int,
        instance: int,
        prompt_tokens: int,
    ) -> int:
        """Return how many of *prompt_tokens* *instance* is assumed to have cached."""
        this, blocks = fleet.instances[instance], 0
        for place in noted_places(len(hashes)):
            holders = self.holders.get((endpoint, hashes[place - 1]), [])
            alive = {
                holder[0]
                for holder in holders
                if holder and 0 <= fleet.instances[holder[0]].placed_tokens - holder[1] < memory(fleet, holder[0])
            }
            if instance not in alive:
                break
            blocks = place
        return max(min(blocks * block_tokens, prompt_tokens - 1), 0) if this.endpoint == endpoint else 0


def memory(fleet: PlainFleet, instance: int) -> int:
    this = fleet.instances[instance]
    return this.memory_tokens or this.kv_capacity_tokens


@dataclass
class Sight:
    """Inputs of a predictive router: the request and the instances."""

    maps: Sequence[PlainMap]
    index: PlainIndex = field(default_factory=PlainIndex)
    hashes: Sequence[int] = ()
    block_tokens: int = 0


def excess_tokens(fleet: PlainFleet, sight: Sight, instance: int, prompt_tokens: int, output_tokens: int) -> float:
    this = fleet.instances[instance]
    peak = sight.maps[instance].peak(prompt_tokens, output_tokens, this.iterations)
    return max(0.0, peak - this.memory_above * memory(fleet, instance))


def load_tokens(
    fleet: PlainFleet, sight: Sight, instance: int, prompt_tokens: int, output_tokens: int, cached: int
) -> float:
    """Return PreServe's load of *instance*, less its *cached* tokens."""
    this = fleet.instances[instance]
    prefill = float(this.queued_prompt_tokens + prompt_tokens - cached)
    decode = float(this.remaining_tokens - this.queued_prompt_tokens + output_tokens)
    return prefill + decode + this.beta * excess_tokens(fleet, sight, instance, prompt_tokens, output_tokens)


def delay_s(
    fleet: PlainFleet, sight: Sight, instance: int, prompt_tokens: int, output_tokens: int, cached: int
) -> float:
    """Return the estimated seconds of the request and of the others (docs/papers/routing.md)."""
    this, map_ = fleet.instances[instance], sight.maps[instance]
    t0, a, b, c, fixed, by_sequence, by_token = this.profile
    room, held, active = float(memory(fleet, instance)), float(map_.tokens()), float(len(map_.requests))
    queued, placed = float(this.queued_prompt_tokens), float(this.running)
    to_generate = float(this.remaining_tokens) - queued
    prompt, output, new = float(prompt_tokens), float(output_tokens), max(float(prompt_tokens - cached), 1.0)
    reserved = this.kv_tokens + prompt + output
    batch = placed * min(1.0, room / reserved) + 1.0
    step = fixed + by_sequence * batch + by_token * min(held + queued + prompt + 0.5 * output, room)
    decoding = by_sequence * active + by_token * held
    wait = 0.5 * (fixed + decoding) if active else 0.0
    if reserved > room:
        wait += (reserved - room) / reserved * to_generate * step / batch
    queue = b * queued + c * queued * queued / max(placed - active, 1.0)
    own = max(t0, a + b * new + c * new * new)
    overlap = min(to_generate, placed * output)
    theirs = by_sequence + by_token * (held + queued + 0.5 * to_generate) / max(placed, 1.0)
    mine = by_sequence + by_token * (prompt + 0.5 * output)
    others = active * max(own - fixed, b * new) + overlap * mine
    others += 10.0 * queue + 0.5 * to_generate * step / batch
    score = (wait + queue + own + decoding) + (output * (fixed + mine) + overlap * theirs) + others
    return score + 0.4 * step / batch * excess_tokens(fleet, sight, instance, prompt_tokens, output_tokens)


def preserve(fleet: PlainFleet, sight: Sight, endpoint: int, prompt_tokens: int, output_tokens: int) -> int:
    slots = fleet.with_room(endpoint, prompt_tokens, output_tokens)
    return min(slots, key=lambda slot: load_tokens(fleet, sight, slot, prompt_tokens, output_tokens, 0), default=-1)


def least_delay(fleet: PlainFleet, sight: Sight, endpoint: int, prompt_tokens: int, output_tokens: int) -> int:
    slots = fleet.with_room(endpoint, prompt_tokens, output_tokens)
    known = all(fleet.instances[slot].profile for slot in slots)

    def score(slot: int) -> float:
        cached = sight.index.cached_tokens(fleet, endpoint, sight.hashes, sight.block_tokens, slot, prompt_tokens)
        return (delay_s if known else load_tokens)(fleet, sight, slot, prompt_tokens, output_tokens, cached)

    return min(slots, key=score, default=-1)


PREDICTIVE: dict[str, Callable[[PlainFleet, Sight, int, int, int], int]] = {
    "preserve": preserve,
    "least_delay": least_delay,
}
"""Twins of the routers of `scheduling.routing.predictive`, by the name that deployments and scenarios use."""


def projected_tokens(ahead: LookAhead, instance: int, iterations: int) -> NDArray[np.int64]:
    """Return the KV tokens of *instance* in this and the coming *iterations*, as the compiled map *ahead* expects them."""
    tokens = np.zeros(iterations, np.int64)
    project(ahead, instance, tokens)
    return tokens
