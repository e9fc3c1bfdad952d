"""Data sets as samples: split by prompt, no prompt twice; on the real sets where they are there."""

import gzip
import json
import os
from pathlib import Path

import pytest

from forecasting.lengths import datasets
from forecasting.lengths.datasets import DataMissing, count_tokens, in_test, normalised, read_sets

REAL = Path(os.environ.get("PILOTHOUSE_DATA", Path(__file__).parents[4] / "shared" / "data"))
real_data = pytest.mark.skipif(
    not (REAL / "gpteacher").is_dir(),
    reason=f"The data sets are not below {REAL} (PILOTHOUSE_DATA names another folder).",
)


def write(folder: Path) -> None:
    for name in ("arena_bench_v1", "gpteacher"):
        (folder / name).mkdir(parents=True)
    with gzip.open(folder / "arena_bench_v1" / "pairs.jsonl.gz", "wt", encoding="utf-8") as file:
        for number in range(40):
            for model in ("a", "b"):
                row = {
                    "qid": str(number),
                    "model": model,
                    "prompt": f"Prompt {number}!",
                    "output": "word " * (number + 1),
                }
                file.write(json.dumps(row) + "\n")
    roleplay = [{"instruction": f"prompt  {number}", "input": "", "output": "one two."} for number in range(30, 60)]
    tools = [{"instruction": "use it", "input": f"case {number}", "output": "x" * (number % 2)} for number in range(20)]
    for part, rows in (("roleplay-simple-deduped-roleplay", roleplay), ("toolformer-dedupe-only", tools)):
        (folder / "gpteacher" / f"{part}-dataset.json").write_text(json.dumps(rows), encoding="utf-8")


def test_parts_share_no_prompt_and_sets_neither(tmp_path: Path) -> None:
    write(tmp_path)
    split = read_sets(tmp_path, datasets.FREE)
    training, test = ({normalised(each.query.text) for each in part} for part in (split.training, split.test))
    assert training
    assert test
    assert not training & test
    every = split.training + split.test
    arena = [each for each in every if each.query.tenant == "arena_bench_v1"]
    gpteacher = [each for each in every if each.query.tenant == "gpteacher"]
    assert len(arena) == 80
    assert len(gpteacher) == 20 + 10  # prompts 40 to 59, and the tool calls that were answered
    assert not {normalised(each.query.text) for each in arena} & {normalised(each.query.text) for each in gpteacher}
    assert read_sets(tmp_path, datasets.FREE) == split


def test_the_part_depends_on_words_alone() -> None:
    assert in_test("Write a story!") == in_test("  write A   STORY ")
    share = sum(in_test(f"prompt {number}") for number in range(2000)) / 2000
    assert share == pytest.approx(datasets.TEST_SHARE, abs=0.04)


def test_tokens_are_counted_by_pieces() -> None:
    assert count_tokens("") == 0
    assert count_tokens("Hello, world! " * 25) == round(1.09 * 100)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="is not there"):
        read_sets(tmp_path, ["arena_bench_v1"])
    write(tmp_path)
    (tmp_path / "arena_bench_v1" / "pairs.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataMissing, match="cannot be read"):
        read_sets(tmp_path, ["arena_bench_v1"])
    (tmp_path / "gpteacher" / "toolformer-dedupe-only-dataset.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataMissing, match="cannot be read"):
        read_sets(tmp_path, ["gpteacher"])


@real_data
@pytest.mark.nightly
def test_real_sets_hold_what_they_should() -> None:
    split = read_sets(REAL)
    counts = {name: sum(each.query.tenant == name for each in split.training + split.test) for name in datasets.SETS}
    assert counts["alpaca_eval"] > 13_000
    assert counts["arena_bench_v1"] > 5_000
    assert min(counts.values()) > 4_000
    assert not {normalised(each.query.text) for each in split.training} & {
        normalised(each.query.text) for each in split.test
    }
    assert 0.25 < len(split.test) / (len(split.training) + len(split.test)) < 0.35


@real_data
def test_lengths_at_several_temperatures_and_released_predictions() -> None:
    lengths = datasets.temperature_lengths(REAL)
    assert len(lengths) == 20_000
    assert max(max(row) for row in lengths) <= 514  # capped at 512 new tokens, counted with the marks
    released = datasets.proxy_predictions(REAL)
    assert len(released) > 80_000
    assert {named for _, named in released} <= set(range(5))
