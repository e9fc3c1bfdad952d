"""A fleet whose arrays are given, and in which nothing runs and no time passes, as `scheduling.control` sees it."""

from scheduling.policy import EndpointPolicy
from scheduling.queueing.running import running_of


class Endpoint:
    policy = EndpointPolicy()


class Still:
    def __init__(self, fleet, endpoints, waiting, now_s=0.0):
        self.instances, self.members, self.waiting, self.now_s = fleet, endpoints, waiting, now_s
        self.endpoints = [Endpoint()] * waiting.size.size
        self.pumped = []

    def running_requests(self):
        return running_of([])

    def pump(self, endpoint):
        self.pumped.append(endpoint)
