"""Estimated waits against measured ones, on the dispatcher under a set clock: request groups, starts, shared GPUs.

`pytest -s tests/dispatch/test_waits.py` prints how well.
"""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from controlplane.fleet.lifecycle.states import InstanceState as S
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.workload.requests import make_requests
from tests.clocks.both import Scenario, live_fleet
from tests.clocks.fleet import COMMAND, VirtualFleet
from tests.clocks.scenarios import BLOCK_TOKENS, Draft, shared_gpus
from tests.dispatch.test_waiting_times import warm
from tests.examples import at_night_but

BURST, BURSTS = 336, 4
GAP_S = 60.0
START_S = 20.0
ASKED_S = 70.0
"""When the instance is asked for; before that waits teach the pace."""
LAST_S = ASKED_S + START_S
"""When the last request comes."""
LEARNED_S = 50.0
"""From when on estimates are judged where GPUs are shared."""


class Listening(VirtualFleet):
    """Keeps the estimated waits: mean and 99th percentile by request."""

    def __init__(self, *arguments):
        self.said, self.unsaid, self.asleep = {}, [], set()
        super().__init__(*arguments)

    def waiting(self, record):
        model = self.courses[record.number].submit.model
        serving = [each for each in self.topology.replicas.values() if each.spec.model == model]
        if not any(self.topology.fleet.accepting[one.slot] for one in serving):
            self.asleep.add(record.number)
        if record.estimated_wait_s is None:
            self.unsaid.append(record.number)
        else:
            self.said[record.number] = record.estimated_wait_s, record.estimated_wait_p99_s

    def compared(self, requests, counts):
        """Return (estimated, measured) waits of the requests with an estimate for which *counts*, and their numbers."""
        numbers = [number for number in self.said if counts(number)]
        said = np.array([self.said[number] for number in numbers])
        came = [self.courses[number].first_queue_s - requests.arrival_s[number] for number in numbers]
        return said, np.array(came), numbers


def cluster_of(ordering, instances):
    engine = EngineConfig(
        max_num_seqs=16, max_num_batched_tokens=256, block_size_tokens=BLOCK_TOKENS, kv_blocks=1500,
        policy="fcfs" if ordering == "fcfs" else "priority", max_model_len=400,
        profile=Profile(0.004, 0.001, 1e-5, 0.0, 0.01, 1e-4, 0.0),
    )  # fmt: skip
    specs = [simulated.InstanceSpec("m", "here", engine)] * instances
    return simulated.Cluster(specs, policies=EndpointPolicy(ordering=ordering, queue_bound=100_000))


def judged(said, came):
    left = ((came - said[:, 0]) ** 2).sum()
    return {
        "requests": came.size,
        "r2": round(float(1 - left / ((came - came.mean()) ** 2).sum()), 3),
        "rmse_s": round(float(np.sqrt(left / came.size)), 2),
        "mean_excess": round(float(said[:, 0].mean() / came.mean() - 1), 3),
        "below_p99": round(float((came <= said[:, 1]).mean()), 3),
        "longest_s": round(float(came.max()), 2),
    }


def lengths_of(random, count):
    return np.clip(np.exp(random.normal(np.log(40), 0.45, count)).astype(int), 1, 200)


def served(ordering, instances):
    """Return estimated and measured waits of the last of several bursts, and which requests are interactive."""
    random = np.random.default_rng(3)
    fleet, count = cluster_of(ordering, instances), BURST * instances
    output = lengths_of(random, BURSTS * count)
    interactive = np.arange(BURSTS * count) % 2 == 0
    arrival_s = np.concatenate([GAP_S * burst + np.sort(random.uniform(0.0, 2.7, count)) for burst in range(BURSTS)])
    requests = make_requests(
        arrival_s, np.full(output.size, 3), output, predicted_tokens=np.full(output.size, 42),
        priority=np.where(interactive, 0, 5), slo_class=np.where(interactive, 0, 1),
        deadline_s=np.where(interactive, 1.0, 3600.0),
    )  # fmt: skip
    live, _ = live_fleet(Scenario(fleet, requests), Listening)
    live.run()
    said, came, numbers = live.compared(requests, lambda number: number >= (BURSTS - 1) * count)
    return said, came, interactive[numbers]


@pytest.mark.parametrize("instances", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("ordering", at_night_but(["qlm"], ["fcfs", "qlm"]))
async def test_waits_are_estimated_as_they_come(ordering, instances):
    said, came, interactive = served(ordering, instances)
    result = {
        "all": judged(said, came),
        "interactive": judged(said[interactive], came[interactive]),
        "batch": judged(said[~interactive], came[~interactive]),
    }
    print(json.dumps({"ordering": ordering, "instances": instances, **result}))
    # Two instances' queues are put in order again, and balanced, after an estimate was made: 0.55 with this seed.
    assert result["all"]["r2"] > (0.95 if ordering == "fcfs" or instances == 1 else 0.5)
    assert abs(result["all"]["mean_excess"]) < 0.1
    assert result["all"]["below_p99"] > 0.9


def starting(fleet, live, *, counted=True):
    """Have the last instance of *live* asked for at `ASKED_S`; it takes `START_S`. Return what asks for it."""
    last = len(live.servers) - 1
    live.dispatcher.fleet.wall_clock = lambda: live.now_s
    for output in (20, 30, 40, 50, 80) * 4:  # lengths are known
        for key in (("m", ""), ("m", "0")):
            live.dispatcher.waits.control.history.learn(key, 3, output, 42.0)
    live.removed = live.servers[last]
    live.apply()

    def ask():
        live.removed = None
        live.put(last, S.LOADING, start_s=START_S if counted else None, start_began_at=ASKED_S)

    live.at(ASKED_S, COMMAND, ask)
    live.at(ASKED_S + START_S, COMMAND, lambda: live.put(last, S.READY, start_s=None))


def served_at_start(ordering, due_s, *, counted, last_s=LAST_S):
    """Return estimated and measured waits of requests that arrived while the instance started."""
    random = np.random.default_rng(11)
    fleet = cluster_of(ordering, 2)
    first = np.sort(random.uniform(0.0, 3.0, 500))
    later = np.sort(random.uniform(ASKED_S - 10.0, last_s, round(60 * (last_s - ASKED_S + 10.0))))
    arrival_s = np.concatenate([first, later])
    output = lengths_of(random, arrival_s.size)
    requests = make_requests(
        arrival_s, np.full(output.size, 3), output, predicted_tokens=np.full(output.size, 42),
        deadline_s=np.full(output.size, due_s),
    )  # fmt: skip
    live, _ = live_fleet(Scenario(fleet, requests), Listening)
    starting(fleet, live, counted=counted)
    live.run()
    said, came, _ = live.compared(requests, lambda number: ASKED_S < arrival_s[number] < ASKED_S + START_S)
    return said, came


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ordering", "due_s"), [("fcfs", 3600.0), pytest.param("qlm", 13.0, marks=pytest.mark.nightly)]
)
async def test_an_instance_that_starts_is_counted_from_when_it_is_ready(ordering, due_s):
    said, came = served_at_start(ordering, due_s, counted=True)
    result, without = judged(said, came), judged(*served_at_start(ordering, due_s, counted=False))
    print(json.dumps({"ordering": ordering, "due_s": due_s, **result, "without": without}))
    assert result["rmse_s"] < 0.6 * without["rmse_s"]
    assert abs(result["mean_excess"]) < 0.15
    assert result["below_p99"] > 0.9


@pytest.mark.nightly
async def test_groups_that_are_in_time_stay_where_they_are_and_wait_as_long():
    said, came = served_at_start("qlm", 3600.0, counted=True, last_s=LAST_S + 10.0)
    result = judged(said, came)
    print(json.dumps({"ordering": "qlm", "due_s": 3600.0, **result}))
    assert result["r2"] > 0.8


async def test_where_nothing_serves_yet_the_start_is_what_is_waited_for():
    fleet = cluster_of("fcfs", 1)
    requests = make_requests(np.full(40, ASKED_S + 5.0), 3, 42, deadline_s=60.0)
    live, _ = live_fleet(Scenario(fleet, requests), Listening)
    starting(fleet, live)
    live.run(ASKED_S + 5.0)
    (endpoint,) = live.topology.endpoints
    assert live.dispatcher.estimated_wait_s(endpoint) == pytest.approx(START_S - 5.0)
    live.run(ASKED_S + 5.1)
    means_s = [live.said[number][0] for number in range(40)]
    assert means_s == sorted(means_s)
    assert means_s[0] == means_s[10] == pytest.approx(START_S - 5.0), "a whole batch begins at once"
    assert means_s[-1] > means_s[10]


@pytest.mark.parametrize("gateway_options", [{"regions": ["east", "east"]}])
@pytest.mark.parametrize(
    ("state", "least_s", "most_s"), [("out of reach", 0.5, 3.0), ("open", 4.0, 8.0), ("lost", 90, 120)]
)
async def test_a_ready_instance_that_takes_nothing_for_a_moment_is_soon_back(served, state, least_s, most_s):
    """In the demo, on a busy machine, estimates had been 112 s, the start of another instance; what was waited was 2 s."""
    await warm(served, 6)
    topology, times, clock = (
        served.gateway.dispatching.topology,
        served.gateway.dispatching.dispatcher.waits.control,
        served.gateway.clock,
    )
    (endpoint,) = topology.endpoints
    ready, starting = topology.members(endpoint)
    starting.spec = replace(starting.spec, state=S.LOADING, start_s=100.0, start_began_at=time.time())
    if state == "open":
        ready.health.open("it failed", clock())
    elif state == "lost":
        ready.lost = "its engine died"
    else:
        ready.reachable = False
    topology.settle(ready)
    topology.settle(starting)
    assert not times.serving(endpoint.index)
    wait = times.of_next(endpoint.index)
    assert least_s <= wait.mean_s <= most_s
    assert wait.variance_s2**0.5 == pytest.approx(wait.mean_s * (0.25 if state == "lost" else 1.0), rel=0.05)


def sharing(seed, per_s=(1.0, 1.0), due_s=(20.0, 60.0)):
    """Return a scenario in which two models share GPUs."""
    draft = Draft(np.random.default_rng(0), [{"ordering": "qlm"}] * 2)
    draft.random = np.random.default_rng(seed)
    shared_gpus(draft, per_s, due_s, 150.0)
    return draft.done()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("per_s", "due_s", "least_r2"),
    at_night_but(
        [((1.0, 1.0), (20.0, 60.0), 0.5)],
        [((1.0, 1.0), (20.0, 60.0), 0.5), ((1.5, 1.5), (20.0, 60.0), 0.2), ((2.0, 2.0), (30.0, 120.0), 0.3)],
    ),
)
async def test_swaps_and_drains_are_in_the_estimate(per_s, due_s, least_r2):
    scenario = sharing([23, int(10 * sum(per_s))], per_s, due_s)
    live, _ = live_fleet(scenario, Listening)
    live.run()
    arrival_s = scenario.requests.arrival_s
    said, came, last = live.compared(scenario.requests, lambda number: arrival_s[number] > LEARNED_S)
    result = judged(said, came) | {"unsaid": len(live.unsaid)}
    asleep = np.array([number in live.asleep for number in last])
    parts = {"asleep": judged(said[asleep], came[asleep]), "up": judged(said[~asleep], came[~asleep])}
    print(json.dumps({"per_s": per_s, **result, **parts}))
    assert not live.unsaid, "also of a model that sleeps it is known how long"
    assert result["r2"] > least_r2
    assert abs(result["mean_excess"]) < 0.3
    assert result["below_p99"] > 0.7


async def test_a_request_for_a_model_that_sleeps_is_said_to_wait_for_the_swap():
    """Only the profile is known: nothing was served, and no request waits."""
    cluster = sharing(0).cluster
    requests = make_requests([0.0, 0.0], 10, 40, model=[0, 1], deadline_s=[20.0, 60.0])
    live, _ = live_fleet(Scenario(cluster, requests), Listening)
    awake, asleep = live.topology.endpoints
    assert live.dispatcher.estimated_wait_s(awake) == 0.0
    assert live.dispatcher.estimated_wait_s(asleep) == pytest.approx(1.0 + 3.0), "one sleeps, the other wakes"
    live.run(0.001)
    assert live.dispatcher.estimated_wait_s(asleep) > 4.5, "it runs, and drains before"
    ((mean_s, p99_s),) = live.said.values()
    assert 4.5 < mean_s < p99_s
