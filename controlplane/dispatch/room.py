"""Room for non-interactive work at each endpoint, by which the queue manager releases it (SageServe section 6.3)."""

from collections.abc import Callable

from controlplane.dispatch.live_fleet.topology import Endpoint, Topology
from scheduling.queueing.held_work import ONE_BELOW, Signal

FIRST_GUESS_TOKENS = 1_000
"""KV tokens of a request that is held, until one of them runs."""


def signals(topology: Topology, waiting: Callable[[Endpoint], int]) -> list[Signal]:
    """State of every endpoint with an instance that accepts work. *waiting*: requests in its queue.

    Use is the KV memory that interactive requests hold or will need, over that of the instances that accept work. Room is
    bounded by memory and by sequences; an endpoint with a queue has none.
    """
    fleet = topology.fleet
    states = []
    for endpoint in topology.own_endpoints:
        replicas = [replica for replica in topology.members(endpoint) if fleet.accepting[replica.slot]]
        capacity = sum(int(fleet.kv_capacity_tokens[replica.slot]) for replica in replicas)
        sequences = sum(int(fleet.max_num_seqs[replica.slot]) for replica in replicas)
        if not capacity or not sequences:
            continue
        running = [request for replica in replicas for request in replica.requests]
        interactive = sum(one.expected_tokens for one in running if one.asked.interactive)
        other = [one.expected_tokens for one in running if not one.asked.interactive]
        each = max(1.0, sum(other) / len(other)) if other else float(FIRST_GUESS_TOKENS)
        use = max(interactive / capacity, sum(one.asked.interactive for one in running) / sequences)
        queued = waiting(endpoint)
        by_memory = (ONE_BELOW * capacity - interactive - sum(other)) / each
        by_sequences = ONE_BELOW * sequences - len(running)
        room = 0 if queued else max(0, int(min(by_memory, by_sequences)))
        states.append(Signal(endpoint.model, endpoint.region, use, room))
    return states
