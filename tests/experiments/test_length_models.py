"""`manage.py reproduce lengths` on small made-up sets with the tiny encoder, and clear words when it cannot run."""

import csv
import gzip
import io
import json
from pathlib import Path

import numpy as np
import pytest
from django.core.management import CommandError, call_command

from controlplane.experiments import length_models as lengths
from forecasting.lengths import Fitting, LengthQuery, Sample
from tests.forecasting.lengths.made import samples


def write(folder: Path) -> None:
    """The five sets and the two lists of lengths, in the form of the real ones."""
    made = samples(400)
    for name in (
        "alpaca_eval",
        "arena_bench_v1",
        "stanford_alpaca_5k",
        "gpteacher",
        "codealpaca",
        "seqsched_lengths",
        "proxy_lengths",
    ):
        (folder / name).mkdir(parents=True)
    prompts = [{"id": number, "instruction": each.query.text} for number, each in enumerate(made[:30])]
    (folder / "alpaca_eval" / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    with gzip.open(folder / "alpaca_eval" / "lengths.csv.gz", "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "prompt_id", "words", "chars"])
        for number in range(30):
            for model in range(20):
                writer.writerow(
                    [f"model-{model:02}", number, made[number].output_tokens + model, 5 * made[number].output_tokens]
                )
    with gzip.open(folder / "arena_bench_v1" / "pairs.jsonl.gz", "wt") as file:
        for each in made[30:80]:
            row = {
                "qid": "q",
                "model": each.query.model,
                "prompt": each.query.text,
                "output": "word " * each.output_tokens,
            }
            file.write(json.dumps(row) + "\n")

    def instructions(part: list[Sample], path: str) -> None:
        rows = [{"instruction": each.query.text, "input": "", "output": "word " * each.output_tokens} for each in part]
        (folder / path).write_text(json.dumps(rows), encoding="utf-8")

    instructions(made[80:160], "stanford_alpaca_5k/alpaca_5000.json")
    instructions(made[160:240], "gpteacher/roleplay-simple-deduped-roleplay-dataset.json")
    instructions(made[240:300], "gpteacher/toolformer-dedupe-only-dataset.json")
    instructions(made[300:350], "codealpaca/code_alpaca_2k.json")
    instructions(made[350:], "codealpaca/new_codealpaca.json")
    heats = [
        {"id": str(number), "L_t0.3": 90 + number, "L_t0.5": 100 + number, "L_t0.7": 110 + number}
        for number in range(50)
    ]
    for part in ("train", "val"):
        (folder / "seqsched_lengths" / f"alpaca-{part}-10k-length.json").write_text(json.dumps(heats), encoding="utf-8")
    with gzip.open(folder / "proxy_lengths" / "predictions_warmup_multi_cls_1000K.csv.gz", "wt") as file:
        file.write(",output_token_length,predicted_length,latency,model\n")
        for number in range(100):
            file.write(f"{number},{number + 1},{(number + 1) // 20},0.01,vicuna-13b\n")


def run(folder: Path, *options: str) -> dict:
    out = io.StringIO()
    call_command(
        "reproduce", "lengths", "--data", str(folder), "--encoder", "tiny", "--quick", "--json", *options, stdout=out
    )
    return json.loads(out.getvalue())


@pytest.mark.nightly
def test_every_model_is_in_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: object) -> None:
    settings.STATE_DIR = tmp_path / "state"  # type: ignore[attr-defined]
    monkeypatch.setattr(lengths, "QUICK", Fitting(tuned=32, read=48, head_epochs=2, most_tokens=24, trees=8))
    write(tmp_path / "data")
    result = run(tmp_path / "data")
    rows = {row["model"]: row for row in result["rows"]}
    assert set(rows) == set(lengths.ORDER)
    for row in rows.values():
        assert 0 <= row["acc_25"] <= row["acc_50"] <= row["acc_100"] <= 1
        assert row["fit_s"] > 0
        assert set(row["by_set"]) == set(result["sets"])
    assert rows["trees"]["mae"] < rows["prompt-buckets"]["mae"]  # what is said counts here, not at what length
    served = result["served"]
    assert set(served) == {"fcfs", *lengths.ORDER, "known"}
    assert max(row["jct_reduction"] for row in served.values()) == served["known"]["jct_reduction"] > 0
    assert result["verdict"]["best"]["mae"] == min(result["rows"], key=lambda row: row["mae"])["model"]
    assert result["floor"]["median_cv"] == pytest.approx(np.std([90, 100, 110]) / 125, rel=0.2)


def test_some_models_as_a_table(tmp_path: Path) -> None:
    write(tmp_path)
    out = io.StringIO()
    call_command(
        "reproduce",
        "lengths",
        "--data",
        str(tmp_path),
        "--strategies",
        "class-mean,prompt-buckets",
        "--quick",
        stdout=out,
    )
    shown = out.getvalue()
    for word in ("class-mean", "prompt-buckets", "PreServe's Table 2", "78.2", "Shortest first by", "Noise floor"):
        assert word in shown
    assert "ssjf" not in shown.split("PreServe's Table 2")[0]


@pytest.mark.nightly
def test_thoroughly_an_encoder_reads_every_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "THOROUGH", Fitting(tuned=16, read=1_000_000, head_epochs=1, most_tokens=16))
    write(tmp_path)
    out = io.StringIO()
    options = ("--data", str(tmp_path), "--encoder", "tiny", "--strategies", "ssjf-reg-l1", "--json")
    call_command("reproduce", "lengths", *options, "--thorough", stdout=out)
    result = json.loads(out.getvalue())
    assert result["effort"] == {"quick": False, "tuned_samples": 16, "read_prompts": result["training"]["prompts"]}
    with pytest.raises(CommandError, match="not allowed with"):
        call_command("reproduce", "lengths", *options, "--thorough", "--quick")


@pytest.mark.nightly
def test_missing_data_and_unknown_models_are_said(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is not there"):
        run(tmp_path)
    with pytest.raises(CommandError, match="none of"):
        run(tmp_path, "--strategies", "oracle")
    write(tmp_path)
    with pytest.raises(CommandError, match="No encoder"):
        call_command(
            "reproduce", "lengths", "--data", str(tmp_path), "--strategies", "ssjf-cls", "--encoder", str(tmp_path)
        )


def test_the_oracle_of_other_models_knows_the_prompt() -> None:
    made = [Sample(LengthQuery("a", 1, model=str(model)), 100) for model in range(5)]
    made += [Sample(LengthQuery("b", 1, model=str(model)), 500) for model in range(5)]
    assert lengths._among_models(made, [50, 150, 250, 350])["mae"] == 0.0
    assert lengths._among_models([made[0]], [50]) == {}


def test_the_floor_leaves_capped_answers_out() -> None:
    floor = lengths._floor([(100, 100, 100), (50, 100, 150), (512, 512, 512)])
    assert floor["prompts"] == 2
    assert floor["others_mae"] == pytest.approx((75 + 0 + 75) / 6)
