"""No request is passed for ever: the bounds of every order by run or by share hold at each decision, under both clocks."""

from collections import defaultdict
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.dispatch.port import Placed, Queued
from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.standings import KnownGraph
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.fair_shares import OUTPUT_WEIGHT
from scheduling.queueing.ordering import NO_DEADLINE_S
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.workload.requests import make_requests
from scheduling.simulation.workload.runs import ApplicationToCome, RunsToCome, RunToCome
from tests.clocks.both import Both, Scenario, assert_equal_events, live_fleet, run_simulation
from tests.clocks.fleet import VirtualFleet
from tests.examples import costly

WEIGHTS = (1.0, 2.0, 0.5)
STRETCH = 2.0
PROFILE = Profile(0.05, 0.04, 1e-3, 0.0, 0.04, 0.002, 1e-5)
UNITS = {name: Backend("llm", "m") for name in ("plan", "work")}
RATES = dict.fromkeys(UNITS, ServiceRate.of(PROFILE))
steps = st.builds(
    Step,
    st.sampled_from(sorted(UNITS)),
    st.just(-1),
    st.integers(1, 30),
    st.integers(1, 30),
    parallelism=st.integers(1, 2),
)
records = st.lists(steps, min_size=1, max_size=3).map(
    lambda chain: RunRecord(tuple(Step(one.unit, at - 1, one.input_tokens, one.output_tokens, parallelism=one.parallelism)
                                  for at, one in enumerate(chain)))
)  # fmt: skip
drawn_runs = st.lists(
    st.tuples(st.integers(0, 8), st.integers(2, 60) | st.just(inf), st.integers(0, 2), records),
    min_size=4,
    max_size=14,
)


class Watching(VirtualFleet):
    """Checks at each decision that no request that waits on is passed by one that may not pass it."""

    ordering, most_cost = "", 0.0

    def __init__(self, *arguments):
        self.known = {}
        self.passed = defaultdict(float)
        """By (tenant that waits, tenant that is served): cost over weight since the first was served last."""
        super().__init__(*arguments)

    def hear(self, record):
        if isinstance(record, Queued | Placed):
            (endpoint,) = self.topology.endpoints
            waiting = self.dispatcher.queue.of(endpoint)
            self.known |= {one.asked.number: one for one in waiting}
            if isinstance(record, Placed):
                self.check(self.known[record.number], waiting)
        super().hear(record)

    def check(self, request, waiting):
        if self.ordering in ("vtc", "wfq"):
            self.check_shares(request, waiting)
            return
        began_s = request.standing.began_s
        for one in waiting:
            stands = one.standing
            if self.ordering in ("srpt", "hermes"):
                needs_s = stands.rank_s if self.ordering == "hermes" else stands.mean_s
                until_s = stands.began_s + STRETCH * needs_s
            elif self.ordering == "application":
                until_s = stands.began_s
            else:
                until_s = stands.due_s if stands.due_s < inf else stands.began_s + NO_DEADLINE_S
            assert began_s <= until_s + 1e-9, "only runs that begin by then may pass"

    def check_shares(self, request, waiting):
        served = request.asked.tenant_id - 1
        prompt, output = request.asked.prompt_tokens, request.predicted_tokens
        cost = prompt + OUTPUT_WEIGHT * output if self.ordering == "vtc" else PROFILE.service_time_s(prompt, output)
        waits = {one.asked.tenant_id - 1 for one in waiting}
        for tenant in range(len(WEIGHTS)):
            if tenant == served or tenant not in waits:
                for other in range(len(WEIGHTS)):
                    self.passed[tenant, other] = 0.0
            else:
                self.passed[tenant, served] += cost / WEIGHTS[served]
                assert self.passed[tenant, served] <= 2 * self.most_cost + 1e-9


@pytest.mark.parametrize("ordering", ["application", "srpt", "hermes", "run_deadline", "run_slack", "vtc", "wfq"])
@costly(10)
@given(drawn=drawn_runs)
def test_what_waits_is_passed_within_the_bound_of_its_order(ordering, drawn):
    began_s = np.cumsum([gap / 8 for gap, *_ in drawn])
    graphs = [KnownGraph.of(DemandGraph("a0", UNITS, [record for *_, record in drawn]), RATES)]
    runs = RunsToCome(
        [ApplicationToCome("a0", UNITS, graphs[0])],
        [RunToCome(0, float(at), due_s, record) for at, (_, due_s, _, record) in zip(began_s, drawn, strict=True)],
    )
    rows = [
        (number, float(began_s[number]), step.input_tokens, step.output_tokens, tenant)
        for number, (_, _, tenant, record) in enumerate(drawn)
        for step in record.steps
        for _ in range(step.parallelism)
    ]
    run_of, arrival_s, prompt, output, tenant = (np.array(column) for column in zip(*rows, strict=True))
    requests = make_requests(arrival_s, prompt, output, predicted_tokens=output, tenant=tenant, run=run_of)
    engine = EngineConfig(2, 64, 4, 60, "priority", 120, PROFILE)
    fleet = simulated.Cluster(
        [simulated.InstanceSpec("m", "east", engine)],
        policies=EndpointPolicy(ordering=ordering, ordering_stretch=STRETCH, queue_bound=None),
        tenant_weights=WEIGHTS,
    )
    cost = prompt + OUTPUT_WEIGHT * output if ordering == "vtc" else [
        PROFILE.service_time_s(int(one), int(other)) for one, other in zip(prompt, output, strict=True)
    ]  # fmt: skip
    scenario = Scenario(fleet, requests, runs=runs, graph_names=[("a0", graphs[0])])
    live, launcher = live_fleet(scenario, Watching)
    live.ordering, live.most_cost = ordering, float(np.max(np.array(cost) / np.array(WEIGHTS)[tenant]))
    live.run()
    assert_equal_events(Both(scenario, live, launcher, *run_simulation(scenario)))
    assert len(live.decisions) == requests.count
