"""One policy, two clocks: everything happens to the same requests, in the same order, at the same moments, to 1e-6 s."""

import pytest

from tests.clocks.both import assert_equal_events, serve
from tests.clocks.scenarios import FEATURES, draw
from tests.examples import at_night_but

SEEDS = range(12)


def of(routing="join_shortest_queue", ordering="fcfs", **more):
    return {"routing": routing, "ordering": ordering} | more


TABLE = {
    "load": (1, [of(ordering="priority"), of("minimum_use", "deadline")], ["due", "small memory"]),
    "ahead": (2, [of("least_request", "ssjf"), of("round_robin", "slack")], ["due", "adapters", "round trip"]),
    "look ahead": (3, [of("preserve", "ssjf"), of("least_delay", "wfq")], ["prefixes", "weights", "front ends"]),
    "KV events": (4, [of("least_delay"), of("least_delay", "ssjf")], ["prefixes", "KV events"]),
    "regions": (5, [of(ordering="priority", region_threshold=0.9), of(region_threshold=0.2)], ["flood", "one-sided", "impatient"]),
    "fair regions": (5, [of(ordering="vtc"), of(ordering="wfq")], ["flood", "one-sided", "weights"]),
    "held": (6, [of(ordering="priority"), of("least_request", "ssjf")], ["held"]),
    "failures": (7, [of(ordering="vtc"), of(ordering="wfq")], ["weights", "failures", "pooling"]),
    "groups": (8, [of(ordering="qlm"), of("least_request", "qlm", group_order="length")], ["due", "flood", "groups"]),
    "evictions": (9, [of(ordering="qlm"), of("preserve", "qlm", group_batches=1.0)], ["urgent", "groups"]),
    "fallbacks": (10, [of(), of(ordering="ssjf")], ["fallbacks", "failures"]),
    "runs": (11, [of(ordering="hermes"), of(ordering="srpt")], ["runs"]),
    "late runs": (12, [of(ordering="run_slack"), of(ordering="run_deadline")], ["runs"]),
    "groups of runs": (13, [of(ordering="qlm", group_order="hermes", group_batches=1.0), of(ordering="qlm", group_batches=1.0)], ["many runs", "classes"]),
    "prewarmed adapters": (14, [of(ordering="application"), of()], ["runs", "prewarmed adapters"]),
    "system prompts": (15, [of("least_delay", "application"), of("least_delay", "application")], ["system prompts", "prewarmed adapters"]),
    "sleeping model": (16, [of(ordering="hermes"), of(ordering="hermes")], ["sleeping model"]),
    "spot": (17, [of(ordering="priority"), of(ordering="priority")], ["spot"]),
    "lives": (18, [of(ordering="ssjf"), of()], ["lives"]),
    "shared GPUs": (19, [of(ordering="qlm"), of(ordering="qlm")], ["shared GPUs"]),
    "evictions on shared GPUs": (20, [of(ordering="qlm", eviction_limit=2), of(ordering="qlm", eviction_limit=2)], ["shared GPUs"]),
    "promises": (21, [of(ordering="priority"), of(ordering="priority")], ["promises"]),
    "degrades": (22, [of(ordering="priority"), of(ordering="priority")], ["degrades"]),
    "late fallbacks": (23, [of(ordering="priority"), of(ordering="priority")], ["late fallbacks"]),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_both_clocks_tell_the_same(name):
    seed, policies, features = TABLE[name]
    both = serve(draw(seed, policies, features))
    assert_equal_events(both)
    for feature in features:
        assert FEATURES[feature].acted(both), f"{feature} made no difference"
