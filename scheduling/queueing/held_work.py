"""The queue manager for non-interactive work (SageServe section 6.3): held by model until an endpoint has room.

An endpoint that signals pulls. By the rule `use` it pulls one request below 60% of use and two below 50%, in order of
arrival, as in the paper; use is that of *interactive* requests, so that released work never closes its own gate. By the rule
`slack`, which is ours:

- the request that has to start first is first;
- below 60% an endpoint pulls as many as fit below that mark, so that a trough fills at once, and nothing beyond it; nor
  more than make the expected first token of an interactive request `slowdown` times as long as without them;
- a request whose slack is used up leaves whatever the use, with priority 0;
- and where what is held needs much of the room that the fleet has left until the deadlines, requests leave at the pace that
  keeps them, with priority 1: the least constant speed (Yao, Demers, Shenker 1995, "Optimal Available");
- and donated instances that opportunistic requests leave idle are filled too: batch work is worth more than idle capacity.

Opportunistic requests come last, and no deadline releases them. Pure: no clock and no I/O. The live dispatcher and the
simulator call the same methods every `LOOK_S`.
"""

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from msgspec import Struct

from scheduling.fleet.carried import most_at_once
from scheduling.fleet.front_end import NO_LIMIT, FrontEnd
from scheduling.fleet.profile import Profile
from scheduling.fleet.state import LONG_AGO_S, BacklogState
from scheduling.queueing.release_rule import AT_ONCE, SLACK, USE, ReleaseRule

Place = TypeVar("Place")

LOOK_S: Final = 0.5
PROMOTED_AFTER_S: Final = 10 * 3600.0
"""Age at which a request is released with priority 0, as interactive work."""
COOLDOWN_S: Final = 15.0
"""Time after a scaling move in which an endpoint pulls nothing, so that queue manager and scaler do not chase each other."""
SLACK_MARGIN: Final = 1.5
"""Times the expected service time before its deadline that a request must start."""
SLACK_FLOOR_S: Final = 60.0
PRESSED: Final = 0.5
"""Share of the room for non-interactive work that deadlines may need before they set the pace."""
PACE_EVERY_S: Final = 5.0
DUE_STEP_S: Final = 60.0
"""Deadlines are counted in steps of this, rounded down."""
RATE_WINDOW_S: Final = 600.0
FIRST_TOKENS: Final = 1000.0
"""Expected tokens of a request of a model of which none is known yet."""
RECENT: Final = 256

USED, TROUGH, PACE, DUE, OFF = "use", "trough", "pace", "slack", "at_once"
"""Why a request was released."""


def service_s(profile: Profile, prompt_tokens: int, output_tokens: int) -> float:
    """Return the expected time from the start of a request to its last token on a busy instance."""
    return profile.service_time_s(prompt_tokens, 1) + profile.decode_time_s(prompt_tokens, output_tokens)


class Held(Struct, frozen=True, kw_only=True):
    """A request that waits for room. Moments are seconds of the caller's clock."""

    number: int
    model: str
    arrived_s: float
    due_s: float
    """Deadline of its last token; infinity for none."""
    expires_s: float = math.inf
    """When it is given up."""
    service_s: float
    """Expected time from its start to its last token."""
    tokens: int
    """Expected KV tokens: prompt and output."""
    regions: tuple[str, ...] = ()
    """The only regions in which it may run; none: anywhere."""
    opportunistic: bool = False

    @property
    def start_by_s(self) -> float:
        """When it has to start to keep its deadline, with a margin; infinity if no deadline releases it."""
        if self.opportunistic:
            return math.inf
        return self.due_s - max(SLACK_FLOOR_S, SLACK_MARGIN * self.service_s)


class Release(Struct, frozen=True):
    """One request let go: where, with which priority of vLLM, and why."""

    number: int
    model: str
    region: str
    priority: int
    why: str
    use: float
    held_s: float


class Signal(Struct, frozen=True, kw_only=True):
    """Load signal of an endpoint: KV tokens in use or promised, running and queued."""

    model: str
    region: str
    capacity_tokens: int = 0
    """KV tokens, without the model's weights, of the instances that accept work."""
    sequences: int = 0
    """Requests that these run at once."""
    interactive_tokens: int = 0
    interactive_requests: int = 0
    other_tokens: int = 0
    other_requests: int = 0
    waiting: int = 0
    """Of all those, requests that wait in its queue."""
    instances: int = 0
    """That accept work."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Mean lengths of the requests given to them; 0 before the first."""
    profile: Profile | None = None
    """Step time of its instances; None while it is not measured."""
    front_end: FrontEnd = NO_LIMIT
    spot: bool = False
    """Of donated instances: only opportunistic requests run there."""

    @property
    def use(self) -> float:
        """Return the share of memory, or of sequences if that is more, in use by interactive requests; infinity if it has no
        capacity.
        """
        if not self.capacity_tokens or not self.sequences:
            return math.inf
        return max(self.interactive_tokens / self.capacity_tokens, self.interactive_requests / self.sequences)

    def most_requests(self, slowdown: float) -> int:
        """Return the most requests with first tokens within *slowdown* times those with interactive ones alone."""
        if self.profile is None or not self.output_tokens or not self.instances:
            return self.sequences
        interactive, most = self.interactive_requests / self.instances, self.sequences // self.instances
        lengths = self.prompt_tokens, self.output_tokens
        return self.instances * most_at_once(self.profile, self.front_end, interactive, *lengths, slowdown, most)


class _Room:
    """What is left of a signal while requests are released to its endpoint."""

    def __init__(self, signal: Signal) -> None:
        self.signal, self.use = signal, signal.use
        self.tokens = signal.interactive_tokens + signal.other_tokens
        self.requests = signal.interactive_requests + signal.other_requests
        self.others = signal.other_requests

    def fits(self, request: Held, rule: ReleaseRule) -> bool:
        """Whether *request* fits below the mark and the slowdown of *rule*; the first one, if too large for them, does."""
        signal, mark = self.signal, rule.one_below
        if signal.waiting or self.use >= mark:
            return False
        if not self.others:
            return True
        below = self.tokens + request.tokens <= mark * signal.capacity_tokens
        return below and self.requests + 1 <= min(mark * signal.sequences, signal.most_requests(rule.slowdown))

    def take(self, request: Held) -> None:
        self.tokens += request.tokens
        self.requests += 1
        self.others += 1

    def spare(self, tokens_each: float) -> float:
        """Return how many requests of that size there is room for, full."""
        signal = self.signal
        by_memory = (signal.capacity_tokens - self.tokens) / tokens_each
        return max(0.0, min(by_memory, float(signal.sequences - self.requests)))


class _Backlog:
    """Work of one model that has deadlines, by deadline."""

    def __init__(self) -> None:
        self.steps: defaultdict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        """Requests, their service time in seconds and their tokens, by deadline in steps."""
        self.requests = 0
        self.service_s = self.tokens = 0.0
        self.mean_service_s, self.mean_tokens = 30.0, FIRST_TOKENS
        self.expected: list[tuple[float, int]] = []
        """(deadline, requests) of work that will be held once there is room."""
        self.checked_s, self.needed = -math.inf, 0.0

    def add(self, request: Held, sign: int) -> None:
        if request.opportunistic or request.due_s == math.inf:
            return
        step = int(request.due_s // DUE_STEP_S)
        self.steps[step][0] += sign
        self.steps[step][1] += sign * request.service_s
        self.steps[step][2] += sign * request.tokens
        if self.steps[step][0] <= 0:
            del self.steps[step]
        self.requests += sign
        self.service_s += sign * request.service_s
        self.tokens += sign * request.tokens
        if self.requests:
            self.mean_service_s, self.mean_tokens = self.service_s / self.requests, self.tokens / self.requests

    def running_for(self, now_s: float) -> float:
        """Return how many requests have to run at once from now on so that all are done by their deadlines."""
        if now_s >= self.checked_s + PACE_EVERY_S or now_s < self.checked_s:
            due = [(DUE_STEP_S * step, work[1]) for step, work in self.steps.items()]
            due += [(due_s, count * self.mean_service_s) for due_s, count in self.expected if due_s > now_s]
            self.checked_s, self.needed, work_s = now_s, 0.0, 0.0
            for due_s, service_s in sorted(due):
                work_s += service_s
                left_s = max(due_s - SLACK_FLOOR_S - now_s, self.mean_service_s, 1.0)
                self.needed = max(self.needed, work_s / left_s)
        return self.needed


class HeldWork:
    """Requests held by model, each released at most once."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self._rules: dict[str, ReleaseRule] = {}
        self._queues: dict[tuple[str, tuple[str, ...], bool], list[tuple[tuple[float, float], int]]] = {}
        self._regions: defaultdict[str, dict[tuple[str, ...], None]] = defaultdict(lambda: {(): None})
        """By model: the sets of regions that requests are bound to, as they came."""
        self._expiring: list[tuple[float, int]] = []
        self._scaled_s: dict[tuple[str, str], float] = {}
        self._backlogs: defaultdict[str, _Backlog] = defaultdict(_Backlog)
        self._released_s: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self.waiting: Counter[str] = Counter()
        """Requests held, by model."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, number: int) -> bool:
        return number in self._held

    def rule(self, model: str) -> ReleaseRule:
        return self._rules.get(model, _USUAL)

    def follow(self, model: str, rule: ReleaseRule) -> None:
        """Release the requests of *model* by *rule* from now on."""
        before = self.rule(model)
        if rule == before:
            return
        self._rules[model] = rule
        if (before.by == USE) != (rule.by == USE):
            for key in [key for key in self._queues if key[0] == model]:
                numbers = [number for _, number in self._queues[key] if number in self._held]
                self._queues[key] = [(self._order(self._held[number]), number) for number in numbers]
                heapq.heapify(self._queues[key])

    def _order(self, request: Held) -> tuple[float, float]:
        """Return by what *request* leaves its queue, lowest first; its number, a row that is used again, says nothing."""
        if self.rule(request.model).by == USE or request.opportunistic:
            return request.arrived_s, request.arrived_s
        return request.start_by_s, request.arrived_s

    def kinds(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the models of which requests are held, with each set of regions that requests of it have been bound to."""
        return [(model, regions) for model, count in self.waiting.items() if count for regions in self._regions[model]]

    def hold(self, request: Held) -> None:
        """Take *request* in. Raise ValueError if its number is held already."""
        if request.number in self._held:
            raise ValueError(f"request {request.number} is held already")
        self._held[request.number] = request
        self.waiting[request.model] += 1
        self._backlogs[request.model].add(request, 1)
        self._regions[request.model][request.regions] = None
        key = request.model, request.regions, request.opportunistic
        heapq.heappush(self._queues.setdefault(key, []), (self._order(request), request.number))
        if request.expires_s < math.inf:
            heapq.heappush(self._expiring, (request.expires_s, request.number))

    def drop(self, number: int) -> bool:
        """Forget a request that was withdrawn; False if it is not held."""
        request = self._held.pop(number, None)  # its entries in the queues are skipped when they come up
        if request is None:
            return False
        self.waiting[request.model] -= 1
        self._backlogs[request.model].add(request, -1)
        return True

    def expired(self, now_s: float) -> list[int]:
        """Forget the requests that are given up by *now_s*, and return their numbers."""
        numbers = []
        while self._expiring and self._expiring[0][0] < now_s:
            at_s, number = heapq.heappop(self._expiring)
            if (
                number in self._held and self._held[number].expires_s == at_s
            ):  # else an entry of a row that was used before
                self.drop(number)
                numbers.append(number)
        return numbers

    def expect(self, model: str, due: Iterable[tuple[float, int]]) -> None:
        """Count work of *model* that will be held once there is room, (deadline, requests): deadlines need room for it."""
        self._backlogs[model].expected = list(due)

    def expected(self, model: str) -> int:
        """Return the number of those requests."""
        return sum(count for _, count in self._backlogs[model].expected)

    def deferred(self, model: str) -> int:
        """Return the number of requests of *model* that are held, without opportunistic ones."""
        return self._backlogs[model].requests

    def due(self, model: str) -> list[tuple[float, float]]:
        """Return the work of *model* that is held or announced, without opportunistic requests: (deadline, tokens)."""
        backlog = self._backlogs[model]
        held = [(DUE_STEP_S * step, work[2]) for step, work in backlog.steps.items()]
        return held + [(due_s, count * backlog.mean_tokens) for due_s, count in backlog.expected]

    def backlogs(self, now_s: float) -> list[BacklogState]:
        """Return what a successor needs to know besides the held requests; times are after *now_s*."""
        return [
            BacklogState(
                model,
                [(due_s - now_s, count) for due_s, count in one.expected],
                max(one.checked_s - now_s, LONG_AGO_S),
                one.needed,
                one.mean_service_s,
                one.mean_tokens,
            )
            for model, one in self._backlogs.items()
        ]

    def resume(self, backlogs: Iterable[BacklogState]) -> None:
        """Continue from *backlogs*, on a clock that is 0 at their time."""
        for state in backlogs:
            one = self._backlogs[state.model]
            for name in ("expected", "checked_s", "needed", "mean_service_s", "mean_tokens"):
                setattr(one, name, getattr(state, name))

    def scaled(self, model: str, region: str, at_s: float) -> None:
        """An instance of the endpoint was added or removed at *at_s*: it pulls nothing for `COOLDOWN_S`."""
        self._scaled_s[model, region] = at_s

    def quiet_s(self, model: str, region: str, now_s: float) -> float:
        """Return how long the endpoint still pulls nothing after a scaling move."""
        return max(0.0, self._scaled_s.get((model, region), -math.inf) + COOLDOWN_S - now_s)

    def first(self, model: str, most: int) -> list[Held]:
        """Return the *most* requests of *model* that leave next, in order."""
        mine = (one for one in self._held.values() if one.model == model)
        return heapq.nsmallest(most, mine, key=lambda one: (one.opportunistic, self._order(one), one.number))

    def all_of(self, model: str) -> list[Held]:
        return [one for one in self._held.values() if one.model == model]

    def next_change_s(self, now_s: float) -> float:
        """Return when something is released or given up for the time alone, at the latest; infinity for never."""
        moments = [one.start_by_s for one in self._held.values() if self.rule(one.model).by != USE]
        moments += [at_s + COOLDOWN_S for at_s in self._scaled_s.values() if at_s + COOLDOWN_S > now_s]
        return min((*moments, *(at_s for at_s, number in self._expiring if number in self._held)), default=math.inf)

    def wait_s(self, request: Held, position: int, now_s: float) -> tuple[float | None, float | None]:
        """Return how long *request*, the *position*-th of its model, is still held: expected, and at most.

        Expected by the pace of the last ten minutes; None while unknown. At most until it has to start; None where no
        deadline releases it.
        """
        most_s = max(0.0, request.start_by_s - now_s)
        most = None if self.rule(request.model).by == USE or most_s == math.inf else most_s
        released_s = [at_s for at_s in self._released_s[request.model] if at_s > now_s - RATE_WINDOW_S]
        if len(released_s) < 2:
            return most, most
        mean_s = position * (now_s - released_s[0]) / len(released_s)
        return (mean_s if most is None else min(mean_s, most)), most

    def pull(self, signals: Iterable[Signal], now_s: float) -> list[Release]:
        """Return the requests to be given to the endpoints of *signals* now, in this order. The least used pull first."""
        rooms: dict[str, list[_Room]] = {}
        for room in sorted(map(_Room, signals), key=lambda one: (one.use, one.signal.model, one.signal.region)):
            if self.waiting[room.signal.model]:
                rooms.setdefault(room.signal.model, []).append(room)
        released: list[Release] = []
        for model, mine in rooms.items():
            rule = self.rule(model)
            if rule.by == AT_ONCE:
                released += self._all(mine[0], now_s)
            elif rule.by == USE:
                released += self._by_use(mine, rule, now_s)
            else:
                released += self._by_slack(model, mine, rule, now_s)
        return released

    def _all(self, room: _Room, now_s: float) -> list[Release]:
        released = []
        while (first := self._first(room.signal)) is not None:
            released.append(self._release(first, room, now_s, OFF))
        return released

    def _by_use(self, rooms: list[_Room], rule: ReleaseRule, now_s: float) -> list[Release]:
        """The paper's rule, with its cooldown."""
        released = []
        for room in rooms:
            if room.use >= rule.one_below or self.quiet_s(room.signal.model, room.signal.region, now_s):
                continue
            count = 2 if room.use < rule.two_below else 1
            while count and (first := self._first(room.signal)) is not None:
                released.append(self._release(first, room, now_s, USED))
                count -= 1
        return released

    def _by_slack(self, model: str, rooms: list[_Room], rule: ReleaseRule, now_s: float) -> list[Release]:
        released = []
        for room in rooms:
            while (first := self._first(room.signal)) is not None and first.start_by_s <= now_s:
                released.append(self._release(first, room, now_s, DUE))
        for room in rooms:
            if self.quiet_s(model, room.signal.region, now_s):
                continue
            while (first := self._first(room.signal)) is not None and room.fits(first, rule):
                released.append(self._release(first, room, now_s, TROUGH))
        backlog = self._backlogs[model]
        needed = backlog.running_for(now_s) if self.waiting[model] else 0.0
        normal = [room for room in rooms if not room.signal.spot]
        running = sum(room.others for room in normal)
        if needed <= running or not normal:
            return released
        spare = {id(room): room.spare(backlog.mean_tokens) for room in normal}
        if needed < PRESSED * (running + sum(spare.values())):
            return released
        for room in sorted(normal, key=lambda one: -spare[id(one)]):
            for _ in range(min(math.ceil(needed - running), int(spare[id(room)]))):
                if (first := self._first(room.signal)) is None or first.start_by_s == math.inf:
                    break
                released.append(self._release(first, room, now_s, PACE))
                running += 1
        return released

    def to_spot(self, model: str, with_room: Callable[[int], Place | None]) -> Iterator[tuple[Held, Place]]:
        """Release requests of *model* to donated instances one by one: opportunistic ones in order of arrival, and then, by
        the rule `slack`, those with deadlines.

        *with_room* returns the place for a request, by its number; they are released until the first has none, of those
        that are bound to the same regions.
        """
        lent = Signal(model=model, region="", spot=True)
        for regions in list(self._regions[model]):
            while (first := self._first(lent, regions)) is not None and (place := with_room(first.number)) is not None:
                self.drop(first.number)
                yield first, place

    def _first(self, signal: Signal, bound: tuple[str, ...] | None = None) -> Held | None:
        """Return the next request that may run at the endpoint; of those that are *bound* so alone."""
        sets = self._regions[signal.model] if bound is None else (bound,)
        allowed = [each for each in sets if bound is not None or not each or signal.region in each]
        kinds: tuple[bool, ...] = (False, True)
        if signal.spot:
            kinds = (True, False) if self.rule(signal.model).by == SLACK else (True,)
        for opportunistic in kinds:
            best: tuple[tuple[float, float], int] | None = None
            for regions in allowed:
                queue = self._queues.get((signal.model, regions, opportunistic), [])
                while queue and not self._is_queued(*queue[0]):
                    heapq.heappop(queue)
                if queue and (best is None or queue[0] < best):
                    best = queue[0]
            if best is not None:
                return self._held[best[1]]
        return None

    def _is_queued(self, order: tuple[float, float], number: int) -> bool:
        """Whether the entry of a queue is of a request that is held, and not of one that had its number before."""
        request = self._held.get(number)
        return request is not None and self._order(request) == order

    def _release(self, request: Held, room: _Room, now_s: float, why: str) -> Release:
        self.drop(request.number)
        room.take(request)
        self._released_s[request.model].append(now_s)
        age_s = now_s - request.arrived_s
        priority = int(why != DUE and age_s < PROMOTED_AFTER_S)
        return Release(request.number, request.model, room.signal.region, priority, why, room.use, age_s)

    def reason(self, signals: Iterable[Signal], model: str, now_s: float) -> str:
        """Return why requests of *model* are held, as pages say it: by the endpoint that is used least."""
        rule, rooms = self.rule(model), [one for one in signals if one.model == model and one.use < math.inf]
        if not rooms:
            return "Held: no instance of its model takes work"
        best = min(rooms, key=lambda one: one.use)
        if best.use >= rule.one_below:
            return f"Held: use {best.use:.0%}, releases below {rule.one_below:.0%}"
        if all(self.quiet_s(model, one.region, now_s) for one in rooms if one.use < rule.one_below):
            return f"Held {COOLDOWN_S:.0f} s: cooldown after scaling"
        if rule.by == USE:
            return f"Held: use {best.use:.0%}, others leave first"
        if best.interactive_requests + best.other_requests >= best.most_requests(rule.slowdown):
            return f"Held: with more, first tokens would take over {rule.slowdown:g} times as long"
        return f"Held: use {best.use:.0%}, full up to {rule.one_below:.0%} with what was released"


_USUAL: Final = ReleaseRule()
