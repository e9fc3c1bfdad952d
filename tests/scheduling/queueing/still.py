"""A fleet whose arrays are given, and in which nothing happens, as `scheduling.control` sees it."""

from types import SimpleNamespace

from scheduling.policy import EndpointPolicy
from scheduling.queueing.running import running_of


class Still:
    def __init__(self, fleet, endpoints, waiting, now_s=0.0, groups=()):
        self.instances, self.members, self.waiting, self.now_s = fleet, endpoints, waiting, now_s
        self.endpoints = [SimpleNamespace(model=f"m{at}", policy=EndpointPolicy()) for at in range(waiting.size.size)]
        self.swap_groups = lambda: groups

    def running_requests(self):
        return running_of([])

    def name(self, instance):
        return "abc"[instance]

    def pump(self, endpoint):
        pass
