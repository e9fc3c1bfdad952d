"""A request's tokens in the fleet's arrays and the look-ahead maps, from its placement to its end.

A request enters the map of its instance with its first token (as in PreServe, when its prefill is over), moves with its
tokens (ten times a second) and leaves at its end. One whose answer is not streamed enters at placement, since nothing shows
when it starts.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from controlplane.dispatch.kernels import advance_many, enter_map, leave_map, move_in_map, prefilled, release
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request, Topology
from controlplane.dispatch.stages import Stage
from scheduling.lookahead import maps as lookahead
from scheduling.lookahead import outlook
from scheduling.lookahead.rule import ITERATIONS

FIRST_REQUESTS = 1024  # initial room in the maps


class Outlook(NamedTuple):
    """Next iterations of an endpoint's instances (PreServe 4.3.2), as many as their `LookAheadRule` says."""

    overloaded_instances: int
    """Instances that will hold too much in too many iterations."""
    peak_kv_sum: float
    """Sum of the highest KV use of each instance."""
    peak_kv_most: float


class TokenAccounts(Stage):
    """Token counts from placement on; the kernels that choose an instance reserve a request's tokens there."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.maps = lookahead.allocate(topology.fleet.endpoint.size, FIRST_REQUESTS)
        self._tokens = np.zeros(0, np.int64)  # scratch
        topology.on_growth.append(self._grow)

    def placed(self, request: Request, replica: Replica) -> None:
        """Register *request* on *replica*, where its first sequence and its tokens are reserved."""
        request.replica = replica
        request.queued_tokens = request.expected_prompt
        replica.requests.add(request)
        if request.asked.sequences > 1:
            self.topology.fleet.running[replica.slot] += request.asked.sequences - 1
        replica.endpoint.running_sequences += request.asked.sequences
        if not request.asked.streamed and request.asked.max_tokens != 1:  # of one token, the prefill is all
            self._prefilled(request)
            self.enter(request, replica.slot)

    def progress(self, tokens: Sequence[tuple[Request, int]]) -> None:
        """Count the output tokens so far of streaming requests."""
        streams, moved = [], []
        for request, count in tokens:
            if request.replica is None:
                continue
            output_tokens = count - request.kept_tokens
            streams.append(request)
            request.replica.endpoint.running_output_tokens += output_tokens - request.output_tokens
            request.output_tokens = output_tokens
            if request.queued_tokens:
                self._prefilled(request)
            done = request.asked.prompt_tokens + output_tokens
            if done > request.counted_tokens:
                moved.append((request.replica.slot, request.expected_tokens, request.counted_tokens, done))
                request.counted_tokens = done
        if streams:
            self.move(streams)
        if moved:
            slots, expected, before, done_tokens = np.ascontiguousarray(np.array(moved, np.int64).T)
            advance_many(self.topology.fleet, slots, expected, before, done_tokens - before)

    def withdrawn(self, request: Request) -> None:
        """Take *request* off its instance, if it has one."""
        self._prefilled(request)
        self.leave(request)
        replica, request.replica = request.replica, None
        if replica is not None:
            fleet = self.topology.fleet
            release(fleet, replica.slot, request.expected_tokens, request.counted_tokens)
            if request.asked.sequences > 1:
                fleet.running[replica.slot] -= request.asked.sequences - 1
            replica.endpoint.running_sequences -= request.asked.sequences
            replica.endpoint.running_output_tokens -= request.output_tokens
            replica.requests.discard(request)

    def _prefilled(self, request: Request) -> None:
        if request.queued_tokens and request.replica is not None:
            prefilled(self.topology.fleet, request.replica.slot, request.queued_tokens)
        request.queued_tokens = 0

    # Look-ahead maps

    def _grow(self, requests: int = 0) -> None:
        """Make room for all instances, and for *requests* over all of them."""
        requests = max(requests, self.maps.instance.size)
        self.maps = lookahead.grow(self.maps, self.topology.fleet.endpoint.size, requests)

    def enter(self, request: Request, instance: int) -> None:
        """Enter *request*, which has just begun to decode on the instance in slot *instance*, into the map.

        Several sequences of one request share their prompt; they count as one, which is slightly too few.
        """
        if self.maps.counters[lookahead.FREE] == 0:
            self._grow(2 * self.maps.instance.size)
        request.ahead_tokens = max(request.output_tokens // request.asked.sequences - 1, 0)
        output = request.expected_tokens - request.expected_prompt
        request.ahead = enter_map(self.maps, instance, request.asked.prompt_tokens, output, request.ahead_tokens)

    def move(self, requests: Iterable[Request]) -> None:
        """Advance the maps by the tokens of *requests*. The first token ended the prefill; `enter` counts it."""
        moved, begun = [], []
        for request in requests:
            produced = request.output_tokens // request.asked.sequences - 1
            if request.ahead < 0 and produced >= 0 and request.replica is not None:
                begun.append((request, request.replica.slot))
            elif request.ahead >= 0 and produced > request.ahead_tokens:
                moved.append((request.ahead, produced - request.ahead_tokens))
                request.ahead_tokens = produced
        if moved:
            columns = np.array(moved, np.int64).T
            move_in_map(self.maps, *map(np.ascontiguousarray, columns))
        for request, slot in begun:
            self.enter(request, slot)

    def leave(self, request: Request) -> None:
        """Remove *request*, which ended or was lost. Does nothing if it is in no map."""
        if request.ahead >= 0:
            leave_map(self.maps, request.ahead)
            request.ahead = -1

    def outlook(self, endpoint: Endpoint, waiting_tokens: int) -> Outlook:
        """Return the outlook of the accepting instances of *endpoint*, each with its part of *waiting_tokens*."""
        fleet = self.topology.fleet
        slots = [replica.slot for replica in self.topology.members(endpoint)]
        accepting = [slot for slot in slots if fleet.accepting[slot]]
        overloaded, peaks = 0, []
        for slot in accepting:
            iterations = int(fleet.look_ahead[slot, ITERATIONS])
            if self._tokens.size < iterations:
                self._tokens = np.zeros(iterations, np.int64)
            coming = self._tokens[:iterations]
            lookahead.project(self.maps, slot, coming)
            is_over, peak = outlook.look(fleet, slot, coming, waiting_tokens / len(accepting))
            overloaded += is_over
            peaks.append(peak)
        return Outlook(overloaded, sum(peaks), max(peaks, default=0.0))
