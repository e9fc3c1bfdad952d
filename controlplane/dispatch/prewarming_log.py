"""What was prewarmed, why, and what became of it; in memory until it is written (`controlplane.applications.prewarming`)."""

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from msgspec import Struct

from scheduling.applications.prewarming import OPEN_S

Fate = Literal["", "hit", "late", "miss", "waste", "failed"]
"""Of what was prewarmed: used by a call that came after it was warm, or before; not used; not warmed. A miss is a call that
found its backend cold."""
MOST_UNWRITTEN: Final = 2_000
MOST_OPEN: Final = 5_000


class CalledBy(NamedTuple):
    """Whose call it was prewarmed for; a request without marks has only a tenant."""

    tenant_id: int
    application: str = ""
    run: str = ""


class Prewarm(Struct, eq=False):
    """One backend that was prewarmed, or a call that found it cold. Moments are epoch seconds."""

    kind: str
    """adapter, prefix, model, container or dnn."""
    backend: str
    place: str
    """Instance, or address of a container or process."""
    why: str
    called_by: CalledBy
    began_at: float
    warm_at: float | None = None
    settled_at: float | None = None
    fate: Fate = ""
    row: int = 0
    """Its row; 0 before it is written."""


class PrewarmLog:
    """*counts* has each fate by kind, and `warmed`, all that were begun."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.counts: Counter[tuple[str, str]] = Counter()
        self._open: OrderedDict[tuple[str, str, str], Prewarm] = OrderedDict()
        self._unwritten: deque[Prewarm] = deque(maxlen=MOST_UNWRITTEN)

    def begin(self, kind: str, backend: str, place: str, why: str, called_by: CalledBy) -> Prewarm:
        """Record that *backend* is being warmed at *place*, in place of an earlier record of the same."""
        key = kind, backend, place
        if (before := self._open.get(key)) is not None:
            self.settle(before, "waste")
        one = Prewarm(kind, backend, place, why, called_by, self.clock())
        self._open[key] = one
        self.counts[kind, "warmed"] += 1
        if len(self._open) > MOST_OPEN:
            self.settle(next(iter(self._open.values())), "waste")
        self._note(one)
        return one

    def get(self, kind: str, backend: str, place: str) -> Prewarm | None:
        """Return what was prewarmed there and not used yet."""
        return self._open.get((kind, backend, place))

    def open(self, kind: str) -> list[Prewarm]:
        """Return what was prewarmed and not used yet."""
        return [one for one in list(self._open.values()) if one.kind == kind]

    def warm(self, one: Prewarm, place: str = "") -> None:
        """Record that *one* is warm, at *place* if that was not known before."""
        one.warm_at = self.clock()
        if place and self._open.pop((one.kind, one.backend, one.place), None) is not None:
            one.place = place
            self._open[one.kind, one.backend, place] = one
        self._note(one)

    def use(self, kind: str, backend: str, place: str, came_at: float) -> Fate:
        """Record that a call which came at *came_at* uses *backend* at *place*; return how it was found, "" if unknown."""
        one = self._open.get((kind, backend, place))
        if one is None:
            return ""
        self.settle(one, "hit" if one.warm_at is not None and one.warm_at <= came_at else "late")
        return one.fate

    def miss(self, kind: str, backend: str, place: str, why: str, called_by: CalledBy) -> None:
        """Record that a call found *backend* cold."""
        now = self.clock()
        self.counts[kind, "miss"] += 1
        self._note(Prewarm(kind, backend, place, why, called_by, now, settled_at=now, fate="miss"))

    def settle(self, one: Prewarm, fate: Fate, why: str = "") -> None:
        """Record what became of *one*; *why* it failed."""
        if one.fate:
            return
        one.fate, one.settled_at = fate, self.clock()
        one.why = f"{one.why} {why}".strip()
        self._open.pop((one.kind, one.backend, one.place), None)
        self.counts[one.kind, fate] += 1
        self._note(one)

    def sweep(self) -> None:
        """Count as waste what was not used for `OPEN_S`. Call now and then."""
        oldest = self.clock() - OPEN_S
        for one in [each for each in list(self._open.values()) if each.began_at < oldest]:
            self.settle(one, "waste")

    def take(self) -> list[Prewarm]:
        """Return what is new or has changed since the last call."""
        taken: dict[int, Prewarm] = {}
        while self._unwritten:
            one = self._unwritten.popleft()
            taken[id(one)] = one
        return list(taken.values())

    def put_back(self, several: list[Prewarm]) -> None:
        """Take *several* again next time: they could not be written."""
        self._unwritten.extendleft(reversed(several[-MOST_UNWRITTEN // 2 :]))

    def _note(self, one: Prewarm) -> None:
        self._unwritten.append(one)
