"""No request is passed for ever: the bounds of every order by run or by share hold at each decision of the dispatcher."""

from collections import defaultdict
from math import inf

import pytest

from controlplane.dispatch.port import Placed, Queued
from scheduling.queueing.fair_shares import OUTPUT_WEIGHT
from scheduling.queueing.ordering import NO_DEADLINE_S
from tests.clocks.both import live_fleet
from tests.clocks.fleet import VirtualFleet
from tests.clocks.scenarios import draw
from tests.examples import at_night_but

STRETCH = 2.0
WEIGHTS = (1.0, 2.0, 0.5)
"""Of tenants, as in `scenarios.weights`."""


class Watching(VirtualFleet):
    """Checks at each decision that no request that waits on is passed by one that may not pass it."""

    ordering, most_cost, checked = "", 0.0, 0

    def __init__(self, *arguments):
        self.known = {}
        self.passed = defaultdict(float)
        """By endpoint, tenant that waits and tenant that is served: cost over weight since the first was served last."""
        super().__init__(*arguments)

    def hear(self, record):
        if isinstance(record, Queued | Placed):
            for endpoint in self.topology.endpoints:
                self.known |= {one.asked.number: one for one in self.dispatcher.queue.of(endpoint)}
            if isinstance(record, Placed):
                request = self.known[record.number]
                waiting = self.dispatcher.queue.of(request.endpoint)
                self.checked += bool(waiting)
                (self.check_shares if self.ordering in ("vtc", "wfq") else self.check)(request, waiting)
        super().hear(record)

    def check(self, request, waiting):
        for one in waiting:
            stands = one.standing
            if self.ordering in ("srpt", "hermes"):
                needs_s = stands.rank_s if self.ordering == "hermes" else stands.mean_s
                until_s = stands.began_s + STRETCH * needs_s
            elif self.ordering == "application":
                until_s = stands.began_s
            else:
                until_s = stands.due_s if stands.due_s < inf else stands.began_s + NO_DEADLINE_S
            assert request.standing.began_s <= until_s + 1e-9, "only runs that begin by then may pass"

    def cost(self, request):
        prompt, output = request.asked.prompt_tokens, request.predicted_tokens
        if self.ordering == "vtc":
            return prompt + OUTPUT_WEIGHT * output
        return request.endpoint.spec.profile.service_time_s(prompt, output)

    def check_shares(self, request, waiting):
        endpoint, served = request.endpoint.index, request.asked.tenant_id - 1
        cost = self.cost(request) / WEIGHTS[served]
        self.most_cost = max([self.most_cost, cost, *(self.cost(one) / min(WEIGHTS) for one in waiting)])
        waits = {one.asked.tenant_id - 1 for one in waiting}
        for tenant in range(len(WEIGHTS)):
            if tenant == served or tenant not in waits:
                for other in range(len(WEIGHTS)):
                    self.passed[endpoint, tenant, other] = 0.0
            else:
                self.passed[endpoint, tenant, served] += cost
                assert self.passed[endpoint, tenant, served] <= 2 * self.most_cost + 1e-9


@pytest.mark.parametrize("seed", at_night_but([0], range(6)))
@pytest.mark.parametrize("ordering", ["application", "srpt", "hermes", "run_deadline", "run_slack", "vtc", "wfq"])
def test_what_waits_is_passed_within_the_bound_of_its_order(ordering, seed):
    policy = {"ordering": ordering, "ordering_stretch": STRETCH}
    live, _ = live_fleet(draw(seed, [policy] * 2, ["many runs", "weights"]), Watching)
    live.ordering = ordering
    live.run()
    assert live.checked > 100
