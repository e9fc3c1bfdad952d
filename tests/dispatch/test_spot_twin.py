"""Donated instances under both clocks: the same requests go there, leave it at a reclaim or redeployment, end elsewhere."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from controlplane.dispatch.port import Left, Lost
from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.held import ENDS_ON_RECLAIM, HELD, OPPORTUNISTIC
from scheduling.queueing.release_rule import ReleaseRule
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.engine.reference import EngineConfig, ReferenceEngine
from scheduling.simulation.simulator import Simulation, TimedEvent
from scheduling.simulation.workload.requests import make_requests
from tests.dispatch.test_twin import NEVER, Live, inventory_of
from tests.examples import at_night_but

COUNT = 400
AFTER_S = 1e-7
"""Time after a change of the simulation at which it is made live: iterations end at times that differ in the last bit."""
LENT, RECLAIMED, GIVEN = 1, 4, 5
"""Instances: donated and reclaimed, donated and redeployed, donated at the start."""
STATES = {
    State.READY: InstanceState.READY,
    State.DRAINING: InstanceState.DRAINING,
    State.SPOT: InstanceState.DONATED,
    State.RECLAIMING: InstanceState.RECLAIMING,
    State.LOADING: InstanceState.LOADING,
}


class Lending(Live):
    """The dispatcher, and what the rows of its instances say at the moments at which a simulation changed them."""

    def __init__(self, fleet, changes):
        self.changes = deque((float(one["time_s"]) + AFTER_S, *one.tolist()[1:]) for one in changes)
        self.fleet, self.ending, self.ended = fleet, set(), 0
        super().__init__(fleet)
        self.inventory = inventory_of(fleet)
        self.specs = {one.instance_id: one for one in self.inventory.instances}
        for number, spec in enumerate(fleet.instances):
            self.specs[number] = replace(self.specs[number], state=STATES[spec.state])
        self.apply()

    def apply(self):
        inventory = replace(self.inventory, instances=tuple(self.specs[number] for number in sorted(self.specs)))
        self.dispatcher.apply_inventory(inventory)
        for endpoint in self.topology.endpoints:
            known = [one for one in self.topology.replicas.values() if one.endpoint is endpoint]
            assert list(self.topology.members(endpoint)) == known
        self.dispatcher.pump_all()

    def change_s(self):
        return self.changes[0][0] if self.changes else NEVER

    def change(self):
        _, number, endpoint, before, after = self.changes.popleft()
        replica = self.topology.by_slot[number]
        if before in (State.DRAINING, State.RECLAIMING):
            assert not replica.requests, "its requests have left under both clocks"
        model, _ = self.fleet.endpoints[endpoint]
        held = replica.spec.instance_id
        spec = self.specs.pop(held)
        if model != spec.model:  # the instance that takes its GPUs
            self.apply()
            held += 100
            self.engines[number] = ReferenceEngine(self.fleet.engines()[model, ""])
        self.specs[held] = replace(spec, instance_id=held, model=model, state=STATES[State(after)])
        self.apply()
        if before == State.SPOT:
            self.dispatcher.spot.reclaim(replica, late=False)

    def take(self, record):
        super().take(record)
        if isinstance(record, Lost):
            assert record.reclaimed
            self.leaving.add(record.number)
            self.ending.add(record.number)

    def evict(self, number, engine):
        if number not in self.ending:
            super().evict(number, engine)
            return
        self.leaving.discard(number)
        self.ended += 1
        engine.abort(str(number))
        self.dispatcher.take(Left(number, again=False))
        self.give()


def fleet_of(round_trip_s: float) -> simulated.Cluster:
    """Return two models: three instances of each in the east, and two of m in the west, one of them donated."""
    engine = EngineConfig(5, 64, 4, 100, "priority", 120, Profile(0.05, 0.04, 1e-3, 0.0, 0.04, 0.002, 1e-5))
    places = [("m", "east")] * 3 + [("m", "west")] * 2 + [("n", "east")] * 3
    specs = [
        simulated.InstanceSpec(*place, engine, state=State.SPOT if at == RECLAIMED else State.READY)
        for at, place in enumerate(places)
    ]
    policy = EndpointPolicy(
        ordering="priority", niw=ReleaseRule(), dispatch_round_trip_ms=1000 * round_trip_s, region_threshold=0.5
    )
    delays = simulated.Delays(spot_median_s=1.0, local_weights_s=3.0)
    return simulated.Cluster(specs, policies=policy, delays=delays, sweeps=True)


def demand(seed: int):
    """Return requests of which four in ten are opportunistic, half of these such that a reclaim ends them."""
    random = np.random.default_rng(seed)
    kinds = np.array([0, HELD, HELD + OPPORTUNISTIC, HELD + OPPORTUNISTIC + ENDS_ON_RECLAIM])
    held = random.choice(kinds, COUNT, p=[0.5, 0.1, 0.2, 0.2])
    output = np.clip(random.geometric(1 / 20, COUNT), 1, 60)
    return make_requests(
        np.cumsum(random.exponential(1 / 16, COUNT)), random.integers(1, 55, COUNT), output,
        predicted_tokens=np.clip(output + random.integers(-15, 15, COUNT), 1, None),
        model=random.choice([0, 1], COUNT, p=[0.7, 0.3]), region=random.integers(0, 2, COUNT),
        priority=np.minimum(held, 1), held=held,
    )  # fmt: skip


EVENTS = [
    TimedEvent(2.0, lambda simulation: simulation.drain(LENT)),
    TimedEvent(4.0, lambda simulation: simulation.drain(GIVEN)),
    TimedEvent(9.0, lambda simulation: simulation.start(RECLAIMED)),
    TimedEvent(13.0, lambda simulation: simulation.start(LENT)),
    TimedEvent(14.0, lambda simulation: simulation.redeploy(GIVEN, 0)),
]


@pytest.mark.parametrize(
    ("seed", "round_trip_s"), at_night_but([(1, 0.0)], [(seed, trip) for seed in (1, 2, 3) for trip in (0.0, 0.05)])
)
async def test_both_clocks_lend_and_reclaim_alike(seed, round_trip_s):
    fleet, requests = fleet_of(round_trip_s), demand(seed)
    simulation = Simulation(fleet, requests, decisions=True)
    result = simulation.run(timed_events=EVENTS)
    live = Lending(fleet, result.changes)
    live.run(fleet, requests)

    of = live.topology.endpoints
    own = [(of[at].base or of[at]).index for at in range(len(of))]
    live_decisions = [(one.asked.number, own[at], slot) for _, one, at, slot in live.dispatcher.decided]
    assert result.decisions[["request", "endpoint", "instance"]].tolist() == live_decisions
    np.testing.assert_allclose(result.decisions["time_s"], [row[0] for row in live.dispatcher.decided], atol=1e-5)
    lent = simulation.world.decisions["endpoint"][: len(live_decisions)] >= len(fleet.endpoints)
    assert lent.tolist() == [of[at].is_spot for _, _, at, _ in live.dispatcher.decided]
    assert set(requests.held[result.decisions["request"][lent]]) == set(requests.held) - {0}

    counters = result.counters
    assert (live.evicted, live.ended) == (counters["spot_evicted"], counters["spot_ended"])
    assert min(counters["spot_evicted"], counters["spot_ended"], counters["redeploys"]) > 0
    assert counters["spot_served"] == lent.sum() - counters["spot_evicted"] - counters["spot_ended"]
    assert counters["spot_served"] > 20
    ended = result.outcomes["state"] == Outcome.FAILED
    assert (ended.sum(), (result.outcomes["state"] == Outcome.DONE).sum()) == (live.ended, COUNT - live.ended)
    assert (requests.held[ended] & ENDS_ON_RECLAIM).all()
