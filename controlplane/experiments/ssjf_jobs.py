"""Jobs of SSJF's evaluation: real lengths with what was predicted of them, drawn prompts, and gaps between arrivals."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from forecasting.lengths import bundled
from forecasting.lengths.datasets import FREE, UNSEEN_SHARE, DataMissing, proxy_predictions, read_sets
from scheduling.simulation.workload.traces import load_trace

LENGTHS: Final = "proxy_lengths/predictions_warmup_multi_cls_1000K.csv.gz"
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MOST = 35.0, 1.1, 600
"""Prompts of LMSYS-Chat-1M have 69.5 tokens on average (its section 3)."""
LONGEST: Final = 511
"""Output tokens: the published table ends there, so for the student the longer answers are left out too."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Real outputs and what a predictor of classes makes of them, in tokens."""

    output: NDArray[np.int64]
    predicted: NDArray[np.int64]


def read_lengths(folder: Path) -> Lengths:
    """The half of the published rows that requests are drawn from. ValueError says which file is missing or wrong."""
    file = folder / LENGTHS
    try:
        rows = proxy_predictions(folder)
    except DataMissing as error:
        raise ValueError(
            f"--data: {error} Give the folder that has proxy_lengths, of"
            " github.com/James-QiuHaoran/LLM-serving-with-proxy-models; docs/ordering.md says more."
        ) from error
    except (KeyError, ValueError) as error:
        raise ValueError(f"--data: {file} is not the table of real and predicted lengths: {error}") from error
    if len(rows) < 2:
        raise ValueError(
            f"--data: {file} has {len(rows)} rows; half of them say what classes mean, half are drawn from"
        )
    output, given = np.array(rows, np.int64).reshape(-1, 2).T
    fitted, drawn = slice(0, None, 2), slice(1, None, 2)
    means = {int(each): output[fitted][given[fitted] == each].mean() for each in np.unique(given[fitted])}
    predicted = np.array([round(means[int(each)]) for each in given[drawn]], np.int64)
    return Lengths(output[drawn], predicted)


def student_lengths(folder: Path) -> Lengths | None:
    """Answers to prompts that our bundled student has not seen, and what it says of them; None without those sets."""
    try:
        samples = [sample for sample in read_sets(folder, FREE, UNSEEN_SHARE).test if sample.output_tokens <= LONGEST]
    except DataMissing:
        return None
    said = bundled().predict([sample.query for sample in samples]).tokens
    output = np.array([sample.output_tokens for sample in samples], np.int64)
    return Lengths(output, np.maximum(np.rint(said), 1).astype(np.int64))


def draw_jobs(
    lengths: Lengths, count: int, seed: int, rounds: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(prompt, output, predicted tokens) of *count* requests of the given conversation round.

    A round's prompt is everything before it, prompts and answers. (How well a round is predicted, the published rows
    do not say; the paper has 0.619 in the first and 0.60 at worst.)
    """
    random = np.random.default_rng([seed, 1, rounds])
    at = random.integers(0, lengths.output.size, (rounds, count))
    asked = np.exp(np.log(PROMPT_MEDIAN) + PROMPT_SIGMA * random.standard_normal((rounds, count)))
    asked = np.clip(np.rint(asked), 1, PROMPT_MOST).astype(np.int64)
    prompt = asked.sum(axis=0) + lengths.output[at[:-1]].sum(axis=0)
    return prompt, lengths.output[at[-1]], lengths.predicted[at[-1]]


def gamma_gaps(count: int, seed: int, cv: float) -> NDArray[np.float64]:
    """Gaps with a mean of 1, gamma with this coefficient of variation."""
    random = np.random.default_rng([seed, 2])
    gaps: NDArray[np.float64] = random.gamma(1 / cv**2, cv**2, count)
    return gaps


def trace_gaps(trace: tuple[Path, str], count: int) -> NDArray[np.float64]:
    """The first gaps of a trace, by their mean."""
    arrival_s = load_trace(*trace, seed=0, limit=count + 1).arrival_s
    gaps = np.diff(arrival_s)
    gaps = np.resize(gaps, count) if gaps.size else np.ones(count)
    return np.asarray(gaps / gaps.mean(), np.float64)
