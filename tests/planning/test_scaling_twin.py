"""Scaling under two clocks: the scaling loop live, and the simulator.

Both have the same fleet and trace with surges. Live, instances are rows; the simulator says how much each has to
do and when what was decided of it is done, for that is physics. What is decided is each one's own: views and moves
must be the same at the same moments.
"""

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from django.utils import timezone

from controlplane.dispatch.live_fleet import inventory as live_inventory
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.observation import Observation
from controlplane.dispatch.port import Asked
from controlplane.dispatch.token_accounts import Outlook
from controlplane.fleet.lifecycle import start_times
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Deployment, GpuType, Instance, InstanceCommand, Model, PerformanceProfile, Region
from controlplane.planning import services
from controlplane.planning.execution import loop, rows, strategies
from controlplane.planning.execution.loop import ScalingLoop
from controlplane.planning.models import PolicyMode, ScalingMove
from controlplane.tuning.selectors import tuned
from scheduling.fleet.profile import Profile
from scheduling.scaling import NO_STRATEGY, Floored, make_strategy
from scheduling.scaling.endpoint import GRACE_S
from scheduling.simulation.cluster.description import Cluster, Delays, InstanceSpec
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.config import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.strategies import Bounds, Control
from scheduling.simulation.workload.requests import make_requests
from tests.planning.looping import LoopOverRows

pytestmark = pytest.mark.django_db
START = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)
MODEL, REGIONS, GPU = "llama", ("east", "west"), "a100"
MAX, READY = 5, 4
LOOK_S = 5.0
TICK_S = 15.0
ENGINE = EngineConfig(16, 2048, 16, 400, "fcfs", 2000, Profile(0.01, 0.0, 1e-4, 0.0, 0.02, 1e-3, 1e-6))
COMING = (State.STARTING, State.LOADING, State.RECLAIMING)
S = InstanceState


def surges(at_s: np.ndarray, region: int) -> np.ndarray:
    """Return requests per second: a daily swing, and surges."""
    swing = 3.0 + 2.0 * np.sin(2 * np.pi * at_s / 3000 + region)
    sudden = (at_s % 1500 > 400) & (at_s % 1500 < 640) if region == 0 else (at_s % 2400 > 1300) & (at_s % 2400 < 1500)
    return np.where(sudden, 16.0, swing)


def trace(until_s: float):
    random = np.random.default_rng(3)
    arrived, regions = [], []
    for region in range(len(REGIONS)):
        times = np.cumsum(random.exponential(1 / 16.0, int(17 * until_s)))
        times = times[times < until_s]
        times = times[random.random(times.size) < surges(times, region) / 16.0]
        arrived.append(times)
        regions.append(np.full(times.size, region))
    arrived, regions = np.concatenate(arrived), np.concatenate(regions)
    order = np.argsort(arrived, kind="stable")
    count = order.size
    return make_requests(
        arrived[order],
        random.integers(50, 400, count),
        random.integers(10, 200, count),
        predicted_tokens=random.integers(10, 200, count),
        region=regions[order],
    )


def simulated_fleet() -> Cluster:
    states = [State.READY] * READY + [State.EMPTY] * (MAX - READY)
    specs = [InstanceSpec(MODEL, region, ENGINE, GPU, state=state) for region in REGIONS for state in states]
    delays = Delays(spot_median_s=45, spot_max_s=90, start_s=20.0, local_weights_s=40.0, remote_weights_s=40.0)
    return Cluster(specs, delays=delays, share_spot=False)


class RulesOnly(LoopOverRows):
    """What is begun is finished by the simulation."""

    def _work_on_rows(self, models, now_s) -> None:
        self.rules = rows.read_rules({})


class Live:
    """The scaling loop over rows, at the time that the simulation has."""

    def __init__(self, simulation: Simulation, control: Control, name: str, monkeypatch) -> None:
        self.simulation, self.control = simulation, control
        self.now_s, self.moves, self.seen = 0.0, [], 0
        self.requests, self.written = 0, True
        monkeypatch.setattr(timezone, "now", self.now)
        model = Model.objects.get(name=MODEL)
        gpu = GpuType.objects.create(name=GPU, title=GPU, memory_bytes=80 * 2**30, on_demand_usd_per_hour="2.0")
        PerformanceProfile.objects.create(
            model=model, gpu_type=gpu, tensor_parallel=1, prefill_t0_s=0.01, prefill_a_s=0.0, prefill_b_s_per_token=1e-4,
            prefill_c_s_per_token2=0.0, decode_a_s=0.02, decode_b_s_per_sequence=1e-3, decode_c_s_per_token=1e-6,
            source="a test",
        )  # fmt: skip
        self.rows: list[int] = []  # by instance of the simulation
        for region in REGIONS:
            place = Region.objects.create(name=region, title=region)
            deployment = Deployment.objects.create(
                model=model, region=place, gpu_type=gpu, min_instances=1, max_instances=MAX,
                max_num_seqs=ENGINE.max_num_seqs,
            )  # fmt: skip
            for number in range(MAX):
                row = Instance.objects.create(
                    name=f"{region}-{number}", deployment=deployment, launcher="emulated",
                    state=S.READY if number < READY else S.STOPPED, url=f"http://127.0.0.1:1/{region}{number}",
                    kv_capacity_tokens=ENGINE.kv_capacity_tokens,
                )  # fmt: skip
                self.rows.append(row.pk)
        long_ago = START - timedelta(days=1)
        Instance.objects.update(state_changed_at=long_ago)
        self.now_s = -100.0
        if name != NO_STRATEGY:
            services.set_policy(model, name, PolicyMode.AUTO, {"tick_s": TICK_S}, "a test")
        self.now_s = 0.0
        self.topology = Topology()
        self.observation = Observation(
            self.topology,
            lambda endpoint: int(simulation.world.waiting.size[self._at(endpoint)]),
            lambda endpoint: self.outlook[self._at(endpoint)],
            lambda: self.now_s,
            lambda: self.now().timestamp(),
            short=lambda endpoint: self.short.get(self._at(endpoint), 0),
        )
        self.outlook = {}
        monkeypatch.setattr(loop, "SETTLE_S", 0.0)
        self.loop = RulesOnly(monkeypatch, self.observation)
        monkeypatch.setattr(timezone, "now", self.now)
        self.topology.apply(live_inventory.read())
        self.now_s = -1000.0
        for endpoint in self.topology.endpoints:  # as long after the gateway's start as the decision has it
            self.observation.changes.changed(endpoint.index)
        self.now_s = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.now_s)

    @property
    def short(self) -> dict[int, int]:
        """What the global scheduler misses."""
        reordering = self.simulation.reordering
        return reordering.short_instances if reordering else {}

    def _at(self, endpoint) -> int:
        return self.simulation.cluster.endpoints.index((endpoint.model, endpoint.region))

    # What happens by itself

    def follow(self) -> None:
        """Make instances ready or drained when those of the simulation were, and count requests."""
        changes = self.simulation.lives.changes()
        for change in changes[self.seen :].tolist():
            at_s, instance, _, _, after = change
            moved = {State.READY: S.READY, State.SPOT: S.STOPPED, State.LOADING: S.LOADING}[State(after)]
            expected = {S.READY: (S.PROVISIONING, S.LOADING), S.STOPPED: (S.DRAINING,)}.get(moved, (S.PROVISIONING,))
            self._put(self.rows[instance], moved, at_s, expected)
        self.seen = changes.size
        asked = self.simulation.requests
        until = int(np.searchsorted(asked.arrival_s, self.now_s))
        for at in range(self.requests, until):
            arrived_s = float(asked.arrival_s[at])
            self.topology.endpoints[int(self.topology.candidates(MODEL, REGIONS[asked.region[at]])[0])].count_demand(
                Asked(
                    at, str(at), MODEL, REGIONS[asked.region[at]], tenant_id=1, priority=0, due_s=None, arrived_at=arrived_s,
                    arrived_s=arrived_s, prompt_tokens=int(asked.prompt_tokens[at]),
                    predicted_tokens=int(asked.predicted_tokens[at]), max_tokens=None, sequences=1, streamed=True,
                ),
                arrived_s,
            )  # fmt: skip
        self.requests = until

    def _put(self, pk: int, state: str, at_s: float, expected) -> None:
        changed_at = START + timedelta(seconds=at_s)
        rows = Instance.objects.filter(pk=pk, state__in=expected)
        url = f"http://127.0.0.1:1/{pk}"
        self.written = True
        assert (
            rows.update(state=state, state_changed_at=changed_at, url=url, kv_capacity_tokens=ENGINE.kv_capacity_tokens)
            == 1
        ), (
            at_s,
            state,
            Instance.objects.get(pk=pk),
        )

    # What is seen and decided

    def views(self):
        """Build the views as the gateway does."""
        topology, simulation = self.topology, self.simulation
        if self.written:
            topology.apply(live_inventory.read())
            self.written = False
        for pk, replica in topology.replicas.items():
            at = self.rows.index(pk)
            for name in ("kv_tokens", "running", "remaining_tokens"):
                getattr(topology.fleet, name)[replica.slot] = getattr(simulation.fleet, name)[at]
        for endpoint in topology.endpoints:  # what was given out is physics too
            for name in ("asked_work_s", "asked_at_s", "clear_at_s"):
                given = getattr(simulation.world.endpoints, name)[self._at(endpoint)]
                getattr(topology.arrays, name)[endpoint.index] = given
        return {self._at(topology.endpoints[at]): view for at, view in self.observation.views().items()}

    def decided(self) -> dict[tuple[str, int, str], list[int]]:
        """Return the moves since the last call: instances' rows by region, direction and reason."""
        InstanceCommand.objects.all().delete()
        new = ScalingMove.objects.filter(pk__gt=self.moves[-1] if self.moves else 0).order_by("pk")
        made: dict[tuple[str, int, str], list[int]] = {}
        for move in new:
            row = Instance.objects.get(name=move.instance)
            made.setdefault((move.region, move.delta, words(move.reason)), []).append(row.pk)
            self.moves.append(move.pk)
            self.written = True
            Instance.objects.filter(pk=row.pk).update(state_changed_at=self.now())
        new.update(at=self.now())
        return made

    def agree(self, made) -> None:
        """Of equals either clock may take another: from now on both use the same instances."""
        changes = self.simulation.lives.changes()
        taken: dict[tuple[str, int], list[int]] = {}
        for _, instance, endpoint, _, after in changes[self.seen :].tolist():
            delta = 1 if State(after) in (*COMING, State.READY) else -1
            taken.setdefault((REGIONS[endpoint], delta), []).append(instance)
        for (region, delta), instances in taken.items():
            theirs = [pk for (where, sign, _), pks in made.items() if (where, sign) == (region, delta) for pk in pks]
            assert len(theirs) == len(instances)
            for instance in [each for each in instances if self.rows[each] not in theirs]:
                pk = next(each for each in theirs if self.rows.index(each) not in instances)
                other, left = self.rows.index(pk), self.simulation.fleet.remaining_tokens
                assert left[other] == left[instance], "not equals"
                self.rows[instance], self.rows[other] = self.rows[other], self.rows[instance]
        for _, instance, _, before, after in changes[self.seen :].tolist():
            if (before, after) == (State.READY, State.SPOT):  # idle: drained at once
                self._put(self.rows[instance], S.STOPPED, self.now_s, (S.DRAINING,))
        self.seen = changes.size


def words(reason: str) -> str:
    """Return *reason* without sources and destinations: live, removed instances are stopped, and none is borrowed."""
    return re.sub(r"( instances), (?!\d+ on the way)[^.]*|\.$", r"\1", reason)


def comparable(view):
    """Return *view* without what a fleet of rows cannot have, with times capped."""
    changed_s, ready_s = min(view.since_change_s, 600.0), min(view.since_ready_s, GRACE_S)
    times = {"since_change_s": round(changed_s, 3), "since_ready_s": round(ready_s, 3)}
    return view._replace(spot=0, changed_delta=0, **times)


def run(name: str, until_s: float, monkeypatch) -> list[tuple]:
    """Return the moves under both clocks."""
    monkeypatch.setattr(
        start_times, "read", lambda: start_times.StartTimes({(MODEL, GPU): start_times.MedianTime(60.0, 9)})
    )
    requests = trace(until_s)
    simulation = Simulation(simulated_fleet(), requests)
    strategy = make_strategy(name, {"tick_s": LOOK_S if name == NO_STRATEGY else TICK_S})
    Model.objects.create(name=MODEL, weights_bytes=1, kv_bytes_per_token=1, context_tokens=2000)
    floor = replace(strategies.floor(tuned(MODEL)), period_s=LOOK_S)
    control = Control(simulation, Floored(strategy, floor), bounds=Bounds(1, MAX), floor=floor)
    live = Live(simulation, control, name, monkeypatch)
    log = []

    def tick(at: Simulation) -> None:
        live.now_s = at.now_s
        live.follow()
        seen = control.views(at)
        live.outlook = {
            each: Outlook(view.overloaded_instances, view.peak_kv_sum, view.peak_kv_most)
            for each, view in enumerate(seen)
        }
        views = live.views()
        for each, view in enumerate(seen):
            assert str(comparable(views[each])) == str(comparable(view)), f"at {at.now_s} s"
        before = len(control.moves)
        ScalingLoop.check(live.loop)
        made = live.decided()
        control(at)
        expected = {}
        for move in control.moves[before:]:
            if move.done:
                sign = 1 if move.done > 0 else -1
                expected[REGIONS[move.endpoint], sign, words(move.reason)] = abs(move.done)
        assert {key: len(rows) for key, rows in made.items()} == expected, f"at {at.now_s} s"
        live.agree(made)
        log.extend((at.now_s, *key, count) for key, count in expected.items())

    tick(simulation)
    simulation.run(tick, LOOK_S, until_s)
    return log


@pytest.mark.parametrize(
    ("name", "until_s"), [("reactive", 500.0), pytest.param(NO_STRATEGY, 1200.0, marks=pytest.mark.nightly)]
)
def test_both_clocks_see_and_move_alike(name, until_s, monkeypatch):
    log = run(name, until_s, monkeypatch)
    assert sum(count for *_, count in log) >= 4
    assert {sign for _, _, sign, _, _ in log} == {1, -1}
    if name == NO_STRATEGY:
        assert any("above 70%" in reason for *_, reason, _ in log)
        assert all(reason.startswith("Floor: ") for *_, reason, _ in log)
