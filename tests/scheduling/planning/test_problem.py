from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduling.planning.problem import Problem, StartCosts, broken_rows
from tests.scheduling.planning.problems import plain_cost, plain_rows, shortage_usd, small_problems


def one_model(**changes):
    """One model, two regions, two types; 2 + 0 instances in the first region, 0 + 1 in the second."""
    fields = {
        "models": ["llama"],
        "regions": ["east", "west"],
        "gpu_types": ["a100", "h100"],
        "instances": [[[2, 0], [0, 1]]],
        "capability_tokens_per_s": [[100.0, 250.0]],
        "demand_tokens_per_s": [[[300.0, 200.0], [100.0, 400.0]]],
        "vm_cost_usd": [10.0, 20.0],
        "start_cost_usd": StartCosts(
            *(np.array([value]) for value in ([1.0, 2.0], [3.0, 6.0], [7.0, 14.0])), np.array([0.5, 1.0])
        ),
        "min_instances": 1,
        "max_instances": 9,
        "capacity": [[4, 4], [4, 4]],
        "spot": [[[1, 0], [0, 0]]],
        "weights_local": [[True, False]],
        "epsilon": 0.5,
    }
    return Problem(**{**fields, **changes})


def test_needs_are_those_of_the_paper():
    problem = one_model()
    assert problem.need_tokens_per_s.tolist() == [[150.0, 200.0]]
    # Not the sum of the peaks, but the peak of the sum.
    assert problem.need_total_tokens_per_s.tolist() == [600.0]
    buffered = one_model(buffer_tokens_per_s=[[10.0, 20.0]])
    assert buffered.need_tokens_per_s.tolist() == [[155.0, 210.0]]
    assert buffered.need_total_tokens_per_s.tolist() == [630.0]


def test_starts_are_paid_by_time():
    costs = StartCosts.paid_while_starting([36.0, 72.0], 3600.0, models=2, gpus=[[1, 1], [4, 2]])
    assert costs.same_spot.tolist() == [[0.6, 1.2], [2.4, 2.4]]
    assert costs.other_spot.tolist() == [[6.0, 12.0], [24.0, 24.0]]
    assert costs.remote_weights.tolist() == [[[72.0, 144.0]], [[288.0, 288.0]]], "the same in every region"
    assert costs.new_vm.tolist() == [3.0, 6.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": []}, "models must be"),
        ({"regions": ["east", "east"]}, "regions must be different"),
        ({"instances": [[[2, 0, 0], [0, 0, 0]]]}, "instances has the shape"),
        ({"instances": [[[-1, 0], [0, 0]]]}, "instances must not be negative"),
        ({"instances": [[[0.5, 0], [0, 0]]]}, "instances must hold whole numbers"),
        ({"demand_tokens_per_s": [[300.0, 200.0]]}, "demand_tokens_per_s must be"),
        ({"demand_tokens_per_s": np.full((1, 2, 1), np.nan)}, "demand_tokens_per_s must hold finite"),
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"epsilon": 1.5}, "epsilon must be"),
        ({"min_instances": 10}, "min_instances must not be above"),
        ({"gpus": 0}, "gpus must be at least 1"),
        (
            {"start_cost_usd": StartCosts(np.ones((1, 2)), np.zeros((1, 2)), np.zeros((1, 2)), np.zeros(2))},
            "other_spot",
        ),
        ({"capacity": [[4, 4, 4], [4, 4, 4]]}, "capacity has the shape"),
    ],
)
def test_a_wrong_problem_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        one_model(**changes)


def test_arrays_are_copies_and_stay_as_they_are():
    instances = np.array([[[2, 0], [0, 1]]])
    problem = one_model(instances=instances)
    instances[0, 0, 0] = 9
    assert problem.instances[0, 0, 0] == 2
    with pytest.raises(ValueError, match="read-only"):
        problem.instances[0, 0, 0] = 9


@given(small_problems(), st.data())
def test_cost_and_rows_agree_with_counting_one_by_one(problem, data):
    size = int(np.prod(problem.shape))
    targets = np.array(data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))).reshape(problem.shape)
    assert problem.cost_usd(targets) == pytest.approx(plain_cost(problem, targets))
    broken, own_region, total, few = plain_rows(problem, targets)
    assert len(broken_rows(problem, targets)) == len(broken)
    shortage = problem.shortage(targets)
    for missing, counted in (
        (shortage.own_region_tokens_per_s, own_region),
        (shortage.total_tokens_per_s, total),
        (shortage.instances, few),
    ):
        expected = np.zeros(missing.shape)
        for at, value in counted.items():
            expected[at] = value
        assert missing == pytest.approx(expected)


def test_broken_rows_are_named():
    problem = one_model(max_instances=3)
    assert broken_rows(problem, np.array([[[2, 0], [0, 1]]])) == []
    assert broken_rows(problem, np.array([[[-1, 0], [0, 1]]])) == ["llama in east has -1 instances on a100"]
    assert "of at most 3" in broken_rows(problem, np.array([[[4, 0], [0, 1]]]))[0]
    crowded = one_model(capacity=[[1, 4], [4, 4]])
    assert broken_rows(crowded, np.array([[[2, 0], [0, 1]]])) == ["east: 2 of 1 a100"]
    assert "whole numbers" in broken_rows(problem, np.array([[[2.0, 0], [0, 1]]]))[0]


def test_missing_more_than_half_weighs_more():
    problem = one_model(epsilon=1e-9)  # only the sum over regions counts
    able = {count: shortage_usd(problem, np.array([[[count, 0], [0, 1]]])) for count in (0, 1, 2, 4)}
    assert able[4] == 0.0 or able[4] < able[2]
    # 250 + 100 a piece of 600: the step over half weighs more than the one after it.
    assert able[0] - able[1] > able[1] - able[2] > 0


@given(small_problems(), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_problem_with_another_demand_equals_a_new_one(problem, windows, seed):
    demand = np.random.default_rng(seed).uniform(0, 300, (*problem.shape[:2], windows))
    _ = problem.need_tokens_per_s, problem.need_total_tokens_per_s  # known of the old demand
    asking, made = problem.asking(demand), replace(problem, demand_tokens_per_s=demand)
    for name in ("peak_tokens_per_s", "need_tokens_per_s", "need_total_tokens_per_s", "acquired_units", "instances"):
        np.testing.assert_array_equal(getattr(asking, name), getattr(made, name), name)
    with pytest.raises(ValueError, match="must not be negative"):
        problem.asking(-1 - demand)
