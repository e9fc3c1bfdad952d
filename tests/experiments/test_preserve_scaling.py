"""`manage.py reproduce` on a small scale: same in, same out; what is measured adds up; wrong options are named."""

import json
from dataclasses import replace
from io import StringIO
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from django.core.management import CommandError, call_command

from controlplane.experiments import preserve_scaling as preserve
from controlplane.experiments import sageserve
from controlplane.experiments.experiment import Case
from controlplane.experiments.shared import scenes, setting
from controlplane.experiments.shared.measures import hours_by_model
from controlplane.experiments.shared.setting import (
    BEFORE_S,
    DemandForecasts,
    Expected,
    Setting,
    forecast_demand,
    in_windows,
    measured_capability,
    minutes,
)
from scheduling.planning.bursts import arrival_cv
from scheduling.planning.capacity import Capability
from scheduling.scaling import PlansFor, make_strategy
from scheduling.simulation.staging import stage
from scheduling.simulation.staging.demand_minutes import DemandMinutes
from tests.docs import evidence
from tests.scheduling.scaling.views import view

DAYS = 0.021
SMALL = ("--days", str(DAYS), "--scale", "0.03", "--forecaster", "seasonal_naive")


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("reproduce", *arguments, stdout=out)
    return out.getvalue()


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if key != "wall_s"}
    return [without_times(each) for each in value] if isinstance(value, list) else value


@pytest.fixture(autouse=True)
def _short_history(monkeypatch):
    monkeypatch.setattr(sageserve, "HISTORY_WEEKS", 1)
    monkeypatch.setattr(setting, "WINDOW_S", 1800.0)  # a third of the windows to walk through


@pytest.mark.nightly
def test_sageserve_is_measured_twice_alike_and_shown(tmp_path):
    arguments = ("sageserve", *SMALL, "--strategies", "per_arrival,lt_ua,pilothouse")
    first = json.loads(run(*arguments, "--json", "--out", str(tmp_path / "deep" / "result.json")))
    options = ("--demand", "plain", "--strategies", "lt_i,lt_ua,per_arrival", "--out", str(tmp_path / "second.json"))
    text = run("sageserve", *SMALL, *options)
    second = json.loads((tmp_path / "second.json").read_text())
    again = next(row for row in second["runs"][0]["rows"] if row["strategy"] == "lt_ua")
    assert without_times(again) == without_times(first["runs"][0]["rows"][1])
    assert json.loads((tmp_path / "deep" / "result.json").read_text()) == first
    assert [each["demand"] for each in first["runs"]] == ["plain", "bursts"]
    plain, bursts = first["runs"]
    assert bursts["requests"] > plain["requests"] > 500
    for each in first["runs"]:
        assert [row["strategy"] for row in each["rows"]] == ["per_arrival", "lt_ua", "pilothouse"]
        for row in each["rows"]:
            assert row["done"] + row["unserved"] == each["requests"]
            assert row["usd"] == pytest.approx(row["instance_hours"] * scenes.USD_PER_HOUR, rel=1e-4)
            assert sum(row["hours_by_model"].values()) == pytest.approx(row["instance_hours"], abs=0.01)
            assert 0.9 * 24 * 24 * DAYS <= row["instance_hours"] <= 24 * 240 * DAYS
            assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["ttft_p99_s"]
    assert first["reported"]["lt_ua"] == {"instance_hours": -0.228, "waste_hours": -0.7}
    assert first["command"] == (
        "manage.py reproduce sageserve --days 0.021 --scale 0.03 --strategies per_arrival,lt_ua,pilothouse"
        " --forecaster seasonal_naive"
    )
    for word in ("lt_i", "per_arrival", "-24.8 %", "TTFT p95", "llama-2-70b hours"):
        assert word in text
    written = _kept_and_written(tmp_path, first)
    assert f"`{first['command']}` at commit abc1234" in written
    for row in (*plain["rows"], *bursts["rows"]):
        assert f"| {row['strategy']} | {row['instance_hours']:,.0f} |" in written
        assert f"| {row['scale_outs']:,}/{row['scale_ins']:,} |" in written
    assert written.count("| lt_ua, plain: instance hours | 7.3.1, figure 11 | -22.8 % |") == 1


def _kept_and_written(folder, result):
    """Return the page that `python -m tests.docs.evidence` writes of *result*."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "KEPT", folder)
        row = evidence.keep("tiny", "sageserve", result, "abc1234")
        assert list(evidence.kept()) == [row]
        assert not row.is_stale
    assert "wall_s" not in (folder / "tiny.json").read_text()
    return evidence.page(row)


@pytest.mark.nightly
def test_preserve_is_measured_and_shown():
    answer = json.loads(run("preserve-scaling", *SMALL, "--json"))
    rows = {(row["depth"], row["service"], row["strategy"]): row for row in answer["rows"]}
    of_depth = {
        depth: set(preserve.DATA["options"]["strategies"]["among"]) - set(left_out)
        for depth, left_out in preserve.NOT_AT.items()
    }
    assert set(rows) == {(at, each, name) for at in of_depth for each in preserve.SERVICES for name in of_depth[at]}
    for depth, names in of_depth.items():
        for service in preserve.SERVICES:
            static = rows[depth, service, "static"]
            assert static["instance_hours"] == pytest.approx(8 * 24 * DAYS, rel=0.05)
            assert static["scale_outs"] == 0
            for name in names:
                row = rows[depth, service, name]
                assert row["instance_hours"] <= static["instance_hours"] + 0.01
                assert row["peak_minute_normalised_s"] >= row["peak_normalised_s"] * 0.99
            saved = rows[depth, service, "preserve"]["instance_hours"] / static["instance_hours"] - 1
            changed = answer["found"]["instance_hours_against_static"]
            assert changed[f"{service}, {depth}"] == pytest.approx(saved, abs=1e-3)
        assert changed[f"both, {depth}"] < 0
    assert not any("shallow" in key for key in answer["found"]["peak_normalised_against_hybrid_mean"])
    assert answer["reported"] == preserve.PAPER
    text = run("preserve-scaling", *SMALL, "--strategies", "static,preserve")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.count("│") == 5]
    compared = {row[0]: row[1:] for row in cells}
    assert compared["instance hours against static, deep"][:2] == ["5.3", "-44.5 %"]
    assert compared["instance hours against static, deep"][2].endswith(" %")
    assert compared["peak normalised against hybrid, deep"][2] == "not measured"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--days", "0"), "--days must be above 0"),
        (("--days", "8"), "at most 7"),
        (("--days", "0.003"), r"--days must be at least 0\.0209: forecasts are for windows of 30 min"),
        (("--scale", "-1"), "--scale"),
        (("--seed", "-1"), "--seed"),
        (("--strategies", "lt_x"), "'lt_x' is none of per_arrival"),
        (("--forecaster", "crystal_ball"), "--forecaster: 'crystal_ball' is none of seasonal_naive"),
    ],
)
def test_wrong_options_are_named(arguments, words):
    with pytest.raises(CommandError, match=words):
        run("sageserve", *arguments)


# The parts


def test_demand_by_minute_is_the_requests_own(monkeypatch):
    monkeypatch.setattr(setting, "WINDOW_S", 600.0)
    scene = scenes.sageserve(0.02)
    drawn = scene.demand(0.25, 3)
    interactive, other = (minutes(scene, drawn, name, 21_600.0) for name in (scenes.INTERACTIVE, scenes.OTHER))
    assert interactive.prompt.shape == (12, 360)
    total = sum(each.prompt.sum() + each.output.sum() for each in (interactive, other))
    assert total * 60 == pytest.approx(float(drawn.prompt_tokens.sum() + drawn.output_tokens.sum()))
    assert interactive.requests.sum() + other.requests.sum() == len(drawn)
    at = scene.streams.index(("bloom-176b", "us-west"))
    model, region = (drawn.model.names.index("bloom-176b"), drawn.region.names.index("us-west"))
    own = (drawn.model.codes == model) & (drawn.region.codes == region) & (drawn.arrival_s < 600)
    windows = sum(in_windows(each.prompt)[at, 0] for each in (interactive, other))
    assert windows * 600 == pytest.approx(drawn.prompt_tokens[own].sum())


def test_plans_see_only_the_minutes_behind_them():
    random = np.random.default_rng(0)
    before, came = (DemandMinutes(*random.uniform(50, 100, (3, 2, count))) for count in (500, 600))
    seen = came.after(before.last(240))
    assert seen.rate(1, BEFORE_S) == pytest.approx((before.prompt + before.output)[1, -60:].mean())
    assert seen.rate(1, BEFORE_S + 7200.0) == pytest.approx((came.prompt + came.output)[1, 60:120].mean())
    assert seen.arrival_cv(0, BEFORE_S) == arrival_cv(before.requests[0, -240:])
    assert seen.arrival_cv(0, BEFORE_S + 5 * 3600.0) == arrival_cv(came.requests[0, 60:300])


@pytest.mark.nightly
def test_a_forecast_knows_only_what_lies_behind_it():
    random = np.random.default_rng(0)
    history, actual = random.uniform(50, 100, (2, 432)), random.uniform(50, 100, (2, 300))
    made = forecast_demand("seasonal_naive", history, actual, 600.0)
    assert made.mean.shape == (300, 2, 6)
    changed = actual.copy()
    changed[:, 100:] *= 10
    again = forecast_demand("seasonal_naive", history, changed, 600.0)
    assert (again.mean[:101] == made.mean[:101]).all()
    assert (again.mean[288] != made.mean[288]).all()
    for now_s, at in ((0.0, 0), (599.0, 0), (600.0, 1), (1e9, 299)):
        assert (made.band(1, now_s).mean == made.mean[at, 1]).all()
    with pytest.raises(ValueError, match="no forecaster 'x'"):
        forecast_demand("x", history, actual, 600.0)


def advice(prompt, output, plans_for, able, views, other=0.0):
    """Of a planner at 10 s to whom these rates are forecast, (streams, windows), while *other* work was seen."""
    streams = [(each.model, each.region) for each in views]
    forecasts = [DemandForecasts("x", 600.0, mean, 2 * mean, 0.0) for mean in (np.array([prompt]), np.array([output]))]
    behind = np.zeros((len(streams), 240))
    seen = DemandMinutes(behind, behind, behind), DemandMinutes(behind + other, behind, behind)
    scene = SimpleNamespace(streams=streams, instances=20, models=[None])
    made = Setting(scene, 1.0, 0, None, Expected(*forecasts, *seen), None, {"llama": able}, []).planner(plans_for, 1.0)
    read, alone = made.inputs_at, replace(made.settings, epsilon=1.0)
    made.inputs_at = lambda now_s, views: replace(read(now_s, views), settings=alone)
    return made.advise(10.0, views)


def test_the_programme_asks_for_what_the_forecast_needs():
    able = Capability(100.0, 100.0, 100.0, "measured")
    views = [view(ready=2, spot=9), view(region="west", ready=2, spot=9)]

    def of(**wishes):
        rates = [[50.0, 50.0, 50.0, 200.0], [50.0] * 4]
        plans_for = PlansFor(period_s=600.0, horizon_s=2400.0, **wishes)
        return advice(rates, rates, plans_for, able, views, other=50.0)

    east, west = of(two_plans=True)
    assert (east.soon_instances, west.soon_instances) == (2, 2)
    assert (east.target_instances, west.target_instances) == (5, 2)
    assert east.forecast_tokens_per_s == 400.0  # interactive, as what it is held against
    assert (east.made_at_s, east.next_plan_s, east.valid_until_s) == (10.0, 610.0, 2400.0)
    assert of(soon=1.0, kept=1.0, two_plans=True)[0].soon_instances == 3
    assert of()[0].soon_instances is None


def test_an_instance_of_which_mostly_answers_are_asked_serves_fewer_tokens():
    able = Capability(200.0, 50.0, 250.0, "measured")
    (even,) = advice([[100.0]], [[100.0]], PlansFor(), able, [view()])
    (answers,) = advice([[0.0]], [[200.0]], PlansFor(), able, [view()])
    assert (even.target_instances, answers.target_instances) == (2, 4)


def test_algorithm_2_looks_at_the_window_after_this_one():
    able, plans_for = Capability(100.0, 50.0, 120.0, "measured"), make_strategy("preserve").plans_for
    (made,) = advice([[900.0, 300.0]], [[0.0, 50.0]], plans_for, able, [view()])
    assert (made.target_instances, made.forecast_tokens_per_s) == (3, 350.0)
    assert (made.next_plan_s, made.valid_until_s) == (610.0, 1210.0)


def test_an_instance_serves_at_most_what_its_profile_allows():
    scene = scenes.preserve("chat-like")
    engine = scene.models[0].engine()
    strict, loose = (
        measured_capability(engine, scene.clients, normalised_s=limit, percentile=98.0, seed=1)
        for limit in (0.045, 0.4)
    )
    assert strict.source == loose.source == "simulated"
    assert strict.total_tokens_per_s < loose.total_tokens_per_s


def test_hours_follow_an_instance_to_another_model():
    scene = scenes.sageserve(0.05)
    scaling = {"strategy": "reactive", "min_instances": 2, "max_instances": 26, "per_arrival": True}
    requests = scene.requests(scene.demand(0.02, 1), 1)
    made = Case.of({}, scene.scenario(scaling=scaling), requests, until_s=1800.0).simulate().result
    hours = hours_by_model(made)
    paid = made.state_s.sum(axis=0) / 3600
    assert list(hours) == [model.name for model in scene.models]
    assert sum(hours.values()) == pytest.approx(paid.sum() - paid[5] - paid[0])


def test_silos_separate_the_same_requests():
    scene = scenes.sageserve(0.02)
    drawn = scene.demand(0.05, 1)
    one, two = (stage(scene.scenario(siloed), workload=scene.requests(drawn, 1, siloed)) for siloed in (False, True))
    assert len(one.cluster.instances) == len(two.cluster.instances) == 240
    siloed = np.array([name.endswith(scenes.SILO) for name in two.cluster.models])[two.requests.model]
    assert (siloed == (two.requests.slo_class == 1)).all()
    assert (one.requests.prompt_tokens == two.requests.prompt_tokens).all()
    assert all(a <= b for a, b in pairwise(one.requests.arrival_s[:100]))
