"""`manage.py reproduce preserve-routing` on small made-up data: every line is there, and what it rests on."""

import gzip
import json
from io import StringIO

import numpy as np
import pytest
from django.core.management import CommandError, call_command
from rich.console import Console

from controlplane.experiments import preserve_routing
from controlplane.experiments.preserve_routing import DEPTHS, PREDICTIONS, ROUTERS, changes, transferred


@pytest.fixture
def data(tmp_path, monkeypatch):
    random = np.random.default_rng(3)
    real = np.clip(random.geometric(1 / 150, 400), 1, 511)
    classes = np.clip(np.searchsorted([40, 90, 180, 300], real + random.normal(0, 40, 400)), 0, 4)
    table = tmp_path / "proxy_lengths" / "predictions_warmup_multi_cls_1000K.csv.gz"
    table.parent.mkdir()
    with gzip.open(table, "wt") as text:
        text.write(",output_token_length,predicted_length,latency,model\n")
        text.writelines(f"{n},{a},{b},0.01,x\n" for n, (a, b) in enumerate(zip(real, classes, strict=True)))
    trace = tmp_path / preserve_routing.AZURE
    trace.parent.mkdir()
    lines = [
        f"2023-11-16 18:{at // 60:02}:{at % 60:02}.0000000,{random.integers(50, 2500)},{random.integers(20, 500)}\n"
        for at in range(300)
    ]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    talks = tmp_path / preserve_routing.MOONCAKE
    talks.parent.mkdir()
    rows = []
    for at in range(60):
        blocks = [100 * (at % 3) + step for step in range(2 + at // 3)]
        rows.append({"timestamp": 200 * at, "input_length": 512 * len(blocks), "output_length": 50, "hash_ids": blocks})
    talks.write_text("\n".join(map(json.dumps, rows)))
    for name, value in {
        "DURATION_S": 20.0,
        "SEEDS": 1,
        "LOADS": (0.5, 1.0),
        "MOONCAKE_SPEEDS": (1.0,),
        "BUSY": 200,
    }.items():
        monkeypatch.setattr(preserve_routing, name, value)
    return tmp_path


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("reproduce", "preserve-routing", *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.nightly
def test_every_line_is_measured_and_shown(data):
    result = json.loads(run("--data", str(data), "--json"))
    rows = result["rows"]
    assert len(rows) == 2 * len(DEPTHS) * len(PREDICTIONS) * 2 * len(ROUTERS) + len(DEPTHS) * len(ROUTERS)
    for row in rows:
        assert 0 < row["ttft_mean_s"] <= row["ttft_p99_s"]
        assert 0 < row["normalised_mean_s"] <= row["normalised_p99_s"]
        assert 0 <= row["slo_met"] <= 1
        assert (row["cached"] > 0) == (row["scene"] == "mooncake")
    by_prefix = {row["router"]: row["cached"] for row in rows if (row["scene"], row["depth"]) == ("mooncake", "deep")}
    assert by_prefix["least_delay"] > by_prefix["round_robin"]
    for key, here in result["found"].items():
        scene, depth, predictions = key.split(", ")
        at_load = {
            row["router"]: row
            for row in rows
            if (row["scene"], row["depth"], row["predictions"]) == (scene, depth, predictions)
            and row["requests_per_s"] == here["requests_per_s"]
        }
        best = min(at_load[name]["ttft_mean_s"] for name in preserve_routing.BASELINES)
        assert here["preserve"]["ttft_mean"] == pytest.approx(at_load["preserve"]["ttft_mean_s"] / best - 1, abs=2e-3)
    console = Console(file=StringIO(), width=200)
    preserve_routing.PRESERVE_ROUTING.show(console, result)
    text = console.file.getvalue()
    assert "llama-2-13b: shallow queues at instances" in text
    compared = {row.measure: row for row in preserve_routing.PRESERVE_ROUTING.compare(result)}
    assert compared["preserve, llama-2-7b: ttft_mean"].paper == -0.711
    assert (
        compared["preserve, llama-2-7b: ttft_mean"].ours
        == (result["found"]["llama-2-7b, deep, predicted"]["preserve"]["ttft_mean"])
    )


def test_data_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CommandError, match="proxy_lengths"):
        run("--data", str(tmp_path))


def test_errors_are_transferred_by_rank():
    rows = np.array([[10, 0], [20, 0], [30, 1], [40, 1]])
    # Class 0 means 15 tokens, class 1 35: a quarter and three quarters of the real lengths are below these.
    outputs = np.array([400, 100, 300, 200])
    said = transferred(rows, outputs)
    assert said.tolist() == [325, 175, 325, 175]
    assert transferred(rows, np.array([7])).tolist() == [7]


def test_the_load_spoken_of_is_the_one_where_least_request_is_near_the_papers():
    rows = [
        {
            "scene": "llama-2-7b", "depth": "deep", "predictions": "true", "requests_per_s": per_s, "router": router,
            **{f"{name}_s": 1.0 + 0.1 * at for name in preserve_routing.LATENCIES}, "slo_met": slo_met,
        }
        for per_s, slo_met in ((7.0, 0.99), (8.0, 0.9), (9.0, 0.5))
        for at, router in enumerate(ROUTERS)
    ]  # fmt: skip
    (here,) = changes(rows).values()
    assert here["requests_per_s"] == 8.0
    assert here["preserve"]["ttft_mean"] == pytest.approx(0.4)
    assert here["preserve"]["violations"] == pytest.approx(0.0)
