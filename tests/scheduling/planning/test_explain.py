from dataclasses import replace

import numpy as np
import pytest

from scheduling.planning.planner import solve
from scheduling.planning.problem import TOLERANCE
from tests.scheduling.planning.problems import synthetic
from tests.scheduling.planning.test_problem import one_model


def test_each_change_says_why():
    plan = solve(one_model(), gap=0.0)
    # 600 tokens/s in all: three A100 in the east (one back from spot) and one H100 more in the west, or cheaper.
    assert plan.status == "optimal"
    assert plan.problem.served_tokens_per_s(plan.targets).sum() >= 600
    for at, why in plan.reasons.items():
        assert why.startswith(f"{plan.delta[at]:+d} llama on ")
    assert plan.infeasible == []
    assert any(line.startswith("llama, all regions: peak demand is 600 tok/s") for line in plan.binding)


def test_own_need_own_spot():
    problem = one_model(instances=[[[0, 0], [0, 2]]], demand_tokens_per_s=[[[200.0], [0.0]]], min_instances=0)
    plan = solve(problem, gap=0.0)
    assert plan.delta.tolist() == [[[2, 0], [0, -2]]]
    assert plan.reasons[0, 0, 0] == (
        "+2 llama on a100 in east: 100 tok/s required in the region, present instances serve 0 tok/s"
        " (1 back from its own spot, 1 on GPUs newly acquired; start $4.50)"
    )
    assert plan.reasons[0, 1, 1] == (
        "-2 llama on h100 in west: leaves 0 tok/s in the region (0 tok/s required), 200 tok/s in all regions"
    )


def test_what_must_go_says_why():
    gone = solve(one_model(capability_tokens_per_s=[[0.0, 250.0]]), gap=0.0)
    assert gone.reasons[0, 0, 0].endswith("the GPU type cannot serve the model")
    lost = solve(one_model(capacity=[[1, 4], [4, 4]]), gap=0.0)
    assert lost.reasons[0, 0, 0].endswith("only 1 a100 exist")
    fewer = solve(one_model(max_instances=1, demand_tokens_per_s=[[[50.0], [50.0]]]), gap=0.0)
    assert "above the maximum of 1 instance" in fewer.reasons[0, 0, 0]


def test_where_weights_come_from():
    problem = one_model(demand_tokens_per_s=[[[0.0], [1000.0]]], capacity=[[4, 4], [4, 4]], epsilon=1.0)
    plan = solve(problem, gap=0.0)
    assert "weights from another region" in plan.reasons[0, 1, 1]
    assert "newly acquired" in plan.reasons[0, 1, 1]


def test_starts_named_add_up_to_the_starts_paid():
    plan = solve(synthetic(5, 4, 3, seed=2))
    named = [
        float(why.rpartition("; start $")[2].rstrip(")").replace(",", ""))
        for why in plan.reasons.values()
        if "start $" in why
    ]
    assert len(named) == (plan.delta > 0).sum()
    assert sum(named) == pytest.approx(plan.problem.start_usd(plan.targets), abs=0.01 * len(named))


def test_a_minimum_and_a_maximum_bind():
    plan = solve(one_model(demand_tokens_per_s=np.zeros((1, 2, 1))), gap=0.0)
    assert "llama in east: at its minimum of 1 instance" in plan.binding
    full = solve(one_model(max_instances=2, demand_tokens_per_s=[[[900.0], [0.0]]], epsilon=0.5), gap=0.0)
    assert "llama in east: at its maximum of 2 instances" in full.binding


def test_rows_that_could_not_hold_say_what_stood_in_the_way():
    none = solve(one_model(capability_tokens_per_s=[[0.0, 0.0]]), gap=0.0)
    assert none.status == "short"
    assert len(none.infeasible) == 5
    assert all(line.endswith("no GPU type can serve the model") for line in none.infeasible)
    at_most = solve(one_model(max_instances=1, demand_tokens_per_s=[[[900.0], [0.0]]], epsilon=0.5), gap=0.0)
    assert at_most.infeasible == [
        "llama, all regions: 500 tok/s of 900 tok/s can be served, 400 tok/s cannot; its maximum of instances is reached",
        "llama in east: 250 tok/s of the 450 tok/s required in the region can be served, 200 tok/s cannot;"
        " its maximum of instances is reached",
    ]
    full = solve(one_model(capacity=[[2, 0], [0, 1]], demand_tokens_per_s=[[[900.0], [0.0]]]), gap=0.0)
    assert full.infeasible[0].endswith("; no room on a100 in east, h100 in east, a100 in west, h100 in west")


def test_rows_that_clash_are_named():
    """C37: a minimum above the maximum, and GPUs for fewer instances than the minimum."""
    with pytest.raises(ValueError, match="2 and 1 of llama in east"):
        one_model(min_instances=2, max_instances=1)
    few = solve(one_model(min_instances=2, capacity=[[1, 0], [0, 2]], demand_tokens_per_s=np.zeros((1, 2, 1))), gap=0.0)
    assert few.status == "short"
    assert few.infeasible == ["llama in east: 1 of at least 2 instances; no room on a100 in east, h100 in east"]


def test_doing_nothing_is_priced_next_to_the_plan():
    problem = one_model()
    plan = solve(problem, gap=0.0)
    assert problem.cost_usd(problem.instances) == 40.0
    assert problem.shortage(problem.instances).total_tokens_per_s.sum() == 600.0 - 450.0
    assert plan.cost_usd == problem.cost_usd(plan.targets)
    cheap = replace(plan, cost_usd=0.0)
    assert cheap.gap == 0.0


def test_binding_demand_rows_would_break_with_one_instance_less():
    plan = solve(synthetic(5, 4, 3, seed=2))
    problem, targets = plan.problem, plan.targets
    served, theta = problem.served_tokens_per_s(targets), problem.capability_tokens_per_s
    for i, model in enumerate(problem.models):
        for j, region in enumerate(problem.regions):
            smallest = min((theta[i, k] for k in range(3) if targets[i, j, k]), default=np.inf)
            binds = served[i, j] - smallest < problem.need_tokens_per_s[i, j] * (1 - TOLERANCE)
            assert any(line.startswith(f"{model} in {region}: 80% of") for line in plan.binding) == binds
