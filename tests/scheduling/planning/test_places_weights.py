"""Weights by region in the planner: a region without them is dearer to start in, and is taken last."""

import numpy as np

from scheduling.planning.places import Deployed, Fleet, problem_of
from scheduling.planning.planner import solve

PLACES = [("m", region, "h100") for region in ("east", "west")]


def problem(east_s: float, west_s: float = 0.0):
    pulls_s = {"east": east_s, "west": west_s}
    fleet = Fleet(
        {
            place: Deployed(1, 0, 0, 4, 1, 2.0, start_s=60.0, machine_s=0.0, pull_s=pulls_s[place[1]])
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


def test_each_region_is_priced_by_its_own_pull():
    """Where the weights are missing everywhere, the plan adds where the pull is short."""
    near, far = problem(0.0), problem(7200.0, 600.0)
    extra = far.redeploy_cost_usd - near.redeploy_cost_usd
    assert extra.tolist() == [[[7200 * 2.0 / 3600], [600 * 2.0 / 3600]]]
    assert (far.instances + solve(far, time_limit_s=5.0).delta)[:, :, 0].tolist() == [[1, 2]]


def test_the_plan_adds_where_the_weights_are():
    far = problem(7200.0)
    targets = (far.instances + solve(far, time_limit_s=5.0).delta)[:, :, 0]
    assert targets.tolist() == [[1, 2]]
