"""Scenarios with strategies, plans, failures and redeploys: each takes effect, and the same file gives the same."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from controlplane.simulation import forecasts, planner
from scheduling.simulation.scenario import load_scenario
from scheduling.simulation.staging.stage import stage
from tests.examples import at_night_but
from tests.scheduling.simulation.test_scenario import EXAMPLES, RIGHT

FOLLOWERS = ("sageserve", "preserve", "pilothouse", "outage")


def run(path: Path, *arguments: str) -> dict[str, Any]:
    out = StringIO()
    call_command("simulate", str(path), "--json", *arguments, stdout=out)
    answer: dict[str, Any] = json.loads(out.getvalue())
    answer.pop("took_s")
    return answer


def forget() -> None:
    """What this process keeps of simulations before."""
    forecasts.cached.cache_clear()


def example(folder: Path, name: str, **values: str) -> Path:
    """Return the example *name*, shorter, with other *values* of keys."""
    text = (EXAMPLES / f"{name}.toml").read_text()
    for key, value in {"duration_h": "0.75", "history_days": "1", **values}.items():
        text = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def changed(folder: Path, old: str, new: str) -> Path:
    assert old in RIGHT
    path = folder / "scenario.toml"
    path.write_text(RIGHT.replace(old, new, 1))
    return path


@pytest.mark.parametrize("name", at_night_but(("reactive", "outage"), ["reactive", *FOLLOWERS]))
def test_every_family_of_strategies_runs(tmp_path: Path, name: str) -> None:
    forecaster = {} if name == "outage" else {"forecaster": '"seasonal_naive"'}
    path = example(tmp_path, name, at_h="0.5", **forecaster)
    answer = run(path)
    forget()
    assert answer == run(path)
    assert answer["strategy"] == {
        "reactive": "reactive", "sageserve": "lt_ua", "preserve": "preserve", "pilothouse": "pilothouse",
        "outage": "lt_u, reactive",
    }[name]  # fmt: skip
    assert bool(answer["plans"]) == (name in FOLLOWERS)
    assert answer["instance_hours"] > 0
    assert answer["cost_usd"] > answer["instance_hours"]
    if name != "reactive":
        # The floor looks every second, and what was done is never more than what was wanted.
        assert all(abs(move["done"]) <= abs(move["wanted"]) and move["time_s"] % 1 == 0 for move in answer["moves"])
    if name == "outage":
        assert answer["failures"] >= 2


@pytest.mark.nightly
def test_the_same_again_has_the_plans_and_forecasts_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = example(tmp_path, "pilothouse", forecaster='"seasonal_naive"', duration_h="0.25")
    answer = run(path)
    monkeypatch.setattr(planner, "make_plan", None)
    monkeypatch.setattr(forecasts, "Fallback", None)
    assert answer["plans"]
    assert answer == run(path)
    forget()
    with pytest.raises(TypeError, match="NoneType"):
        run(path)


def test_plans_come_at_their_period_and_cover_what_they_are_for(tmp_path: Path) -> None:
    answer = run(example(tmp_path, "preserve"))
    made = sorted({plan["made_at_s"] for plan in answer["plans"]})
    assert made == [600.0 * step for step in range(len(made))]
    assert len(made) >= 4
    assert all(plan["valid_until_s"] >= plan["made_at_s"] + 600 for plan in answer["plans"])


def test_an_oracle_and_the_recent_minutes_plan_differently(tmp_path: Path) -> None:
    forecasts = {
        forecaster: [plan["forecast_tokens_per_s"] for plan in run(example(tmp_path, "outage", **{
            "forecaster": f'"{forecaster}"', "demand_level": '"mean"',
        }))["plans"]]
        for forecaster in ("oracle", "recent")
    }  # fmt: skip
    assert forecasts["oracle"][0] > 0
    assert forecasts["recent"][0] == 0  # nothing has been seen before the start


@pytest.mark.nightly
def test_capability_as_given_decides_how_many(tmp_path: Path) -> None:
    def most(tokens_per_s: str) -> int:
        answer = run(example(tmp_path, "preserve", total_tokens_per_s=tokens_per_s))
        return max(plan["target_instances"] for plan in answer["plans"])

    assert most("1000") > most("20000")


def test_a_region_that_fails_loses_its_instances(tmp_path: Path) -> None:
    failure = "[[failures]]\nat_h = 0.05\nregion = 'east'\nrepair_min = 1\n\n[demand]"
    path = changed(tmp_path, "[demand]", failure)
    path.write_text(
        path.read_text().replace('[scaling]\nstrategy = "reactive"\nmin_instances = 1\nmax_instances = 4\n', "")
    )
    out = tmp_path / "out"
    answer = run(path, "--out", str(out))
    assert answer["failures"] == 2
    assert answer["strategy"] == "none"
    rows = (out / "changes.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in rows if row.endswith(",failed")] == [
        ["180.0", "m-east-1"], ["180.0", "m-east-2"],
    ]  # fmt: skip
    assert run(path, "--seed", "3") == answer


@pytest.mark.parametrize("strategy", ["reactive", "siloed"])
def test_nothing_serves_in_a_lost_region_before_it_is_back(tmp_path: Path, strategy: str) -> None:
    """Its empty places fail with it: no scaler fills them, and they are empty again afterwards."""
    failure = "[[failures]]\nat_h = 0.05\nregion = 'east'\nrepair_min = 1\n\n[demand]"
    path = changed(tmp_path, "[demand]", failure)
    text = path.read_text().replace('strategy = "reactive"', f'strategy = "{strategy}"')
    path.write_text(text.replace("instances = 2\n", "instances = 2\nempty = 2\n", 1).replace("sample_s", "# sample_s"))
    out = tmp_path / "out"
    run(path, "--out", str(out))
    rows = [row.split(",") for row in (out / "changes.csv").read_text().splitlines()[1:]]
    own = [(float(at), name, after) for at, name, *_, after in rows if "-east-" in name]
    assert {name for at, name, after in own if at == 180.0} == {f"m-east-{number}" for number in (1, 2, 3, 4)}
    assert [each for each in own if 180.0 < each[0] < 240.0] == []
    back = {name: after for at, name, after in own if at == 240.0}
    assert (back["m-east-1"], back["m-east-2"]) == ("loading", "loading")
    assert {back["m-east-3"], back["m-east-4"]} == {"empty"}


def test_planners_do_not_count_on_what_is_lost(tmp_path: Path) -> None:
    failure = "[[failures]]\nat_h = 0.05\nregion = 'east'\nrepair_min = 1\n\n[demand]"
    path = changed(tmp_path, "[demand]", failure)
    text = path.read_text().replace('strategy = "reactive"', 'strategy = "lt_i"')
    path.write_text(text.replace("instances = 2\n", "instances = 2\nempty = 2\n", 1))
    scenario = load_scenario(path)
    planned = planner.planner_of(stage(scenario, path))
    assert planned is not None

    def most(now_s: float) -> dict[str, tuple[int, int]]:
        fleet = planned.inputs_at(now_s, []).fleet
        return {
            region: (row.max_instances, fleet.units[region, gpu]) for (_, region, gpu), row in fleet.deployments.items()
        }

    whole = most(0.0)
    assert whole["east"] == (4, 4)
    assert most(180.0) == most(239.0) == whole | {"east": (0, 0)}
    assert most(240.0) == whole


def test_spot_goes_over_to_another_model_when_the_scenario_says(tmp_path: Path) -> None:
    text = RIGHT.replace("instances = 2", "instances = 2\nspot = 1")
    text = text.replace(
        "[models.m]\ncontext_tokens = 1000", "[models.m]\ncontext_tokens = 1000\n[models.n]\ncontext_tokens = 1000"
    )
    profile, group = (text[text.index(f"[[{name}]]") :].split("\n\n", 1)[0] for name in ("profiles", "fleet"))
    other = f"{profile}\n\n{group}".replace('"m"', '"n"')
    redeploy = "[[redeploys]]\nat_h = 0.01\nregion = 'west'\nfrom_model = 'n'\nto_model = 'm'\ncount = 3"
    path = tmp_path / "scenario.toml"
    path.write_text(f"{text}\n{other}\n{redeploy}\n")
    counters = {row["counter"]: row["value"] for row in run(path)["counters"]}
    assert counters["redeploys"] == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"reactive"', '"hope"', r"line 32, scaling: there is no strategy 'hope'; there is siloed, reactive"),
        (
            '"reactive"',
            '"lt_u"\nparameters = { speed = 2 }',
            r"line 32, scaling: lt_u has no parameter 'speed'; it has",
        ),
        (
            "[demand]",
            "[forecast]\nforecaster = 'crystal'\n[demand]",
            r"line 38, forecast.forecaster: must be one of oracle",
        ),
        (
            "[demand]",
            "[planner]\nperiod = 3\n[demand]",
            r"planner.period: is not a key here; there is period_s, horizon_s",
        ),
        ("[demand]", "[planner]\nepsilon = 3\n[demand]", r"planner.epsilon: should be less than or equal to 1, not 3"),
        ("[demand]", "[forecast]\nwindow_s = 90\n[demand]", r"forecast.window_s: should be a multiple of 60, not 90"),
        (
            "[demand]",
            "[predictions]\nbias = 2\n[demand]",
            r"predictions: log_sd and bias are those of kind error, not of",
        ),
        ("[demand]", "[[failures]]\nat_h = 1\n[demand]", r"failures\[0\]: give instance or region"),
        (
            "[demand]",
            "[[failures]]\nat_h = 1\ninstance = 'x'\n[demand]",
            r"failures\[0\].instance: there is no instance 'x'; there is m-east-1",
        ),
        (
            "[demand]",
            "[[endpoints]]\nmodel = 'x'\n[demand]",
            r"endpoints\[0\].model: there is no model 'x'; there is m",
        ),
        (
            "[demand]",
            "[[endpoints]]\nmodel = 'm'\nmin_instances = 9\n[demand]",
            r"endpoints\[0\]: min_instances \(9\) is above max_instances \(4\)",
        ),
        (
            '"reactive"',
            '"lt_u"\n[[endpoints]]\nmodel = "m"\nregion = "west"\nstrategy = "lt_i"\n[policies]',
            r"endpoints\[0\].strategy: m follows plans for lt_u in another region",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = changed(tmp_path, old, new)
    if "policies" in new:
        path.write_text(path.read_text().replace("[policies]\nmin_instances = 1\nmax_instances = 4\n", "[policies]\n"))
    with pytest.raises(CommandError, match=message):
        run(path)


def test_a_bundle_has_its_strategy_and_forecaster(tmp_path: Path) -> None:
    """The same as individual keys; an unknown forecaster of one model is named."""
    text = RIGHT.replace('strategy = "reactive"\n', "").replace(
        "context_tokens = 1000", "context_tokens = 1000\nbundle = 'SageServe LT-UA'"
    )
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    bundled = run(path)
    assert bundled["strategy"] == "lt_ua"
    assert bundled["plans"]
    alone = RIGHT.replace('strategy = "reactive"', 'strategy = "lt_ua"')
    path.write_text(alone + "\n[policies]\nordering = 'priority'\n[forecast]\nforecaster = 'arima'\n")
    assert run(path) == bundled
    path.write_text(alone + "\n[[endpoints]]\nmodel = 'm'\nforecaster = 'luck'\n")
    with pytest.raises(CommandError, match=r"endpoints\[0\].forecaster: must be one of oracle, .* not 'luck'"):
        run(path)
