"""Routers that look ahead in the simulator: the compiled loop and the plain fleet decide alike, whatever happens."""

from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from tests.examples import at_night_but, costly
from tests.oracles.lookahead import PREDICTIVE
from tests.scheduling.simulation.cluster.agreeing import agree
from tests.scheduling.simulation.cluster.drawn import Drawn, scenarios

FEW = settings(costly(20), suppress_health_check=list(HealthCheck))
HOLDS = {
    "memory": ["preemptions"],
    "cached_and_preempted": ["prefix_hit_tokens", "preemptions"],
    "batches": [],
    "lives": ["changes"],
    "everything": ["prefix_hit_tokens", "preemptions", "changes"],
}
"""Kinds of scenarios, and what those of a kind must hold between them."""


@pytest.mark.parametrize("routing", PREDICTIVE)
@pytest.mark.parametrize("kind", at_night_but(("everything",), HOLDS))
def test_every_decision_agrees_with_the_plain_fleet(kind, routing):
    held: Counter[str] = Counter()

    @FEW
    @given(scenarios(kind))
    def of_kind(drawn: Drawn):
        policies = msgspec.structs.replace(drawn.cluster.policies, routing=routing)
        _, result = agree(replace(drawn, cluster=replace(drawn.cluster, policies=policies)))
        held.update(result.counters)
        held["changes"] += len(result.changes)
        held["several"] += len({row["instance"] for row in result.decisions}) > 1

    of_kind()
    assert held["several"], "no scenario has a choice"
    for name in HOLDS[kind]:
        assert held[name] > 0, f"no scenario has {name}"
