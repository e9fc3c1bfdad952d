"""Waits that are estimated as requests come, where two models share GPUs: swaps and drains before a request count.

`pytest -s tests/dispatch/test_waits_by_swap.py` prints how well.
"""

import json

import numpy as np
import pytest

from controlplane.dispatch.port import Waiting
from controlplane.fleet.lifecycle.states import InstanceState as S
from scheduling.queueing.swapping.service import drain_s
from tests.dispatch.test_swap_twin import Sharing, fleet_of, mixed
from tests.dispatch.test_waits_by_group import judged
from tests.examples import at_night_but

LEARNED_S = 50.0
"""From when on estimates are judged."""


class Listening(Sharing):
    """Keeps what is said of waits, and of which was said nothing."""

    def __init__(self, fleet):
        self.said, self.unsaid, self.asleep = {}, [], set()
        super().__init__(fleet)

    def take(self, record):
        if isinstance(record, Waiting) and record.estimated_wait_s is None:
            self.unsaid.append(record.number)
        elif isinstance(record, Waiting):
            endpoint = self.dispatcher._requests[record.number].endpoint
            if not any(self.topology.fleet.accepting[one.slot] for one in self.topology.members(endpoint)):
                self.asleep.add(record.number)
            self.said[record.number] = record.estimated_wait_s, record.estimated_wait_p99_s
        super().take(record)


class Draining(Sharing):
    """Keeps how long each drain before a swap was expected to take, and how long it took."""

    def __init__(self, fleet):
        self.drains, self.began = [], (0.0, 0.0)
        super().__init__(fleet)

    def move(self, number, state):
        arrays, running = self.topology.fleet, float(self.topology.fleet.running[number])
        if state == S.DRAINING:
            self.began = self.now_s, drain_s(arrays, self.dispatcher.queue.arrays.groups, number, running)
        elif state == S.SLEEPING:
            began_s, expected_s = self.began
            self.drains.append((expected_s, self.now_s - began_s - self.fleet.instances[number].sharing.sleep_s))
        super().move(number, state)


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [2, 6])
async def test_drains_take_what_they_are_expected_to(seeds):
    drains = []
    for seed in range(seeds):
        fleet, requests = fleet_of(), mixed(np.random.default_rng([seed, 40]), (2.0, 2.0), (30.0, 120.0))
        live = Draining(fleet)
        live.run(fleet, requests)
        drains += live.drains
    expected_s, took_s = np.array(drains).T
    rmse_s = float(np.sqrt(((expected_s - took_s) ** 2).mean()))
    print(
        json.dumps({"drains": len(drains), "expected_s": expected_s.mean(), "took_s": took_s.mean(), "rmse_s": rmse_s})
    )
    assert expected_s.mean() == pytest.approx(took_s.mean(), rel=0.25)
    assert rmse_s < took_s.mean()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("per_s", "due_s", "least_r2"),
    at_night_but(
        [((1.0, 1.0), (20.0, 60.0), 0.5)],
        [((1.0, 1.0), (20.0, 60.0), 0.5), ((1.5, 1.5), (20.0, 60.0), 0.2), ((2.0, 2.0), (30.0, 120.0), 0.3)],
    ),
)
async def test_swaps_and_drains_are_in_what_is_said(per_s, due_s, least_r2):
    random = np.random.default_rng([23, int(10 * sum(per_s))])
    fleet, requests = fleet_of(), mixed(random, per_s, due_s)
    live = Listening(fleet)
    live.run(fleet, requests)
    given_s = {}
    for time_s, request, _, _ in live.dispatcher.decided:
        given_s.setdefault(request.asked.number, time_s)
    last = [number for number in live.said if requests.arrival_s[number] > LEARNED_S]
    said, came = (
        np.array([live.said[number] for number in last]),
        np.array([given_s[number] - requests.arrival_s[number] for number in last]),
    )
    result = judged(said, came) | {"unsaid": len(live.unsaid)}
    asleep = np.array([number in live.asleep for number in last])
    parts = {"asleep": judged(said[asleep], came[asleep]), "up": judged(said[~asleep], came[~asleep])}
    print(json.dumps({"per_s": per_s, **result, **parts}))
    assert not live.unsaid, "also of a model that sleeps it is known how long"
    assert result["r2"] > least_r2
    assert abs(result["mean_excess"]) < 0.2
    assert result["below_p99"] > 0.8


async def test_a_request_for_a_model_that_sleeps_is_said_to_wait_for_the_swap():
    """The profile is known, and nothing else: nothing was served, and nobody waits."""
    fleet = fleet_of()
    live = Listening(fleet)
    awake, asleep = live.topology.endpoints
    assert live.dispatcher.estimated_wait_s(awake) == 0.0
    assert live.dispatcher.estimated_wait_s(asleep) == pytest.approx(1.0 + 3.0), "one sleeps, the other wakes"
    live.arrive(0, "m", "here", 10, 40, 40, 0, 20.0, None, None)
    assert live.dispatcher.estimated_wait_s(asleep) > 4.5, "it runs, and drains before"
    live.arrive(1, "n", "here", 10, 40, 40, 0, 60.0, None, None)
    ((mean_s, p99_s),) = live.said.values()
    assert 4.5 < mean_s < p99_s
