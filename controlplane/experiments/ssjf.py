"""SSJF's evaluation (sections 4.2 and 4.3): mean job completion time and throughput by ordering, in our simulator.

Outputs and what was predicted of them are real: Vicuna-13B's answers in LMSYS-Chat-1M, and the class that the paper's own
BERT gave each (`proxy_lengths`, published with its code). Half of the rows say what a class means in tokens, the requests
are drawn from the other half. Prompts, rounds and gaps are drawn, or gaps come from a trace.

Two things differ from the published simulator on purpose: throughput is that of the whole run, from the first arrival to
the last token, and every ordering has the same batching rules.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from controlplane.experiments.experiment import SEED, Comparison, Experiment, Option, Progress, Result, Settings
from controlplane.experiments.shared.measures import Row, rounded
from controlplane.experiments.shared.scenes import ServedModel, fleet
from controlplane.terminal import Column, table
from forecasting.lengths import bundled
from forecasting.lengths.datasets import FREE, UNSEEN_SHARE, DataMissing, proxy_predictions, read_sets
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.simulator import Simulation
from scheduling.simulation.workload.requests import Requests, make_requests
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
"""OPT-2.7B on a V100: 2351 ms for 512 tokens (Table 1); what batching adds to a step is ours to set."""
CONTEXT: Final = 8192
STUDENT: Final = "student"

PAPER: Final[dict[str, dict[str, dict[str, tuple[float, float | None]]]]] = {
    "jct_reduction": {
        "rate": {"none": (0.345, 0.437), "dynamic": (0.396, 0.582), "continuous": (0.332, 0.430)},
        "burstiness": {"none": (0.305, 0.376), "dynamic": (0.390, 0.529), "continuous": (0.350, 0.415)},
        "rounds": {"continuous": (0.331, None)},
    },
    "throughput_factor": {
        "rate": {"none": (3.6, 4.7), "dynamic": (3.0, 4.1), "continuous": (2.8, 3.2)},
        "burstiness": {"none": (2.6, 3.4), "dynamic": (2.6, 3.8), "continuous": (2.2, 2.7)},
        "rounds": {"continuous": (1.67, None)},
    },
}
"""Of SSJF and of the oracle, by what varies and by mode of batching (section 4.2); of rounds that of the fifth."""


Plan = tuple[str, str, float | str, int, float, float, int, tuple[Path, str] | None]


def _plans(folder: Path) -> Iterable[Plan]:
    """(what varies, mode, its value, batch size, load, CV of gaps, conversation round, trace of arrivals)."""
    for mode in MODES:
        batch = 1 if mode == "none" else BATCH
        for load in LOADS:
            yield "rate", mode, load, batch, load, 1.0, 1, None
        for cv in CVS:
            yield "burstiness", mode, cv, batch, USUAL_LOAD, cv, 1, None
        for name, (file, kind) in TRACES.items():
            if (folder / file).exists():
                yield "trace", mode, name, batch, USUAL_LOAD, 0.0, 1, (folder / file, kind)
        if mode != "none":
            for size in BATCHES:
                yield "batch", mode, size, size, USUAL_LOAD, USUAL_CV, 1, None
        for round_ in ROUNDS:
            yield "rounds", mode, round_, batch, USUAL_LOAD, USUAL_CV, round_, None
    yield "predictor", "continuous", "BERT", BATCH, USUAL_LOAD, USUAL_CV, 1, None
    for stretch in STRETCHES:
        yield "stretch", "continuous", stretch, BATCH, USUAL_LOAD, USUAL_CV, 1, None


def cluster(mode: str, batch: int, ordering: str, stretch: float) -> Cluster:
    """One instance that runs *batch* requests at once, with the given *mode* of batching."""
    served = ServedModel("m", PROFILE, batch * CONTEXT, batch, CONTEXT, batched_tokens=CONTEXT, queue="fcfs")
    batching: dict[str, Any] = {"mode": mode}
    if mode == "dynamic":
        batching |= {"max_batch_size": batch, "wait_timeout_s": WAIT_S}
    policies = {"ordering": ordering, "ordering_stretch": stretch, "batching": batching}
    return fleet([served.group()], policies=policies)


def _capacity(jobs: tuple[NDArray[np.int64], ...], mode: str, batch: int) -> float:
    """Requests a second that are served by arrival when all are there at once: what rates are measured by."""
    prompt, output, predicted = jobs
    requests = make_requests(np.zeros(prompt.size), prompt, output, predicted_tokens=predicted)
    outcomes = Simulation(cluster(mode, batch, "fcfs", 0.0), requests).run().outcomes
    return float(prompt.size / outcomes["e2e_s"].max())


def _measured(requests: Requests, mode: str, batch: int, ordering: str, stretch: float) -> dict[str, float]:
    """Seconds, and requests a second: of all requests over the whole run, from the first arrival to the last token
    (`throughput`), and of those that ended before the last one came."""
    outcomes = Simulation(cluster(mode, batch, ordering, stretch), requests).run().outcomes
    jct_s, ended_s = outcomes["e2e_s"], requests.arrival_s + outcomes["e2e_s"]
    first_s, last_s = float(requests.arrival_s[0]), float(requests.arrival_s[-1])
    p50, p99 = np.percentile(jct_s, [50, 99])
    return {
        "jct_mean_s": float(jct_s.mean()),
        "jct_p50_s": float(p50),
        "jct_p99_s": float(p99),
        "wait_most_s": float(outcomes["queue_s"].max()),
        "throughput": float(jct_s.size / (ended_s.max() - first_s)),
        "throughput_arriving": float(np.count_nonzero(ended_s <= last_s) / (last_s - first_s)),
    }


def against_fcfs(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """{what varies: {mode: {ordering: against FCFS, the mean over its values and the best of them}}}.

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
        reductions, whole, arriving = np.array(values).T
        changes.setdefault(varied, {}).setdefault(mode, {})[ordering] = rounded(
            {
                "jct_reduction": float(reductions.mean()),
                "jct_reduction_most": float(reductions.max()),
                "throughput_factor": float(whole.mean()),
                "throughput_factor_most": float(whole.max()),
                "throughput_arriving_factor_most": float(arriving.max()),
            }
        )
    return changes


def _change(ordering: str) -> Column:
    """Mean job completion time by *ordering* against FCFS."""
    return Column(ordering, lambda by: 100 * (by[ordering]["jct_mean_s"] / by["fcfs"]["jct_mean_s"] - 1), "{:+.1f} %")


def _factor(ordering: str) -> Column:
    """Throughput by *ordering* against FCFS."""
    return Column(ordering, lambda by: by[ordering]["throughput"] / by["fcfs"]["throughput"], "x {:.2f}")


RUNS: Final = (
    Column("Varied", lambda by: by["fcfs"]["varied"]),
    Column("Batching", lambda by: by["fcfs"]["mode"]),
    Column("value", lambda by: by["fcfs"]["value"], "{}"),
    Column("FCFS (s)", lambda by: by["fcfs"]["jct_mean_s"], "{:,.2f}"),
    *map(_change, ORDERINGS[1:]),
    Column("FCFS (1/s)", lambda by: by["fcfs"]["throughput"], "{:.2f}"),
    *map(_factor, ("ssjf", "sjf")),
    Column("p99 ssjf / FCFS", lambda by: by["ssjf"]["jct_p99_s"] / by["fcfs"]["jct_p99_s"], "{:.2f}"),
)
"""Of a run by ordering."""
AGING: Final = (
    Column("stretch", lambda row: f"{row['stretch']:g}" if row["ordering"] == "ssjf" else row["ordering"], "{}"),
    Column("mean JCT (s)", "jct_mean_s", "{:,.2f}"),
    Column("p50", "jct_p50_s", "{:,.2f}"),
    Column("p99", "jct_p99_s", "{:,.2f}"),
    Column("longest wait", "wait_most_s", "{:,.2f}"),
)
TOTALS: Final = (
    Column("Varied", "varied"),
    Column("Batching", "mode"),
    Column("JCT ssjf", lambda by: 100 * by["ssjf"]["jct_reduction"], "-{:.1f} %"),
    Column("JCT sjf", lambda by: 100 * by["sjf"]["jct_reduction"], "-{:.1f} %"),
    Column("throughput ssjf", lambda by: by["ssjf"]["throughput_factor"], "x {:.2f}"),
    Column("arriving", lambda by: by["ssjf"]["throughput_arriving_factor_most"], "x {:.2f}"),
)


class Ssjf(Experiment):
    name = "ssjf"
    paper = "SSJF"
    section = "4.2, 4.3"
    measures = (
        "mean job completion time and throughput by ordering: rate, burstiness, traces, batch size, rounds, aging"
    )
    results = "ordering.md#measured"
    options = (
        Option("data", "folder with proxy_lengths, and traces", Path("data"), Path),
        Option("scale", "factor on the 4,000 requests of a run", 1.0, float, above=0.0, at_most=100.0),
        SEED,
    )

    def run(self, settings: Settings, progress: Progress) -> Result:
        """Every run: {"rows", "found", "reported", ...}; `scale` times 4,000 requests each. ValueError as `read_lengths`."""
        folder, seed = settings["data"], settings["seed"]
        lengths = read_lengths(folder)
        count = max(50, round(4000 * settings["scale"]))
        capacity: dict[tuple[str, int, int, bool], float] = {}
        rows: list[Row] = []
        plans = list(_plans(folder))
        students = student_lengths(folder)
        if students is not None:
            plans.append(("predictor", "continuous", STUDENT, BATCH, USUAL_LOAD, USUAL_CV, 1, None))
        for done, (varied, mode, value, batch, load, cv, rounds, trace) in enumerate(plans):
            progress("ssjf", done, len(plans))
            said = students if value == STUDENT and students is not None else lengths
            jobs = draw_jobs(said, count, seed, rounds)
            key = (mode, batch, rounds, said is students)
            if key not in capacity:
                capacity[key] = _capacity(jobs, mode, batch)
            gaps = gamma_gaps(count, seed, cv) if trace is None else trace_gaps(trace, count)
            arrival_s = np.cumsum(gaps) / (load * capacity[key])
            requests = make_requests(arrival_s, jobs[0], jobs[1], predicted_tokens=jobs[2])
            chosen = [("ssjf", value)] if varied == "stretch" else [(ordering, STRETCH) for ordering in ORDERINGS]
            if varied == "stretch" and value == STRETCHES[0]:
                chosen += [("shortest", STRETCH), ("sjf", STRETCH)]
            for ordering, stretch in chosen:
                case = {"varied": varied, "mode": mode, "value": value, "ordering": ordering, "stretch": float(stretch)}
                rows.append(case | _measured(requests, mode, batch, ordering, float(stretch)))
        progress("ssjf", len(plans), len(plans))
        return {
            "paper": "ssjf",
            "seed": seed,
            "requests": count,
            "stretch": STRETCH,
            "mean_output_tokens": round(float(lengths.output.mean()), 1),
            "prediction_error_tokens": round(float(np.abs(lengths.predicted - lengths.output).mean()), 1),
            "capacity_per_s": {f"{mode}, batch {batch}, round {rounds}": round(value, 3)
                               for (mode, batch, rounds, student), value in capacity.items() if not student},
            "rows": [rounded(row) for row in rows],
            "found": against_fcfs(rows),
            "reported": PAPER,
        }  # fmt: skip

    def show(self, console: Console, result: Result) -> None:
        console.print(
            f"[bold]SSJF[/], section 4.2: {result['requests']:,} requests a run, seed {result['seed']}, outputs of"
            f" {result['mean_output_tokens']} tokens predicted to {result['prediction_error_tokens']} on average."
        )
        groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
        for row in result["rows"]:
            groups.setdefault((row["varied"], row["mode"], row["value"]), {})[row["ordering"]] = row
        runs = [by for (varied, _, _), by in groups.items() if varied != "stretch"]
        console.print(table("Mean job completion time against FCFS, and throughput of the whole run", RUNS, runs))
        stretched = [row for row in result["rows"] if row["varied"] == "stretch"]
        console.print(table("Aging: ssjf by its stretch, continuous batching", AGING, stretched))
        totals = [
            {"varied": varied, "mode": mode, **by}
            for varied, modes in result["found"].items()
            if varied != "predictor"  # two sets of lengths, which the first table has line by line
            for mode, by in modes.items()
        ]
        console.print(table("Against FCFS, over all values", TOTALS, totals))

    def compare(self, result: Result) -> list[Comparison]:
        """SSJF and its oracle against FCFS, the mean over the values of what varies."""
        rows = []
        for measure, by_varied in PAPER.items():
            for varied, modes in by_varied.items():
                for mode, figures in modes.items():
                    ours = result["found"].get(varied, {}).get(mode, {})
                    for ordering, figure in zip(("ssjf", "sjf"), figures, strict=True):
                        if figure is None:
                            continue
                        about, value = f"{varied}, {mode}, {ordering}", ours.get(ordering, {}).get(measure)
                        if measure == "jct_reduction":
                            change = None if value is None else -value
                            rows.append(Comparison(f"mean JCT: {about}", "4.2", -figure, change))
                        else:
                            rows.append(Comparison(f"throughput: {about}", "4.2", figure, value, "factor"))
        return rows


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
