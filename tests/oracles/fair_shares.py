"""The virtual token counter (VTC) and start-time fair queueing word for word: counters of tenants, and a queue of each."""

from collections import defaultdict


class PlainShares:
    """*weights* by tenant. `vtc`: lift to the least counter of those that wait; else to the last start."""

    def __init__(self, weights, vtc):
        self.weights, self.vtc = weights, vtc
        self.counter = defaultdict(float)
        """What each tenant was charged for requests that left its queue."""
        self.queues = defaultdict(list)
        self.clock = 0.0

    def arrive(self, tenant, number, cost):
        if not self.queues[tenant]:
            others = [self.counter[other] for other, queue in self.queues.items() if queue]
            since = min(others) if others and self.vtc else self.clock
            self.counter[tenant] = max(self.counter[tenant], since)
        self.queues[tenant].append((number, cost / self.weights[tenant]))

    def dispatch(self):
        """Return the request that leaves: the first one of the tenant with the lowest counter, of equals as they came."""
        tenants = [tenant for tenant, queue in self.queues.items() if queue]
        if not tenants:
            return -1
        tenant = min(tenants, key=lambda each: (self.counter[each], self.queues[each][0][0]))
        number, cost = self.queues[tenant].pop(0)
        self.clock = self.counter[tenant]
        self.counter[tenant] += cost
        return number

    def settle(self, tenant, more):
        self.counter[tenant] += more / self.weights[tenant]

    def leave(self, number):
        for queue in self.queues.values():
            queue[:] = [each for each in queue if each[0] != number]
