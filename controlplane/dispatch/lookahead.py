"""The live look-ahead maps: what each instance will hold in its next iterations, moved by the tokens that stream through.

One `scheduling.lookahead.maps` map for each slot of the fleet's arrays. A request enters with its first token (as in
PreServe, when its prefill is over), moves with its tokens (ten times a second) and leaves with its end. One whose answer is
not streamed enters when it is given to an instance, for nobody hears when it begins. All calls happen on the event loop.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from controlplane.gateway.ticket import Ticket
from scheduling.fleet.arrays import FleetArrays
from scheduling.lookahead import maps as lookahead

FIRST_REQUESTS = 1024


class Anticipation:
    def __init__(self, instances: int) -> None:
        self.maps = lookahead.allocate(instances, FIRST_REQUESTS)

    def add(self, ticket: Ticket, instance: int) -> None:
        """*ticket* begins to decode on the instance in slot *instance*, or began a few tokens ago.

        Several sequences of one request share their prompt; they count as one, which is a little too few.
        """
        maps = self.maps
        instances, requests = maps.clock.size, maps.instance.size
        if instance >= instances:
            instances = 2 * instance
        if maps.counters[lookahead.FREE] == 0:
            requests = 2 * requests
        if (instances, requests) != (maps.clock.size, maps.instance.size):
            self.maps = maps = lookahead.grow(maps, instances, requests)
        ticket.ahead_tokens = max(ticket.output_tokens // ticket.call.sequences - 1, 0)
        expected_output = ticket.expected_tokens - ticket.expected_prompt
        ticket.ahead = lookahead.add(maps, instance, ticket.prompt_tokens, expected_output, ticket.ahead_tokens)

    def fit(self, instances: int) -> None:
        """Let there be maps for as many *instances* as the fleet's arrays have slots."""
        if self.maps.clock.size < instances:
            self.maps = lookahead.grow(self.maps, instances, self.maps.instance.size)

    def count_tokens(self, tickets: Iterable[Ticket]) -> None:
        """Tell the maps how far *tickets* have come. The first token ended the prefill; `add` stands for it."""
        moved, begun = [], []
        for ticket in tickets:
            produced = ticket.output_tokens // ticket.call.sequences - 1
            if ticket.ahead < 0 and produced >= 0 and ticket.replica is not None:
                begun.append(ticket)
            elif ticket.ahead >= 0 and produced > ticket.ahead_tokens:
                moved.append((ticket.ahead, produced - ticket.ahead_tokens))
                ticket.ahead_tokens = produced
        if moved:
            columns = np.array(moved, np.int64).T
            lookahead.token_many(self.maps, *map(np.ascontiguousarray, columns))
        for ticket in begun:
            assert ticket.replica is not None
            self.add(ticket, ticket.replica.slot)

    def remove(self, ticket: Ticket) -> None:
        """*ticket* ended or was lost. Nothing happens to one that no instance has."""
        if ticket.ahead >= 0:
            lookahead.finish(self.maps, ticket.ahead)
            ticket.ahead = -1

    def look(self, fleet: FleetArrays, slots: list[int], queued_tokens: int) -> "Outlook":
        """What is coming to the instances in *slots* that take work, each with its part of *queued_tokens*."""
        accepting = [slot for slot in slots if fleet.accepting[slot] and slot < self.maps.clock.size]
        overloaded, peaks = 0, []
        for slot in accepting:
            capacity, unbegun = int(fleet.kv_capacity_tokens[slot]), int(fleet.queued_prompt_tokens[slot])
            overloaded += lookahead.overloaded(self.maps, slot, capacity, unbegun + queued_tokens / len(accepting))
            peaks.append((unbegun + lookahead.peak_tokens(self.maps, slot, lookahead.ITERATIONS)) / capacity)
        return Outlook(overloaded, sum(peaks), max(peaks, default=0.0))


class Outlook(NamedTuple):
    """The next 100 iterations of an endpoint's instances (PreServe 4.3.2)."""

    overloaded_instances: int
    """Those above 95 % KV use in more than 10 % of them."""
    peak_kv_sum: float
    """Sum over the instances of their highest KV use."""
    peak_kv_most: float
