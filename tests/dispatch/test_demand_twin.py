"""Demand under both clocks: what the dispatcher counts of a trace, and reports for the ledger, is what the simulator counts.

Callers of three regions and of one that serves nothing ask two models, one of which is not everywhere; most are refused.
"""

import numpy as np
import pytest

from controlplane.dispatch.observation import Observation
from controlplane.dispatch.port import Queued, Refused
from controlplane.dispatch.token_accounts import Outlook
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.held import HELD
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.description import InstanceSpec as SimulatedInstance
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.strategies import Demand
from scheduling.simulation.workload.requests import make_requests
from tests.dispatch.test_twin import Live

ENGINE = EngineConfig(
    max_num_seqs=2, max_num_batched_tokens=64, block_size_tokens=4, kv_blocks=64, max_model_len=200,
    policy="fcfs", profile=Profile(0.02, 0.004, 0.0003, 0.0, 0.01, 0.0005, 0.0),
)  # fmt: skip
PLACES = [("a", "east"), ("a", "north"), ("a", "west"), ("b", "north"), ("b", "west")]
REGIONS = ["east", "north", "west"]
LAST_S = 240.0
REQUESTS = 400
ROUTING = "join_shortest_queue"


class Observed(Live):
    """The dispatcher and what its floor observes; no instance ever answers, so that queues fill and refuse."""

    def __init__(self) -> None:
        self.own_region: dict[int, str] = {}
        specs = [SimulatedInstance(*place, ENGINE) for place in PLACES]
        super().__init__(Cluster(specs, policies=EndpointPolicy(routing=ROUTING, queue_bound=3)))
        nothing = Outlook(0, 0.0, 0.0)
        self.observation = Observation(self.topology, lambda endpoint: 0, lambda endpoint: nothing, lambda: self.now_s)

    def take(self, record: object) -> None:
        super().take(record)
        if isinstance(record, Queued | Refused):
            self.own_region[record.number] = record.own_region or self.own_region[record.number]

    def ask(
        self, number: int, at_s: float, model: str, region: str, prompt: int, predicted: int, interactive: bool = True
    ) -> None:
        self.now_s = at_s
        self.arrive(number, model, region, prompt, predicted, 1, 0, None, None, None, 0 if interactive else HELD)

    def tokens_per_s(self, at_s: float) -> dict[tuple[str, str], float]:
        self.now_s = at_s
        return {
            (endpoint.model, endpoint.region): self.observation.view(
                endpoint, self.topology.members(endpoint), at_s
            ).tokens_per_s
            for endpoint in self.topology.endpoints
        }


@pytest.fixture(scope="module")
def trace():
    draw = np.random.default_rng(4)
    arrived_s = np.sort(draw.uniform(0.01, LAST_S, REQUESTS))
    return (
        arrived_s,
        draw.integers(0, 2, REQUESTS),
        draw.integers(0, 3, REQUESTS),
        draw.integers(1, 90, REQUESTS),
        draw.integers(1, 90, REQUESTS),
    )


@pytest.fixture(scope="module")
def simulated(trace) -> tuple[Cluster, Demand]:
    arrived_s, model, region, prompt, predicted = trace
    cluster = Cluster([SimulatedInstance(name, place, ENGINE) for name, place in PLACES])
    requests = make_requests(
        arrived_s,
        prompt,
        np.minimum(predicted, 90),
        model=np.array([cluster.models.index("ab"[at]) for at in model]),
        region=np.array([cluster.regions.index(REGIONS[at]) for at in region]),
        predicted_tokens=predicted,
    )
    return cluster, Demand(cluster, requests)


def test_the_floor_sees_the_demand_that_the_simulator_sees(trace, simulated):
    cluster, counted = simulated
    live = Observed()
    number, arrivals = 0, list(zip(*trace, strict=True))
    for at_s in range(5, int(LAST_S), 5):
        while number < REQUESTS and arrivals[number][0] < at_s:
            arrived_s, model, region, prompt, predicted = arrivals[number]
            live.ask(number, arrived_s, "ab"[model], REGIONS[region], int(prompt), int(predicted))
            number += 1
        seen = live.tokens_per_s(float(at_s))
        expected = dict(zip(cluster.endpoints, counted.seen(float(at_s)), strict=True))
        assert seen == pytest.approx(expected), f"at {at_s} s"
    assert len(live.refused) > REQUESTS / 2


def test_what_scales_sees_interactive_demand_alone(trace):
    """Like the forecasts it is compared with (SageServe 6.4, 6.5.1): a burst of opportunistic work is no surge."""
    arrived_s, model, region, prompt, predicted = trace
    other = np.arange(REQUESTS) % 3 == 0
    cluster = Cluster([SimulatedInstance(name, place, ENGINE) for name, place in PLACES])
    requests = make_requests(
        arrived_s,
        prompt,
        predicted,
        model=np.array([cluster.models.index("ab"[at]) for at in model]),
        region=np.array([cluster.regions.index(REGIONS[at]) for at in region]),
        slo_class=other.astype(np.int64),
    )
    counted, every = Demand(cluster, requests, interactive=(True, False)), Demand(cluster, requests)
    live = Observed()
    for number in range(REQUESTS):
        if arrived_s[number] < 60.0:
            live.ask(
                number, arrived_s[number], "ab"[model[number]], REGIONS[region[number]], int(prompt[number]),
                int(predicted[number]), not other[number],
            )  # fmt: skip
    expected = dict(zip(cluster.endpoints, counted.seen(60.0), strict=True))
    assert live.tokens_per_s(60.0) == pytest.approx(expected)
    assert 0 < sum(expected.values()) < 0.8 * every.seen(60.0).sum()


def test_reports_for_the_ledger_add_up_to_the_simulators_windows(trace, simulated):
    cluster, counted = simulated
    live = Observed()
    windows = dict.fromkeys(cluster.endpoints)
    for key in windows:
        windows[key] = np.zeros(int(LAST_S // 60))
    for number, (arrived_s, model, region, prompt, predicted) in enumerate(zip(*trace, strict=True)):
        live.ask(number, arrived_s, "ab"[model], REGIONS[region], int(prompt), int(predicted))
        windows["ab"[model], live.own_region[number]][int(arrived_s // 60)] += (prompt + predicted) / 60.0
    expected = counted.windows(60.0)
    for key, series in zip(cluster.endpoints, expected, strict=True):
        assert windows[key][: len(series)] == pytest.approx(series), key
    live.ask(REQUESTS, LAST_S, "b", "moon", 1, 1)
    assert live.own_region[REQUESTS] == "north"  # the first that it would have
    assert len(live.refused) > REQUESTS / 2
