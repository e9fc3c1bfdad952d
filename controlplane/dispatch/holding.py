"""Requests of non-interactive classes, held by model until the queue manager releases them to an endpoint.

The rules are `scheduling.control.holding`; here requests are held as they arrive, and callers and pages see them.
"""

import math
from collections import Counter, defaultdict
from typing import Final, NamedTuple

from controlplane.dispatch import port
from controlplane.dispatch.fleet import LiveFleet
from controlplane.dispatch.live_fleet.topology import Request
from controlplane.dispatch.stages import Arrival, Stage
from scheduling.control.holding import Holding
from scheduling.planning.capacity import must_run
from scheduling.queueing.release_rule import AT_ONCE

SIGNAL_EVERY_S: Final = 1.0


class HeldEstimate(NamedTuple):
    """A held request as lists of waiting requests show it. Waits are from now, and None while unknown."""

    request: Request
    position: int
    """Of its model, from 1."""
    wait_s: float | None
    most_s: float | None
    reason: str


class HeldRequests(Stage):
    def __init__(self, fleet: LiveFleet, deliver: port.Deliver) -> None:
        self.fleet, self.deliver = fleet, deliver
        self.control = Holding(fleet)
        self.work = self.control.work
        self.by_tenant: Counter[tuple[int, str]] = Counter()
        """Held requests by (tenant, model)."""
        self._requests: dict[int, Request] = {}  # by row
        self.acted_s = fleet.now_s
        """Last call of `release_due`."""
        self._signals_s = -math.inf

    def is_wanted(self) -> bool:
        return any(endpoint.policy.niw.by != AT_ONCE for endpoint in self.fleet.topology.own_endpoints)

    def __len__(self) -> int:
        return len(self._requests)

    def holds(self, asked: port.Asked) -> bool:
        """Whether requests such as *asked* are held."""
        return not asked.interactive and self.control.holds(asked.model)

    def hold(self, request: Request) -> None:
        """Hold *request*, which would wait at its endpoint."""
        self.hold_until(request)
        number, own_region, request.own_region = request.asked.number, request.own_region, ""
        reason = self.reason(request.asked.model)
        self.deliver(
            port.Held(number, request.endpoint.region, request.predicted_tokens, reason, own_region=own_region)
        )

    def hold_until(self, request: Request, until_s: float | None = None) -> None:
        """Hold *request* until *until_s* at the most; None: as long as its class, its model or its caller say."""
        asked = request.asked
        if until_s is None and asked.max_wait_s is not None:
            until_s = asked.arrived_s + min(float(self.fleet.requests.hold_s[request.row]), asked.max_wait_s)
        self.control.hold(request.row, request.endpoint, until_s)
        if request.row not in self._requests:
            self._requests[request.row] = request
            self.by_tenant[asked.tenant_id, asked.model] += 1

    def admit(self, arrival: Arrival) -> None:
        if not arrival.on_spot and arrival.own is not None and self.holds(arrival.asked):
            arrival.endpoint, arrival.hold = arrival.own, self.hold

    def queued(self, request: Request) -> None:
        """Forget *request*, which is released."""
        if self._requests:
            self._forget(request)

    def withdrawn(self, request: Request) -> None:
        if self._requests:
            self.work.drop(request.row)
            self._forget(request)

    def _forget(self, request: Request) -> None:
        if self._requests.pop(request.row, None) is not None:
            self.by_tenant[request.asked.tenant_id, request.asked.model] -= 1

    def release_due(self) -> None:
        """Release what the endpoints have room for, and give up what is too late. Call every `held_work.LOOK_S`."""
        self.acted_s = self.fleet.now_s
        self.control.release_due()

    def read_signals(self) -> None:
        """Read the signal of every endpoint that gets requests."""
        self.control.read_signals()
        self._signals_s = self.fleet.now_s

    def reason(self, model: str) -> str:
        """Return why requests of *model* are held."""
        if self.fleet.now_s - self._signals_s >= SIGNAL_EVERY_S:
            self.read_signals()
        return self.control.reason(model)

    def of_unserved(self) -> list[Request]:
        """Return the held requests of models that no deployment serves any longer."""
        topology = self.fleet.topology
        served = {one.model for one in topology.own_endpoints if topology.serves(one)}
        gone = {name for name, count in self.work.waiting.items() if count and name not in served}
        return [one for one in self._requests.values() if one.asked.model in gone] if gone else []

    def requests(self) -> list[Request]:
        """Return the held requests, in order of arrival."""
        return list(self._requests.values())

    def waiting_work(self) -> dict[str, dict[str, float]]:
        """Return what waits by model, as `planning.plans.waiting.Waiting`. Opportunistic work is left out."""
        now_s, queued, endpoints = self.fleet.now_s, defaultdict[str, list[int]](list), self.fleet.endpoints
        for endpoint in endpoints:
            for request in self.fleet.waiting_queue.of(endpoint):
                if not request.asked.opportunistic:
                    queued[endpoint.model].append(request.expected_tokens)
        work = {}
        for model in {one.model for one in endpoints}:
            due, waits = self.work.due(model), queued[model]
            if due or waits:
                tokens = sum(tokens for _, tokens in due)
                requests = self.work.deferred(model) + len(waits)
                work[model] = {"requests": requests, "tokens": tokens, "tokens_per_s": must_run(due, now_s)}
                work[model]["queued_tokens"] = float(sum(waits))
        return work

    def estimates(self, most: int) -> list[HeldEstimate]:
        """Return the first *most* held requests of each model, in the order in which they leave."""
        now_s, rows = self.fleet.now_s, []
        for model in [name for name, count in self.work.waiting.items() if count]:
            reason = self.reason(model)
            for position, held in enumerate(self.work.first(model, most), 1):
                wait_s, most_s = self.work.wait_s(held, position, now_s)
                rows.append(HeldEstimate(self._requests[held.number], position, wait_s, most_s, reason))
        return rows
