"""Waits that are estimated while an instance starts: the dispatcher under a clock that is set.

`pytest -s tests/dispatch/test_waits_by_start.py` prints how well, and what it would be if starts were not counted.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from controlplane.fleet.lifecycle.states import InstanceState as S
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.workload.requests import make_requests
from tests.dispatch.test_twin import BLOCK_TOKENS, NEVER, inventory_of
from tests.dispatch.test_waits_by_group import Listening, judged

START_S = 20.0
ASKED_S = 70.0
"""When the instance is asked for; before that waits teach the pace."""
LAST_S = ASKED_S + START_S
"""When the last request comes."""


class Starting(Listening):
    """The last instance is not there at first: it is asked for at `ASKED_S` and takes `START_S`."""

    def __init__(self, fleet, *, counted):
        self.fleet, self.counted, self.state = fleet, counted, S.STOPPED
        super().__init__(fleet)
        self.dispatcher.waits.paces.wall_clock = lambda: self.now_s
        for output in (20, 30, 40, 50, 80) * 4:  # lengths are known
            for key in ("m", ("m", "0")):
                self.dispatcher.waits.history.learn(key, 3, output, 42.0)
        self.apply()

    def apply(self):
        rows = inventory_of(self.fleet)
        *before, last = rows.instances
        start_s = START_S if self.counted and self.state == S.LOADING else None
        last = replace(last, state=self.state, start_s=start_s, start_began_at=ASKED_S)
        instances = (*before, last) if self.state != S.STOPPED else tuple(before)
        self.dispatcher.apply_inventory(replace(rows, instances=instances))
        self.dispatcher.pump_all()

    def change_s(self):
        return {S.STOPPED: ASKED_S, S.LOADING: ASKED_S + START_S}.get(self.state, NEVER)

    def change(self):
        self.state = S.LOADING if self.state == S.STOPPED else S.READY
        self.apply()


def fleet_of(ordering, instances):
    engine = EngineConfig(
        max_num_seqs=16, max_num_batched_tokens=256, block_size_tokens=BLOCK_TOKENS, kv_blocks=1500,
        policy="fcfs" if ordering == "fcfs" else "priority", max_model_len=400,
        profile=Profile(0.004, 0.001, 1e-5, 0.0, 0.01, 1e-4, 0.0),
    )  # fmt: skip
    specs = [simulated.InstanceSpec("m", "here", engine)] * instances
    return simulated.Cluster(specs, policies=EndpointPolicy(ordering=ordering, queue_bound=100_000))


def served(ordering, due_s, *, counted, last_s=LAST_S):
    """Waits as they were estimated while the instance started, and as they came."""
    random = np.random.default_rng(11)
    fleet = fleet_of(ordering, 2)
    first = np.sort(random.uniform(0.0, 3.0, 500))
    later = np.sort(random.uniform(ASKED_S - 10.0, last_s, round(60 * (last_s - ASKED_S + 10.0))))
    arrival_s = np.concatenate([first, later])
    output = np.clip(np.exp(random.normal(np.log(40), 0.45, arrival_s.size)).astype(int), 1, 200)
    requests = make_requests(
        arrival_s, np.full(output.size, 3), output, predicted_tokens=np.full(output.size, 42),
        deadline_s=np.full(output.size, due_s),
    )  # fmt: skip
    live = Starting(fleet, counted=counted)
    live.run(fleet, requests)
    given_s = {}
    for time_s, request, _, _ in live.dispatcher.decided:
        given_s.setdefault(request.asked.number, time_s)
    during = [number for number in live.said if ASKED_S < arrival_s[number] < ASKED_S + START_S]
    said = np.array([live.said[number] for number in during])
    came = np.array([given_s[number] - arrival_s[number] for number in during])
    return said, came


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ordering", "due_s"), [("fcfs", 3600.0), pytest.param("qlm", 13.0, marks=pytest.mark.nightly)]
)
async def test_an_instance_that_starts_is_counted_from_when_it_is_ready(ordering, due_s):
    said, came = served(ordering, due_s, counted=True)
    result, without = judged(said, came), judged(*served(ordering, due_s, counted=False))
    print(json.dumps({"ordering": ordering, "due_s": due_s, **result, "without": without}))
    assert result["rmse_s"] < 0.6 * without["rmse_s"]
    assert abs(result["mean_excess"]) < 0.15
    assert result["below_p99"] > 0.9


@pytest.mark.nightly
async def test_groups_that_are_in_time_stay_where_they_are_and_wait_as_long():
    said, came = served("qlm", 3600.0, counted=True, last_s=LAST_S + 10.0)
    result = judged(said, came)
    print(json.dumps({"ordering": "qlm", "due_s": 3600.0, **result}))
    assert result["r2"] > 0.8


async def test_where_nothing_serves_yet_the_start_is_what_is_waited_for():
    fleet = fleet_of("fcfs", 1)
    live = Starting(fleet, counted=True)
    (endpoint,) = live.topology.endpoints
    live.now_s = ASKED_S
    live.change()
    live.now_s += 5.0
    assert live.dispatcher.estimated_wait_s(endpoint) == pytest.approx(START_S - 5.0)
    for number in range(40):
        live.arrive(number, "m", "here", 3, 42, 42, 0, 60.0, None, None)
    means_s = [live.said[number][0] for number in range(40)]
    assert means_s == sorted(means_s)
    assert means_s[0] == means_s[10] == pytest.approx(START_S - 5.0), "a whole batch begins at once"
    assert means_s[-1] > means_s[10]
