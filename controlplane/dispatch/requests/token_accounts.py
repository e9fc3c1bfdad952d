"""What the fleet's arrays and the look-ahead maps know of a request's tokens, from its placement to its end."""

from collections.abc import Iterable

import numpy as np

from controlplane.dispatch.kernels import prefilled, release
from controlplane.dispatch.live_fleet.lookahead import Anticipation
from controlplane.dispatch.live_fleet.topology import Replica, Topology
from controlplane.dispatch.requests.request import Request
from scheduling.routing.routers import advance_many


class TokenAccounts:
    """The kernels that choose an instance reserve a request's tokens there; the rest is done here."""

    def __init__(self, topology: Topology, anticipation: Anticipation) -> None:
        self.topology = topology
        self.anticipation = anticipation

    def opened(self, request: Request, replica: Replica) -> None:
        """*request* was given to *replica*, where its first sequence and its tokens are reserved."""
        request.replica = replica
        request.queued_tokens = request.expected_prompt
        replica.requests.add(request)
        if request.asked.sequences > 1:
            self.topology.fleet.running[replica.slot] += request.asked.sequences - 1
        replica.endpoint.running_sequences += request.asked.sequences

    def runs_unseen(self, request: Request, replica: Replica) -> None:
        """*request* is not streamed, so nobody hears when it begins: as if it did now."""
        self._prefilled(request)
        self.anticipation.add(request, replica.slot)

    def advance(self, came: Iterable[tuple[Request, int]]) -> None:
        """Requests that stream, and the output tokens of each so far."""
        streams, moved = [], []
        for request, output_tokens in came:
            if request.replica is None:
                continue
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
            self.anticipation.count_tokens(streams)
        if moved:
            slots, expected, before, done_tokens = np.ascontiguousarray(np.array(moved, np.int64).T)
            advance_many(self.topology.fleet, slots, expected, before, done_tokens - before)

    def close(self, request: Request) -> Replica | None:
        """*request* leaves its instance, which is returned; None if it had none."""
        self._prefilled(request)
        self.anticipation.remove(request)
        replica, request.replica = request.replica, None
        if replica is not None:
            fleet = self.topology.fleet
            release(fleet, replica.slot, request.expected_tokens, request.counted_tokens)
            if request.asked.sequences > 1:
                fleet.running[replica.slot] -= request.asked.sequences - 1
            replica.endpoint.running_sequences -= request.asked.sequences
            replica.endpoint.running_output_tokens -= request.output_tokens
            replica.requests.discard(request)
        return replica

    def _prefilled(self, request: Request) -> None:
        """The prompt of *request* is not queued at its instance any more."""
        if request.queued_tokens and request.replica is not None:
            prefilled(self.topology.fleet, request.replica.slot, request.queued_tokens)
        request.queued_tokens = 0
