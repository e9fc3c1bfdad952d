"""Weights by region in the planner: a region without them is dearer to start in, and is taken last."""

import numpy as np

from scheduling.planning.places import Deployed, Fleet, problem_of
from scheduling.planning.planner import solve

PLACES = [("m", region, "h100") for region in ("east", "west")]


def problem(pull_s: float):
    fleet = Fleet(
        {
            place: Deployed(
                1, 0, 0, 4, 1, 2.0, start_s=60.0, machine_s=0.0, pull_s=pull_s if place[1] == "east" else 0.0
            )
            for place in PLACES
        },
        {},
    )
    demand = {place[:2]: np.array([140.0]) for place in PLACES}
    return problem_of(fleet, demand, {}, {("m", "h100"): 100.0}, 3600.0, 0.5).problem


def test_a_region_without_weights_costs_the_pull():
    near, far = problem(0.0), problem(7200.0)
    assert near.weights_local.all()
    assert far.weights_local.tolist() == [[False, True]]
    extra = far.redeploy_cost_usd - near.redeploy_cost_usd
    assert extra.tolist() == [[[7200 * 2.0 / 3600], [0.0]]]


def test_the_plan_adds_where_the_weights_are():
    far = problem(7200.0)
    targets = (far.instances + solve(far, time_limit_s=5.0).delta)[:, :, 0]
    assert targets.tolist() == [[1, 2]]
