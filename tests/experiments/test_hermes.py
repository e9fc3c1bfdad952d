"""`manage.py reproduce hermes` on a few runs: the same twice, orders paired by seed, shown beside the paper."""

import json
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from controlplane.experiments import hermes
from controlplane.experiments.hermes import LLAMA_7B, PARTS, slowdown


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("reproduce", "hermes", *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.nightly
def test_orders_serve_the_same_runs_and_are_compared(tmp_path):
    options = ("--scale", "0.1", "--seeds", "2", "--data", str(tmp_path), "--intensities", "3x")
    some = ("--parts", "7b", "--systems", "vLLM;Hermes;oracle")
    result = json.loads(run(*options, *some, "--json"))
    assert result["arrivals"] == "gaps of CV 3"
    rows = {row["system"]: row for row in result["rows"]}
    assert list(rows) == ["vLLM", "Hermes", "oracle"]
    for row in rows.values():
        assert row["runs"] == [30, 30]
        assert row["calls"] == rows["vLLM"]["calls"]
        assert all(p50 <= p95 for p50, p95 in zip(row["p50_s"], row["p95_s"], strict=True))
    assert sum(rows["Hermes"]["mean_s"]) < sum(rows["vLLM"]["mean_s"])
    again = json.loads(run(*options, "--parts", "7b", "--systems", "Hermes", "--json"))
    assert again["rows"] == [rows["Hermes"]]
    interval = hermes.against(rows["Hermes"], rows["vLLM"], "mean_s")
    assert interval.low <= interval.mean <= interval.high


def test_deadlines_are_counted_by_factor(tmp_path):
    options = ("--parts", "deadlines", "--systems", "EDF;Hermes-DDL", "--scale", "0.05", "--seeds", "1")
    text = run(*options, "--data", str(tmp_path))
    assert "at 1.5x" in text
    assert "deadlines met, Hermes-DDL over EDF" in text
    assert "7B 1x" not in text  # of another part


def test_what_does_not_exist_is_named():
    with pytest.raises(CommandError, match="None of the parts has these systems"):
        run("--parts", "7b", "--systems", "Orca")
    with pytest.raises(CommandError, match="--parts: '7c' is none of 7b, 70b"):
        run("--parts", "7c")


def test_a_full_instance_decodes_slower():
    assert 1.5 < slowdown(LLAMA_7B) < 3
    assert all(set(part["windows"]) <= set(hermes.DATA["intensities"]) for part in PARTS.values())
