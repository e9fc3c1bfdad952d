"""`manage.py reproduce lengths-shipped`: the shipped file on sets that it has not seen, and clear words without them."""

import gzip
import io
import json
from pathlib import Path

import pytest
from django.core.management import call_command

from controlplane.experiments import shipped_lengths
from forecasting.lengths import LengthQuery, Sample, bundled
from tests.experiments.test_length_models import write


def conversations(folder: Path, count: int = 30) -> None:
    (folder / "sharegpt_eval").mkdir()
    with gzip.open(folder / shipped_lengths.CONVERSATIONS, "wt") as file:
        for number in range(count):
            turns = [{"from": "gpt", "value": "of no prompt"}]
            for turn in range(1 + number % 4):
                turns.append({"from": "human", "value": f"Question {number} of {turn}?"})
                turns.append({"from": "gpt", "value": "word " * (20 + 80 * (number % 3))})
            file.write(json.dumps({"id": number, "conversations": turns}) + "\n")


def run(folder: Path, *options: str) -> str:
    out = io.StringIO()
    call_command("reproduce", "lengths-shipped", "--data", str(folder), *options, stdout=out)
    return out.getvalue()


def test_without_the_sets_it_says_what_is_skipped(tmp_path: Path) -> None:
    shown = run(tmp_path)
    assert "Prompts never seen: skipped." in shown
    assert "Conversations: skipped." in shown
    assert "sharegpt_eval.jsonl.gz is not there" in " ".join(shown.split())


def test_both_parts_are_measured(tmp_path: Path) -> None:
    write(tmp_path)
    conversations(tmp_path)
    result = json.loads(run(tmp_path, "--json"))
    for part in ("unseen", "conversations"):
        rows = result[part]["rows"]
        assert set(rows) == set(shipped_lengths.METHODS)
        assert all(row["mae"] > 0 and row["median_ratio"] > 0 for row in rows.values())
    assert result["conversations"]["answers"] == sum(1 + number % 4 for number in range(30))
    rounds = {row["round"]: row["answers"] for row in result["conversations"]["rounds"]}
    assert rounds == {2: 30, 3: 22, 4: 14, 5: 7}  # each begins with the answer to nothing
    jct_s = result["conversations"]["jct_mean_s"]
    assert jct_s["known"] <= jct_s["fcfs"]
    assert "lengths known" in run(tmp_path)


def test_turns_before_an_answer_are_its_prompt(tmp_path: Path) -> None:
    conversations(tmp_path, 4)
    answers = list(shipped_lengths.read_conversations(tmp_path / shipped_lengths.CONVERSATIONS))[3]
    assert [each.query.turns for each in answers] == [2, 4, 6, 8]  # the answer to nothing is a turn, and no sample
    assert [each.query.asked for each in answers] == [f"Question 3 of {turn}?" for turn in range(4)]
    assert all(each.query.conversation for each in answers)


def test_nothing_of_a_prompt_is_learned_before_all_of_it_is_predicted() -> None:
    query = LengthQuery("What is it?", 3, "m", "t")
    once, again = ([Sample(query, 900)] * 5 for _ in range(2))
    said = shipped_lengths.predicted(bundled(), [once, again])
    for method in ("calibrated", "histogram"):
        assert len(set(said[method][:5])) == 1
        assert said[method][5] > said[method][0]
    assert said["raw"][5] == pytest.approx(said["raw"][0])
