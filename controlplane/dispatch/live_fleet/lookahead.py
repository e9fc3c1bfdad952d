"""The live look-ahead maps: what each instance will hold in its next iterations, moved by the tokens that stream through.

One `scheduling.lookahead.maps` map for each slot of the fleet's arrays. A request enters with its first token (as in
PreServe, when its prefill is over), moves with its tokens (ten times a second) and leaves with its end. One whose answer
comes in one piece enters when it is given to an instance, for nobody hears when it begins. All calls come from the event
loop.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from controlplane.dispatch.kernels import enter_map, leave_map
from controlplane.dispatch.requests.request import Request
from scheduling.fleet.arrays import FleetArrays
from scheduling.lookahead import maps as lookahead
from scheduling.lookahead import outlook
from scheduling.lookahead.rule import ITERATIONS

FIRST_REQUESTS = 1024


class Anticipation:
    def __init__(self, instances: int) -> None:
        self.maps = lookahead.allocate(instances, FIRST_REQUESTS)
        self._tokens = np.zeros(0, np.int64)  # scratch

    def add(self, request: Request, instance: int) -> None:
        """*request* begins to decode on the instance in slot *instance*, or began a few tokens ago.

        Several sequences of one request share their prompt; they count as one, which is a little too few.
        """
        maps = self.maps
        instances, capacity = maps.clock.size, maps.instance.size
        if instance >= instances:
            instances = 2 * instance
        if maps.counters[lookahead.FREE] == 0:
            capacity = 2 * capacity
        if (instances, capacity) != (maps.clock.size, maps.instance.size):
            self.maps = maps = lookahead.grow(maps, instances, capacity)
        request.ahead_tokens = max(request.output_tokens // request.asked.sequences - 1, 0)
        expected_output = request.expected_tokens - request.expected_prompt
        request.ahead = enter_map(maps, instance, request.asked.prompt_tokens, expected_output, request.ahead_tokens)

    def fit(self, instances: int) -> None:
        """Let there be maps for as many *instances* as the fleet's arrays have slots."""
        if self.maps.clock.size < instances:
            self.maps = lookahead.grow(self.maps, instances, self.maps.instance.size)

    def count_tokens(self, requests: Iterable[Request]) -> None:
        """Move the maps by how far *requests* have come. The first token ended the prefill; `add` stands for it."""
        moved, begun = [], []
        for request in requests:
            produced = request.output_tokens // request.asked.sequences - 1
            if request.ahead < 0 and produced >= 0 and request.replica is not None:
                begun.append(request)
            elif request.ahead >= 0 and produced > request.ahead_tokens:
                moved.append((request.ahead, produced - request.ahead_tokens))
                request.ahead_tokens = produced
        if moved:
            columns = np.array(moved, np.int64).T
            lookahead.token_many(self.maps, *map(np.ascontiguousarray, columns))
        for request in begun:
            assert request.replica is not None
            self.add(request, request.replica.slot)

    def remove(self, request: Request) -> None:
        """*request* ended or was lost. Nothing happens to one that no instance has."""
        if request.ahead >= 0:
            leave_map(self.maps, request.ahead)
            request.ahead = -1

    def look(self, fleet: FleetArrays, slots: list[int], waiting_tokens: int) -> "Outlook":
        """What is coming to the instances in *slots* that take work, each with its part of *waiting_tokens*."""
        accepting = [slot for slot in slots if fleet.accepting[slot] and slot < self.maps.clock.size]
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


class Outlook(NamedTuple):
    """The next iterations of an endpoint's instances (PreServe 4.3.2), as many as their `LookAheadRule` says."""

    overloaded_instances: int
    """Those that will hold too much for too many of them."""
    peak_kv_sum: float
    """Sum over the instances of their highest KV use."""
    peak_kv_most: float
