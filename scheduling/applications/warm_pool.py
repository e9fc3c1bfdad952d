"""Backends that are warm in simulations: started containers, loaded DNN models (Hermes section 3.4)."""

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class WarmTerms(NamedTuple):
    """How backends of one kind are started and kept."""

    start_s: float
    """Time of a cold start,"""
    starts_s: Mapping[str, float] = {}
    """and of the backends by name where it differs."""
    capacity: float = 16.0
    keep_alive_s: float = 60.0

    def warm_s(self, name: str) -> float:
        """Return the seconds that the backend *name* takes to warm."""
        return self.starts_s.get(name, self.start_s)


@dataclass(slots=True, eq=False)
class WarmBackend:
    """One backend that is warm or being warmed."""

    name: Hashable
    ready_s: float
    """When it is warm."""
    asked_s: float
    """When it was last used, or wanted by a call that is likely; the one with the earliest leaves first."""
    idle_from_s: float
    users: int = 0
    unused: bool = False
    """It was prewarmed, and no call has used it since."""


class WarmPool:
    """At most *capacity* backends; those idle for *keep_alive_s* leave.

    A *shared* backend serves any number of calls at once, as a DNN model does; another one serves one call at a time, as a
    container does. Where all room is in use, a call gets a backend beyond the capacity, which leaves after it: no call
    waits for room.

    `counts` has calls by what they found (`hit`; `late`: it was being warmed; `miss`), and backends `warmed` early, `used`
    by a call afterwards, and `wasted`: they left without. `waited_s`: seconds that calls waited for theirs to be warm.
    """

    def __init__(self, capacity: float, keep_alive_s: float = math.inf, *, shared: bool = False) -> None:
        self.capacity, self.keep_alive_s, self.shared = capacity, keep_alive_s, shared
        self.backends: list[WarmBackend] = []
        self.counts: Counter[str] = Counter(hit=0, late=0, miss=0, warmed=0, used=0, wasted=0)
        self.waited_s = self._idle_s = 0.0

    def use(self, name: Hashable, warm_s: float, now_s: float) -> WarmBackend:
        """Return the backend for a call that arrives, warm from its `ready_s` on; a cold one needs *warm_s*."""
        self.expire(now_s)
        able = [one for one in self.backends if one.name == name and (self.shared or not one.users)]
        if able:
            one = min(able, key=lambda each: each.ready_s)
            self.counts["hit" if one.ready_s <= now_s else "late"] += 1
            self.counts["used"] += one.unused
            self._idle_s += _idle_s(one, now_s)
        else:
            self.counts["miss"] += 1
            self._make_room(now_s, for_call=True)
            one = WarmBackend(name, now_s + warm_s, now_s, now_s)
            self.backends.append(one)
        one.unused, one.asked_s = False, now_s
        one.users += 1
        self.waited_s += max(0.0, one.ready_s - now_s)
        return one

    def release(self, one: WarmBackend, now_s: float) -> None:
        """End a call's use of *one*."""
        one.users -= 1
        one.asked_s = one.idle_from_s = now_s
        if not one.users and one in self.backends and len(self.backends) > self.capacity:
            self._leave(one, now_s)

    def warm(self, name: Hashable, warm_s: float, now_s: float, count: int = 1) -> list[WarmBackend]:
        """Keep *count* backends free for calls that are likely, and return those that are to be started for it.

        There may be fewer: what is in use, or wanted at this moment too, does not leave for them.
        """
        self.expire(now_s)
        free = [one for one in self.backends if one.name == name and (self.shared or not one.users)]
        for one in free[:count]:
            one.asked_s = now_s
        started: list[WarmBackend] = []
        while len(free) + len(started) < (min(count, 1) if self.shared else count):
            if not self._make_room(now_s):
                break
            one = WarmBackend(name, now_s + warm_s, now_s, now_s, unused=True)
            self.backends.append(one)
            started.append(one)
            self.counts["warmed"] += 1
        return started

    def expire(self, now_s: float) -> None:
        """Let backends leave whose time is over. Every other method calls it."""
        for one in [each for each in self.backends if not each.users]:
            end_s = max(one.asked_s, one.ready_s) + self.keep_alive_s
            if end_s < now_s:
                self._leave(one, end_s)

    def idle_s(self, now_s: float) -> float:
        """Return for how many seconds backends have been warm and not in use."""
        return self._idle_s + sum(_idle_s(one, now_s) for one in self.backends)

    def _make_room(self, now_s: float, *, for_call: bool = False) -> bool:
        while len(self.backends) + 1 > self.capacity:
            idle = [one for one in self.backends if not one.users and (for_call or one.asked_s < now_s)]
            if not idle:
                return False
            self._leave(min(idle, key=lambda each: each.asked_s), now_s)
        return True

    def _leave(self, one: WarmBackend, now_s: float) -> None:
        self._idle_s += _idle_s(one, now_s)
        self.counts["wasted"] += one.unused
        self.backends.remove(one)


def _idle_s(one: WarmBackend, now_s: float) -> float:
    """Return for how long *one* has been warm and not in use."""
    return 0.0 if one.users else max(0.0, now_s - max(one.ready_s, one.idle_from_s))
