"""Requests of non-interactive classes, held by model until the queue manager releases them to an endpoint.

The rules are `scheduling.queueing.held_work`; this is its live form: signals from the live fleet, requests by number, and
what pages and callers are shown.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from controlplane.dispatch import port
from controlplane.dispatch.live_fleet.topology import Endpoint, Request, Topology
from controlplane.dispatch.stages import Arrival, Stage
from controlplane.dispatch.waiting_queue import WaitingQueue
from scheduling.fleet.carried import mean_given
from scheduling.fleet.profile import USUAL
from scheduling.planning.capacity import must_run
from scheduling.queueing.held_work import Held, HeldWork, Release, Signal, service_s
from scheduling.queueing.ordering import hold_s
from scheduling.queueing.release_rule import AT_ONCE

SHOWN_RELEASES: Final = 50
SIGNAL_EVERY_S: Final = 1.0
SPOT: Final = "A donated instance has room"


class HeldEstimate(NamedTuple):
    """A held request as lists of waiting requests show it. Waits are from now, and None while unknown."""

    request: Request
    position: int
    """Of its model, from 1."""
    wait_s: float | None
    most_s: float | None
    reason: str


class Holding(Stage):
    """*spot_with_room*: donated instances a request may go to; *enqueue* queues a released one, *expire* ends one
    whose hold is over, or holds it again."""

    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        clock: Callable[[], float],
        *,
        spot_with_room: Callable[[port.Asked], Endpoint | None],
        enqueue: Callable[[Request, Endpoint], None],
        expire: Callable[[Request], None],
        deliver: port.Deliver,
    ) -> None:
        self.topology, self.queue, self.clock, self.deliver = topology, queue, clock, deliver
        self.work = HeldWork()
        self.signals: list[Signal] = []
        """As of the last look."""
        self.released: deque[tuple[float, Release]] = deque(maxlen=SHOWN_RELEASES)
        """The last releases, oldest first, with their moments."""
        self.by_tenant: Counter[tuple[int, str]] = Counter()
        """Held requests by (tenant, model)."""
        self._requests: dict[int, Request] = {}
        self.looked_s = clock()
        """Last look."""
        self._spot_with_room, self._enqueue, self._expire = spot_with_room, enqueue, expire
        self._signals_s = -math.inf

    def __len__(self) -> int:
        return len(self._requests)

    def holds(self, asked: port.Asked) -> bool:
        """Whether requests such as *asked* are held."""
        if asked.interactive:
            return False
        rule = self._rule(asked.model)
        return rule is not None and rule.by != AT_ONCE

    def _rule(self, model: str) -> Any:
        """Return the release rule of *model*: that of its first endpoint, None without any."""
        endpoint = next((one for one in self.topology.endpoints if one.model == model), None)
        return endpoint.spec.policy.niw if endpoint is not None else None

    def hold(self, request: Request) -> None:
        """Hold *request*, which would wait at its endpoint."""
        self.work.follow(request.asked.model, self._rule(request.asked.model))
        self.hold_until(request)
        own_region, request.own_region = request.own_region, ""
        self.deliver(
            port.Held(
                request.asked.number,
                request.endpoint.region,
                request.predicted_tokens,
                self.reason(request.asked.model),
                own_region=own_region,
            )
        )

    def hold_until(self, request: Request, until_s: float | None = None) -> None:
        """Hold *request* until *until_s* at the most; None: as long as its class, its model or its caller say."""
        asked = request.asked
        held_s = hold_s(
            math.inf if asked.deadline_s is None else asked.deadline_s, request.endpoint.spec.tuned.MAX_HOLD_S
        )
        most_s = held_s if asked.max_wait_s is None else min(held_s, asked.max_wait_s)
        end_s = math.inf if asked.end_s is None else asked.end_s
        profile = request.endpoint.spec.profile
        self.work.hold(
            Held(
                number=asked.number,
                model=asked.model,
                arrived_s=asked.arrived_s - asked.age_s,
                due_s=asked.arrived_s + min(end_s, held_s),
                expires_s=asked.arrived_s + most_s if until_s is None else until_s,
                service_s=service_s(profile, asked.prompt_tokens, request.predicted_tokens),
                tokens=asked.prompt_tokens + request.predicted_tokens,
                opportunistic=asked.opportunistic,
            )
        )
        self._requests[asked.number] = request
        self.by_tenant[asked.tenant_id, asked.model] += 1

    def admit(self, arrival: Arrival) -> None:
        if not arrival.on_spot and arrival.own is not None and self.holds(arrival.asked):
            arrival.endpoint, arrival.held = arrival.own, True

    def withdrawn(self, request: Request) -> None:
        """Forget a request that is held."""
        if self._requests and self.work.drop(request.asked.number):
            self._forget(request.asked.number)

    def _forget(self, number: int) -> Request:
        request = self._requests.pop(number)
        self.by_tenant[request.asked.tenant_id, request.asked.model] -= 1
        return request

    def look(self) -> None:
        """Release what the endpoints have room for, and give up what is too late. Call every `held_work.LOOK_S`."""
        now_s = self.looked_s = self.clock()
        if not self._requests:
            return
        for number in self.work.expired(now_s):
            self._expire(self._forget(number))
        for model in {one.model for one in self.topology.endpoints}:
            self.work.follow(model, self._rule(model))
        self.read_signals()
        for release in self.work.pull(self.signals, now_s):
            endpoint = self.topology.endpoint(release.model, release.region)
            assert endpoint is not None  # it sent the signal
            self._release(release, endpoint, now_s)
        self._fill_spot(now_s)

    def _release(self, release: Release, endpoint: Endpoint, now_s: float) -> None:
        self.released.append((now_s, release))
        request = self._forget(release.number)
        request.asked = replace(request.asked, priority=release.priority and max(1, request.asked.priority))
        request.release = {
            "why": release.why,
            "use": None if math.isinf(release.use) else round(release.use, 4),
            "held_s": round(release.held_s, 3),
            "priority": request.asked.priority,
        }
        request.released_s = now_s
        self._enqueue(request, endpoint)

    def _fill_spot(self, now_s: float) -> None:
        """Give held requests to donated instances, for as long as these have room."""
        for model in [name for name, count in self.work.waiting.items() if count]:
            for held, endpoint in self.work.to_spot(
                model, lambda number: self._spot_with_room(self._requests[number].asked)
            ):
                asked = self._requests[held.number].asked
                held_s = now_s - asked.arrived_s
                release = Release(held.number, model, endpoint.region, asked.priority, SPOT, math.inf, held_s)
                self._release(release, endpoint, now_s)

    def read_signals(self) -> None:
        """Read the signal of every endpoint that gets requests."""
        self.signals, self._signals_s = list(self._read_signals()), self.clock()

    def _read_signals(self) -> Iterator[Signal]:
        topology = self.topology
        fleet = topology.fleet
        accepting: dict[int, list[Any]] = {}
        for replica in topology.replicas.values():
            if fleet.accepting[replica.slot]:
                accepting.setdefault(replica.endpoint.index, []).append(replica)
        for endpoint in topology.endpoints:
            if not topology.serves(endpoint):
                continue
            replicas, waiting = accepting.get(endpoint.index, []), self.queue.of(endpoint)
            interactive, other = Counter[str](), Counter[str]()
            for request in (*waiting, *(one for replica in replicas for one in replica.requests)):
                counted = interactive if request.asked.interactive else other
                counted["tokens"] += request.expected_tokens
                counted["requests"] += request.asked.sequences
            prompt_tokens, output_tokens = mean_given(fleet, [one.slot for one in replicas])
            yield Signal(
                model=endpoint.model,
                region=endpoint.region,
                capacity_tokens=sum(int(fleet.kv_capacity_tokens[one.slot]) for one in replicas),
                sequences=sum(topology.at_once(one) for one in replicas),
                interactive_tokens=interactive["tokens"],
                interactive_requests=interactive["requests"],
                other_tokens=other["tokens"],
                other_requests=other["requests"],
                waiting=len(waiting),
                instances=len(replicas),
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                profile=None if endpoint.spec.profile == USUAL else endpoint.spec.profile,
                front_end=endpoint.spec.front_end,
            )

    def reason(self, model: str) -> str:
        """Return why requests of *model* are held."""
        if not self.signals or self.clock() - self._signals_s >= SIGNAL_EVERY_S:
            self.read_signals()
        return self.work.reason(self.signals, model, self.clock())

    def of_unserved(self) -> list[Request]:
        """Return the held requests of models that no deployment serves any longer."""
        gone = {
            name for name, count in self.work.waiting.items() if count and not self.topology.candidates(name, "").size
        }
        return [one for one in self._requests.values() if one.asked.model in gone] if gone else []

    def requests(self) -> list[Request]:
        """Return the held requests, in order of arrival."""
        return list(self._requests.values())

    def waiting_work(self) -> dict[str, tuple[int, float, float, float]]:
        """Return what waits by model, as `planning.plans.waiting.Waiting`: requests that are held or queued, tokens
        of held and announced work, the rate that they need, and tokens of queued requests. Opportunistic work is left out.
        """
        now_s, queued = self.clock(), defaultdict[str, list[int]](list)
        for endpoint in self.topology.endpoints:
            for request in self.queue.of(endpoint):
                if not request.asked.opportunistic:
                    queued[endpoint.model].append(request.expected_tokens)
        work = {}
        for model in {one.model for one in self.topology.endpoints}:
            due, waits = self.work.due(model), queued[model]
            if due or waits:
                tokens = sum(tokens for _, tokens in due)
                requests = self.work.deferred(model) + len(waits)
                work[model] = requests, tokens, must_run(due, now_s), float(sum(waits))
        return work

    def estimates(self, most: int) -> list[HeldEstimate]:
        """Return the first *most* held requests of each model, in the order in which they leave."""
        now_s, rows = self.clock(), []
        for model in [name for name, count in self.work.waiting.items() if count]:
            reason = self.reason(model)
            for position, held in enumerate(self.work.first(model, most), 1):
                wait_s, most_s = self.work.wait_s(held, position, now_s)
                rows.append(HeldEstimate(self._requests[held.number], position, wait_s, most_s, reason))
        return rows
