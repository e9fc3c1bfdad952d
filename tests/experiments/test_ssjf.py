"""`manage.py reproduce ssjf` on a small table of lengths: the same twice, and orderings as they must be."""

import gzip
import json
from io import StringIO

import numpy as np
import pytest
from django.core.management import CommandError, call_command

from controlplane.experiments import ssjf

HEAD = ",output_token_length,predicted_length,latency,model\n"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder as the published one: five classes, right in six of ten."""
    random = np.random.default_rng(0)
    output = np.clip(random.geometric(1 / 90, 600), 1, 511)
    edges = np.quantile(output, [0.2, 0.4, 0.6, 0.8])
    given = np.where(random.random(600) < 0.6, np.searchsorted(edges, output), random.integers(0, 5, 600))
    file = tmp_path / ssjf.LENGTHS
    file.parent.mkdir()
    with gzip.open(file, "wt") as text:
        text.write(HEAD)
        text.writelines(f"{n},{a},{b},0.01,x\n" for n, (a, b) in enumerate(zip(output, given, strict=True)))
    trace = tmp_path / ssjf.TRACES["azure code"][0]
    trace.parent.mkdir()
    moments = np.cumsum(random.gamma(0.2, 5.0, 40))
    lines = [f"2023-11-16 18:{int(at // 60):02}:{at % 60:09.6f}0,10,20\n" for at in moments]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    for name, values in {
        "LOADS": (0.9,), "CVS": (4.0,), "BATCHES": (1, 8), "ROUNDS": (2,), "STRETCHES": (0.0, 10.0, 1000.0),
    }.items():  # fmt: skip
        monkeypatch.setattr(ssjf, name, values)
    return tmp_path


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("reproduce", "ssjf", *arguments, stdout=out)
    return out.getvalue()


@pytest.mark.nightly
def test_it_is_measured_twice_alike_and_shown(data):
    options = ("--data", str(data), "--scale", "0.1")
    result = json.loads(run(*options, "--json"))
    assert json.loads(run(*options, "--json")) == result
    rows = {(row["varied"], row["mode"], row["value"], row["ordering"]): row for row in result["rows"]}
    assert {row["varied"] for row in result["rows"]} == {
        "rate", "burstiness", "trace", "batch", "rounds", "predictor", "stretch",
    }  # fmt: skip
    for (varied, mode, value, ordering), row in rows.items():
        assert 0 < row["jct_p50_s"] <= row["jct_p99_s"]
        assert row["throughput"] > 0
        if ordering == "fcfs":
            oracle = rows[varied, mode, value, "sjf"]
            assert oracle["jct_mean_s"] < row["jct_mean_s"]
            assert rows[varied, mode, value, "ssjf"]["jct_mean_s"] < row["jct_mean_s"]
            # The same work under the same batching rules: over the whole run hardly anything can be won.
            if mode == "none":
                assert oracle["throughput"] == pytest.approx(row["throughput"], rel=0.05)
    aged = {row["stretch"]: row for row in result["rows"] if row["varied"] == "stretch" and row["ordering"] == "ssjf"}
    assert aged[1000.0]["jct_mean_s"] < aged[10.0]["jct_mean_s"] < aged[0.0]["jct_mean_s"]
    assert aged[0.0]["wait_most_s"] < rows["stretch", "continuous", 0.0, "shortest"]["wait_most_s"]
    changed = result["found"]["rate"]["none"]["ssjf"]
    before, after = (rows["rate", "none", 0.9, name]["jct_mean_s"] for name in ("fcfs", "ssjf"))
    assert changed["jct_reduction"] == pytest.approx(1 - after / before, abs=1e-3)
    text = run(*options)
    for words in ("-34.5 %", "x 3.6", "dynamic", "azure code", "Aging"):
        assert words in text


@pytest.mark.nightly
def test_a_batch_of_one_is_no_batching(data):
    rows = {
        (row["mode"], row["ordering"]): row["jct_mean_s"]
        for row in json.loads(run("--data", str(data), "--scale", "0.05", "--json"))["rows"]
        if row["varied"] == "batch" and row["value"] == 1
    }
    for ordering in ssjf.ORDERINGS:
        assert rows["dynamic", ordering] == pytest.approx(rows["continuous", ordering], rel=0.1)


def test_later_rounds_have_all_before_them_in_their_prompt(data):
    lengths = ssjf.read_lengths(data)
    first, third = (ssjf.draw_jobs(lengths, 500, 1, rounds) for rounds in (1, 3))
    assert third[0].mean() == pytest.approx(3 * first[0].mean() + 2 * lengths.output.mean(), rel=0.15)
    assert third[1].mean() == pytest.approx(first[1].mean(), rel=0.15)


def test_classes_are_worth_what_the_other_half_says(data):
    lengths = ssjf.read_lengths(data)
    assert lengths.output.size == 300
    assert 2 <= np.unique(lengths.predicted).size <= 5
    assert np.corrcoef(lengths.output, lengths.predicted)[0, 1] > 0.3


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"no gzip",
        gzip.compress(b"a,b\n1,2\n", mtime=0),
        gzip.compress(HEAD.encode() + b"0,x,1,0,y\n", mtime=0),
        gzip.compress(HEAD.encode(), mtime=0),
    ],
)
def test_data_that_is_not_there_or_wrong_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / ssjf.LENGTHS).parent.mkdir()
        (tmp_path / ssjf.LENGTHS).write_bytes(content)
    with pytest.raises(CommandError, match=r"--data: .*predictions_warmup_multi_cls_1000K\.csv\.gz"):
        run("--data", str(tmp_path))
