"""An instance that fails under both clocks: its requests wait again or fail alike, and shares are settled alike."""

from dataclasses import replace

import numpy as np
import pytest

from controlplane.dispatch.port import Left, Lost
from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.fleet.profile import Profile
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation, TimedEvent
from scheduling.simulation.workload.requests import make_requests
from tests.dispatch.test_twin import NEVER, Live, assert_alike, inventory_of, simulated_fleet
from tests.examples import at_night_but

COUNT = 200
FAILS = ((1.503, 0), (3.017, 1))
"""Moments and instances."""
WEIGHTS = (1.0, 2.0, 0.5)


class Failing(Live):
    """Instances whose servers die. The gateway has what has no output queued again, and gives up the other streams."""

    def __init__(self, fleet):
        self.fails, self.lost = list(FAILS), []
        super().__init__(fleet)
        self.inventory, self.failed = inventory_of(fleet), set()
        named = ", ".join(f"t{number}={weight}" for number, weight in enumerate(WEIGHTS))
        self.tuned = self.topology.tuned.model_copy(update={"TENANT_WEIGHTS": named})
        self.topology.tuned = self.tuned

    def change_s(self):
        return self.fails[0][0] if self.fails else NEVER

    def take(self, record):
        super().take(record)
        if isinstance(record, Lost):
            self.lost.append(record.number)

    def change(self):
        _, slot = self.fails.pop(0)
        self.failed.add(slot)
        rows = [
            replace(one, state=InstanceState.FAILED) if one.instance_id in self.failed else one
            for one in self.inventory.instances
        ]
        self.dispatcher.apply_inventory(replace(self.inventory, instances=tuple(rows)))
        self.topology.tuned = self.tuned
        if not self.lost:
            self.dispatcher.lose(self.topology.by_slot[slot])
        engine, self.steps[slot], self.events_s[slot] = self.engines[slot], None, NEVER
        had = [int(one) for one in (*engine._running, *engine._waiting)]
        had = [
            number for number in self.lost if number not in had
        ] + had  # first those that would end with this iteration
        assert sorted(had) == sorted(self.lost)
        self.lost.clear()
        for number in had:
            engine.abort(str(number))
            self.dispatcher.take(Left(number, again=not self.came[number]))
            self.give()


def fail_in_both(live, fleet, requests, fails):
    """Serve *requests* under both clocks; return the simulation's result."""
    live.run(fleet, requests)
    events = [
        TimedEvent(at_s, lambda simulation, slot=slot: simulation.fail(slot, repair_s=np.inf)) for at_s, slot in fails
    ]
    return Simulation(fleet, requests, decisions=True).run(timed_events=events)


@pytest.mark.parametrize("ordering", at_night_but(["vtc"], ["vtc", "wfq", "ssjf", "hermes"]))
async def test_both_clocks_settle_what_a_failed_instance_had(ordering):
    random = np.random.default_rng([5, len(ordering)])
    policies = simulated_fleet(random, "join_shortest_queue", ordering).policies
    engine = EngineConfig(4, 8, 4, 60, "priority", 120, Profile(0.05, 0.04, 1e-3, 0.0, 0.04, 0.002, 1e-5))
    specs = [simulated.InstanceSpec("m", "east", engine)] * 3
    fleet = simulated.Cluster(specs, policies=policies, tenant_weights=WEIGHTS)
    output = np.clip(random.geometric(1 / 20, COUNT), 1, 60)
    requests = make_requests(
        np.cumsum(random.exponential(1 / 40, COUNT)),
        random.integers(1, 55, COUNT),
        output,
        predicted_tokens=np.clip(output + random.integers(-15, 15, COUNT), 1, None),
        tenant=random.choice(3, COUNT, p=[0.5, 0.3, 0.2]),
    )
    live = Failing(fleet)
    result = fail_in_both(live, fleet, requests, FAILS)
    assert_alike(live, result)
    assert result.counters["requeued"] > 0
    assert result.counters["failed"] > 0
    states = result.outcomes["state"]
    assert np.flatnonzero(states == Outcome.REFUSED).tolist() == sorted(number for number, _ in live.refused)
    assert (states == Outcome.DONE).sum() + result.counters["failed"] + len(live.refused) == COUNT
