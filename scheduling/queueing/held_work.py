"""The queue manager for non-interactive work (SageServe section 6.3): held by model until a region has room.

A region that signals pulls: one request below `ONE_BELOW` of use, two below `TWO_BELOW`, where use is the KV memory of
*interactive* requests over the memory without weights, so that released work never closes its own gate. Ours on top, unless
`faithful`: a signal below `ONE_BELOW` pulls as many as fit below that mark, so a trough fills at once; a request whose slack
is used up leaves whatever the use; and among those held the one that must start first goes first. The paper holds by region
and releases by arrival.

Pure: no clock and no I/O. The live gateway and the simulator call the same methods.
"""

import heapq
from typing import Final

from msgspec import Struct

ONE_BELOW: Final = 0.6
TWO_BELOW: Final = 0.5
PROMOTED_AFTER_S: Final = 10 * 3600.0
"""Age at which a request is released with priority 0, as interactive work."""
COOLDOWN_S: Final = 15.0
"""Time after a scaling move in which an endpoint pulls nothing, so that feeder and scaler do not chase each other."""
ANYWHERE: Final = ""
SLACK_MARGIN: Final = 1.5
"""Times the expected service time before its deadline that a request must start."""
SLACK_FLOOR_S: Final = 60.0

FAITHFUL, TROUGH, SLACK = "use", "trough", "slack"
"""Rules by which a request is released."""


class Held(Struct, frozen=True):
    """A request that waits for room. Moments are seconds of the caller's clock."""

    number: int
    model: str
    arrived_s: float
    due_s: float
    """Deadline of its last token; infinity for none."""
    service_s: float
    """Expected time from its start to its last token."""
    region: str = ANYWHERE
    """The only region in which it may run."""

    @property
    def start_by_s(self) -> float:
        """When it has to start to keep its deadline, with a margin."""
        return self.due_s - max(SLACK_FLOOR_S, SLACK_MARGIN * self.service_s)


class Release(Struct, frozen=True):
    """One request let go: where, with which priority of vLLM, and by which rule."""

    number: int
    model: str
    region: str
    priority: int
    rule: str
    use: float


class Signal(Struct, frozen=True):
    """State of one endpoint: *use* by interactive requests (share of KV memory), and *room*, the requests that fit below
    `ONE_BELOW` alongside what runs and was released."""

    model: str
    region: str
    use: float
    room: int = 0


class HeldWork:
    """Requests held by model, each released at most once."""

    def __init__(self, *, faithful: bool = False) -> None:
        self.faithful = faithful
        self._held: dict[int, Held] = {}
        self._queues: dict[tuple[str, str], list[tuple[float, int]]] = {}
        self._quiet_until_s: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, request: Held) -> None:
        """Take *request* in. ValueError if its number is held already."""
        if request.number in self._held:
            raise ValueError(f"request {request.number} is held already")
        self._held[request.number] = request
        key = request.arrived_s if self.faithful else request.start_by_s
        heapq.heappush(self._queues.setdefault((request.model, request.region), []), (key, request.number))

    def drop(self, number: int) -> bool:
        """Forget a request that was withdrawn; False if it is not held."""
        return self._held.pop(number, None) is not None  # its entry in the queue is skipped when it comes up

    def scaled(self, model: str, region: str, now_s: float) -> None:
        """An instance of the endpoint was added or removed: it pulls nothing for `COOLDOWN_S`."""
        self._quiet_until_s[model, region] = now_s + COOLDOWN_S

    def held(self, model: str) -> list[Held]:
        """Requests of *model*, the next to leave first."""
        rows = [one for one in self._held.values() if one.model == model]
        return sorted(rows, key=lambda one: (one.arrived_s if self.faithful else one.start_by_s, one.number))

    def waiting(self) -> dict[str, int]:
        """Requests held, by model."""
        counts: dict[str, int] = {}
        for one in self._held.values():
            counts[one.model] = counts.get(one.model, 0) + 1
        return counts

    def pull(self, signal: Signal, now_s: float) -> list[Release]:
        """Requests that the endpoint of *signal* is to be given now, in this order."""
        released: list[Release] = []
        while not self.faithful and (first := self._first(signal)) is not None and first.start_by_s <= now_s:
            released.append(self._release(first, signal, now_s, SLACK))
        if now_s < self._quiet_until_s.get((signal.model, signal.region), -1.0):
            return released
        count = 2 if signal.use < TWO_BELOW else 1 if signal.use < ONE_BELOW else 0
        fits = 0 if self.faithful or not count else max(0, signal.room - len(released))
        for taken in range(max(count, fits)):
            first = self._first(signal)
            if first is None:
                break
            released.append(self._release(first, signal, now_s, FAITHFUL if taken < count else TROUGH))
        return released

    def _first(self, signal: Signal) -> Held | None:
        """The next request that may run at the endpoint."""
        best: tuple[float, int] | None = None
        for region in (ANYWHERE, signal.region):
            queue = self._queues.get((signal.model, region), [])
            while queue and queue[0][1] not in self._held:
                heapq.heappop(queue)
            if queue and (best is None or queue[0] < best):
                best = queue[0]
        return None if best is None else self._held[best[1]]

    def _release(self, request: Held, signal: Signal, now_s: float, rule: str) -> Release:
        del self._held[request.number]
        promoted = rule == SLACK or now_s - request.arrived_s >= PROMOTED_AFTER_S
        return Release(request.number, request.model, signal.region, 0 if promoted else 1, rule, signal.use)
