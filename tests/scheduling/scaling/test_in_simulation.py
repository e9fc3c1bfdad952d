"""Strategies inside a simulation: what they see, what they move, and that the look-ahead figures are those of the map."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.fleet.profile import Profile
from scheduling.lookahead.rule import LookAheadRule
from scheduling.policy import EndpointPolicy
from scheduling.routing.regions import filled
from scheduling.scaling import FLOOR, Advice, Reactive, make_strategy
from scheduling.scaling.reactive import reactive_move
from scheduling.simulation.cluster.description import Cluster, Delays, InstanceSpec
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.lookahead import memory_held, project_engine
from scheduling.simulation.engine.reference import EngineConfig
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.strategies import Bounds, Demand
from scheduling.simulation.workload.requests import make_requests
from tests.scheduling.fleets import as_arrays, plain_fleets
from tests.scheduling.scaling.running import control_of, run_strategy
from tests.scheduling.scaling.views import view

ENGINE = EngineConfig(16, 2048, 16, 400, "fcfs", 2000, Profile(0.01, 0.0, 1e-4, 0.0, 0.02, 1e-3, 1e-6))


def cluster(ready: int = 2, spot: int = 4, regions: tuple[str, ...] = ("east", "west"), **more) -> Cluster:
    states = [State.READY] * ready + [State.SPOT] * spot
    specs = [InstanceSpec("llama", region, ENGINE, state=state) for region in regions for state in states]
    return Cluster(specs, delays=Delays(spot_median_s=20, spot_max_s=30), **more)


def demand(count: int, rate: float, seed: int = 0, **more):
    random = np.random.default_rng(seed)
    return make_requests(
        np.cumsum(random.exponential(1 / rate, count)),
        random.integers(50, 400, count),
        random.integers(10, 200, count),
        predicted_tokens=random.integers(10, 200, count),
        region=random.integers(0, 2, count),
        **more,
    )


class Fixed:
    """Plans that are all alike, made every five minutes."""

    def __init__(self, *targets: int) -> None:
        self.targets, self.made_s = targets, []

    def advise(self, now_s, views):
        if not self.made_s or now_s >= self.made_s[-1] + 300.0:
            self.made_s.append(now_s)
        return [Advice(target, 1000.0, self.made_s[-1], now_s + 300.0) for target in self.targets]


# The look-ahead figures


@given(st.integers(0, 10_000), st.floats(0.3, 20))
def test_memory_held_is_that_of_the_tokens_in_it(seed, at_s):
    random = np.random.default_rng(seed)
    count = 40
    engine = replace(ENGINE, max_num_seqs=count, kv_blocks=400)
    spec = InstanceSpec("m", "r", engine, dispatch_max_num_seqs=100_000, dispatch_kv_tokens=1 << 40)
    requests = make_requests(
        np.cumsum(random.exponential(0.3, count)), random.integers(1, 300, count), random.integers(1, 150, count)
    )
    simulation = Simulation(Cluster([spec, spec, replace(spec, state=State.SPOT)]), requests)
    simulation.advance(at_s)
    world = simulation.world
    mean, most = np.zeros(1), np.zeros(1)
    memory_held(world.fleet, world.endpoints, world.engines, mean, most)
    held, within = [], []
    for instance in range(2):
        tokens, lines = np.zeros(1, np.int64), np.zeros((2, 2), np.int64)
        project_engine(world.engines, instance, lines[0], lines[1], tokens)
        held.append(int(tokens[0]))
        # Blocks that are not full, and a prompt whose prefill is under way.
        running = int(world.engines.instances[instance]["running"])
        within.append(engine.block_size_tokens * running + engine.max_num_batched_tokens)
    room = engine.kv_capacity_tokens
    assert max(held) / room - 0.01 <= most[0] <= min(1, (max(map(sum, zip(held, within, strict=True)))) / room)
    assert sum(held) / room / 2 - 0.01 <= mean[0] <= most[0]


def test_what_queues_at_an_instance_counts_for_its_map_but_holds_no_memory():
    engine = replace(ENGINE, max_num_seqs=64, kv_blocks=40)
    room = engine.kv_capacity_tokens
    spec = InstanceSpec("m", "r", engine, dispatch_max_num_seqs=100_000, dispatch_kv_tokens=1 << 40)
    prompt = room // 2 + engine.block_size_tokens  # two do not fit
    requests = make_requests(np.zeros(3), prompt, 100)
    simulation = Simulation(Cluster([spec]), requests)
    control = control_of(simulation, make_strategy("preserve"), bounds=Bounds(1, 5))
    simulation.advance(1.0)
    (one,) = control.views(simulation)
    assert (one.waiting, one.overloaded_instances) == (0, 1)
    assert one.peak_kv_most > 1.5
    mean, most = np.zeros(1), np.zeros(1)
    memory_held(simulation.fleet, simulation.endpoints, simulation.world.engines, mean, most)
    assert mean[0] == most[0]
    assert 0.5 < most[0] < 0.95


def test_each_endpoint_has_its_rule_of_overload():
    specs = [InstanceSpec("m", region, ENGINE) for region in ("east", "west", "north")]
    rules = {
        ("m", "east"): LookAheadRule(iterations=500, overload_above=0.1, overload_share=0.0),
        ("m", "west"): LookAheadRule(overload_above=5.0),
        ("m", "north"): LookAheadRule(iterations=1),
    }
    requests = make_requests(np.zeros(60), 200, 100, region=np.arange(60) % 3)
    policies = {key: EndpointPolicy(look_ahead=rule) for key, rule in rules.items()}
    simulation = Simulation(Cluster(specs, policies=policies), requests)
    control = control_of(simulation, make_strategy("preserve"), bounds=Bounds(1, 5))
    simulation.advance(1.0)
    east, west, north = control.views(simulation)
    assert (east.overloaded_instances, west.overloaded_instances) == (1, 0)
    assert north.peak_kv_most < east.peak_kv_most


# The compiled trigger and the strategy are one heuristic


@given(plain_fleets, st.integers(0, 20), st.integers(0, 6), st.sampled_from([0.0, 14.9, 15.0, inf]))
def test_the_trigger_on_arrival_decides_as_the_strategy(plain, waiting, coming, since_s):
    fleet, endpoints = as_arrays(plain)
    ready = sum(each.accepting and each.endpoint == 0 for each in plain.instances)
    rule = Reactive(min_instances=min(1, ready + coming), max_instances=8)
    if not ready <= 8 or ready + coming > 8:
        return
    seen = view(
        ready=ready,
        coming=coming,
        use=filled(fleet, endpoints, 0, waiting, 0.0, 0.0),
        since_change_s=since_s,
        min_instances=rule.min_instances,
        max_instances=rule.max_instances,
    )
    # As the trigger of the simulation calls it.
    wanted = reactive_move(
        seen.use, ready + coming, 0, 0, since_s, 0.0, rule.out_above, rule.in_below, rule.cooldown_s,
        rule.min_instances, rule.max_instances, 0.0,
    )  # fmt: skip
    moves = make_strategy("reactive", {"patience_s": 0}).decide(0.0, [seen], [None])
    if moves and moves[0].delta < 0 and not moves[0].drains:
        return  # starts are cancelled that nothing needs, which the kernel leaves to the next tick
    if wanted < 0 and ready <= rule.min_instances:
        assert moves == []  # the kernel asks; nothing that is ready may go
    else:
        assert [each.delta for each in moves] == ([wanted] if wanted else [])


# Seeing and moving


def test_a_view_says_what_the_fleet_is():
    simulation = Simulation(cluster(), demand(400, 8.0))
    control = control_of(simulation, make_strategy("preserve"), bounds=Bounds(1, 5))
    simulation.advance(30.0)
    simulation.scale_out(0, 2)
    simulation.scale_in(1)
    east, west = control.views(simulation)
    assert (east.model, east.region, east.ready, east.coming, east.spot) == ("llama", "east", 2, 2, 2)
    assert (west.ready + west.draining, west.coming) == (2, 0)
    assert (east.min_instances, east.max_instances, east.spot_other) == (1, 5, 0)
    assert east.use == filled(simulation.fleet, simulation.endpoints, 0, east.waiting, 0.0, 30.0)
    assert 0 < east.kv_use <= east.peak_kv_sum
    asked = simulation.requests
    own = (asked.region == 0) & (asked.arrival_s < 30.0)
    tokens = (asked.prompt_tokens[own].astype(int) + asked.predicted_tokens[own]).sum()
    assert east.tokens_per_s == pytest.approx(tokens / 30.0)


def test_demand_is_that_of_the_minute_behind():
    requests = make_requests([1.0, 59.0, 61.0, 200.0], 10, 5, region=[0, 0, 0, 1])
    seen = Demand(cluster(), requests)
    assert seen.seen(60.0).tolist() == [30 / 60, 0]
    assert seen.seen(120.0).tolist() == [15 / 60, 0]
    assert seen.seen(205.0).tolist() == [0, 15 / 60]
    assert seen.seen(5.0).tolist() == [3, 0]


def test_moves_are_carried_out_and_recorded():
    advisor = Fixed(5, 1)
    run = run_strategy(
        cluster(), demand(1000, 4.0), make_strategy("lt_i"), bounds=Bounds(1, 6), advisor=advisor, until_s=200.0
    )
    assert [(each.time_s, each.endpoint, each.wanted, each.done) for each in run.moves] == [
        (0, 0, 3, 3),
        (0, 1, -1, -1),
    ]
    assert run.counters["scale_outs"] == 3
    assert advisor.made_s == [0.0]
    ready_s = run.state_s[:, State.READY]
    assert (ready_s[:5] > 150).all()
    assert ready_s[5] == 0


def test_a_view_knows_when_an_instance_last_became_ready():
    from scheduling.simulation.simulator import Simulation

    simulation = Simulation(cluster(), demand(1000, 4.0))
    control = control_of(simulation, make_strategy("reactive"))
    seen: list[tuple[float, int, float]] = []

    def tick(at: Simulation) -> None:
        if at.now_s == 0:
            at.scale_out(0, 1)
        one = control.views(at)[0]
        seen.append((at.now_s, one.ready, one.since_ready_s))

    tick(simulation)
    simulation.run(tick, 5.0, 100.0)
    assert seen[0] == (0, 2, np.inf)
    reclaimed = simulation.lives.changes()
    (first,) = reclaimed["time_s"][reclaimed["after"] == State.READY].tolist()
    assert first % 5.0 > 0  # not only when it was looked at
    assert all(since_s == (at_s - first if at_s >= first else np.inf) for at_s, _, since_s in seen)
    assert {ready for at_s, ready, _ in seen if at_s >= first} == {3}


def test_advice_is_asked_for_at_its_own_times():
    advisor = Fixed(2, 2)
    run_strategy(cluster(), demand(4000, 4.0), make_strategy("lt_u"), advisor=advisor, until_s=700.0)
    assert advisor.made_s == [0.0, 300.0, 600.0]
    with pytest.raises(ValueError, match="advisor is needed"):
        run_strategy(cluster(), demand(10, 4.0), make_strategy("lt_u"))


@pytest.mark.parametrize("name", ["lt_i", "lt_u", "lt_ua", "proactive", "hybrid", "preserve", "pilothouse", "reactive"])
def test_the_same_run_twice_is_the_same_and_within_bounds(name):
    def once():
        return run_strategy(
            cluster(), demand(1500, 12.0), make_strategy(name), bounds=Bounds(1, 5), advisor=Fixed(1, 1), until_s=150.0
        )

    first, second = once(), once()
    assert first.moves == second.moves
    assert (first.outcomes == second.outcomes).all()
    for change in first.changes:
        assert change["time_s"] <= 150.0
    serving = {0: 2, 1: 2}
    coming = {State.READY, State.RECLAIMING}
    for change in first.changes.tolist():
        _, _, endpoint, before, after = change
        serving[endpoint] += (after in coming) - (before in coming)
        assert 0 <= serving[endpoint] <= 5


def test_the_floor_is_under_a_plan_that_starves_and_can_be_left_out():
    def waiting(floor):
        return run_strategy(
            cluster(1, 4, ("east",)),
            make_requests(np.arange(600) / 12.0, 200, 100),
            make_strategy("lt_i"),
            bounds=Bounds(1, 5),
            floor=floor,
            advisor=Fixed(1),
            until_s=200.0,
        )

    with_floor, without = waiting(FLOOR), waiting(None)
    assert without.moves == []
    assert {each.reason[:19] for each in with_floor.moves} == {"Safety autoscaler: "}
    assert np.nanmean(with_floor.outcomes["queue_s"]) < np.nanmean(without.outcomes["queue_s"])


def test_silos_do_not_take_from_each_other():
    specs = [
        InstanceSpec(model, "east", ENGINE, state=state)
        for model, states in {
            "small": [State.READY],
            "large": [State.READY, State.SPOT, State.SPOT],
        }.items()
        for state in states
    ]
    both = Cluster(specs, delays=Delays(local_weights_s=10))
    requests = make_requests(np.arange(400) / 12.0, 200, 100, model=0)
    separate = run_strategy(both, requests, make_strategy("siloed"), bounds=Bounds(1, 5))
    shared = run_strategy(both, requests, make_strategy("reactive"), bounds=Bounds(1, 5))
    assert separate.counters["redeploys"] == 0
    assert shared.counters["redeploys"] > 0


# Use


CODE = Profile(0.02, 0.005, 5e-5, 1e-10, 0.012, 2e-4, 2e-8)


def code_like(count: int, rate: float, seed: int = 1):
    """Long prompts and short answers."""
    random = np.random.default_rng(seed)
    prompts = np.clip(1900 * np.exp(0.6 * random.standard_normal(count)), 50, 7000).astype(np.int32)
    return make_requests(np.cumsum(random.exponential(1 / rate, count)), prompts, random.integers(5, 16, count))


def mean_use(requests, engine: EngineConfig, instances: int = 1, seconds: int = 600) -> float:
    simulation = Simulation(Cluster([InstanceSpec("m", "r", engine)] * instances), requests)
    control = control_of(simulation, make_strategy("reactive"), bounds=Bounds(1, 9))
    uses = []
    for now_s in range(60, seconds, 5):
        simulation.advance(float(now_s))
        uses.append(control.views(simulation)[0].use)
    return float(np.mean(uses))


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_use_of_an_instance_that_mostly_reads_prompts_is_the_share_of_what_it_can_serve(load):
    engine = EngineConfig(128, 8192, 16, 30_000, "fcfs", 32_768, CODE)
    done = run_strategy(Cluster([InstanceSpec("m", "r", engine)]), code_like(2000, 1e4), make_strategy("reactive"))
    rate = 2000 / float(np.nanmax(done.outcomes["e2e_s"]))
    assert mean_use(code_like(round(600 * rate * load), rate * load), engine) == pytest.approx(load, abs=0.08)


def test_what_the_prefix_cache_has_is_no_use():
    engine = EngineConfig(128, 8192, 16, 30_000, "fcfs", 32_768, CODE, prefix_caching=True)
    count, blocks = 6000, 110
    random = np.random.default_rng(2)
    own = random.integers(1, 1 << 60, (count, 10)).tolist()
    requests = make_requests(
        np.cumsum(random.exponential(0.1, count)), 16 * blocks, 10,
        prefix_blocks=[[*range(1, blocks - 9), *each] for each in own],
    )  # fmt: skip
    cached = mean_use(requests, engine)
    assert cached < 0.3 < mean_use(requests, replace(engine, prefix_caching=False))
