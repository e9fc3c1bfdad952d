"""`manage.py simulate`: a scenario file in, a table of results and files out."""

import csv
import json
import math
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from tests.scheduling.simulation.test_scenario import EXAMPLES, RIGHT


def run(path: Path, *arguments: str) -> str:
    out = StringIO()
    call_command("simulate", str(path), *arguments, stdout=out)
    return out.getvalue()


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(RIGHT)
    return path


def values(answer: dict, measure: str, statistic: str, by: str = "all") -> list[float]:
    return [
        row["value"]
        for row in answer["measures"]
        if (row["by"], row["measure"], row["statistic"]) == (by, measure, statistic)
    ]


def test_a_scenario_is_run_and_shown(scenario: Path) -> None:
    text = run(scenario)
    for word in ("TTFT p50", "SLO met", "east", "west", "iw", "cost (USD)"):
        assert word in text
    answer = json.loads(run(scenario, "--json"))
    (requests,) = values(answer, "requests", "count")
    assert answer["requests"] == requests == values(answer, "done", "count")[0]
    (first_s,) = values(answer, "ttft_s", "p50")
    # A prompt of some 100 tokens takes 0.02 s on an idle instance, and so it is most of the time.
    assert 0.015 < first_s < 0.08
    assert sum(values(answer, "requests", "count", "region")) == requests
    assert values(answer, "slo_attainment", "ratio", "slo_class") == [pytest.approx(1.0, abs=0.05)]
    hours = {row["measure"]: row["value"] for row in answer["hours"] if row["by"] == "model"}
    # Reactive scaling lends out what a request a second does not need.
    assert hours["donated_h"] > 0
    assert hours["instance_h"] + hours["donated_h"] == pytest.approx(4 * answer["simulated_s"] / 3600)


def test_the_seed_decides(scenario: Path) -> None:
    def measured(*arguments: str) -> dict:
        answer = json.loads(run(scenario, "--json", *arguments))
        answer.pop("took_s")
        return answer

    assert measured() == measured()
    assert measured() == measured("--seed", "3")
    assert measured() != measured("--seed", "4")


def test_tables_are_written(scenario: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    answer = json.loads(run(scenario, "--out", str(out), "--requests", "--json"))
    assert sorted(path.name for path in out.iterdir()) == [
        "changes.csv", "counters.csv", "hours.csv", "measures.csv", "moves.csv", "plans.csv", "requests.csv", "result.json",
        "runs.csv", "series.csv",
    ]  # fmt: skip
    rows = list(csv.DictReader((out / "requests.csv").read_text().splitlines()))
    assert len(rows) == answer["requests"]
    assert {row["outcome"] for row in rows} == {"done"}
    assert {row["region"] for row in rows} == {"east", "west"}
    firsts = sorted(float(row["ttft_s"]) for row in rows)
    assert max(firsts) == pytest.approx(values(answer, "ttft_s", "max")[0])
    single = [row for row in rows if row["output_tokens"] == "1"]
    assert all(row["itl_s"] == "" for row in single)
    series = list(csv.DictReader((out / "series.csv").read_text().splitlines()))
    assert {row["region"] for row in series} == {"east", "west"}
    assert len(series) == 2 * math.ceil(answer["simulated_s"] / 60)
    assert json.loads((out / "result.json").read_text())["seed"] == 3


def test_the_small_example_runs() -> None:
    answer = json.loads(run(EXAMPLES / "small.toml", "--json"))
    assert answer["requests"] > 2000
    assert values(answer, "slo_attainment", "ratio")[0] > 0.9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("instances = 2", "instances = -2", r"scenario.toml, line 26, fleet\[0\].instances: .*not -2"),
        ("median = 100, p95 = 300, maximum = 800", "median = 900, p95 = 3000", r"clients: request \d+ has \d+ tokens"),
    ],
)
def test_a_wrong_scenario_is_one_line(scenario: Path, old: str, new: str, message: str) -> None:
    scenario.write_text(RIGHT.replace(old, new, 1))
    with pytest.raises(CommandError, match=message):
        run(scenario)


def test_wrong_arguments(scenario: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--seed must be at least 0"):
        run(scenario, "--seed", "-1")
    with pytest.raises(CommandError, match="give one"):
        run(scenario, "--requests")
    with pytest.raises(CommandError, match="No such file"):
        run(tmp_path / "nowhere.toml")
