"""Swaps under both clocks: the live dispatcher and the floor's rule for shared GPUs alongside the simulator, on one trace.

Two models have the same GPUs. Who is put to sleep and woken when, and which instance gets which request at which moment,
must be the same.
"""

from dataclasses import replace

import numpy as np
import pytest

from controlplane.dispatch.live_fleet.inventory import SwapGroupSpec, SwapMemberSpec
from controlplane.fleet.lifecycle.states import InstanceState
from scheduling.control.swaps import EVERY_S, Swaps
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation import swapping as simulated_swapping
from scheduling.simulation.cluster import description as simulated
from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import make_requests
from tests.dispatch.test_twin import BLOCK_TOKENS, NEVER, Live, assert_alike, inventory_of

S = InstanceState
SHARING = {"m": simulated.Sharing("pair", 1.0, 2.0, 20.0, 1.0), "n": simulated.Sharing("pair", 0.4, 3.0, 20.0, 1.0)}
FOR_S = 150.0
TWIN_S = 75.0
"""For which both clocks are compared."""


class Sharing(Live):
    """In place of rows and workers: who has the GPUs of the pair sleeps when it is idle, then the other wakes."""

    def __init__(self, fleet: simulated.Cluster):
        rest = {State.ASLEEP: S.SLEEPING, State.EMPTY: S.STOPPED}
        self.states = {number: rest.get(spec.state, S.READY) for number, spec in enumerate(fleet.instances)}
        self.since_s = dict.fromkeys(self.states, 0.0)
        self.shares = [number for number, spec in enumerate(fleet.instances) if spec.sharing is not None]
        self.fleet, self.target, self.changed, self.changes_s = fleet, None, [], NEVER
        super().__init__(fleet)
        self.apply()
        self.dispatcher.fleet.wall_clock = lambda: self.now_s
        self.swaps = Swaps(self.dispatcher.fleet)

    def apply(self):
        rows = inventory_of(self.fleet)
        self.dispatcher.apply_inventory(
            replace(
                rows,
                endpoints=tuple(replace(one, shares_gpus=True) for one in rows.endpoints),
                instances=tuple(replace(one, state=self.states[one.instance_id]) for one in rows.instances),
                swap_groups=(SwapGroupSpec("pair", tuple(map(self.member, self.shares)), self.target),),
            )
        )
        self.dispatcher.pump_all()

    def load_s(self, number):
        """Return the state in which *number* comes up: a stopped one starts, and sleeps from then on."""
        spec = self.fleet.instances[number]
        return self.fleet.delays.local_weights_s if self.states[number] == S.STOPPED else spec.sharing.wake_s

    def member(self, number):
        spec, holder = self.fleet.instances[number], self.holder()
        seconds = self.load_s(number) + (0.0 if holder is None else self.fleet.instances[holder].sharing.sleep_s)
        return SwapMemberSpec(
            number, f"i{number}", spec.model, spec.region, self.states[number], self.since_s[number], seconds,
            spec.sharing.sleep_s, self.load_s(number),
        )  # fmt: skip

    def move(self, number, state):
        self.states[number], self.since_s[number] = state, self.now_s
        if state != S.SLEEPING:
            self.changed.append((self.now_s, number, state))

    def holder(self):
        return next((one for one in self.shares if self.states[one] not in (S.SLEEPING, S.STOPPED)), None)

    def looks(self):
        super().looks()
        for slot, _ in self.swaps.wanted():
            self.target = self.topology.by_slot[slot].spec.instance_id
            self.move(self.holder(), S.DRAINING)
            self.apply()
            self.settle()

    def settle(self):
        """Put draining instances without requests to sleep."""
        holder = self.holder()
        drained = self.target is not None and self.states[holder] == S.DRAINING
        if drained and self.changes_s == NEVER and not self.topology.replicas[holder].requests:
            self.changes_s = self.now_s + self.fleet.instances[holder].sharing.sleep_s

    def work(self, slot):
        super().work(slot)
        self.settle()

    def change_s(self):
        return self.changes_s

    def change(self):
        holder = self.holder()
        if holder != self.target:
            self.move(holder, S.SLEEPING)
            self.changes_s = self.now_s + self.load_s(self.target)
            self.move(self.target, S.LOADING)
        else:
            self.move(holder, S.READY)
            self.target, self.changes_s = None, NEVER
        self.apply()


def fleet_of(*, alone=False, stopped=False, **policies):
    """Two models on the same GPUs. With *alone* the first also has a separate instance, with
    *stopped* the second one's is stopped.
    """
    engine = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=64, block_size_tokens=BLOCK_TOKENS, kv_blocks=600, policy="priority",
        max_model_len=400, profile=Profile(0.02, 0.01, 2e-4, 0.0, 0.04, 0.002, 1e-5),
    )  # fmt: skip
    specs = [
        simulated.InstanceSpec("m", "here", engine, sharing=SHARING["m"]),
        simulated.InstanceSpec(
            "n", "here", engine, state=State.EMPTY if stopped else State.ASLEEP, sharing=SHARING["n"]
        ),
        *([simulated.InstanceSpec("m", "here", engine)] if alone else []),
    ]
    delays = simulated.Delays(local_weights_s=6.0)
    return simulated.Cluster(
        specs,
        policies=EndpointPolicy(ordering="qlm", queue_bound=10_000, **policies),
        sweeps=True,
        delays=delays,
    )


def mixed(random, per_s, due_s, for_s=FOR_S):
    """Return Poisson arrivals of both models for *for_s*, each due within its *due_s* or, one in ten, at any time."""
    arrival_s = [random.uniform(0.0, for_s, random.poisson(rate * for_s)) for rate in per_s]
    model = np.repeat([0, 1], [each.size for each in arrival_s])
    arrival_s = np.concatenate(arrival_s)
    order = np.argsort(arrival_s)
    model, count = model[order], order.size
    output = np.clip(random.geometric(1 / 40, count), 1, 150)
    return make_requests(
        arrival_s[order],
        random.integers(1, 40, count),
        output,
        predicted_tokens=np.clip(output + random.integers(-15, 15, count), 1, None),
        model=model,
        deadline_s=np.where(random.random(count) < 0.9, np.array(due_s)[model], NEVER),
    )


SWAPS = {
    State.DRAINING: S.DRAINING,
    State.FALLING_ASLEEP: S.DRAINING,
    State.WAKING: S.LOADING,
    State.LOADING: S.LOADING,
    State.READY: S.READY,
}


def changes_of(result):
    """Return (moment, instance, state) as in live rows: one that falls asleep counts as draining."""
    rows = [
        (float(one["time_s"]), int(one["instance"]), SWAPS[State(int(one["after"]))])
        for one in result.changes
        if one["after"] in SWAPS and one["before"] != State.DRAINING
    ]
    return [row for row in rows if row[0] > 0.0]


@pytest.mark.parametrize(
    ("per_s", "due_s", "options"),
    [
        ((1.5, 1.5), (20.0, 60.0), {}),
        pytest.param((2.5, 2.5), (20.0, 120.0), {}, marks=pytest.mark.nightly),
        ((2.5, 0.5), (10.0, 60.0), {"eviction_limit": 2}),
        pytest.param((4.5, 1.0), (10.0, 40.0), {"alone": True, "for_s": FOR_S}, marks=pytest.mark.nightly),
        pytest.param((2.5, 2.5), (20.0, 120.0), {"swap_by_queue": False}, marks=pytest.mark.nightly),
        pytest.param((2.0, 2.0), (20.0, 40.0), {"group_batches": 0.5}, marks=pytest.mark.nightly),
        pytest.param((1.5, 1.5), (20.0, 60.0), {"stopped": True}, marks=pytest.mark.nightly),
        pytest.param((2.5, 2.5), (20.0, 120.0), {"stopped": True, "for_s": FOR_S}, marks=pytest.mark.nightly),
    ],
)
async def test_both_clocks_swap_and_place_alike(per_s, due_s, options):
    random = np.random.default_rng([17, int(10 * sum(per_s))])
    options = dict(options)
    for_s = options.pop("for_s", TWIN_S)
    fleet, requests = fleet_of(**options), mixed(random, per_s, due_s, for_s)
    live = Sharing(fleet)
    live.run(fleet, requests)
    simulation = Simulation(fleet, requests, decisions=True)
    result = simulation.run(simulated_swapping.Swapping(simulation), EVERY_S)

    assert (result.outcomes["state"] == Outcome.DONE).all()
    assert_alike(live, result)
    simulated_changes = changes_of(result)
    assert [row[1:] for row in simulated_changes] == [row[1:] for row in live.changed]
    np.testing.assert_allclose([row[0] for row in simulated_changes], [row[0] for row in live.changed], atol=1e-6)
    assert result.counters["swaps"] == sum(state == S.LOADING for _, _, state in live.changed) >= 3
    assert result.counters["evictions"] == live.evicted
    assert result.counters["reorderings"] == pytest.approx(live.dispatcher.reordering.control.reordered, abs=1)
    shared = len(set(live.dispatcher.queue.arrays.groups.queue_of[live.shares].tolist())) == 1
    assert shared == fleet.policies.swap_by_queue
