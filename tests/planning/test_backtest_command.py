"""`manage.py backtest`: a trace or the ledger in, a table or one JSON object out."""

import csv
import json
import math
from datetime import UTC, datetime, timedelta
from io import StringIO

import numpy as np
import pytest
from django.core.management import CommandError, call_command

from controlplane.gateway.models import MinuteRow

pytestmark = pytest.mark.django_db

QUICK = ("--forecasters", "seasonal_naive", "ets")


def run(*arguments):
    out = StringIO()
    call_command("backtest", *map(str, arguments), stdout=out)
    return out.getvalue()


def bins(path, days=4, header="t_s,requests,prompt_tokens,output_tokens", change=None):
    """Return a servegen file of hourly steps in ten-minute bins; *change* edits its rows."""
    random = np.random.default_rng(0)
    rows = []
    for index in range(round(days * 144)):
        rate = 1000 + 600 * math.sin(2 * math.pi * index / 144) + 50 * random.random()
        rows.append([600 * index, 60, round(600 * rate), round(150 * rate)])
    if change:
        change(rows)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows(rows)
    return path


def test_a_trace_is_judged(tmp_path):
    """The table and the JSON object show the same figures; bins that are missing or partly collected are not judged."""

    def broken(rows):
        for index in range(500, 510):
            rows[index][1:] = [0, 0, 0]
        rows[510][1:] = [1, 600, 150]
        del rows[520:524]

    file = bins(tmp_path / "demand.csv", change=broken)
    answer = json.loads(run(file, *QUICK, "--fit-days", 3, "--json"))
    assert (answer["source"], answer["window_s"], answer["horizon_windows"]) == ("demand.csv", 600.0, 6)
    assert [(row["series"], row["quantity"], row["forecaster"]) for row in answer["rows"]] == [
        ("demand", "prompt", "seasonal_naive"), ("demand", "prompt", "ets"),
        ("demand", "output", "seasonal_naive"), ("demand", "output", "ets"),
    ]  # fmt: skip
    assert answer["series"][0]["gaps"] == 15
    for row in answer["rows"]:
        assert row["windows"] == 144 - 15
        assert 0 < row["mean_ape"] < row["max_ape"] < 1
        assert len(row["error_by_horizon"]) == 6
    text = run(file, *QUICK, "--fit-days", 3)
    lines = [line for line in text.splitlines() if line.startswith("│ ")]
    for row in answer["rows"]:
        shares = [f"{100 * row[name]:.2f}%" for name in ("error", "coverage_80")]
        assert any(row["forecaster"] in line and all(share in line for share in shares) for line in lines)
    assert "step 6" in text
    assert "step 7" not in text
    wider = json.loads(run(file, "--forecasters", "ets", "--window", 3600, "--fit-days", 3, "--json"))
    assert wider["series"][0]["test_windows"] == 24


def test_requests_of_any_trace_become_series(tmp_path):
    file = tmp_path / "burst.csv"
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["Timestamp", "Model", "Request tokens", "Response tokens"])
        for second in range(0, 4 * 3600, 5):
            writer.writerow([second, "gpt" if second % 2 else "chat", 100, 10 + second % 7])
    arguments = ("--format", "burstgpt", "--window", 60, "--json", "--forecasters", "ets")
    answer = json.loads(run(file, *arguments))
    assert {row["series"] for row in answer["rows"]} == {"chat", "gpt"}
    assert answer["series"][0]["fit_windows"] == int(0.7 * 239)
    one = json.loads(run(file, *arguments, "--model", "gpt"))
    assert {row["series"] for row in one["rows"]} == {"gpt"}
    with pytest.raises(CommandError, match="chat, gpt"):
        run(file, *arguments, "--model", "llama")


@pytest.fixture
def ledger():
    begin = datetime(2026, 11, 1, tzinfo=UTC)
    MinuteRow.objects.bulk_create(
        MinuteRow(
            minute=begin + timedelta(minutes=minute), model=model, region="eu", slo_class=slo_class, requests=1,
            prompt_tokens=6000 + minute % 60, output_tokens=600 + minute % 30,
        )
        for minute in range(300)
        for model, slo_class in (("a", "x"), ("a", "y"), ("b", "x"))
        if not (100 <= minute < 110 or (model == "b" and minute == 50))
    )  # fmt: skip


def test_the_ledger_is_judged_without_a_file(ledger):
    answer = json.loads(run(*QUICK, "--window", 60, "--json"))
    assert answer["source"] == "ledger"
    assert [(one["series"], one["quantity"], one["gaps"]) for one in answer["series"]] == [
        ("a eu", "prompt", 10), ("a eu", "output", 10), ("b eu", "prompt", 10), ("b eu", "output", 10),
    ]  # fmt: skip
    with pytest.raises(CommandError, match="no minute of c"):
        run("--model", "c")


def test_an_empty_ledger_is_an_error():
    with pytest.raises(CommandError, match="holds no minute yet"):
        run(*QUICK)


def edit(row, column, value):
    def change(rows):
        rows[row][column] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit(3, 2, "many"), "line 5, column prompt_tokens: 'many' is not a number"),
        (edit(3, 2, "-1"), "line 5, column prompt_tokens"),
        (edit(3, 0, 1234), "line 5, column t_s: '1234' is no multiple of 600 s"),
        (edit(3, 0, 600), "line 5, column t_s: '600' is not after the row above it"),
        (edit(3, 0, 6e12), "line 5, column t_s"),
        (lambda rows: rows.clear(), "holds no bin"),
    ],
)
def test_a_wrong_file_is_named_by_line_and_column(tmp_path, change, words):
    with pytest.raises(CommandError, match=words):
        run(bins(tmp_path / "demand.csv", change=change), *QUICK)


def test_files_that_are_not_there_or_have_other_columns(tmp_path):
    with pytest.raises(CommandError, match=r"none\.csv"):
        run(tmp_path / "none.csv")
    with pytest.raises(CommandError, match="column requests: is missing"):
        run(bins(tmp_path / "demand.csv", header="t_s,count,prompt_tokens,output_tokens"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--window", "0"), "--window"),
        (("--window", "90"), "a whole number of them"),
        (("--horizon", "0"), "--horizon"),
        (("--fit-days", "0"), "--fit-days"),
        (("--fit-days", "9"), "leave none to judge"),
        (("--model", "a"), "one model"),
        (("--forecasters", "oracle"), "oracle"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, arguments, words):
    with pytest.raises(CommandError, match=words):
        run(bins(tmp_path / "demand.csv"), *arguments)
