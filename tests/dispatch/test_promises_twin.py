"""Promises at the door under both clocks: the same rule on nearly the same estimate refuses nearly the same share."""

import numpy as np
import pytest
from msgspec.structs import replace

from controlplane.dispatch.port import Admission, Asked, Held, Waiting
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.queueing.held import HELD
from scheduling.queueing.promises import DEGRADE, REFUSE, ClassTerms
from scheduling.queueing.release_rule import AT_ONCE, SLACK, ReleaseRule
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.dispatch.test_twin import NEVER, Live

COUNT = 1200
DUE_S = 6.0
HELD_FOR_S = 80.0


BATCH = ClassTerms("batch", priority=5, deadline_s=1800.0, interactive=False)


class AtLiveDoor(Live):
    """The dispatcher with a class that refuses what is unreachable, or degrades it to `BATCH`."""

    def __init__(self, fleet):
        self.degraded, self.held = set(), set()
        super().__init__(fleet, max_hold_s=NEVER)
        take, chat = self.dispatcher.take, fleet.classes[0]

        def submit(record):
            if isinstance(record, Asked) and not record.interactive:
                record = replace(record, slo_class=BATCH.slo_class)
            elif isinstance(record, Asked):
                fallbacks = (BATCH,) if chat.if_unreachable == DEGRADE else ()
                record = replace(record, slo_class="chat", if_unreachable=chat.if_unreachable, fallbacks=fallbacks)
            take(record)

        self.dispatcher.take = submit

    def take(self, record):
        super().take(record)
        if isinstance(record, Held):
            self.held.add(record.number)
        elif isinstance(record, Admission) and record.slo_class == BATCH.slo_class:
            self.degraded.add(record.number)


def fleet_of(if_unreachable=REFUSE, release=SLACK):
    engine = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=1024, block_size_tokens=16, kv_blocks=4000, policy="fcfs",
        max_model_len=4096, profile=Profile(0.02, 0.01, 1e-4, 0.0, 0.02, 4e-4, 1e-7),
    )  # fmt: skip
    return simulated.Cluster(
        [simulated.InstanceSpec("m", "east", engine) for _ in range(2)],
        policies=EndpointPolicy(ordering="priority", niw=ReleaseRule(by=release)),
        classes=(ClassTerms("chat", due_s=DUE_S, if_unreachable=if_unreachable, degrades_to="batch"), BATCH),
    )


def demand():
    random = np.random.default_rng(5)
    output = np.maximum(1, random.lognormal(4.5, 0.7, COUNT)).astype(np.int32)
    return make_requests(
        np.sort(random.uniform(0.0, COUNT / 9.0, COUNT)), random.integers(50, 400, COUNT), output,
        predicted_tokens=np.maximum(1, output * random.lognormal(0.0, 0.3, COUNT)).astype(np.int32),
        deadline_s=DUE_S, judged=np.ones(COUNT, np.int8), priority=np.zeros(COUNT, np.int32),
    )  # fmt: skip


@pytest.mark.asyncio
async def test_the_dispatcher_and_the_simulator_refuse_alike():
    fleet, requests = fleet_of(), demand()
    live = AtLiveDoor(fleet)
    live.run(fleet, requests)
    result = Simulation(fleet, requests).run()
    by_live = np.zeros(COUNT, bool)
    by_live[[number for number, code in live.refused if code == "deadline_unreachable"]] = True
    by_simulator = result.refused_at_door
    assert (result.outcomes["state"][~by_simulator] == Outcome.DONE).all()
    assert 0.1 < by_live.mean() < 0.6
    assert abs(by_live.mean() - by_simulator.mean()) < 0.05
    late = result.outcomes["ttft_s"][~by_simulator] > DUE_S
    assert late.mean() < 0.1


@pytest.mark.asyncio
@pytest.mark.parametrize("release", [SLACK, AT_ONCE])
async def test_both_hold_what_they_degrade_where_the_class_is_held(release):
    fleet, requests = fleet_of(DEGRADE, release), demand()
    live = AtLiveDoor(fleet)
    live.run(fleet, requests)
    simulation = Simulation(fleet, requests)
    result = simulation.run()
    by_live = np.zeros(COUNT, bool)
    by_live[list(live.degraded)] = True
    by_simulator = result.asked_class == 0
    assert (result.outcomes["state"] == Outcome.DONE).all()
    assert 0.1 < by_live.mean() < 0.6
    assert abs(by_live.mean() - by_simulator.mean()) < 0.05
    holds = release != AT_ONCE
    assert live.held == (live.degraded if holds else set())
    assert simulation.holding.holding.release_count == (by_simulator.sum() if holds else 0)
    assert (result.requests.held != 0).tolist() == (by_simulator & holds).tolist()
    waited_s = np.zeros(COUNT)
    for at_s, request, _, _ in live.dispatcher.decided:
        waited_s[request.asked.number] = at_s - requests.arrival_s[request.asked.number]
    assert waited_s[by_live].mean() == pytest.approx(result.outcomes["queue_s"][by_simulator].mean(), rel=0.2)
    assert (result.outcomes["ttft_s"][~by_simulator] > DUE_S).mean() < 0.1


@pytest.mark.asyncio
async def test_both_estimate_what_the_queue_manager_releases(monkeypatch):
    """Held work that has to start waits at the full endpoint: its estimates, and what its waits teach, count from then."""
    fleet, chat = fleet_of(), demand()
    fleet.classes = (fleet.classes[0], replace(BATCH, deadline_s=HELD_FOR_S))
    later = np.arange(COUNT) % 4 == 0
    requests = chat._replace(
        slo_class=later.astype(np.int16),
        judged=(~later).astype(np.int8),
        priority=np.where(later, BATCH.priority, 0).astype(np.int32),
        held=np.where(later, HELD, 0).astype(np.int8),
        deadline_s=np.where(later, NEVER, DUE_S),
        end_s=np.where(later, HELD_FOR_S, NEVER),
        hold_s=np.where(later, HELD_FOR_S, NEVER),
    )
    live = AtLiveDoor(fleet)
    deliver, by_live = live.dispatcher.deliver, {}

    def note(record):
        if isinstance(record, Waiting) and later[record.number]:
            by_live[record.number] = record.estimated_wait_p99_s
        deliver(record)

    live.dispatcher.deliver = note
    live.run(fleet, requests, deadlines=[HELD_FOR_S if each else None for each in later])
    simulation = Simulation(fleet, requests)
    estimates, by_simulator = simulation.waits, {}
    learn = estimates._learn
    monkeypatch.setattr(estimates, "_learn", lambda: (by_simulator.update(estimates._waits), learn()))
    result = simulation.run()
    by_simulator = [p99_s for number, (_, p99_s) in by_simulator.items() if later[number]]
    by_live = [p99_s for p99_s in by_live.values() if p99_s is not None]
    endpoint, waits = live.topology.endpoints[0], live.dispatcher.waits
    refused = (result.outcomes["state"] == Outcome.REFUSED).mean()
    assert refused == pytest.approx(len(live.refused) / COUNT, abs=0.05)
    assert np.median(result.outcomes["queue_s"][later]) > 15.0, "it is held for longer than it waits at the endpoint"
    assert len(by_live) > COUNT / 6
    assert len(by_simulator) == pytest.approx(len(by_live), rel=0.1)
    assert np.mean(by_simulator) == pytest.approx(np.mean(by_live), rel=0.35)
    # Counted from their arrival, all waits would be longer than estimated.
    assert max(waits.calibration(endpoint, BATCH.slo_class).factor, estimates.calibration(0, 1).factor) < 0.8
    taught = waits.paces.learned(endpoint, BATCH.slo_class).batches, estimates._correction(0, 1).batches
    assert taught[1] == pytest.approx(taught[0], rel=0.3)
    assert min(taught) > 3.0
