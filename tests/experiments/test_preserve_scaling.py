"""`manage.py reproduce` on a small scale: same in, same out; what is measured adds up; wrong options are named."""

import json
from dataclasses import replace
from io import StringIO
from itertools import pairwise

import numpy as np
import pytest
from django.core.management import CommandError, call_command

from controlplane.experiments import preserve_scaling as preserve
from controlplane.experiments import sageserve
from controlplane.experiments.shared import scenes
from controlplane.experiments.shared.advisors import by_quantity, by_total
from controlplane.experiments.shared.capability import measured_capability
from controlplane.experiments.shared.demand import DemandForecasts, Windows, forecast_demand, windows
from controlplane.experiments.shared.measures import hours_by_model
from scheduling.planning.capacity import Capability
from scheduling.scaling import PlansFor, make_strategy
from scheduling.simulation.strategies import Bounds, run_strategy
from tests.scheduling.scaling.views import view

SMALL = ("--days", "0.03", "--scale", "0.03", "--forecaster", "seasonal_naive")


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


def test_sageserve_is_measured_twice_alike_and_shown(tmp_path):
    arguments = ("sageserve", *SMALL, "--own-forecaster", "seasonal_naive", "--strategies", "reactive,lt_ua,pilothouse")
    first = json.loads(run(*arguments, "--json", "--out", str(tmp_path / "deep" / "result.json")))
    second = json.loads(run(*arguments, "--json"))
    assert without_times(first) == without_times(second)
    assert json.loads((tmp_path / "deep" / "result.json").read_text()) == first
    assert [each["demand"] for each in first["runs"]] == ["plain", "bursts"]
    plain, bursts = first["runs"]
    assert bursts["requests"] > plain["requests"] > 1000
    for each in first["runs"]:
        assert [row["strategy"] for row in each["rows"]] == ["reactive", "lt_ua", "pilothouse"]
        for row in each["rows"]:
            assert row["done"] + row["unserved"] == each["requests"]
            assert row["usd"] == pytest.approx(row["instance_hours"] * scenes.USD_PER_HOUR, rel=1e-4)
            assert sum(row["hours_by_model"].values()) == pytest.approx(row["instance_hours"], abs=0.01)
            assert 0.9 * 24 * 24 * 0.03 <= row["instance_hours"] <= 24 * 240 * 0.03
            assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["ttft_p99_s"]
    assert first["reported"]["lt_ua"] == {"instance_hours": -0.228, "waste_hours": -0.7}
    text = run(
        "sageserve", *SMALL, "--demand", "plain", "--own-forecaster", "seasonal_naive", "--strategies", "lt_i,reactive"
    )
    for word in ("lt_i", "reactive", "-24.8 %", "TTFT p95", "llama-2-70b hours"):
        assert word in text


def test_preserve_is_measured_and_shown():
    answer = json.loads(run("preserve-scaling", *SMALL, "--json"))
    rows = {(row["depth"], row["service"], row["strategy"]): row for row in answer["rows"]}
    of_depth = {"deep": set(preserve.STRATEGIES), "shallow": set(preserve.STRATEGIES) - {"hybrid_mean"}}
    assert set(rows) == {(at, each, name) for at in of_depth for each in preserve.SERVICES for name in of_depth[at]}
    for depth, names in of_depth.items():
        for service in preserve.SERVICES:
            static = rows[depth, service, "static"]
            assert static["instance_hours"] == pytest.approx(8 * 24 * 0.03, rel=0.05)
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
        (("--scale", "-1"), "--scale"),
        (("--seed", "-1"), "--seed"),
        (("--strategies", "lt_x"), "'lt_x' is none of reactive"),
        (("--forecaster", "crystal_ball"), "--forecaster: 'crystal_ball' is none of seasonal_naive"),
        (("--own-forecaster", "none"), "--own-forecaster"),
    ],
)
def test_wrong_options_are_named(arguments, words):
    with pytest.raises(CommandError, match=words):
        run("sageserve", *arguments)


# The parts


def test_demand_by_window_is_the_requests_own():
    scene = scenes.sageserve(0.02)
    drawn = scene.demand(0.25, 3)
    interactive, other = (
        windows(drawn, scene.streams, [name], 600.0, 21_600.0) for name in (scenes.INTERACTIVE, scenes.OTHER)
    )
    assert interactive.total.shape == (12, 36)
    tokens = float(drawn.prompt_tokens.sum() + drawn.output_tokens.sum())
    assert (interactive.total.sum() + other.total.sum()) * 600 == pytest.approx(tokens)
    at = scene.streams.index(("bloom-176b", "us-west"))
    model, region = (drawn.model.names.index("bloom-176b"), drawn.region.names.index("us-west"))
    own = (drawn.model.codes == model) & (drawn.region.codes == region) & (drawn.arrival_s < 600)
    assert (interactive.prompt[at, 0] + other.prompt[at, 0]) * 600 == pytest.approx(drawn.prompt_tokens[own].sum())


def test_a_forecast_knows_only_what_lies_behind_it():
    random = np.random.default_rng(0)
    history, actual = random.uniform(50, 100, (2, 432)), random.uniform(50, 100, (2, 36))
    made = forecast_demand("seasonal_naive", history, actual, 600.0, 6, 3)
    assert made.mean.shape == (6, 2, 3)
    changed = actual.copy()
    changed[:, 12:] *= 10
    again = forecast_demand("seasonal_naive", history, changed, 600.0, 6, 3)
    assert (again.mean[:3] == made.mean[:3]).all()
    assert [made.at(now_s) for now_s in (0.0, 3599.0, 3600.0, 1e9)] == [0, 0, 1, 5]
    with pytest.raises(ValueError, match="no forecaster 'x'"):
        forecast_demand("x", history, actual, 600.0, 6, 3)


def test_hour_peaks():
    rates = np.arange(14.0).reshape(1, 14)
    assert sageserve.hour_peaks(rates).tolist() == [[5.0, 11.0, 13.0]]


def forecasts(*values):
    mean = np.array([values])
    return DemandForecasts("x", 1, 600.0, mean, mean * 2, 0.0)


def test_the_programme_asks_for_what_the_forecast_needs():
    streams = [("llama", "east"), ("llama", "west")]
    other = Windows(600.0, np.full((2, 9), 50.0), np.zeros((2, 9)))
    views = [view(ready=2, spot=9), view(region="west", ready=2, spot=9)]

    def advice(plans_for):
        seen = forecasts([100.0, 100.0, 100.0, 400.0], [100.0] * 4)
        able = Capability(100.0, 100.0, 100.0, "measured")
        planner = by_total(streams, seen, other, plans_for, 600.0, {"llama": able}, [1.0, 1.0], 20, 1.0)
        planner.settings = replace(planner.settings, epsilon=1.0)
        return planner.advise(0.0, views)

    east, west = advice(PlansFor(two_plans=True))
    assert (east.soon_instances, west.soon_instances) == (2, 2)
    assert (east.target_instances, west.target_instances) == (5, 2)
    assert east.forecast_tokens_per_s == 450.0
    assert (east.made_at_s, east.next_plan_s, east.valid_until_s) == (0.0, 600.0, 2400.0)
    assert advice(PlansFor(soon=1.0, kept=1.0, two_plans=True))[0].soon_instances == 3
    assert advice(PlansFor())[0].soon_instances is None


def test_algorithm_2_looks_at_the_window_after_this_one():
    able = Capability(100.0, 50.0, 120.0, "measured")
    streams, plans_for = [("llama", "east")], make_strategy("preserve").plans_for
    planner = by_quantity(streams, forecasts([900.0, 300.0]), forecasts([0.0, 50.0]), able, [1.0], plans_for, 600.0)
    (made,) = planner.advise(10.0, [view()])
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
    cluster = scene.cluster()
    requests = scene.requests(cluster, scene.demand(0.02, 1), 1)
    made = run_strategy(cluster, requests, make_strategy("reactive"), bounds=Bounds(2, 26), until_s=1800.0)
    hours = hours_by_model(made.result)
    paid = made.result.state_s.sum(axis=0) / 3600
    assert list(hours) == [model.name for model in scene.models]
    assert sum(hours.values()) == pytest.approx(paid.sum() - paid[5] - paid[0])


def test_silos_separate_the_same_requests():
    scene = scenes.sageserve(0.02)
    workload = scene.demand(0.05, 1)
    one, two = (scene.requests(scene.cluster(siloed), workload, 1) for siloed in (False, True))
    cluster = scene.cluster(siloed=True)
    assert len(cluster.instances) == len(scene.cluster().instances) == 240
    siloed = np.array([name.endswith(scenes.SILO) for name in cluster.models])[two.model]
    assert (siloed == (two.slo_class == 1)).all()
    assert (one.prompt_tokens == two.prompt_tokens).all()
    assert all(a <= b for a, b in pairwise(one.arrival_s[:100]))
