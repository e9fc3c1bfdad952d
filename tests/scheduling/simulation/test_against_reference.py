"""The compiled engine against the reference engine, one iteration at a time, on scenarios that Hypothesis makes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from scheduling.simulation.world import Outcome
from tests.scheduling.simulation.agreeing import agree
from tests.scheduling.simulation.drawn import LOADS, Drawn, scenarios

FEW = settings(deadline=None, max_examples=10, derandomize=True, suppress_health_check=list(HealthCheck))
MANY = settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck), print_blob=True)

HOLDS = {
    "light": ["forwarded"],
    "memory": ["preemptions"],
    "overload": ["queued", "refused"],
    "priorities": ["preemptions"],
    "chunked": ["chunked"],
    "prefixes": ["prefix_hit_tokens"],
    "cached_and_preempted": ["prefix_hit_tokens", "preemptions"],
    "batches": ["batched"],
    "lives": ["changes", "swaps"],
    "scaling": ["scale_outs", "scale_ins"],
    "everything": ["prefix_hit_tokens", "preemptions", "changes"],
}
"""What the scenarios of a kind must hold between them, or agreeing on them would say little."""


def every_one_agrees(kind: str, how: settings) -> None:
    held: Counter[str] = Counter()

    @how
    @given(scenarios(kind))
    def of_kind(drawn: Drawn):
        _, result = agree(drawn)
        held.update(result.counters)
        budgets = np.array([spec.engine.max_num_batched_tokens for spec in drawn.cluster.instances])
        outcomes = result.outcomes
        done = outcomes["state"] == Outcome.DONE
        held["queued"] += int((outcomes["queue_s"] > 0).sum())
        held["changes"] += len(result.changes)
        held["chunked"] += int((drawn.requests.prompt_tokens[done] > budgets[outcomes["instance"][done]]).sum())
        if drawn.cluster.of(drawn.cluster.batching, drawn.cluster.endpoints[0]).mode == "dynamic":
            held["batched"] += int(done.sum())

    of_kind()
    for name in HOLDS[kind]:
        assert held[name] > 0, f"no scenario has {name}"


@pytest.mark.parametrize("kind", LOADS)
def test_every_latency_and_decision_agrees(kind):
    every_one_agrees(kind, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOADS)
def test_every_latency_and_decision_agrees_on_many_more(kind):
    every_one_agrees(kind, MANY)
