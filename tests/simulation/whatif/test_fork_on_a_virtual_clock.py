"""A fork of a living fleet, simulated with the requests that then came, does what the fleet did: placement for placement.

Both run on virtual clocks, so that the answer is the same on every machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from django.db.models import F

from controlplane.accounts.models import Tenant
from controlplane.dispatch.port import Backlog
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import (
    Deployment,
    GpuType,
    Instance,
    Model,
    PerformanceProfile,
    SloClass,
    SloKind,
    WeightedTarget,
)
from controlplane.gateway.models import LedgerRow
from controlplane.simulation.whatif.fork import fork_of
from controlplane.simulation.whatif.start import Start, stage_start
from controlplane.tuning.services import put
from scheduling.applications.demand_graph import Backend, DemandGraph, RunRecord, ServiceRate, Step
from scheduling.applications.standings import KnownGraph
from scheduling.routing.models import RULES
from scheduling.routing.prefix_affinity import recorded
from scheduling.simulation.result import Result
from scheduling.simulation.scenario import Scenario
from tests.examples import at_night_but
from tests.gateway.rows import make_model, make_rows
from tests.simulation.whatif.rows import as_it_went
from tests.simulation.whatif.virtual_fleet import BLOCK_TOKENS, DrawnRequest, RowsFleet

AFTER_S, LONG_S = 180.0, 600.0
INSTANCES, SEQUENCES = 3, 4
LENT = f"m-{INSTANCES - 1}"
ROUND_TRIP_S = 0.004
COUNT_S = 0.1
"""As the gateway has its dispatcher hear of tokens."""
PROFILE = {
    "prefill_t0_s": 0.1,
    "prefill_a_s": 0.05,
    "prefill_b_s_per_token": 1e-3,
    "prefill_c_s_per_token2": 0.0,
    "decode_a_s": 0.1,
    "decode_b_s_per_sequence": 0.005,
    "decode_c_s_per_token": 1e-5,
}


def make_fleet(routing: str, ordering: str, *, blocks: int = 1024, **deployment: object) -> None:
    """Write the rows of a fleet whose instances have *blocks* of memory each, and are given nothing ahead."""
    servers = [SimpleNamespace(name=f"m-{at}", url=f"http://127.0.0.1:1/m-{at}") for at in range(INSTANCES)]
    make_rows(servers, regions=["east"] * INSTANCES, max_num_seqs=SEQUENCES, queue_bound=1000)
    model, gpu_type = Model.objects.get(), GpuType.objects.get()
    PerformanceProfile.objects.create(model=model, gpu_type=gpu_type, tensor_parallel=1, source="test", **PROFILE)
    bounds = {"min_instances": INSTANCES, "max_instances": INSTANCES}
    values = {"routing_policy": routing, "ordering_policy": ordering, "max_num_batched_tokens": 2048} | bounds
    values["requests_ahead_limit"] = 0
    Deployment.objects.update(**values | deployment)
    Instance.objects.update(kv_capacity_tokens=BLOCK_TOKENS * blocks)


def lend() -> None:
    """Donate the last instance, and have a class for which it serves."""
    Instance.objects.filter(name=LENT).update(state=InstanceState.DONATED)
    Deployment.objects.update(min_instances=INSTANCES - 1, max_instances=INSTANCES - 1)  # so that nothing scales
    spare = SloClass.objects.create(name="spare", title="Spare", kind=SloKind.OPPORTUNISTIC, priority=2)
    Tenant.objects.get().slo_classes.add(spare)


def requests(until_s: float, per_s: float, longest: int = 400, spare: float = 0.0) -> list[DrawnRequest]:
    """Return requests before *until_s*, at random times and of random lengths; a share *spare* is opportunistic."""
    random = np.random.default_rng(1)
    asked, came_s = [], 0.0
    while (came_s := came_s + random.exponential(1 / per_s)) < until_s:
        output = int(np.clip(random.lognormal(3.1, 0.6), 2, 200))
        predicted = max(1, int(output * np.exp(0.4 * random.standard_normal())))
        drawn = random.random()
        slo_class = "interactive" if drawn < 0.6 - spare else "flexible" if drawn < 1.0 - spare else "spare"
        asked.append(
            DrawnRequest(round(came_s, 6), "east", slo_class, int(random.integers(20, longest)), output, predicted)
        )
    return asked


def simulate(start: Start) -> Result:
    scenario = Scenario.model_validate(start.scenario)
    return stage_start(start, scenario, 0).run(decisions=True)


@dataclass
class Both:
    """What the fleet did after the fork, and what the simulation of it did."""

    live: RowsFleet
    rows: list[LedgerRow]
    result: Result
    held: list[int]
    """Numbers of the requests that ran, waited or were held at the fork, in order of arrival."""

    @property
    def outcomes(self) -> Any:
        return self.result.outcomes[len(self.held) :]

    def ttft_off(self, percentile: float) -> float:
        """Return the relative difference of that percentile of TTFT in the simulation."""
        real_ms = np.percentile([row.ttft_ms for row in self.rows], percentile)
        return float(1000 * np.percentile(self.outcomes["ttft_s"], percentile) / real_ms - 1)

    def decisions_of_the_fleet(self) -> list[tuple[float, int, int]]:
        """Return seconds after the fork, number of the request, and slot of the instance, in order of time."""
        began_s = self.live.forked_s
        return [(at_s - began_s, number, slot) for at_s, number, slot in self.live.decided if at_s >= began_s]

    def decisions_of_the_simulation(self) -> list[tuple[float, int, int]]:
        came = len(self.live.courses) - len(self.rows)
        numbers = [*self.held, *range(came, len(self.live.courses))]
        each = self.result.decisions[["time_s", "request", "instance"]].tolist()
        return [(at_s, numbers[request], instance) for at_s, request, instance in each]

    def decided_alike(self) -> list[tuple[float, int, int]]:
        """Assert that every decision is the same, at the same time; return them."""
        fleet, simulation = self.decisions_of_the_fleet(), self.decisions_of_the_simulation()
        assert [row[1:] for row in simulation] == [row[1:] for row in fleet]
        np.testing.assert_allclose([row[0] for row in simulation], [row[0] for row in fleet], atol=1e-5)
        return fleet


def alike(asked: list[DrawnRequest], until_s: float) -> list[DrawnRequest]:
    """Return *asked*; prompts that come before *until_s* are of six kinds, alike as far as they go."""
    random, some = np.random.default_rng(4), []
    for each in asked:
        kind = int(random.integers(1, 7))
        blocks = 1_000_000 * kind + np.arange(each.prompt_tokens // BLOCK_TOKENS)
        some.append(replace(each, recorded=recorded(blocks) if each.arrived_s < until_s else ()))
    return some


def fork_and_continue(
    at_s: float = 120.0,
    per_s: float = 2.2,
    count_s: float = 0.0,
    longest: int = 400,
    after_s: float = AFTER_S,
    spare: float = 0.0,
    prompts: bool = False,
    named: bool = False,
    runs: bool = False,
    before_fork: Callable[[RowsFleet], None] | None = None,
) -> Both:
    """Run the fleet of the rows, fork it at *at_s*, and run *after_s* more of both."""
    live, asked = RowsFleet("m", ROUND_TRIP_S, count_s), requests(at_s + after_s, per_s, longest, spare)
    asked = alike(asked, at_s) if prompts else asked
    if named:
        asked = [
            replace(each, name="chat", model="mmn"[at // 2 % 3]) if at % 2 else each for at, each in enumerate(asked)
        ]
    before = [each for each in asked if each.arrived_s < at_s]
    live.let_come(before, at_s)
    if before_fork is not None:
        before_fork(live)
    seen = live.seen()
    hashes = {prompt.tokens for prompt in seen.prompts if prompt.tokens}
    start = Start.model_validate_json(fork_of(seen, after_s).model_dump_json())
    assert start.state is not None
    assert hashes.isdisjoint(prompt.tokens for prompt in start.state.prompts), "no hash without a key is stored"
    live.let_come(asked[len(before) :])
    live.write_ledger()
    if runs:
        LedgerRow.objects.update(application="agent", run=F("request_id"))
    result = simulate(as_it_went(start, after_s))
    held = sorted(int(one.request_id[1:]) for one in start.state.requests)
    rows = list(LedgerRow.objects.filter(arrived_at__gte=start.at).order_by("arrived_at", "pk"))
    assert len(rows) == result.requests.count - len(held) > 0.8 * after_s * per_s
    return Both(live, rows, result, held)


@pytest.mark.parametrize(
    ("routing", "ordering", "options"),
    [
        pytest.param("join_shortest_queue", "fcfs", {}, marks=pytest.mark.nightly),
        pytest.param("join_shortest_queue", "ssjf", {"at_s": 133.77}, marks=pytest.mark.nightly),
        pytest.param("join_shortest_queue", "qlm", {}, marks=pytest.mark.nightly),
        pytest.param("join_shortest_queue", "qlm", {"at_s": 133.77, "per_s": 2.5}, marks=pytest.mark.nightly),
        ("join_shortest_queue", "qlm", {"at_s": 151.3, "per_s": 2.5, "evictions": 2}),
        pytest.param("least_request", "slack", {"at_s": 140.5}, marks=pytest.mark.nightly),
        pytest.param("join_shortest_queue", "fcfs", {"blocks": 60}, marks=pytest.mark.nightly),
        pytest.param("join_shortest_queue", "vtc", {"at_s": 133.77, "per_s": 2.5}, marks=pytest.mark.nightly),
        pytest.param("preserve", "priority", {}, marks=pytest.mark.nightly),
        pytest.param("preserve", "ssjf", {"at_s": 133.77, "ahead": None, "per_s": 2.5}, marks=pytest.mark.nightly),
        pytest.param("join_shortest_queue", "qlm", {"evictions": 2, "after_s": LONG_S}, marks=pytest.mark.nightly),
        pytest.param("preserve", "ssjf", {"ahead": None, "after_s": LONG_S}, marks=pytest.mark.nightly),
    ],
)
def test_a_fork_decides_as_the_fleet_did(db, routing, ordering, options):
    """Every decision is the same, at the same time, for three minutes, or for ten."""
    options = dict(options)  # a second try has the same
    limits = {"requests_ahead_limit": options.pop("ahead", 0)}
    short = "blocks" in options
    make_fleet(routing, ordering, blocks=options.pop("blocks", 1024), **limits)
    put("EVICTION_LIMIT", options.pop("evictions", 0), "test")
    both = fork_and_continue(**options)
    assert len(both.held) > 3, "or it would be a fork of little"
    assert max(both.outcomes["queue_s"]) > 1.0, "or order would hardly matter"
    assert short == any(engine.preemptions_total for engine in both.live.engines)
    both.decided_alike()
    for percentile in (50, 95):
        assert abs(both.ttft_off(percentile)) < 1e-4


def test_the_first_calls_of_runs_come_in_a_fork_as_they_came(db):
    make_fleet("join_shortest_queue", "fcfs")
    both = fork_and_continue(after_s=60.0, runs=True)
    assert np.isfinite(both.result.runs.ended_s).all()
    assert both.result.runs.ended_s.size == len(both.rows)
    both.decided_alike()


RUN_ORDERS = ("application", "srpt", "hermes", "run_deadline", "run_slack", "qlm")


@pytest.mark.parametrize(
    ("ordering", "per_s"),
    at_night_but([("hermes", 4.5), ("qlm", 9.5)], [(each, 9.5 if each == "qlm" else 4.5) for each in RUN_ORDERS]),
)
def test_a_fork_has_runs_in_progress_where_they_stood(db, ordering, per_s):
    """Runs of two applications, of which one has a demand graph: what waits at the fork leaves as it does in the fleet.

    With 300 waiting, request groups of `qlm` are full: their limits are those of the fleet's last sweep.
    """
    make_fleet("join_shortest_queue", ordering, ordering_stretch=3.0)
    put("GROUP_ORDER", "hermes", "test")
    random, at_s = np.random.default_rng(2), 60.3
    asked = [
        replace(
            each,
            application=f"a{at % 2}",
            run=f"r{at}",
            slo_class="interactive",
            run_due_s=float(random.choice([20.0, 90.0])) if at % 3 else None,
        )
        for at, each in enumerate(requests(at_s, per_s))
    ]
    live = RowsFleet("m", ROUND_TRIP_S)
    records = [RunRecord((Step("request", -1, 100, int(length)),)) for length in random.choice([20, 60, 400], 40)]
    graph = KnownGraph.of(DemandGraph("a0", {"request": Backend("llm", "m")}, records), {"request": ServiceRate()})
    live.dispatcher.runs.graphs[live.tenant.pk, "a0"] = graph
    live.let_come(asked, at_s)
    start = Start.model_validate_json(fork_of(live.seen(), AFTER_S).model_dump_json())
    assert start.state is not None
    waiting = {int(one.request_id[1:]): one for one in start.state.waiting}
    assert len(waiting) > (30 if per_s < 5 else 300)

    live.let_come(
        [DrawnRequest(at_s + AFTER_S - 1.0, "east", "interactive", 20, 5, 5)]
    )  # a simulation needs one that comes
    live.write_ledger()
    result = simulate(as_it_went(start, AFTER_S))
    both = Both(
        live,
        list(LedgerRow.objects.filter(arrived_at__gte=start.at)),
        result,
        sorted(int(one.request_id[1:]) for one in start.state.requests),
    )
    fleet = both.decided_alike()
    assert {number for _, number, _ in fleet} == {*waiting, len(asked)}
    assert [number for _, number, _ in fleet] != sorted(waiting), "or order would hardly matter"


def test_what_instances_carry_is_the_same_in_a_fork(db):
    """Their API processes carry fewer requests than their sequences, by the lengths of those that came before the fork."""
    make_fleet("join_shortest_queue", "fcfs")
    PerformanceProfile.objects.update(front_end_requests_per_s=20.0, front_end_tokens_per_s=20.0)
    carried = []

    def note(live):
        carried.extend(live.topology.at_once(one) for one in live.topology.replicas.values())

    both = fork_and_continue(at_s=133.77, per_s=1.8, before_fork=note)
    assert max(carried) < SEQUENCES
    both.decided_alike()
    assert max(both.outcomes["queue_s"]) > 1.0, "or room would hardly matter"


@pytest.mark.parametrize("kv_events", [False, True])
@pytest.mark.parametrize("ordering", at_night_but(["ssjf"], ["fcfs", "ssjf", "slack"]))
def test_a_fork_has_the_prefix_caches_of_the_fleet(db, ordering, kv_events):
    """What waits at the fork finds as much of its prompts cached, at the same instances, as in the fleet."""
    make_fleet("least_delay", ordering, kv_events=kv_events)
    hits: list[int] = []

    def note(live: RowsFleet) -> None:
        hits.append(sum(engine.prefix_hit_tokens_total for engine in live.engines))

    both = fork_and_continue(at_s=133.77, per_s=2.5, prompts=True, before_fork=note)
    assert both.live.publishes == kv_events
    both.decided_alike()
    cached_tokens = sum(engine.prefix_hit_tokens_total for engine in both.live.engines) - hits[0]
    assert both.result.counters["prefix_hit_tokens"] == cached_tokens > 500


@pytest.mark.parametrize("wait_s", [None, 2.0])
def test_a_fork_has_fallbacks_and_weights_as_the_fleet(db, wait_s):
    """The queue of a model is full at the fork, and its fallback serves what comes; a third of a public name's requests has
    the other model by weight.
    """
    make_fleet("join_shortest_queue", "ssjf", queue_bound=6)
    make_model("n", "http://127.0.0.1:1/n")
    own, other = Model.objects.get(name="m"), Model.objects.get(name="n")
    PerformanceProfile.objects.create(
        model=other, gpu_type=GpuType.objects.get(), tensor_parallel=1, source="test", **PROFILE
    )
    values = {"max_num_batched_tokens": 2048, "ordering_policy": "ssjf", "requests_ahead_limit": 0, "max_instances": 1}
    Deployment.objects.filter(model=other).update(routing_policy="join_shortest_queue", min_instances=1, **values)
    Model.objects.filter(pk=own.pk).update(fallback=other, fallback_wait_s=wait_s)
    for target, weight in (("m", 2.0), ("n", 1.0)):
        WeightedTarget.objects.create(name="chat", target=target, weight=weight)
    Instance.objects.update(kv_capacity_tokens=16 * 1024)
    both = fork_and_continue(at_s=133.77, per_s=6.0, named=True)
    rules = [str(RULES[one["model_rule"]] or "") for one in both.outcomes]
    live = [row.model_rule for row in both.rows]
    assert {"weights", "unavailable"} <= set(live)
    assert rules == live
    both.decided_alike()


def test_announced_work_sets_the_pace_in_a_fork_too(db):
    """Lines that are not open yet count by their deadlines: held work leaves in time for them."""
    make_fleet("join_shortest_queue", "fcfs")
    announced = Backlog("m", ((133.77 + 400.0, 1000),))
    both = fork_and_continue(at_s=133.77, per_s=1.8, before_fork=lambda live: live.dispatcher.take(announced))
    both.decided_alike()
    assert "pace" in {one.why for _, one in both.live.dispatcher.holding.control.released}


@pytest.mark.parametrize("reclaimed", [False, True])
def test_a_fork_has_the_donated_instances_and_what_runs_there(db, reclaimed):
    """Opportunistic requests run there, and held work in the room they leave; they leave when it is being reclaimed."""
    make_fleet("join_shortest_queue", "priority")
    lend()
    both = fork_and_continue(
        at_s=151.3, per_s=2.5, spare=0.3, before_fork=lambda live: live.reclaim(LENT) if reclaimed else None
    )
    fleet = both.decided_alike()
    lent = [number for _, number, slot in fleet if slot == both.live.slot_of[LENT]]
    assert len(lent) > 20
    classes = {both.live.courses[number].submit.slo_class for number in lent}
    assert classes == {"flexible", "spare"} | ({"interactive"} if reclaimed else set())
    assert (both.result.counters["spot_evicted"] > 0) == reclaimed
    assert (both.result.counters["spot_served"] > 20) != reclaimed


def test_prompts_in_several_chunks_are_computed_again(db):
    """Engines do not report their progress: first tokens are late by chunks at most, and that is soon over."""
    make_fleet("join_shortest_queue", "qlm", max_num_batched_tokens=256, blocks=4096)
    both = fork_and_continue(151.1, 0.9, longest=1500)
    for percentile in (50, 95):
        assert abs(both.ttft_off(percentile)) < 0.05


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("routing", "ordering"),
    at_night_but(
        [("join_shortest_queue", "qlm")],
        [("join_shortest_queue", "ssjf"), ("join_shortest_queue", "qlm"), ("preserve", "priority")],
    ),
)
def test_tokens_that_are_counted_ten_times_a_second_hardly_matter(db, routing, ordering):
    """As in the gateway: its dispatcher knows a little less than a simulation's, and decides almost alike."""
    make_fleet(routing, ordering)
    both = fork_and_continue(count_s=COUNT_S)
    for percentile in (50, 95):
        assert abs(both.ttft_off(percentile)) < 0.12
