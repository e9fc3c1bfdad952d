"""Holding requests and giving them out: the live side of the kernels in `scheduling`.

We hold the queue; an instance is given a request only while it has room, so order stays ours to change, and the few
beyond that which begin there within a dispatch round trip (`scheduling.routing.requests_ahead`). All calls happen on the
event loop, so no lock is needed; every decision is one compiled call on the same arrays that the simulator uses.
"""

import asyncio
import logging
import math
from collections.abc import Callable

import numpy as np

from controlplane.dispatch.explanation import explained
from controlplane.dispatch.lookahead import Anticipation, Outlook
from controlplane.dispatch.topology import Endpoint, Replica, Topology
from controlplane.fleet.states import PRESENT
from controlplane.gateway.errors import ApiError, too_many, unavailable
from controlplane.gateway.prefixes import leading_hashes
from controlplane.gateway.ticket import Ticket, TicketState
from scheduling.dispatch import dispatch
from scheduling.queueing.ordering import ORDERINGS, queue_key
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
    def __init__(self, topology: Topology, clock: Callable[[], float], *, max_hold_s: float) -> None:
        self.topology = topology
        self.clock = clock
        self.max_hold_s = max_hold_s
        self.waiting = allocate_waiting(16, 1024)
        self.anticipation = Anticipation(topology.fleet.endpoint.size)
        self.affinity = allocate_affinity(topology.fleet.endpoint.size, 1024)
        self.streaming: set[Ticket] = set()
        self._held: dict[int, Ticket] = {}  # by slot of the waiting set
        self._began_s = clock()

    @property
    def waiting_count(self) -> int:
        return len(self._held)

    # Where and when

    def choose_endpoint(self, model: str, region: str) -> Endpoint:
        """The endpoint for a new request for *model* from *region*: one that serves, or soon will, or can be started.

        Raises ApiError 503 if there is none.
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
        raise unavailable(
            f"No instance of {model!r} is serving or being started.", code="model_unavailable", retry_after_s=15
        )

    def submit(self, ticket: Ticket) -> None:
        """Queue *ticket* where it belongs and give out what can be given out.

        Raises ApiError: 503 if nothing serves its model or soon will, 429 if the queue there is full.
        """
        endpoint = ticket.endpoint = self.choose_endpoint(ticket.call.model, ticket.region)
        if len(endpoint.waiting) >= endpoint.spec.queue_bound:
            wait_s = self.estimated_wait_s(endpoint)
            raise too_many(
                f"The queue for {endpoint.model!r} in {endpoint.region} is full ({len(endpoint.waiting)} requests)."
                + ("" if wait_s is None else f" The wait is about {wait_s:.0f} s."),
                code="queue_full",
                retry_after_s=max(1.0, wait_s / 2) if wait_s is not None else 5.0,
                estimated_wait_s=wait_s,
            )
        self._enqueue(ticket, endpoint)
        self.pump(endpoint)

    def _enqueue(self, ticket: Ticket, endpoint: Endpoint) -> None:
        self._fit_waiting()
        arrival_s = ticket.arrived_s - self._began_s
        deadline_s = arrival_s + ticket.terms.due_s
        ticket.predicted_tokens = self._possible(ticket)
        # A prompt that we guessed larger than any instance must not hold up the queue for ever: vLLM knows better.
        room = endpoint.largest_kv_tokens
        prompt, output = ticket.prompt_tokens, ticket.predicted_tokens
        if room and prompt + output > room:
            prompt = min(prompt, room - 1)
            output = room - prompt
        ticket.expected_tokens, ticket.counted_tokens = prompt + output, 0
        ticket.expected_prompt = prompt
        key = _turn_key(endpoint, arrival_s, deadline_s, ticket.terms.priority, prompt, output)
        ticket.turn_s = key - arrival_s + ticket.arrived_at
        ticket.slot = enqueue(
            self.waiting,
            endpoint.index,
            key,
            arrival_s,
            deadline_s,
            ticket.terms.priority,
            prompt,
            output,
            ticket.grant.tenant_id,
            -1,
            -1,
            -1,
        )
        ticket.move(TicketState.WAITING)
        ticket.placed = asyncio.get_running_loop().create_future()
        self._held[ticket.slot] = ticket
        endpoint.waiting.add(ticket)
        self._note(ticket, endpoint)

    def _note(self, ticket: Ticket, endpoint: Endpoint) -> None:
        """Note how the prompt of *ticket*, which waits for *endpoint*, begins, where the router goes by that."""
        hashes, block_tokens = [], 0
        if POLICY_CODES[endpoint.spec.routing_policy] == LEAST_DELAY:
            hashes, block_tokens = self._leading_hashes(ticket)
        self.affinity.noted[ticket.slot, : len(hashes)] = hashes
        self.affinity.noted_count[ticket.slot] = len(hashes)
        self.affinity.block_tokens[ticket.slot] = block_tokens

    def _leading_hashes(self, ticket: Ticket) -> tuple[list[int], int]:
        return leading_hashes(ticket.call, ticket.prompt_tokens)

    def _possible(self, ticket: Ticket) -> int:
        """What was predicted of *ticket*'s output, but no more than may come, and all of that if it is no number at all.

        Every bound on a wait rests on this: a length model may say anything.
        """
        model = self.topology.models.get(ticket.call.model)
        most = ticket.call.max_tokens
        if model:
            room = model.context_tokens - ticket.prompt_tokens
            # A prompt that we guess to fill the whole context says nothing of its answer: vLLM counts it, or refuses it.
            most = room if room > 0 else model.context_tokens
        if most and ticket.call.max_tokens:
            most = min(most, ticket.call.max_tokens)
        predicted = float(ticket.predicted_tokens)
        if most is None:
            return int(max(predicted, 1)) if math.isfinite(predicted) else 1
        most *= ticket.call.sequences
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
            ticket = self._take_out(slot)
            replica = topology.by_slot[instance]
            ticket.move(TicketState.PLACED)
            ticket.placed_s = self.clock()
            ticket.replica = replica
            ticket.attempts += 1
            ticket.queued_tokens = ticket.expected_prompt
            replica.tickets.add(ticket)
            ticket.instance = replica.name
            ticket.trace.append(self._explain(ticket, endpoint, replica, slot))
            topology.fleet.running[instance] += ticket.call.sequences - 1
            if policy == LEAST_DELAY:
                learn(topology.fleet, self.affinity, endpoint.index, slot, instance)
            if not ticket.call.stream:  # nobody hears when it begins
                self._prefilled(ticket)
                self.anticipation.add(ticket, instance)
            if ticket.placed is not None and not ticket.placed.done():
                ticket.placed.set_result(replica)

    def pump_all(self) -> None:
        for endpoint in self.topology.endpoints:
            if endpoint.waiting:
                self.pump(endpoint)

    def _take_out(self, slot: int) -> Ticket:
        ticket = self._held.pop(slot)
        free_slot(self.waiting, slot)
        ticket.slot = -1
        if ticket.endpoint is not None:
            ticket.endpoint.waiting.discard(ticket)
        return ticket

    def _explain(self, ticket: Ticket, endpoint: Endpoint, replica: Replica, slot: int) -> dict[str, object]:
        """What the decision saw: docs/routing.md. *slot* was that of *ticket* in the waiting set."""
        return {
            "instance": replica.name,
            "region": endpoint.region,
            "policy": endpoint.spec.routing_policy,
            "ordering": endpoint.spec.ordering_policy,
            "waited_ms": round((ticket.placed_s - ticket.arrived_s) * 1000, 3),
            "waiting": len(endpoint.waiting),
            **explained(
                self.topology,
                self.anticipation.maps,
                self.affinity,
                endpoint,
                replica,
                slot,
                ticket.expected_prompt,
                ticket.expected_tokens - ticket.expected_prompt,
            ),
        }

    # What happens to a request afterwards

    def began(self, ticket: Ticket) -> None:
        """The first byte came back: the prompt is prefilled."""
        ticket.move(TicketState.STREAMING)
        ticket.first_token_s = self.clock()
        self.streaming.add(ticket)

    def count_tokens(self) -> None:
        """Tell the arrays how far every streaming request has come since the last call. Call it some ten times a second."""
        self.anticipation.count_tokens(self.streaming)
        for ticket in self.streaming:
            if ticket.queued_tokens:
                self._prefilled(ticket)
        moved = [
            (ticket.replica.slot, ticket.expected_tokens, ticket.counted_tokens, tokens)
            for ticket in self.streaming
            if ticket.replica is not None
            and (tokens := ticket.prompt_tokens + ticket.output_tokens - ticket.counted_tokens) > 0
        ]
        if not moved:
            return
        columns = np.array(moved, np.int64).T
        advance_many(self.topology.fleet, *map(np.ascontiguousarray, columns))
        for ticket in self.streaming:
            ticket.counted_tokens = max(ticket.counted_tokens, ticket.prompt_tokens + ticket.output_tokens)

    def _prefilled(self, ticket: Ticket) -> None:
        """The prompt of *ticket* is not queued at its instance any more."""
        if ticket.replica is not None:
            prefilled(self.topology.fleet, ticket.replica.slot, ticket.queued_tokens)
        ticket.queued_tokens = 0

    def leave(self, ticket: Ticket) -> None:
        """Take *ticket* out of wherever it is (queue or instance) and let others have its room."""
        self.streaming.discard(ticket)
        self._prefilled(ticket)
        self.anticipation.remove(ticket)
        if ticket.slot >= 0:
            self._take_out(ticket.slot)
        replica, ticket.replica = ticket.replica, None
        if ticket.placed is not None and ticket.placed.done() and not ticket.placed.cancelled():
            ticket.placed.exception()  # a request that left before it heard: nobody else will ask
        if replica is not None:
            fleet = self.topology.fleet
            release(fleet, replica.slot, ticket.expected_tokens, ticket.counted_tokens)
            fleet.running[replica.slot] -= ticket.call.sequences - 1
            replica.tickets.discard(ticket)
            self.pump(replica.endpoint)

    def finished(self, ticket: Ticket, replica: Replica) -> None:
        """*ticket* was answered by *replica*: note the pace, by which waits are estimated and requests given ahead."""
        now_s = self.clock()
        replica.endpoint.finished_s.append(now_s)
        replica.round_trip.request_ended(now_s - ticket.placed_s)
        note_end(self.topology.fleet, replica.slot, now_s - self._began_s)

    def requeue(self, ticket: Ticket, reason: str) -> None:
        """Queue *ticket* again after its instance was lost before it sent a byte, with its first turn.

        Raises ApiError 503 after too many attempts, or when nothing serves the model any more.
        """
        ticket.trace[-1]["lost"] = reason
        self.leave(ticket)
        if ticket.attempts >= MAX_ATTEMPTS:
            raise unavailable(
                f"The request was tried on {ticket.attempts} instances, and each failed before it answered.",
                code="upstream_failed",
                retry_after_s=5,
                status=502,
            )
        endpoint = ticket.endpoint = self.choose_endpoint(ticket.call.model, ticket.region)
        self._enqueue(ticket, endpoint)
        self.pump(endpoint)

    # Once a second

    def sweep(self) -> None:
        """Move requests away from endpoints that cannot serve them, or not soon; turn away those held too long."""
        now_s = self.clock()
        self._fit_waiting()  # kernels index by endpoint without a check, and endpoints may have come
        for endpoint in self.topology.endpoints:
            if not endpoint.waiting:
                continue
            for slot in in_order(self.waiting, endpoint.index).tolist():
                ticket = self._held[slot]
                if now_s - ticket.arrived_s > self.max_hold_s:
                    self._turn_away(
                        ticket,
                        unavailable(
                            f"No instance had room within {self.max_hold_s:.0f} s.",
                            code="hold_expired",
                            retry_after_s=30,
                        ),
                    )
            self._rehome(endpoint)

    def _rehome(self, endpoint: Endpoint) -> None:
        topology = self.topology
        candidates = topology.candidates(endpoint.model, endpoint.region)
        moved = set()
        for slot in in_order(self.waiting, endpoint.index).tolist():
            ticket = self._held[slot]
            index = choose_region(topology.fleet, topology.arrays, candidates, self.waiting.size, THRESHOLD)
            if index < 0:
                others = [topology.endpoints[other] for other in candidates.tolist()]
                if any(other.can_start or self._coming(other) for other in others):
                    break
                self._turn_away(
                    ticket,
                    unavailable(
                        f"The last instance of {endpoint.model!r} went away.",
                        code="model_unavailable",
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
            key = _turn_key(target, arrival_s, deadline_s, ticket.terms.priority, prompt, output)
            ticket.turn_s = key - arrival_s + ticket.arrived_at
            push(self.waiting, index, slot, key)
            endpoint.waiting.discard(ticket)
            target.waiting.add(ticket)
            ticket.endpoint = target
            self._note(ticket, target)
            ticket.trace.append(
                {"moved": f"{endpoint.region} to {target.region}", "pressure": None if np.isinf(here) else here}
            )
            moved.add(index)
            self.pump(target)

    def _turn_away(self, ticket: Ticket, error: ApiError) -> None:
        self._take_out(ticket.slot)
        if ticket.placed is not None and not ticket.placed.done():
            ticket.placed.set_exception(error)

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
        return max((now_s - ticket.arrived_s for ticket in endpoint.waiting), default=0.0)

    def outlook(self, endpoint: Endpoint) -> Outlook:
        """What the look-ahead maps of *endpoint* say, counting what is held for it."""
        queued = sum(ticket.prompt_tokens + ticket.predicted_tokens for ticket in endpoint.waiting)
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


def _turn_key(
    endpoint: Endpoint, arrival_s: float, deadline_s: float, priority: int, prompt_tokens: int, output_tokens: int
) -> float:
    """The turn of a request at *endpoint*, by its ordering and the profile that it goes by."""
    spec = endpoint.spec
    service_s = spec.profile.service_time_s(prompt_tokens, output_tokens)
    return queue_key(ORDERINGS[spec.ordering_policy], arrival_s, deadline_s, priority, service_s, spec.ordering_stretch)
