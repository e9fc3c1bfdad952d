"""One policy, two clocks: everything happens to the same requests, in the same order, at the same moments, to 1e-6 s.

A scenario is drawn from a seed with a policy for each of two models and a set of features, each of which must act in it.
"""

import numpy as np
import pytest
from msgspec.structs import replace

from controlplane.dispatch.observation import Observation
from scheduling.scaling import make_strategy
from scheduling.scaling.endpoint import GRACE_S
from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.strategies import Demand
from tests.clocks.both import assert_equal_events, live_fleet, run, serve, simulation_of
from tests.clocks.scenarios import FEATURES, draw
from tests.scheduling.scaling.running import control_of


def of(routing="join_shortest_queue", ordering="fcfs", **more):
    return {"routing": routing, "ordering": ordering} | more


GROUPED = of(ordering="qlm", group_batches=1.0)
TABLE = {
    "load": ([of(ordering="priority"), of("minimum_use", "deadline")], ["due", "overcommitted"], (1, 4, 6, 13)),
    "ahead": ([of("least_request", "ssjf"), of("round_robin", "slack")], ["due", "adapters", "round trip"],
              (0, 6, 11, 12, 13, 16, 17)),
    "look ahead": ([of("preserve", "ssjf"), of("least_delay", "wfq")], ["prefixes", "weights", "front ends"],
                   (1, 6, 11, 12, 16, 17)),
    "KV events": ([of("least_delay"), of("least_delay", "ssjf")], ["prefixes", "KV events"], (0, 4, 10, 12, 17)),
    "offloads": ([of("least_delay"), of("least_delay", "ssjf")], ["prefixes", "offloads"], (0, 4, 7)),
    "evicted KV": ([of(ordering="qlm")] * 2, ["evicted KV"], (0, 2)),
    "regions": (
        [of(ordering="priority", region_threshold=0.9), of(region_threshold=0.2)],
        ["flood", "one-sided", "impatient"], (0, 6, 11, 12, 13, 16, 17),
    ),
    "fair regions": ([of(ordering="vtc"), of(ordering="wfq")], ["flood", "one-sided", "weights"], (1, 0, 6, 12, 13, 16, 17)),
    "bound to regions": (
        [of(ordering="priority", region_threshold=0.2), of(ordering="vtc")],
        ["flood", "one-sided", "bound"], (0, 6, 11, 16),
    ),
    "held": ([of(ordering="priority"), of("least_request", "ssjf")], ["held"], (0, 5, 10, 16, 17)),
    "failures": ([of(ordering="vtc"), of(ordering="wfq")], ["weights", "failures", "pooling"], (0, 6, 11, 12, 13, 16, 17)),
    "groups": ([of(ordering="qlm"), of("least_request", "qlm", group_order="length")], ["due", "flood", "groups"],
               (1, 7, 11, 12, 13, 16, 17)),
    "evictions": ([of(ordering="qlm"), of("preserve", "qlm", group_batches=1.0)], ["urgent", "groups"], (3, 7, 11, 13)),
    "streams go on": ([of(ordering="qlm"), of(ordering="qlm")], ["urgent", "failures of groups"], (0, 6, 9, 13, 16)),
    "fallbacks": ([of(), of(ordering="ssjf")], ["fallbacks", "failures"], (0, 6, 11, 13, 16)),
    "runs": ([of(ordering="hermes", run_demand="graph"), of(ordering="srpt")], ["runs"], (0, 5, 10, 12, 13, 16, 17)),
    "tables of runs": ([of(ordering="hermes", run_demand="table"), of(ordering="srpt")], ["runs"], (0, 5, 10, 12)),
    "late runs": (
        [of(ordering="run_slack", run_demand="graph"), of(ordering="run_deadline")], ["runs"], (0, 6, 11, 12, 13, 16, 17),
    ),
    "groups of runs": ([GROUPED | {"group_order": "hermes"}] * 2, ["many runs", "classes"], (3, 6, 11, 12, 16, 17)),
    "two orders within groups": (
        [GROUPED | {"group_order": "hermes", "run_demand": "graph"}, GROUPED | {"run_demand": "graph"}],
        ["many runs", "classes"], (0, 3, 10, 12, 17),
    ),
    "adapters of runs": ([of(ordering="application"), of()], ["runs", "prewarmed adapters"], (0, 5, 11, 12, 13, 16, 17)),
    "system prompts": ([of("least_delay", "application")] * 2, ["system prompts", "prewarmed adapters"],
                       (0, 6, 11, 12, 13, 16, 17)),
    "sleeping model": ([of(ordering="hermes")] * 2, ["sleeping model"], (0, 6, 11, 12, 13, 16, 17)),
    "spot": ([of(ordering="priority")] * 2, ["spot"], (0, 6, 11, 12, 13, 16, 17)),
    "lives": ([of(ordering="ssjf"), of()], ["lives"], (0, 6, 11, 12, 13, 16, 17)),
    "shared GPUs": ([of(ordering="qlm")] * 2, ["shared GPUs"], (0, 6, 11, 12, 13, 16, 17)),
    "swaps on demand": ([of(ordering="qlm", swap_by_queue=False)] * 2, ["shared GPUs"], (0, 6, 11, 12, 13, 16, 17)),
    "short memory": ([of(ordering="qlm", swap_by_queue=False)] * 3, ["short memory"], (0, 11, 12, 16, 17)),
    "stopped model": ([of(ordering="qlm")] * 2, ["stopped model"], (0, 6, 11, 12, 13, 16, 17)),
    "promises": ([of(ordering="priority")] * 2, ["promises"], (21, 12, 13, 16, 17)),
    "degrades": ([of(ordering="priority")] * 2, ["degrades"], (21, 12, 13, 16, 17)),
    "late fallbacks": ([of(ordering="priority")] * 2, ["late fallbacks"], (21, 12, 16)),
    "promises to groups": ([of(ordering="qlm")] * 2, ["promises"], (21, 12, 13, 16, 17)),
}  # fmt: skip
"""Policies of the models, features, and seeds: the first always, the others at night."""
CASES = [
    pytest.param(name, seed, id=f"{name} {seed}", marks=pytest.mark.nightly if seed != seeds[0] else ())
    for name, (_, _, seeds) in TABLE.items()
    for seed in seeds
]
DIFFERENT = {
    "cached blocks": (
        3, [of("least_delay"), of("least_delay", "ssjf")], ["prefixes", "KV events"],
        "with KV events the compiled engine forgets blocks that the reference still has",
    ),
}  # fmt: skip
"""Seed, policies, features, and how the clocks differ."""


def same(seed, policies, features):
    both = serve(draw(seed, policies, features))
    assert_equal_events(both)
    for feature in features:
        assert FEATURES[feature].acted(both), f"{feature} made no difference"
    return both


@pytest.mark.parametrize(("name", "seed"), CASES)
def test_both_clocks_tell_the_same(name, seed):
    policies, features, _ = TABLE[name]
    both = same(seed, policies, features)
    done = both.result.outcomes["state"] == Outcome.DONE
    courses = [both.live.courses[number] for number in np.flatnonzero(done)]
    assert all(each.tokens == each.output_tokens for each in courses), "every token came once, wherever it was computed"


@pytest.mark.parametrize("name", DIFFERENT)
def test_both_clocks_tell_the_same_here_too(name, request):
    seed, policies, features, reason = DIFFERENT[name]
    request.applymarker(pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason))
    same(seed, policies, features)


def seen(view):
    """Return what both clocks can say of an endpoint: what scales it is another matter."""
    return view._replace(
        spot=0, spot_other=0, changed_delta=0, since_change_s=0.0, min_instances=0, max_instances=0, short_instances=0,
        since_ready_s=min(view.since_ready_s, GRACE_S), tokens_per_s=round(view.tokens_per_s, 6),
        **{name: round(float(getattr(view, name)), 9) for name in ("use", "kv_use", "peak_kv_sum", "peak_kv_most")},
    )  # fmt: skip


@pytest.mark.parametrize("features", [["flood"], ["held"], ["spot"]], ids=lambda each: each[0])
def test_strategies_see_the_same(features):
    """Every second: instances, use, memory, what waits, what is coming by the look-ahead maps, and interactive demand."""
    scenario = draw(4, [of(), of(ordering="ssjf")], features)
    by_live, by_simulator = [], []
    live, _ = live_fleet(scenario)
    observation = Observation(
        live.topology, live.dispatcher.queue.count, live.dispatcher.outlook, lambda: live.now_s,
        wall_clock=lambda: live.now_s,
    )  # fmt: skip

    def look():
        by_live.append([seen(view) for view in observation.views().values()])

    live.on_tick.append(look)
    live.run()
    simulation = simulation_of(scenario)
    of_classes = scenario.requests._replace(slo_class=(scenario.requests.held > 0).astype(np.int16))
    control = control_of(simulation, make_strategy("preserve"))
    control.demand = Demand(scenario.cluster, of_classes, interactive=(True, False))
    run(simulation, scenario, lambda at: by_simulator.append([seen(view) for view in control.views(at)]), 1.0)
    for at_s, (one, other) in enumerate(zip(by_live, by_simulator, strict=False), 1):
        for mine, theirs in zip(one, other, strict=True):
            differs = {name: (a, b) for name, a, b in zip(mine._fields, mine, theirs, strict=True) if str(a) != str(b)}
            assert not differs, f"{mine.model} {mine.region} at {at_s} s"
    views = [view for second in by_live for view in second]
    assert len({str(view) for view in views}) > 10
    assert any(view.waiting or view.coming for view in views)
    assert max(view.tokens_per_s for view in views) > 0 < max(view.peak_kv_most for view in views)


def test_eviction_keeps_in_time_what_would_be_late():
    """The same trace with and without evictions: more first tokens are in time, and every request is served."""
    shares = []
    for limit in (0, 2):
        scenario = draw(0, [of(ordering="qlm")] * 2, ["urgent"])
        scenario.cluster.policies = {
            key: replace(policy, eviction_limit=limit) for key, policy in scenario.cluster.policies.items()
        }
        outcomes = Simulation(scenario.cluster, scenario.requests).run().outcomes
        mine = (scenario.requests.priority == 0) & (outcomes["state"] == Outcome.DONE)
        shares.append(float((outcomes["ttft_s"][mine] <= scenario.requests.deadline_s[mine]).mean()))
        assert (outcomes["state"] != Outcome.FAILED).all()
    assert shares[1] > shares[0] + 0.1
