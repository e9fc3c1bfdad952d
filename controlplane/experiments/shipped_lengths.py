"""The worth of the shipped length model, on prompts and conversations that it was not fitted to.

Predictions are raw, corrected online by the class that the live service uses, and those of a moving histogram of the
tenant's lengths by that model. On conversations (`sharegpt_eval`: every answer of the assistant, its prompt is
all turns before it) also what shortest-first gains by them in our simulator, as a share of what it gains when lengths are
known.
"""

import gzip
import json
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from controlplane.experiments.experiment import Experiment, Progress, Result, Settings, columns, read_data
from controlplane.experiments.length_models import TEST_PROMPTS, thinned
from controlplane.experiments.ssjf import ROUNDS, completions
from controlplane.terminal import table
from forecasting.lengths import LengthQuery, Sample, Trees, bundled
from forecasting.lengths.baselines import TenantHistogram
from forecasting.lengths.datasets import (
    FREE,
    SETS,
    UNSEEN_SHARE,
    DataMissing,
    count_tokens,
    in_test,
    normalised,
    read_sets,
)
from forecasting.lengths.online import OUTPUT_TOKENS, Online
from forecasting.lengths.query import read_turns
from forecasting.lengths.scoring import class_edges, score

CONVERSATIONS: Final = "sharegpt_eval/sharegpt_eval.jsonl.gz"
ASSISTANT: Final = {"gpt": "assistant", "human": "user", "system": "system"}
LOAD: Final = 0.8
REMEMBERED: Final = 1000
"""Lengths of each (model, tenant) in the histogram."""
SHOWN: Final = read_data("lengths-shipped")["columns"]
METHODS: Final = ("raw", "calibrated", "histogram")
Values = NDArray[np.float64]


class MovingHistogram:
    """`TenantHistogram`, fitted before each answer to all lengths so far; of all groups together while one is unknown."""

    def __init__(self) -> None:
        self._model = TenantHistogram()
        self._lengths: dict[str, deque[int]] = defaultdict(lambda: deque(maxlen=REMEMBERED))

    def predict(self, query: LengthQuery) -> float:
        lengths = self._lengths.get(self._model.group(query)) or self._lengths.get("")
        return float(self._model.answer(list(lengths))[0]) if lengths else OUTPUT_TOKENS

    def learn(self, query: LengthQuery, real: int) -> None:
        for group in (self._model.group(query), ""):
            self._lengths[group].append(real)


def predicted(model: Trees, groups: Sequence[Sequence[Sample]]) -> dict[str, Values]:
    """Predict by each of `METHODS`; all of a group is predicted before any of it is learned."""
    online, histogram = Online(model), MovingHistogram()
    tokens_by_method: dict[str, list[float]] = {method: [] for method in METHODS}
    for group in groups:
        waiting = []
        for sample in group:
            tokens, quantiles = model.predict_one(sample.query)
            corrected = online.correct(sample.query, tokens, quantiles.tolist())
            for method, value in zip(METHODS, (tokens, corrected.tokens, histogram.predict(sample.query)), strict=True):
                tokens_by_method[method].append(value)
            waiting.append((sample, corrected))
        for sample, corrected in waiting:
            online.learn(sample.query, corrected, sample.output_tokens)
            histogram.learn(sample.query, sample.output_tokens)
    return {method: np.array(values) for method, values in tokens_by_method.items()}


def _unseen(model: Trees, folder: Path, seed: int) -> dict[str, Any]:
    """Measure prompts that the bundled trees has not seen: held-out ones of the free sets, the test part of the others."""
    try:
        split = read_sets(folder)
    except DataMissing as missing:
        return {"skipped": str(missing)}
    kept = [each for each in split.test if each.query.tenant not in FREE or in_test(each.query.text, UNSEEN_SHARE)]
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in thinned(kept, TEST_PROMPTS, seed):
        groups[normalised(sample.query.text)].append(sample)
    order = np.random.default_rng(seed).permutation(len(groups))
    drawn = [list(groups.values())[place] for place in order]
    samples = [sample for group in drawn for sample in group]
    said = predicted(model, drawn)
    tenants = np.array([sample.query.tenant for sample in samples])
    sets = {name: tenants == name for name in SETS if (tenants == name).any()}
    return {
        "prompts": len(drawn),
        "samples": len(samples),
        "rows": {method: _errors(values, samples) for method, values in said.items()},
        "mae_by_set": {
            name: {method: _errors(values, samples, mine)["mae"] for method, values in said.items()}
            for name, mine in sets.items()
        },
    }


def _errors(values: Values, samples: Sequence[Sample], mine: Any = slice(None)) -> dict[str, float]:
    """Return MAE in tokens, and the median of predicted over real lengths."""
    real = np.array([sample.output_tokens for sample in samples], float)[mine]
    said = values[mine]
    return {"mae": float(np.abs(said - real).mean()), "median_ratio": float(np.median(said / real))}


def read_conversations(file: Path) -> Iterator[list[Sample]]:
    """Yield the answers of each conversation, in its order. Raise DataMissing."""
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield list(_answers(json.loads(line)["conversations"]))
    except FileNotFoundError as error:
        raise DataMissing(f"{file} is not there.") from error
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise DataMissing(f"{file} cannot be read: {error}") from error


def _answers(turns: Sequence[dict[str, str]]) -> Iterator[Sample]:
    before: list[tuple[str, str]] = []
    tokens = 0
    for turn in turns:
        counted = count_tokens(turn["value"])
        if turn["from"] == "gpt" and before and counted:
            text, conversation = read_turns(before, before[0][1])
            query = LengthQuery(
                text, tokens, model="chatgpt", tenant="sharegpt", turns=len(before), conversation=conversation
            )
            yield Sample(query, counted)
        before.append((ASSISTANT.get(turn["from"], "user"), turn["value"]))
        tokens += counted


def _conversations(model: Trees, folder: Path, seed: int) -> dict[str, Any]:
    try:
        whole = list(read_conversations(folder / CONVERSATIONS))
    except DataMissing as missing:
        return {"skipped": str(missing)}
    order = np.random.default_rng(seed).permutation(len(whole))
    samples = [sample for place in order for sample in whole[place]]
    said = predicted(model, [[sample] for sample in samples])
    served = completions(samples, said, seed, LOAD, cv=1.0)
    jct_s = {name: row["jct_mean_s"] for name, row in served.items()}
    most = jct_s["fcfs"] - jct_s["known"]
    rows = {
        method: {**_errors(values, samples), "gain_share": (jct_s["fcfs"] - jct_s[method]) / most}
        for method, values in said.items()
    }
    return {
        "conversations": len(whole), "answers": len(samples), "load": LOAD, "jct_mean_s": jct_s, "rows": rows,
        "rounds": _rounds(samples, said),
    }  # fmt: skip


def _rounds(samples: Sequence[Sample], said: dict[str, Values]) -> list[dict[str, Any]]:
    """Return the five-class accuracy by round of the conversation (SSJF, figure 9), with the same classes in all."""
    real = np.array([sample.output_tokens for sample in samples], float)
    place = np.array([sample.query.conversation.answers + 1 if sample.query.conversation else 1 for sample in samples])
    return [
        {"round": number, "answers": int(mine.sum())}
        | {
            method: score(real[mine], values[mine], class_edges(real))["five_class_accuracy"]
            for method, values in said.items()
        }
        for number in ROUNDS
        if (mine := place == number).any()
    ]


def run(settings: Settings, progress: Progress) -> Result:
    """Return {"unseen", "conversations"}: measures of each, or {"skipped": why}."""
    folder, seed, model = settings["data"], settings["seed"], bundled()
    progress("shipped length model", 0, 2)
    unseen = _unseen(model, folder, seed)
    progress("shipped length model", 1, 2)
    conversations = _conversations(model, folder, seed)
    progress("shipped length model", 2, 2)
    return {"paper": "lengths-shipped", "seed": seed, "unseen": unseen, "conversations": conversations}


def show(console: Console, result: Result) -> None:
    unseen, conversations = result["unseen"], result["conversations"]
    if "skipped" in unseen:
        console.print(f"Prompts never seen: skipped. {unseen['skipped']}")
    else:
        title = f"{unseen['samples']:,} answers to {unseen['prompts']:,} prompts never seen by the shipped file"
        sets = [(name, f"sets/{name}", "{:.1f}") for name in unseen["mae_by_set"]]
        rows = [
            {**row, "method": method, "sets": {name: each[method] for name, each in unseen["mae_by_set"].items()}}
            for method, row in unseen["rows"].items()
        ]
        console.print(table(title, columns([*SHOWN["errors"], *sets]), rows))
    if "skipped" in conversations:
        console.print(f"Conversations: skipped. {conversations['skipped']}")
        return
    title = f"{conversations['answers']:,} answers in {conversations['conversations']:,} conversations"
    jct_s = conversations["jct_mean_s"]
    gains = [
        {"method": "by arrival", "jct_s": jct_s["fcfs"], "gain_share": 0.0},
        *({**row, "method": name, "jct_s": jct_s[name]} for name, row in conversations["rows"].items()),
        {"method": "lengths known", "jct_s": jct_s["known"], "gain_share": 1.0},
    ]
    console.print(table(title, columns([*SHOWN["errors"], *SHOWN["gains"]]), gains))
    console.print(table("Right class of five, by round", columns(SHOWN["rounds"]), conversations["rounds"]))


SHIPPED_LENGTHS: Final = Experiment.read("lengths-shipped", run=run, show=show)
