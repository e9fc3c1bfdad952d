"""What SageServe's experiment compares strategies with, and what our own plans are made for."""

import numpy as np
import pytest

from controlplane.experiments import sageserve, sageserve_mixed
from controlplane.experiments.shared import scenes
from controlplane.experiments.shared.setting import in_windows, minutes
from scheduling.scaling import Pilothouse, make_strategy
from scheduling.simulation.measures.results import spells


@pytest.fixture(autouse=True)
def _short_history(monkeypatch):
    monkeypatch.setattr(sageserve, "HISTORY_WEEKS", 1)


@pytest.mark.nightly
def test_foreknown_plans_for_the_demand_that_comes_and_keeps_its_name():
    setting = sageserve.prepare(scenes.sageserve(0.03), 0.03, 1, False, "seasonal_naive", lambda *step: None)
    came = minutes(setting.scene, setting.workload, scenes.INTERACTIVE, 0.03 * 86_400)
    total = in_windows(came.prompt + came.output)
    advisor = setting.planner(make_strategy("lt_i").plans_for, 1.0, foreknown=True)
    assert {advisor.settings.period_of(plans_for) for plans_for in advisor.follows.values()} == {600.0}
    for at in range(total.shape[1]):
        known = advisor.inputs_at(at * 600.0, []).demand
        assert known.windows == 1
        assert [float(known.of[stream].kept[0]) for stream in setting.scene.streams] == pytest.approx(
            total[:, at].tolist()
        )
    (row,) = sageserve.rows_of(setting, ["foreknown"], lambda *step: None)
    assert row["strategy"] == "foreknown"
    (reactive,) = sageserve.rows_of(setting, ["reactive"], lambda *step: None)
    assert row["instance_hours"] < 1.05 * reactive["instance_hours"]
    for name in ("lt_ua", "preserve", "pilothouse"):
        plans_for = make_strategy(name).plans_for
        assert set(setting.planner(plans_for, 1.0).follows.values()) == {plans_for}


def test_our_own_plans_keep_more_than_they_add_for():
    assert 0 < Pilothouse.plans_for.soon < Pilothouse.plans_for.kept <= 1


def test_hours_of_a_mixed_day_are_the_times_that_instances_spent_in_states():
    scene = scenes.mixed(0.01)
    run = next(sageserve_mixed.pools(scene, scene.demand(0.05, 1), 1)).simulate()
    spent = spells(run.result, run.result.end_s)
    by_state = np.zeros(run.result.state_s.shape)
    np.add.at(by_state, (spent.instance, spent.state), spent.ended_s - spent.began_s)
    assert by_state == pytest.approx(run.result.state_s, abs=1e-6)
    row = sageserve_mixed.measured(run, sageserve_mixed.of_busiest)
    assert sum(row["hours_by_model"].values()) == pytest.approx(row["instance_hours"])
    assert row["series"]["hours_course"].keys() == scene.regions.keys()
