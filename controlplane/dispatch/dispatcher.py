"""Holding requests and giving them out: the live side of the kernels in `scheduling`.

We hold the queue; an instance is given a request only while it has room, so order stays ours to change, and the few
beyond that which begin there within a dispatch round trip (`scheduling.routing.requests_ahead`). All calls happen on the
event loop, so no lock is needed; every decision is one compiled call on the same arrays that the simulator uses.
"""

import logging
import math
from collections.abc import Callable

import numpy as np

from controlplane.dispatch.explanation import explained
from controlplane.dispatch.lookahead import Anticipation, Outlook
from controlplane.dispatch.port import (
    DEAD,
    Deliver,
    Finished,
    FromGateway,
    Left,
    Lost,
    Moved,
    Placed,
    Progress,
    Refused,
    Submit,
)
from controlplane.dispatch.request import Request
from controlplane.dispatch.topology import Endpoint, Replica, Topology
from controlplane.fleet.states import PRESENT
from scheduling.dispatch import dispatch
from scheduling.queueing.ordering import ORDERINGS, turn_key
from scheduling.queueing.waiting_set import allocate_waiting, enqueue, free_slot, grow_waiting, in_order, push, remove
from scheduling.routing.predictive import dispatch_ahead
from scheduling.routing.prefix_affinity import allocate_affinity, grow_affinity, learn
from scheduling.routing.regions import THRESHOLD, choose_region, pressure
from scheduling.routing.requests_ahead import note_end
from scheduling.routing.routers import LEAST_DELAY, POLICY_CODES, PRESERVE, advance_many, prefilled, release

logger = logging.getLogger(__name__)
MAX_ATTEMPTS = 3
PACE_STALE_S = 60.0


class Dispatcher:
    """*deliver* takes what is decided about requests; `take` is told of them."""

    def __init__(self, topology: Topology, clock: Callable[[], float], *, max_hold_s: float, deliver: Deliver) -> None:
        self.topology = topology
        topology.on_lost = self._lost
        self.deliver = deliver
        self.clock = clock
        self.max_hold_s = max_hold_s
        self.waiting = allocate_waiting(16, 1024)
        self.anticipation = Anticipation(topology.fleet.endpoint.size)
        self.affinity = allocate_affinity(topology.fleet.endpoint.size, 1024)
        self.on_submit: Callable[[Submit], None] = lambda asked: None
        self._requests: dict[int, Request] = {}  # by number
        self._held: dict[int, Request] = {}  # by slot of the waiting set
        self._began_s = clock()

    @property
    def waiting_count(self) -> int:
        return len(self._held)

    def take(self, record: FromGateway) -> None:
        """Do what the gateway says; what comes of it is delivered before this returns, or later."""
        match record:
            case Progress():
                self._progress(record)
            case Submit():
                self._submit(record)
            case Finished():
                self._finished(record)
            case Left():
                self._left(record)

    # Where and when

    def choose_endpoint(self, model: str, region: str) -> Endpoint | None:
        """The endpoint for a new request for *model* from *region*: one that serves, or soon will, or can be started.

        None if there is none.
        """
        topology = self.topology
        candidates = topology.candidates(model, region)
        if candidates.size:
            self._fit_waiting()
            index = choose_region(topology.fleet, topology.arrays, candidates, self.waiting.size, THRESHOLD)
            if index >= 0:
                return topology.endpoints[index]
            endpoints = [topology.endpoints[index] for index in candidates.tolist()]
            for endpoint in endpoints:
                if self._coming(endpoint):
                    return endpoint
            for endpoint in endpoints:
                if endpoint.can_start:
                    return endpoint
        return None

    def _submit(self, asked: Submit) -> None:
        """Queue what was *asked* where it belongs and give out what can be given out.

        Refused with 503 if nothing serves its model or soon will, with 429 if the queue there is full.
        """
        self.on_submit(asked)
        endpoint = self.choose_endpoint(asked.model, asked.region)
        if endpoint is None:
            self.deliver(_none_serves(asked))
        elif len(endpoint.waiting) >= endpoint.spec.queue_bound:
            self.deliver(self._full(asked, endpoint))
        else:
            request = self._requests[asked.number] = Request(asked, self._possible(asked), endpoint)
            self._enqueue(request, endpoint)
            self.pump(endpoint)

    def _full(self, asked: Submit, endpoint: Endpoint) -> Refused:
        wait_s = self.estimated_wait_s(endpoint)
        return Refused(
            asked.number,
            429,
            "queue_full",
            f"The queue for {endpoint.model!r} in {endpoint.region} is full ({len(endpoint.waiting)} requests)."
            + ("" if wait_s is None else f" The wait is about {wait_s:.0f} s."),
            retry_after_s=max(1.0, wait_s / 2) if wait_s is not None else 5.0,
            estimated_wait_s=wait_s,
            region=endpoint.region,
        )

    def _enqueue(self, request: Request, endpoint: Endpoint) -> None:
        self._fit_waiting()
        asked = request.asked
        arrival_s = asked.arrived_s - self._began_s
        deadline_s = arrival_s + (math.inf if asked.due_s is None else asked.due_s)
        # A prompt that we guessed larger than any instance must not hold up the queue for ever: vLLM knows better.
        room = endpoint.largest_kv_tokens
        prompt, output = asked.prompt_tokens, request.predicted_tokens
        if room and prompt + output > room:
            prompt = min(prompt, room - 1)
            output = room - prompt
        request.expected_tokens, request.counted_tokens = prompt + output, 0
        request.expected_prompt = prompt
        key = _turn_key(endpoint, arrival_s, deadline_s, asked.priority, prompt, output)
        request.turn_s = key - arrival_s + asked.arrived_at
        request.slot = enqueue(
            self.waiting,
            endpoint.index,
            key,
            arrival_s,
            deadline_s,
            asked.priority,
            prompt,
            output,
            asked.tenant_id,
            -1,
            -1,
            -1,
        )
        self._held[request.slot] = request
        request.endpoint = endpoint
        endpoint.waiting.add(request)
        self._note(request, endpoint)
        self.deliver(Moved(asked.number, endpoint.region, request.predicted_tokens))

    def _note(self, request: Request, endpoint: Endpoint) -> None:
        """Note how the prompt of *request*, which waits for *endpoint*, begins, where the router goes by that."""
        hashes: tuple[int, ...] = ()
        block_tokens = 0
        if POLICY_CODES[endpoint.spec.routing_policy] == LEAST_DELAY:
            hashes, block_tokens = request.asked.prefix_hashes, request.asked.block_tokens
        self.affinity.noted[request.slot, : len(hashes)] = hashes
        self.affinity.noted_count[request.slot] = len(hashes)
        self.affinity.block_tokens[request.slot] = block_tokens

    def _possible(self, asked: Submit) -> int:
        """The output predicted of what was *asked*, but no more than may come, and all of that if it is no number at all.

        Every bound on a wait rests on this: a length model may say anything.
        """
        model = self.topology.models.get(asked.model)
        most = asked.max_tokens
        if model:
            room = model.context_tokens - asked.prompt_tokens
            # A prompt that we guess to fill the whole context says nothing of its answer: vLLM counts it, or refuses it.
            most = room if room > 0 else model.context_tokens
        if most and asked.max_tokens:
            most = min(most, asked.max_tokens)
        predicted = float(asked.predicted_tokens)
        if most is None:
            return int(max(predicted, 1)) if math.isfinite(predicted) else 1
        most *= asked.sequences
        return int(min(max(predicted, 1), most)) if math.isfinite(predicted) else most

    def pump(self, endpoint: Endpoint) -> None:
        """Give out requests of *endpoint*, in order, while an instance has room or may have one more ahead."""
        topology = self.topology
        policy = POLICY_CODES[endpoint.spec.routing_policy]
        while endpoint.waiting:
            if policy >= PRESERVE:
                self.anticipation.fit(topology.fleet.endpoint.size)
                slot, instance = dispatch_ahead(
                    topology.fleet,
                    topology.arrays,
                    self.waiting,
                    self.anticipation.maps,
                    self.affinity,
                    endpoint.index,
                    policy,
                )
            else:
                slot, instance = dispatch(topology.fleet, topology.arrays, self.waiting, endpoint.index, policy)
            if slot < 0:
                return
            request = self._take_out(slot)
            replica = topology.by_slot[instance]
            request.placed_s = self.clock()
            request.replica = replica
            request.attempts += 1
            request.queued_tokens = request.expected_prompt
            replica.requests.add(request)
            why = self._explain(request, endpoint, replica, slot)
            topology.fleet.running[instance] += request.asked.sequences - 1
            if policy == LEAST_DELAY:
                learn(topology.fleet, self.affinity, endpoint.index, slot, instance)
            if not request.asked.streamed:  # nobody hears when it begins
                self._prefilled(request)
                self.anticipation.add(request, instance)
            self.deliver(
                Placed(
                    request.asked.number,
                    request.attempts,
                    replica.name,
                    replica.spec.url,
                    replica.spec.api_key,
                    endpoint.region,
                    endpoint.spec.ordering_policy,
                    request.turn_s,
                    request.placed_s,
                    why,
                )
            )

    def pump_all(self) -> None:
        for endpoint in self.topology.endpoints:
            if endpoint.waiting:
                self.pump(endpoint)

    def _take_out(self, slot: int) -> Request:
        request = self._held.pop(slot)
        free_slot(self.waiting, slot)
        request.slot = -1
        request.endpoint.waiting.discard(request)
        return request

    def _explain(self, request: Request, endpoint: Endpoint, replica: Replica, slot: int) -> dict[str, object]:
        """What the decision saw: docs/routing.md. *slot* was that of *request* in the waiting set."""
        return {
            "instance": replica.name,
            "region": endpoint.region,
            "policy": endpoint.spec.routing_policy,
            "ordering": endpoint.spec.ordering_policy,
            "waited_ms": round((request.placed_s - request.asked.arrived_s) * 1000, 3),
            "waiting": len(endpoint.waiting),
            **explained(
                self.topology,
                self.anticipation.maps,
                self.affinity,
                endpoint,
                replica,
                slot,
                request.expected_prompt,
                request.expected_tokens - request.expected_prompt,
            ),
        }

    # What happens to a request afterwards

    def _progress(self, progress: Progress) -> None:
        """Tell the arrays how far streaming requests have come."""
        fleet, now_s = self.topology.fleet, self.clock()
        for number, took_s in progress.headers:
            if (request := self._requests.get(number)) is not None and request.replica is not None:
                request.replica.round_trip.headers_came(fleet, request.replica.slot, took_s, now_s)
        came, moved = [], []
        for number, output_tokens in progress.tokens:
            request = self._requests.get(number)
            if request is None or request.replica is None:
                continue
            came.append(request)
            request.output_tokens = output_tokens
            if request.queued_tokens:
                self._prefilled(request)
            done = request.asked.prompt_tokens + output_tokens
            if done > request.counted_tokens:
                moved.append((request.replica.slot, request.expected_tokens, request.counted_tokens, done))
                request.counted_tokens = done
        if came:
            self.anticipation.count_tokens(came)
        if moved:
            slots, expected, before, done = np.ascontiguousarray(np.array(moved, np.int64).T)
            advance_many(fleet, slots, expected, before, done - before)

    def _prefilled(self, request: Request) -> None:
        """The prompt of *request* is not queued at its instance any more."""
        if request.replica is not None:
            prefilled(self.topology.fleet, request.replica.slot, request.queued_tokens)
        request.queued_tokens = 0

    def _leave(self, request: Request) -> None:
        """Take *request* out of wherever it is (queue or instance) and let others have its room."""
        self._prefilled(request)
        self.anticipation.remove(request)
        if request.slot >= 0:
            self._take_out(request.slot)
        replica, request.replica = request.replica, None
        if replica is not None:
            fleet = self.topology.fleet
            release(fleet, replica.slot, request.expected_tokens, request.counted_tokens)
            fleet.running[replica.slot] -= request.asked.sequences - 1
            replica.requests.discard(request)
            self.pump(replica.endpoint)

    def _finished(self, finished: Finished) -> None:
        """Note the pace, by which waits are estimated and requests given ahead, and let the request go."""
        request = self._requests.pop(finished.number, None)
        if request is None:
            return
        replica = request.replica
        if replica is not None:
            now_s = self.clock()
            replica.endpoint.finished_s.append(now_s)
            replica.round_trip.request_ended(now_s - request.placed_s)
            note_end(self.topology.fleet, replica.slot, now_s - self._began_s)
        self._leave(request)

    def _left(self, left: Left) -> None:
        """Let a request go, or only from its instance; note what it found of that."""
        request = self._requests.get(left.number)
        if request is None:
            return
        replica = request.replica
        if replica is not None and left.found:
            replica.reachable = False  # until its next heartbeat
            if left.found == DEAD:
                replica.lost = "its engine died"
            self.topology.settle(replica)
        self._leave(request)
        if left.again:
            self._place_again(request)
        else:
            del self._requests[left.number]

    def _place_again(self, request: Request) -> None:
        """Queue *request* again after its instance was lost before it sent a byte, with its first turn.

        Refused after too many attempts (502), or when nothing serves the model any more (503).
        """
        asked = request.asked
        if request.attempts >= MAX_ATTEMPTS:
            self._turn_away(
                request,
                Refused(
                    asked.number,
                    502,
                    "upstream_failed",
                    f"The request was tried on {request.attempts} instances, and each failed before it answered.",
                    retry_after_s=5,
                ),
            )
            return
        endpoint = self.choose_endpoint(asked.model, asked.region)
        if endpoint is None:
            self._turn_away(request, _none_serves(asked))
            return
        request.output_tokens = 0
        self._enqueue(request, endpoint)
        self.pump(endpoint)

    def _lost(self, replica: Replica) -> None:
        """*replica* was given up: tell the gateway, which knows of each of its requests what to do."""
        for request in list(replica.requests):
            self.deliver(Lost(request.asked.number))

    # Once a second

    def sweep(self) -> None:
        """Move requests away from endpoints that cannot serve them, or not soon; turn away those held too long."""
        now_s = self.clock()
        self._fit_waiting()  # kernels index by endpoint without a check, and endpoints may have come
        for endpoint in self.topology.endpoints:
            if not endpoint.waiting:
                continue
            for slot in in_order(self.waiting, endpoint.index).tolist():
                request = self._held[slot]
                if now_s - request.asked.arrived_s > self.max_hold_s:
                    self._turn_away(
                        request,
                        Refused(
                            request.asked.number,
                            503,
                            "hold_expired",
                            f"No instance had room within {self.max_hold_s:.0f} s.",
                            retry_after_s=30,
                        ),
                    )
            self._rehome(endpoint)

    def _rehome(self, endpoint: Endpoint) -> None:
        topology = self.topology
        candidates = topology.candidates(endpoint.model, endpoint.region)
        moved = set()
        for slot in in_order(self.waiting, endpoint.index).tolist():
            request = self._held[slot]
            index = choose_region(topology.fleet, topology.arrays, candidates, self.waiting.size, THRESHOLD)
            if index < 0:
                others = [topology.endpoints[other] for other in candidates.tolist()]
                if any(other.can_start or self._coming(other) for other in others):
                    break
                self._turn_away(
                    request,
                    Refused(
                        request.asked.number,
                        503,
                        "model_unavailable",
                        f"The last instance of {endpoint.model!r} went away.",
                        retry_after_s=15,
                    ),
                )
                continue
            if index == endpoint.index:
                break
            here = pressure(topology.fleet, topology.arrays, endpoint.index, len(endpoint.waiting))
            there = pressure(topology.fleet, topology.arrays, index, int(self.waiting.size[index]))
            if there >= 1.0 and np.isfinite(here):
                break  # no better off there
            target = topology.endpoints[index]
            remove(self.waiting, slot)
            arrival_s, deadline_s = float(self.waiting.arrival_s[slot]), float(self.waiting.deadline_s[slot])
            prompt, output = int(self.waiting.prompt_tokens[slot]), int(self.waiting.output_tokens[slot])
            key = _turn_key(target, arrival_s, deadline_s, request.asked.priority, prompt, output)
            request.turn_s = key - arrival_s + request.asked.arrived_at
            push(self.waiting, index, slot, key)
            endpoint.waiting.discard(request)
            target.waiting.add(request)
            request.endpoint = target
            self._note(request, target)
            self.deliver(
                Moved(
                    request.asked.number,
                    target.region,
                    request.predicted_tokens,
                    came_from=endpoint.region,
                    pressure=None if np.isinf(here) else float(here),
                )
            )
            moved.add(index)
            self.pump(target)

    def _turn_away(self, request: Request, refused: Refused) -> None:
        if request.slot >= 0:
            self._take_out(request.slot)
        del self._requests[request.asked.number]
        self.deliver(refused)

    # What is asked of it

    def estimated_wait_s(self, endpoint: Endpoint) -> float | None:
        """Time until a request that joins the queue of *endpoint* now is given out; None while there is no pace to go by.

        Requests ahead over the pace at which the endpoint finished its last ones.
        """
        if not endpoint.waiting:
            return 0.0
        finished = endpoint.finished_s
        if len(finished) < 2 or self.clock() - finished[-1] > PACE_STALE_S:
            return None
        elapsed_s = max(self.clock() - finished[0], 1e-3)
        return len(endpoint.waiting) * elapsed_s / len(finished)

    def oldest_wait_s(self, endpoint: Endpoint) -> float:
        now_s = self.clock()
        return max((now_s - request.asked.arrived_s for request in endpoint.waiting), default=0.0)

    def outlook(self, endpoint: Endpoint) -> Outlook:
        """What the look-ahead maps of *endpoint* say, counting what is held for it."""
        queued = sum(request.asked.prompt_tokens + request.predicted_tokens for request in endpoint.waiting)
        slots = [replica.slot for replica in self.topology.members(endpoint)]
        return self.anticipation.look(self.topology.fleet, slots, queued)

    def _coming(self, endpoint: Endpoint) -> bool:
        return any(replica.spec.state in PRESENT for replica in self.topology.members(endpoint))

    def _fit_waiting(self) -> None:
        """Let the waiting set have a heap for every endpoint and a slot to spare."""
        endpoints, capacity = self.waiting.heap.shape
        if endpoints < len(self.topology.endpoints) or len(self._held) >= capacity:
            self.waiting = grow_waiting(
                self.waiting,
                2 * capacity if len(self._held) >= capacity else capacity,
                max(endpoints, self.topology.arrays.cursor.size),
            )
        instances, slots = self.topology.fleet.endpoint.size, self.waiting.key.size
        if self.affinity.matched.size < instances or self.affinity.noted_count.size < slots:
            self.affinity = grow_affinity(self.affinity, instances, slots)


def _none_serves(asked: Submit) -> Refused:
    return Refused(
        asked.number,
        503,
        "model_unavailable",
        f"No instance of {asked.model!r} is serving or being started.",
        retry_after_s=15,
    )


def _turn_key(
    endpoint: Endpoint, arrival_s: float, deadline_s: float, priority: int, prompt_tokens: int, output_tokens: int
) -> float:
    """The turn of a request at *endpoint*, by its ordering and the profile that it goes by."""
    spec = endpoint.spec
    service_s = spec.profile.service_time_s(prompt_tokens, output_tokens)
    return turn_key(ORDERINGS[spec.ordering_policy], arrival_s, deadline_s, priority, service_s, spec.ordering_stretch)
