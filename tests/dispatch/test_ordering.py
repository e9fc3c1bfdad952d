"""What a length model says, however wrong, delays nobody beyond the bound of docs/papers/ordering.md: the dispatcher itself.

One instance that runs one request at a time, so that what a request waits is what was given out before it.
"""

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.inventory import EndpointSpec, Inventory, ModelSpec
from controlplane.dispatch.live_fleet.topology import Request, Topology
from controlplane.dispatch.port import Asked
from scheduling.fleet.profile import USUAL, Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.workload.requests import make_requests
from tests.clocks.both import Scenario, courses_of, fleet_of
from tests.examples import at_night_but

MOST = 64  # max_tokens of every request
PROFILE = Profile(0.05, 0.0, 1e-3, 0.0, 0.03, 0.0, 1e-5)
SICK = {
    "killed": lambda output, random: math.nan,
    "endless": lambda output, random: math.inf,
    "nothing": lambda output, random: 0,
    "below nothing": lambda output, random: -(10**9),
    "ten times too long": lambda output, random: 10 * output,
    "ten times too short": lambda output, random: max(1, output // 10),
    "turned round": lambda output, random: MOST + 1 - output,
    "anything": lambda output, random: random.choice([math.nan, -1, 0.5, 3, 1e300, 10**12]),
}


def fleet(ordering: str, stretch: float) -> simulated.Cluster:
    engine = EngineConfig(1, 512, 4, 100, "priority", 400, PROFILE)
    policies = EndpointPolicy(ordering=ordering, ordering_stretch=stretch)
    return simulated.Cluster([simulated.InstanceSpec("m", "here", engine)], policies=policies)


async def begins(ordering: str, stretch: float, requests, predictions) -> list[float]:
    """Return when each request was dispatched."""
    live = fleet_of(fleet(ordering, stretch))
    courses = courses_of(Scenario(fleet(ordering, stretch), requests))
    for course, predicted in zip(courses, predictions, strict=True):
        course.submit = msgspec.structs.replace(course.submit, predicted_tokens=predicted, max_tokens=MOST)
    live.expect(courses)
    live.run()
    given_s = {number: time_s for time_s, number, *_ in live.decisions}
    assert len(given_s) == requests.arrival_s.size, "every request is served"
    return [given_s[number] for number in range(requests.arrival_s.size)]


@pytest.mark.parametrize("sick", at_night_but(("killed", "turned round", "anything"), SICK))
@pytest.mark.parametrize("stretch", at_night_but([5.0], [1.0, 5.0]))
async def test_no_prediction_delays_a_request_beyond_the_bound(sick, stretch):
    random = np.random.default_rng([len(sick), int(stretch)])
    count = 60
    output = np.clip(random.geometric(1 / 15, count), 1, MOST)
    requests = make_requests(np.cumsum(random.exponential(0.5, count)), random.integers(1, 55, count), output)
    predictions = [SICK[sick](int(tokens), random) for tokens in output]
    by_arrival = await begins("fcfs", stretch, requests, predictions)
    assert by_arrival == sorted(by_arrival)
    speculative = await begins("ssjf", stretch, requests, predictions)
    prompt = requests.prompt_tokens
    real_s = [PROFILE.service_time_s(int(prompt[at]), int(output[at])) for at in range(count)]
    waited = 0
    for number, arrival_s in enumerate(requests.arrival_s):
        window_s = arrival_s + stretch * PROFILE.service_time_s(int(prompt[number]), MOST)
        after = range(number + 1, count)
        overtaking = [later for later in after if speculative[later] < speculative[number]]
        assert all(requests.arrival_s[later] < window_s for later in overtaking)
        work_s = sum(real_s[later] for later in after if requests.arrival_s[later] < window_s)
        assert speculative[number] <= by_arrival[number] + work_s + 1e-6
        waited += speculative[number] > arrival_s
    assert waited > count // 2, "or order would hardly matter"


def dispatcher(*endpoints: EndpointSpec) -> Dispatcher:
    topology = Topology()
    topology.apply(Inventory(models={"m": ModelSpec("m", 1000, 0)}, endpoints=endpoints, instances=()))
    return Dispatcher(topology, lambda: 0.0, deliver=lambda record: None)


def asked(predicted, *, max_tokens=None, prompt=100, sequences=1) -> Asked:
    return Asked(1, "1", "m", "here", 1, 0, None, 0.0, 0.0, prompt, predicted, max_tokens, sequences, streamed=False)


@given(
    st.floats() | st.integers(-(10**20), 10**20),
    st.none() | st.integers(1, 5000),
    st.integers(1, 2000),
    st.integers(1, 4),
)
def test_planned_numbers_are_possible(predicted, max_tokens, prompt, sequences):
    possible = dispatcher().possible(asked(predicted, max_tokens=max_tokens, prompt=prompt, sequences=sequences))
    assert isinstance(possible, int)
    room = 1000 - prompt if prompt < 1000 else 1000  # a guessed prompt that leaves no room says nothing of the answer
    most = sequences * min(max_tokens or 1000, room)
    assert 1 <= possible <= most
    if 1 <= predicted <= most:
        assert possible == int(predicted)


async def test_a_request_that_moves_gets_its_key_by_the_ordering_there(monkeypatch):
    here = EndpointSpec("m", "here", EndpointPolicy(ordering_stretch=3.0), profile=USUAL)
    there = replace(here, region="there", policy=EndpointPolicy(ordering="ssjf", ordering_stretch=3.0), profile=PROFILE)
    held = dispatcher(here, there)
    one, other = held.topology.endpoints
    moving = Request(asked(40), 40, one)
    held.queue.add(moving, one)
    assert held.queue.arrays.key[moving.slot] == 0.0
    monkeypatch.setattr("controlplane.dispatch.sweeping.better_home", lambda *_: other.index)
    held.sweeping.sweep()
    assert moving.endpoint is other
    assert held.queue.arrays.key[moving.slot] == 3.0 * PROFILE.service_time_s(100, 40)
