"""SSJF's evaluation (sections 4.2 and 4.3): mean job completion time and throughput by ordering, in our simulator.

Outputs and their predictions are real: Vicuna-13B's answers in LMSYS-Chat-1M, and the class that the paper's own BERT gave
each (`proxy_lengths`, published with its code). Half of the rows give a class its mean in tokens, and the requests are drawn
from the other half. Prompts, rounds and gaps are drawn, or gaps come from a trace.

Two things differ from the published simulator on purpose: throughput is that of the whole run, from the first arrival to
the last token, and every ordering has the same batching rules.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.shared.scenes import ServedModel, requests_of, scenario_of
from controlplane.simulation.running import Simulated
from controlplane.terminal import table
from forecasting.lengths import Sample, bundled
from forecasting.lengths.datasets import FREE, UNSEEN_SHARE, DataMissing, proxy_predictions, read_sets
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.traces import load_trace

TRACES: Final = {
    "azure conversation": ("azure_llm_2023/AzureLLMInferenceTrace_conv.csv", "azure"),
    "azure code": ("azure_llm_2023/AzureLLMInferenceTrace_code.csv", "azure"),
    "mooncake": ("mooncake/conversation_trace.jsonl", "mooncake"),
}

STRETCH: Final = EndpointPolicy().ordering_stretch
ORDERINGS: Final = ("fcfs", "ssjf", "shortest", "sjf")
"""`shortest` is the paper's SSJF, `ssjf` ours, which ages, and `sjf` the oracle."""
MODES: Final = ("none", "dynamic", "continuous")
BATCH: Final = 4
WAIT_S: Final = 0.1
LOADS: Final = (0.5, 0.7, 0.9, 1.0, 1.2)
CVS: Final = (1.0, 2.0, 4.0, 8.0)
BATCHES: Final = (1, 2, 4, 8, 16, 32)
ROUNDS: Final = (1, 2, 3, 4, 5)
STRETCHES: Final = (0.0, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
USUAL_LOAD, USUAL_CV = 0.9, 2.0
PROFILE: Final = Profile(0.012, 0.008, 3e-5, 0.0, 4.4e-3, 5e-5, 1e-7)
"""OPT-2.7B on a V100: 2351 ms for 512 tokens (Table 1); the cost of batching in a step is our choice."""
CONTEXT: Final = 8192
TREES: Final = "trees"

DATA: Final = experiment.read_data("ssjf")
PAPER: Final[Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]] = DATA["reported"]


@dataclass(frozen=True, slots=True)
class Variation:
    """One value of one parameter."""

    varied: str
    mode: str
    """Of batching."""
    value: float | str
    batch: int = BATCH
    load: float = USUAL_LOAD
    cv: float = USUAL_CV
    """Of gaps between arrivals."""
    round: int = 1
    """Of the conversation."""
    trace: tuple[Path, str] | None = None
    """File and format of a trace of arrivals."""

    @property
    def chosen(self) -> list[tuple[str, float]]:
        """Return the orderings to compare, with their stretch."""
        if self.varied != "stretch":
            return [(ordering, STRETCH) for ordering in ORDERINGS]
        others = [("shortest", STRETCH), ("sjf", STRETCH)] if self.value == STRETCHES[0] else []
        return [("ssjf", float(self.value)), *others]


def _variations(folder: Path) -> Iterator[Variation]:
    for mode in MODES:
        batch = 1 if mode == "none" else BATCH
        for load in LOADS:
            yield Variation("rate", mode, load, batch, load, cv=1.0)
        for cv in CVS:
            yield Variation("burstiness", mode, cv, batch, cv=cv)
        for name, (file, kind) in TRACES.items():
            if (folder / file).exists():
                yield Variation("trace", mode, name, batch, trace=(folder / file, kind))
        if mode != "none":
            for size in BATCHES:
                yield Variation("batch", mode, size, size)
        for round_ in ROUNDS:
            yield Variation("rounds", mode, round_, batch, round=round_)
    yield Variation("predictor", "continuous", "BERT")
    for stretch in STRETCHES:
        yield Variation("stretch", "continuous", stretch)


Jobs = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
"""Prompt, output and predicted tokens."""


def scenario(mode: str, batch: int, ordering: str, stretch: float) -> Scenario:
    """Return one instance that runs *batch* requests at once, with *mode* of batching."""
    served = ServedModel("m", PROFILE, batch * CONTEXT, batch, CONTEXT, batched_tokens=CONTEXT, queue="fcfs")
    batching: dict[str, Any] = {"mode": mode}
    if mode == "dynamic":
        batching |= {"max_batch_size": batch, "wait_timeout_s": WAIT_S}
    policies = {"ordering": ordering, "ordering_stretch": stretch, "batching": batching}
    return scenario_of([served.group()], policies=policies)


def requests(arrival_s: NDArray[np.float64], jobs: Jobs) -> Workload:
    return requests_of(arrival_s, *jobs, models=["m"])


def capacity_per_s(jobs: Jobs, mode: str, batch: int) -> float:
    """Return the requests a second served by FCFS when all are there at once; loads are shares of it."""
    at_once = requests(np.zeros(jobs[0].size), jobs)
    outcomes = experiment.Case.of({}, scenario(mode, batch, "fcfs", 0.0), at_once).simulate().result.outcomes
    return float(jobs[0].size / outcomes["e2e_s"].max())


def measured(run: Simulated) -> experiment.Row:
    """Return seconds, and requests a second: of all over the whole run, from the first arrival to the last token
    (`throughput`), and of those that ended before the last arrival.
    """
    outcomes, arrival_s = run.result.outcomes, run.result.requests.arrival_s
    jct_s, ended_s = outcomes["e2e_s"], arrival_s + outcomes["e2e_s"]
    first_s, last_s = float(arrival_s[0]), float(arrival_s[-1])
    p50, p99 = np.percentile(jct_s, [50, 99])
    return {
        "jct_mean_s": float(jct_s.mean()),
        "jct_p50_s": float(p50),
        "jct_p99_s": float(p99),
        "wait_most_s": float(outcomes["queue_s"].max()),
        "throughput": float(jct_s.size / (ended_s.max() - first_s)),
        "throughput_arriving": float(np.count_nonzero(ended_s <= last_s) / (last_s - first_s)),
    }


def completions(
    samples: Sequence[Sample], predicted: Mapping[str, NDArray[np.float64]], seed: int, load: float, cv: float
) -> dict[str, experiment.Row]:
    """Return `measured` of *samples* served by arrival (`fcfs`), shortest first by each of *predicted*, and by true lengths
    (`known`), at one *load* with gaps of *cv*, by continuous batching.
    """
    order = np.random.default_rng([seed, 3]).permutation(len(samples))
    output = np.array([sample.output_tokens for sample in samples], np.int64)[order]
    asked = np.array([max(1, sample.query.prompt_tokens) for sample in samples], np.int64)[order]
    prompt = np.minimum(asked, CONTEXT - output)
    arrival_s = np.cumsum(gamma_gaps(len(samples), seed, cv)) / load
    arrival_s /= capacity_per_s((prompt, output, output), "continuous", BATCH)

    def served(ordering: str, lengths: NDArray[np.int64]) -> experiment.Row:
        drawn = requests(arrival_s, (prompt, output, lengths))
        return measured(experiment.Case.of({}, scenario("continuous", BATCH, ordering, 0.0), drawn).simulate())

    by = {name: np.maximum(np.rint(tokens[order]), 1).astype(np.int64) for name, tokens in predicted.items()}
    return {
        "fcfs": served("fcfs", output), **{name: served("shortest", lengths) for name, lengths in by.items()},
        "known": served("sjf", output),
    }  # fmt: skip


def against_fcfs(rows: Sequence[experiment.Row]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Return {parameter: {mode: {ordering: against FCFS, the mean over its values and the best of them}}}.

    JCT as a reduction, throughputs as factors.
    """
    by_arrival = {(row["varied"], row["mode"], row["value"]): row for row in rows if row["ordering"] == "fcfs"}
    gathered: dict[tuple[str, str, str], list[tuple[float, float, float]]] = {}
    for row in rows:
        before = by_arrival.get((row["varied"], row["mode"], row["value"]))
        if before is None or row["ordering"] == "fcfs":
            continue
        gathered.setdefault((row["varied"], row["mode"], row["ordering"]), []).append(
            (
                1 - row["jct_mean_s"] / before["jct_mean_s"],
                row["throughput"] / before["throughput"],
                row["throughput_arriving"] / max(before["throughput_arriving"], 1e-9),
            )
        )
    changes: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for (varied, mode, ordering), values in gathered.items():
        (reduction, whole, _), (most, whole_most, arriving_most) = np.mean(values, axis=0), np.max(values, axis=0)
        changes.setdefault(varied, {}).setdefault(mode, {})[ordering] = experiment.rounded(
            {
                "jct_reduction": float(reduction),
                "jct_reduction_most": float(most),
                "throughput_factor": float(whole),
                "throughput_factor_most": float(whole_most),
                "throughput_arriving_factor_most": float(arriving_most),
            }
        )
    return changes


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    """Run every variation with `scale` times 4,000 requests each. Raise ValueError as `read_lengths`."""
    folder, seed = settings["data"], settings["seed"]
    lengths, trees = read_lengths(folder), trees_lengths(folder)
    count = max(50, round(4000 * settings["scale"]))
    capacity: dict[tuple[str, int, int, bool], float] = {}
    variations = [*_variations(folder), *([Variation("predictor", "continuous", TREES)] if trees else [])]

    def cases() -> Iterator[experiment.Case]:
        for each in variations:
            said = trees if each.value == TREES and trees is not None else lengths
            jobs = draw_jobs(said, count, seed, each.round)
            key = (each.mode, each.batch, each.round, said is trees)
            if key not in capacity:
                capacity[key] = capacity_per_s(jobs, each.mode, each.batch)
            gaps = gamma_gaps(count, seed, each.cv) if each.trace is None else trace_gaps(each.trace, count)
            drawn = requests(np.cumsum(gaps) / (each.load * capacity[key]), jobs)
            about = {"varied": each.varied, "mode": each.mode, "value": each.value}
            for ordering, stretch in each.chosen:
                of_ordering = {"ordering": ordering, "stretch": stretch}
                yield experiment.Case.of(about | of_ordering, scenario(each.mode, each.batch, ordering, stretch), drawn)

    rows = experiment.run_cases("ssjf", cases(), measured, progress)
    return {
        "paper": "ssjf",
        "seed": seed,
        "requests": count,
        "stretch": STRETCH,
        "mean_output_tokens": round(float(lengths.output.mean()), 1),
        "prediction_error_tokens": round(float(np.abs(lengths.predicted - lengths.output).mean()), 1),
        "capacity_per_s": {f"{mode}, batch {batch}, round {round_}": round(value, 3)
                           for (mode, batch, round_, ours), value in capacity.items() if not ours},
        "rows": experiment.rounded(rows),
        "found": against_fcfs(rows),
        "reported": PAPER,
    }  # fmt: skip


def show(console: Console, result: experiment.Result) -> None:
    console.print(
        f"[bold]SSJF[/], section 4.2: {result['requests']:,} requests a run, seed {result['seed']}, outputs of"
        f" {result['mean_output_tokens']} tokens predicted to {result['prediction_error_tokens']} on average."
    )
    runs: dict[tuple[Any, ...], dict[str, experiment.Row]] = {}
    stretched, shown = [], DATA["columns"]
    for row in result["rows"]:
        if row["varied"] == "stretch":
            name = f"{row['stretch']:g}" if row["ordering"] == "ssjf" else row["ordering"]
            stretched.append(row | {"shown": name})
            continue
        by = runs.setdefault((row["varied"], row["mode"], row["value"]), {})
        before = by.get("fcfs", row)  # the first of the orderings
        by[row["ordering"]] = row | {
            "jct_change": row["jct_mean_s"] / before["jct_mean_s"] - 1,
            "throughput_factor": row["throughput"] / before["throughput"],
            "p99_factor": row["jct_p99_s"] / before["jct_p99_s"],
        }
    title = "Mean job completion time against FCFS, and throughput of the whole run"
    console.print(table(title, experiment.columns(shown["runs"]), runs.values()))
    title = "Aging: ssjf by its stretch, continuous batching"
    console.print(table(title, experiment.columns(shown["aging"]), stretched))
    totals = [
        {"varied": varied, "mode": mode, **by}
        for varied, modes in result["found"].items()
        if varied != "predictor"  # two sets of lengths, which the first table has line by line
        for mode, by in modes.items()
    ]
    console.print(table("Against FCFS, over all values", experiment.columns(shown["totals"]), totals))


def compare(result: experiment.Result) -> list[experiment.Comparison]:
    """Return SSJF as published, with our aging, and the oracle against FCFS, the mean over the values of each parameter."""
    rows = []
    for measure, by_varied in PAPER.items():
        for varied, modes in by_varied.items():
            for mode, (published, *oracle) in modes.items():
                paper = [("SSJF", "shortest", published), ("SSJF with aging", "ssjf", published)]
                for name, ordering, figure in [*paper, *(("oracle", "sjf", of_oracle) for of_oracle in oracle)]:
                    ours = result["found"].get(varied, {}).get(mode, {}).get(ordering, {}).get(measure)
                    about = f"{name}, {varied}, {'no' if mode == 'none' else mode} batching"
                    if measure == "throughput_factor":
                        rows.append(experiment.Comparison(f"throughput: {about}", "4.2", figure, ours, "factor"))
                    else:
                        change = None if ours is None else -ours
                        rows.append(experiment.Comparison(f"mean JCT: {about}", "4.2", -figure, change))
    return rows


LENGTHS: Final = "proxy_lengths/predictions_warmup_multi_cls_1000K.csv.gz"
PROMPT_MEDIAN, PROMPT_SIGMA, PROMPT_MOST = 35.0, 1.1, 600
"""Prompts of LMSYS-Chat-1M have 69.5 tokens on average (its section 3)."""
LONGEST: Final = 511
"""Output tokens: the published table ends there, so for the trees the longer answers are left out too."""


@dataclass(frozen=True, slots=True)
class PredictedLengths:
    """Real outputs and their predictions, in tokens."""

    output: NDArray[np.int64]
    predicted: NDArray[np.int64]


def read_lengths(folder: Path) -> PredictedLengths:
    """Return the half of the published rows that requests are drawn from. Raise ValueError for a missing or wrong file."""
    file = folder / LENGTHS
    try:
        rows = proxy_predictions(folder)
    except DataMissing as error:
        raise ValueError(
            f"--data: {error} Give the folder that has proxy_lengths, of"
            " github.com/James-QiuHaoran/LLM-serving-with-proxy-models; docs/papers/ordering.md says more."
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
    return PredictedLengths(output[drawn], predicted)


def trees_lengths(folder: Path) -> PredictedLengths | None:
    """Return answers to prompts that the bundled trees has not seen, with its predictions; None without those sets."""
    try:
        samples = [sample for sample in read_sets(folder, FREE, UNSEEN_SHARE).test if sample.output_tokens <= LONGEST]
    except DataMissing:
        return None
    said = bundled().predict([sample.query for sample in samples]).tokens
    output = np.array([sample.output_tokens for sample in samples], np.int64)
    return PredictedLengths(output, np.maximum(np.rint(said), 1).astype(np.int64))


def draw_jobs(lengths: PredictedLengths, count: int, seed: int, rounds: int) -> Jobs:
    """Return *count* requests of the given conversation round.

    A round's prompt is everything before it, prompts and answers. (The published rows do not give the accuracy by round;
    the paper has 0.619 in the first and 0.60 at worst.)
    """
    random = np.random.default_rng([seed, 1, rounds])
    at = random.integers(0, lengths.output.size, (rounds, count))
    asked = np.exp(np.log(PROMPT_MEDIAN) + PROMPT_SIGMA * random.standard_normal((rounds, count)))
    asked = np.clip(np.rint(asked), 1, PROMPT_MOST).astype(np.int64)
    prompt = asked.sum(axis=0) + lengths.output[at[:-1]].sum(axis=0)
    return prompt, lengths.output[at[-1]], lengths.predicted[at[-1]]


def gamma_gaps(count: int, seed: int, cv: float) -> NDArray[np.float64]:
    """Return gamma gaps with a mean of 1 and this coefficient of variation."""
    random = np.random.default_rng([seed, 2])
    gaps: NDArray[np.float64] = random.gamma(1 / cv**2, cv**2, count)
    return gaps


def trace_gaps(trace: tuple[Path, str], count: int) -> NDArray[np.float64]:
    """Return the first gaps of a trace, divided by their mean."""
    arrival_s = load_trace(*trace, seed=0, limit=count + 1).arrival_s
    gaps = np.diff(arrival_s)
    gaps = np.resize(gaps, count) if gaps.size else np.ones(count)
    return np.asarray(gaps / gaps.mean(), np.float64)


SSJF: Final = experiment.Experiment.read("ssjf", run=run, show=show, compare=compare)
