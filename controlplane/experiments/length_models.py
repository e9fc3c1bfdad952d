"""Every length model on the same prompts, against SSJF's Table 2 and PreServe's Table 2, and the noise floor of any model.

What serving gains by each model is simulated with the model's own predictions of the test's answers, beside serving by
arrival and by true lengths.

Prompts are split 7 to 3, as in PreServe; those of the test are thinned to as many from each set, and every model is asked
for the same ones. Encoders are fine-tuned on a part of the samples (`Fitting`): a core reads about fifty prompts a second.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from controlplane.experiments.experiment import (
    Comparison,
    Experiment,
    Progress,
    Result,
    Settings,
    columns,
    read_data,
)
from controlplane.experiments.ssjf import LOADS, USUAL_CV, USUAL_LOAD, completions
from controlplane.terminal import table
from forecasting.lengths import MODELS, Fitting, LengthModel, LengthQuery, Sample, Trees, unavailable_reason
from forecasting.lengths.datasets import SETS, normalised, proxy_predictions, read_sets, temperature_lengths
from forecasting.lengths.proxy import Proxy
from forecasting.lengths.scoring import class_edges, full_score, score

TEST_PROMPTS: Final = 250
"""Of each set, at most."""
USUAL: Final = Fitting()
QUICK_TEST_PROMPTS: Final = 120
QUICK: Final = Fitting(tuned=480, read=800, head_epochs=15, most_tokens=64, trees=60)
THOROUGH: Final = Fitting(tuned=8000, read=1_000_000)
ORDER: Final = (
    "class-mean", "tenant-histogram", "prompt-buckets", "trees", "ssjf-reg-l1", "ssjf-reg-mse", "ssjf-cls",
    "ssjf-ordinal-l1", "ssjf-ordinal-mse", "ssjf-binary", "ssjf-pairwise", "preserve", "ours",
)  # fmt: skip
ENCODERS: Final = tuple(name for name in ORDER if issubclass(MODELS[name], Proxy))
ASKED_ALONE: Final = 40
"""Queries that are asked one by one, for the time that one takes."""

DATA: Final = read_data("lengths")
PAPER: Final[Mapping[str, Any]] = DATA["reported"]
CAPPED_AT: Final = 512  # of the lengths at several temperatures


def _fitted(model: LengthModel, samples: Sequence[Sample]) -> tuple[LengthModel, float]:
    """Return the fitted model and the CPU seconds of its fit."""
    start = time.process_time()
    model.fit(samples)
    return model, time.process_time() - start


def _row(
    name: str, fitted: tuple[LengthModel, float], test: Sequence[Sample], edges: Any
) -> tuple[dict[str, Any], NDArray[np.float64]]:
    """Return the measures of a model, and its predictions."""
    model, fit_s = fitted
    queries = [sample.query for sample in test]
    real = np.array([sample.output_tokens for sample in test], float)
    predictions = model.predict(queries)
    sets = np.array([sample.query.tenant for sample in test])
    by_set = {
        each: score(real[sets == each], predictions.tokens[sets == each], edges)
        for each in SETS
        if (sets == each).any()
    }
    return {
        "model": name,
        **full_score(real, predictions, edges),
        "by_set": by_set,
        "fit_s": fit_s,
        "predict_ms": _milliseconds(model, queries),
    }, predictions.tokens


def _served(test: Sequence[Sample], said: Mapping[str, NDArray[np.float64]], seed: int) -> dict[str, dict[str, float]]:
    """Return, against serving by arrival, what shortest first by each of *said* wins, and by true lengths (`known`).

    JCT is at the usual load, throughput at the highest: below its capacity an instance serves all that comes in any order.
    """
    usual, most = (completions(test, said, seed, load, USUAL_CV) for load in (USUAL_LOAD, LOADS[-1]))
    return {
        name: {
            "jct_mean_s": row["jct_mean_s"],
            "jct_reduction": 1.0 - row["jct_mean_s"] / usual["fcfs"]["jct_mean_s"],
            "throughput_factor": most[name]["throughput_arriving"] / most["fcfs"]["throughput_arriving"],
        }
        for name, row in usual.items()
    }


def _milliseconds(model: LengthModel, queries: Sequence[LengthQuery]) -> float:
    """Return the median CPU milliseconds of one prediction; `ours` has read the prompts already."""
    taken = []
    for query in queries[:: max(1, len(queries) // ASKED_ALONE)]:
        start = time.process_time()
        model.predict_one(query)
        taken.append(time.process_time() - start)
    return 1000 * float(np.median(taken))


def thinned(samples: Sequence[Sample], most: int, seed: int) -> list[Sample]:
    """Return all samples of at most *most* prompts of each set."""
    generator = np.random.default_rng(seed)
    kept: set[tuple[str, str]] = set()
    for name in SETS:
        prompts = sorted({normalised(each.query.text) for each in samples if each.query.tenant == name})
        chosen = generator.permutation(len(prompts))[:most]
        kept |= {(name, prompts[index]) for index in chosen}
    return [each for each in samples if (each.query.tenant, normalised(each.query.text)) in kept]


def _floor(lengths: Sequence[tuple[int, ...]]) -> dict[str, float]:
    """Return the error of a model that knows each prompt's mean: answers to the same prompt at three temperatures.

    The mean is taken over the other two answers; prompts with a capped answer are left out.
    """
    table = np.array([row for row in lengths if max(row) < CAPPED_AT], float)
    spread = table.std(axis=1) / table.mean(axis=1)
    others = (table.sum(axis=1, keepdims=True) - table) / (table.shape[1] - 1)
    known = score(table.ravel(), others.ravel())
    own_mean = score(table.ravel(), np.repeat(table.mean(axis=1), table.shape[1]))
    return {
        "prompts": float(len(table)),
        "median_cv": float(np.median(spread)),
        "mean_tokens": float(table.mean()),
        **{f"others_{name}": value for name, value in known.items()},
        "own_mean_mae": own_mean["mae"],
    }


def _among_models(samples: Sequence[Sample], edges: Any) -> dict[str, Any]:
    """Return the error of the other models' answers to the same prompt: their mean, and the mean corrected for the model.

    The first ignores which model is asked, so a model that knows it can do better, and it is no floor. The second adds, in
    logarithms, how much longer this model's answers to the other prompts are than the others' to the same ones.
    """
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.query.text, []).append(sample)
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        return {}
    real, mean, logs = [], [], []
    owner: list[tuple[str, str]] = []
    for group in several:
        own = np.array([sample.output_tokens for sample in group], float)
        real += own.tolist()
        mean += ((own.sum() - own) / (len(own) - 1)).tolist()
        log = np.log(own)
        logs += [((log.sum() - log) / (len(log) - 1)).tolist()]
        owner += [(sample.query.tenant, sample.query.model) for sample in group]
    others = np.concatenate(logs)
    above = np.log(real) - others
    habits: dict[tuple[str, str], list[float]] = {}
    for key, value in zip(owner, above, strict=True):
        habits.setdefault(key, []).append(value)
    adjusted = [
        said + (sum(habits[key]) - value) / max(len(habits[key]) - 1, 1)
        for key, value, said in zip(owner, above, others, strict=True)
    ]
    return {**score(real, mean, edges), "who_answers_known": score(real, np.exp(adjusted), edges)}


def _released(rows: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return the accuracy of the class in SSJF's released predictions, and that of always naming the commonest."""
    real, named = np.array(rows).T
    edges = class_edges(real)
    truth = np.searchsorted(edges, real)
    counts = np.bincount(truth)
    return {
        "requests": float(len(rows)),
        "five_class_accuracy": float((truth == named).mean()),
        "commonest": float(counts.max() / counts.sum()),
    }


def _verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the best model by each measure, and whether the trees are as exact as the best single encoder."""
    best = {
        measure: (min if measure == "mae" else max)(rows, key=lambda row: row[measure])["model"]
        for measure in ("mae", "acc_25", "acc_50", "acc_100", "rank_correlation", "five_class_accuracy")
    }
    encoders = [row for row in rows if row["model"] in ENCODERS]
    trees = next((row for row in rows if row["model"] == Trees.name), None)
    against = min(encoders, key=lambda row: row["mae"], default=None)
    return {
        "best": best,
        "best_encoder": against and against["model"],
        "trees_as_exact": bool(trees and against and trees["mae"] <= against["mae"]),
    }


def run(settings: Settings, progress: Progress) -> Result:
    """Fit and test every model. Raise DataMissing without the data sets, ValueError for an unknown encoder."""
    quick, seed = settings["quick"], settings["seed"]
    data, encoder, wanted = settings["data"], settings["encoder"], settings["strategies"]
    fitting = replace(
        QUICK if quick else THOROUGH if settings["thorough"] else USUAL,
        encoder=encoder,
        seed=seed,
    )
    split = read_sets(data)
    test = thinned(split.test, QUICK_TEST_PROMPTS if quick else TEST_PROMPTS, seed)
    prompts = len({each.query.text for each in split.training})
    edges = class_edges([sample.output_tokens for sample in split.training])
    rows: list[dict[str, Any]] = []
    said: dict[str, NDArray[np.float64]] = {}
    for place, name in enumerate(wanted):
        progress("models", place, len(wanted))
        row, said[name] = _row(name, _fitted(MODELS[name](fitting), split.training), test, edges)
        rows.append(row)
    progress("models", len(wanted), len(wanted))
    return {
        "paper": "lengths",
        "encoder": encoder,
        "effort": {"quick": quick, "tuned_samples": fitting.tuned, "read_prompts": min(fitting.read, prompts)},
        "seed": seed,
        "training": {"samples": len(split.training), "prompts": prompts},
        "test": {"samples": len(test), "prompts": len({each.query.text for each in test})},
        "sets": {name: sum(each.query.tenant == name for each in test) for name in SETS},
        "rows": rows,
        "served": _served(test, said, seed),
        "floor": _floor(temperature_lengths(data)),
        "among_models": _among_models(test, edges),
        "ssjf_released": _released(proxy_predictions(data)),
        "reported": PAPER,
        "verdict": _verdict(rows),
    }


def show(console: Console, result: Result) -> None:
    test, training = result["test"], result["training"]
    title = (
        f"{training['samples']:,} samples of {training['prompts']:,} prompts to learn from; tested on"
        f" {test['samples']:,} of {test['prompts']:,}; encoder {result['encoder']}, tuned on"
        f" {result['effort']['tuned_samples']:,} samples, head on {result['effort']['read_prompts']:,} prompts"
    )
    reported = result["reported"]
    rows = [*result["rows"]]
    rows += [{**row, "model": f"PreServe's Table 2: {name}"} for name, row in reported["preserve"].items()]
    console.print(table(title, columns(DATA["columns"]["models"]), rows, lambda row: "" if "pinball" in row else "dim"))
    measures = {row["model"]: row for row in result["rows"]}
    formulations = [
        {"model": name, **measures.get(name, {}), **row, "paper": reported["ssjf"].get(name)}
        for name, row in result["served"].items()
    ]
    console.print(
        table("Shortest first by each model (SSJF's Table 2)", columns(DATA["columns"]["served"]), formulations)
    )
    floor = result["floor"]
    console.print(
        f"Noise floor, {floor['prompts']:,.0f} prompts at three temperatures: median variation within a prompt"
        f" {floor['median_cv']:.2f}; who knows a prompt's two other answers is off by {floor['others_mae']:.1f} tokens"
        f" (mean length {floor['mean_tokens']:.0f}), Acc-25 {100 * floor['others_acc_25']:.1f} %."
    )
    if among := result["among_models"]:
        console.print(
            f"Who knows what all other models answered to the very prompt: MAE {among['mae']:.1f}, rank"
            f" {among['rank_correlation']:.3f}, where a prompt has several; and which model is asked:"
            f" {among['who_answers_known']['mae']:.1f}, {among['who_answers_known']['rank_correlation']:.3f}."
        )
    released = result["ssjf_released"]
    console.print(
        f"SSJF's released predictions, {released['requests']:,.0f} requests: right class"
        f" in {100 * released['five_class_accuracy']:.1f} %"
        f" (the commonest class alone: {100 * released['commonest']:.1f} %)."
    )
    verdict = result["verdict"]
    console.print(f"Best by measure: {', '.join(f'{name} {model}' for name, model in verdict['best'].items())}.")
    if verdict["best_encoder"]:
        word = "at least as exact as" if verdict["trees_as_exact"] else "NOT as exact as"
        console.print(f"The trees are {word} the best single encoder, {verdict['best_encoder']}.")


def compare(result: Result) -> list[Comparison]:
    """Return the papers' figures, on LMSYS-Chat-1M and ShareGPT, with ours, on other data."""
    rows = {row["model"]: row | result["served"][row["model"]] for row in result["rows"]}
    compared = [
        Comparison(
            f"{name}: {measure}",
            "SSJF, Table 2",
            figure,
            _of(rows, name, measure),
            "factor" if measure == "throughput_factor" else "share",
        )
        for name, figures in PAPER["ssjf"].items()
        for measure, figure in figures.items()
    ]
    return compared + [
        Comparison(
            f"preserve: {measure}",
            "PreServe, Table 2",
            figure,
            _of(rows, "preserve", measure),
            "tokens" if measure == "mae" else "share",
        )
        for measure, figure in PAPER["preserve"]["PreServe"].items()
    ]


def _of(rows: dict[str, dict[str, Any]], model: str, measure: str) -> float | None:
    return rows[model][measure] if model in rows else None


LENGTH_MODELS: Final = Experiment.read(
    "lengths", among={"strategies": ORDER}, missing={"strategies": unavailable_reason}, run=run, show=show, compare=compare,
)  # fmt: skip
