"""Promises of a simulated fleet under an overload."""

import numpy as np
import pytest

from scheduling.simulation.cluster.world import Outcome
from scheduling.simulation.measures.results import kept, request_table
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.references import unresolved
from scheduling.simulation.staging.stage import stage

CHAT, BATCH = 0, 1


def scenario_of(if_unreachable="admit", requests_per_s=14.0, ordering="priority", **policies):
    degrades = {"degrades_to": "batch"} if if_unreachable == "degrade" else {}
    client = {
        "tenant": "acme", "model": "m", "requests_per_s": requests_per_s,
        "prompt": {"median": 200, "p95": 600}, "output": {"median": 120, "p95": 400},
    }  # fmt: skip
    return Scenario.model_validate(
        {
            "models": {"m": {"context_tokens": 8192}},
            "gpus": {"g": {"usd_per_hour": 2.0}},
            "regions": {"east": {}},
            "profiles": [
                {
                    "model": "m", "gpu": "g",
                    "prefill": {"t0_s": 0.02, "a_s": 0.01, "b_s_per_token": 1e-4, "c_s_per_token2": 0.0},
                    "decode": {"a_s": 0.02, "b_s_per_sequence": 4e-4, "c_s_per_token": 1e-7},
                }
            ],
            "fleet": [
                {
                    "model": "m", "gpu": "g", "regions": ["east"], "instances": 2, "kv_tokens": 60_000,
                    "max_num_seqs": 16, "max_num_batched_tokens": 2048,
                }
            ],
            "classes": {
                "chat": {"ttft_ms": 4000, "if_unreachable": if_unreachable, **degrades},
                "batch": {"kind": "non_interactive", "deadline_s": 7200, "priority": 5},
            },
            "policies": {"ordering": ordering, **policies},
            "demand": {"duration_h": 0.1},
            "clients": [{**client, "slo_class": "chat"}],
        }
    )  # fmt: skip


def run(**options):
    staged = stage(scenario_of(**options), seed=3)
    result = staged.run()
    return staged, result


@pytest.fixture(scope="module")
def admitted():
    return run()


@pytest.fixture(scope="module")
def refusing():
    return run(if_unreachable="refuse")


def attainment(staged, result, among):
    judged, met = kept(result, result.cluster.promises)
    return met[judged & among].mean()


@pytest.mark.parametrize("ordering", ["priority", "deadline", "qlm"])
def test_refusing_keeps_the_promises_to_the_others(ordering, refusing):
    staged, result = refusing if ordering == "priority" else run(if_unreachable="refuse", ordering=ordering)
    state, refused = result.outcomes["state"], result.refused_at_door
    assert set(state) == {Outcome.DONE, Outcome.REFUSED}
    assert (state[refused] == Outcome.REFUSED).all()
    assert 0.1 < refused.mean() < 0.6
    assert attainment(staged, result, state == Outcome.DONE) > 0.9
    assert result.counters["refused_at_door"] == refused.sum() == result.counters["refused"]


def test_refused_requests_took_no_capacity(admitted, refusing):
    """About as many tokens are served as without the rule: admission does not leave the fleet idle."""
    tokens = [result.requests.output_tokens[result.outcomes["state"] == Outcome.DONE].sum() / result.end_s
              for _, result in (admitted, refusing)]  # fmt: skip
    assert tokens[1] > 0.85 * tokens[0]


def test_degraded_requests_run_in_the_other_class():
    staged, result = run(if_unreachable="degrade")
    degraded = result.asked_class == CHAT
    assert (result.outcomes["state"] == Outcome.DONE).all()
    assert result.counters["degraded"] == degraded.sum() > 0
    assert (result.requests.slo_class == np.where(degraded, BATCH, CHAT)).all()
    assert (result.requests.priority == np.where(degraded, 5, 0)).all()
    assert attainment(staged, result, ~degraded) > 0.9
    assert attainment(staged, result, degraded) == 1.0
    assert result.counters["admitted_late"] == result.admitted_late.sum()
    counted = [row for row in request_table(result, staged.tenants).rows if row[2] == "degraded_to"]
    assert ("slo_class", "batch", "degraded_to", "count", degraded.sum()) in counted


def test_the_same_seed_gives_the_same_result(refusing):
    again = run(if_unreachable="refuse")[1]
    assert again.outcomes.tobytes() == refusing[1].outcomes.tobytes()
    # The staged requests are not changed by a run.
    first = stage(scenario_of(if_unreachable="degrade"), seed=3)
    before = first.requests.slo_class.copy()
    first.run()
    assert (first.requests.slo_class == before).all()


@pytest.mark.parametrize(
    ("classes", "wrong"),
    [
        ({"a": {"if_unreachable": "degrade", "degrades_to": "x"}}, "there is no class 'x'"),
        (
            {
                "a": {"if_unreachable": "degrade", "degrades_to": "b"},
                "b": {"if_unreachable": "degrade", "degrades_to": "a"},
            },
            "leads back to this class",
        ),
        ({"a": {"if_unreachable": "degrade"}}, "give degrades_to"),
        ({"a": {"degrades_to": "a"}}, "give degrades_to"),
    ],
)
def test_contradictions_are_named(classes, wrong):
    whole = scenario_of().model_dump(exclude_none=True)
    try:
        problems = [text for _, text in unresolved(Scenario.model_validate(whole | {"classes": classes}))]
    except ValueError as error:
        problems = [str(error)]
    assert any(wrong in text for text in problems)
