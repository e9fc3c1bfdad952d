"""`manage.py reproduce qlm`: every part of section 8, and the paper's figures with ours."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.qlm.systems import (
    BASELINES,
    BATCH_1,
    BATCH_2,
    CLASSES,
    INTERACTIVE,
    MISTRAL_A10,
    MISTRAL_A100,
    MIXES,
    SWAPPING_EDF,
    SYSTEMS,
    TUNED,
    VICUNA_A100,
    WITHOUT,
    Drawn,
    Stream,
    case,
    draw,
    full_per_s,
    measured,
    mixes,
    nodes,
    one_model,
)
from controlplane.experiments.shared.scenes import ServedModel
from controlplane.terminal import Column, table
from scheduling.policy import EndpointPolicy

DELTA: Final = EndpointPolicy().group_batches

GPUS: Final = 50
NODES: Final = 12
"""Of four A100 each, for W_B: 48 of the paper's 50."""
ARRIVING_S: Final = 60.0
ARRIVING_B_S: Final = 180.0
FEW_NODES: Final = 3
"""Fewer than models, so that nothing is served without swaps."""
BATCH_1_LOAD: Final = 0.2
WAITING_S: Final = 40.0
"""Of the whole fleet: the work of the Batch-2 requests that wait at the start."""
WAITING_B_S: Final = 120.0
BUSY_LOAD: Final = 1.4
"""At which operations are left out of QLM, and mega prompts and group sizes are varied."""
SIZE_LOAD: Final = 0.9
"""Of interactive requests, where the waiting work is varied: with Batch-1 a little more than the fleet ends."""
MIX_VARIATIONS: Final = (1.0, 3.0)


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """*systems* at each of *values* of one parameter; the others are those of `on_one_model`."""

    title: str
    head: str
    """Of the column with the values."""
    values: Sequence[float]
    systems: Sequence[str]
    cases: Callable[[str, "EvaluationPart", float], Iterator[experiment.Case]]
    """By its name and the scale of GPUs and demand."""
    varies: str = "load"
    load: float = BUSY_LOAD
    """Of interactive requests (W_A) or Batch-1 (W_B), as a multiple of the fleet's throughput in the long run."""
    section: str = ""


def on_one_model(name: str, part: EvaluationPart, scale: float) -> Iterator[experiment.Case]:
    """W_A: interactive requests at a load of the fleet's throughput, Batch-1 with them, and Batch-2 waiting at the start."""
    for value in part.values:
        values: dict[str, Any] = {
            "load": part.load, "mega": 0.0, "waiting_s": WAITING_S, "group_batches": DELTA, "a10": None,
        } | {part.varies: value}  # fmt: skip
        count = max(1, round(GPUS * scale))
        a10s = 0 if values["a10"] is None else round(values["a10"] * count)
        a100 = VICUNA_A100 if values["a10"] is None else MISTRAL_A100
        served = [(MISTRAL_A10, "A10")] * a10s + [(a100, "A100")] * (count - a10s)
        rate = sum(full_per_s(model) for model, _ in served)
        for system in part.systems:
            drawn = partial(_workload_a, values, served, rate, system)
            yield case(name, value, system, values["load"] * rate, drawn)


def _workload_a(
    values: Mapping[str, Any], served: Sequence[tuple[ServedModel, str]], rate: float, system: str, seed: int
) -> Drawn:
    streams = [
        Stream(INTERACTIVE, values["load"] * rate),
        Stream(BATCH_1, BATCH_1_LOAD * rate),
        Stream(BATCH_2, 0.0, waiting=round(values["waiting_s"] * rate)),
    ]
    requests = draw(streams, [served[0][0].name], ARRIVING_S, seed, values["mega"])
    return one_model(served, system, requests, group_batches=values["group_batches"])


def multi(name: str, part: EvaluationPart, scale: float) -> Iterator[experiment.Case]:
    """W_B with a node for each model."""
    yield from _several_models(name, part, max(len(TUNED), round(NODES * scale)))


def few(name: str, part: EvaluationPart, scale: float) -> Iterator[experiment.Case]:
    """W_B on fewer nodes than there are models. Fixed batches have no swaps."""
    yield from _several_models(name, part, FEW_NODES)


def _several_models(name: str, part: EvaluationPart, count: int) -> Iterator[experiment.Case]:
    """Two models of Batch-1 at a rate each, three of Batch-2 with requests that wait at the start, on *count* nodes."""
    per_s = [full_per_s(each.base) for each in TUNED]
    first = [at for at, each in enumerate(TUNED) if each.slo_class == BATCH_1]
    second = [at for at, each in enumerate(TUNED) if each.slo_class == BATCH_2]
    rate = count * len(first) / sum(1.0 / per_s[at] for at in first)
    waiting = WAITING_B_S * count / sum(1.0 / per_s[at] for at in second)

    def drawn(load: float, system: str, seed: int) -> Drawn:
        streams = [Stream(BATCH_1, load * rate / len(first), at) for at in first]
        streams += [Stream(BATCH_2, 0.0, at, waiting=round(waiting)) for at in second]
        return nodes(count, system, draw(streams, [each.name for each in TUNED], ARRIVING_B_S, seed))

    for load in part.values:
        for system in part.systems:
            yield case(name, load, system, load * rate, partial(drawn, load, system))


def all_mixes(name: str, part: EvaluationPart, scale: float) -> Iterator[experiment.Case]:
    yield from mixes(tuple(MIXES), part.values, MIX_VARIATIONS, scale)


FEW_SYSTEMS: Final = ("qlm", SWAPPING_EDF, "fcfs", "edf-per-queue+evictions", "edf-earliest-completion+evictions")
"""Without `edf`: in W_B the requests of a model are of one class, and its order is that of arrival."""
PARTS: Final = {
    "single": EvaluationPart(
        "W_A, one model on A100, over the rate of interactive requests", "load", (0.7, 0.9, 1.1, 1.4), SYSTEMS,
        on_one_model, section="8.1",
    ),
    "without": EvaluationPart(
        "W_A, each operation left out", "load", (BUSY_LOAD,), ("qlm", *WITHOUT), on_one_model, section="8.1"
    ),
    "multi": EvaluationPart(
        "W_B, five models on nodes of four A100, over the rate of Batch-1", "load", (0.3, 0.6, 0.9, 1.2),
        ("qlm", "fcfs", "shepherd", SWAPPING_EDF, "without-swapping"), multi, section="8.2",
    ),
    "few": EvaluationPart(
        f"W_B on {FEW_NODES} nodes, over the rate of Batch-1", "load", (0.4, 0.8), FEW_SYSTEMS, few, section="8.2"
    ),
    "mega": EvaluationPart(
        "W_C, W_A with a share of mega prompts", "mega", (0.0, 0.05, 0.2), ("qlm", "edf", "fcfs"), on_one_model, "mega"
    ),
    "gpus": EvaluationPart(
        "W_A on A100 and A10, over the share of A10", "A10", (0.0, 0.2, 0.5, 1.0), ("qlm", "without-balance"),
        on_one_model, "a10",
    ),
    "size": EvaluationPart(
        "W_A, over how much waits at the start, in seconds of the whole fleet", "waiting s",
        (0.0, 20.0, 40.0, 80.0, 160.0), ("qlm", *BASELINES), on_one_model, "waiting_s", SIZE_LOAD,
    ),
    "delta": EvaluationPart(
        "W_A, batches in a request group (delta)", "delta", (0.0625, 0.25, 1.0, DELTA, 16.0), ("qlm",),
        on_one_model, "group_batches",
    ),
    "mixes": EvaluationPart(
        "Mixes that nothing was chosen on, the search next to rules with evictions", "mix", (1.0, 1.3, 1.6, 2.0), (),
        all_mixes,
    ),
}  # fmt: skip


def columns(part: str) -> Sequence[Column]:
    """Return the columns of *part*."""
    shown: str | Callable[[Any], str] = "{:g}"
    if part in ("mega", "gpus", "mixes"):
        shown = str if part == "mixes" else lambda value: experiment.percent(value, sign=False)
    classes = CLASSES[1:] if part in ("multi", "few") else CLASSES
    return (
        Column(PARTS[part].head, "varied", shown),
        Column("req/s", "requests_per_s", "{:,.0f}"),
        Column("system", "system"),
        Column("in time", "attainment", lambda value: experiment.percent(value, sign=False)),
        *(_of_class(name) for name in classes),
        Column("TTFT p99", "ttft_p99_s", experiment.seconds),
        Column("throughput", "throughput", "{:,.1f}"),
        Column("in time/s", "goodput", "{:,.1f}"),
        Column("most waiting", "most_waiting", "{:,.0f}"),
        Column("evictions", "evictions", "{:,.0f}"),
        Column("swaps", "swaps", "{:,.0f}"),
    )


def side_by_side(rows: Sequence[experiment.Result]) -> list[experiment.Result]:
    """Return a line for each mix of *rows*: by system, the share of requests that were in time."""
    lines: dict[str, experiment.Result] = {}
    for row in rows:
        lines.setdefault(row["varied"], {"mix": row["varied"]})[row["system"]] = row["attainment"]
    return list(lines.values())


def mix_columns(rows: Sequence[experiment.Result]) -> Sequence[Column]:
    """Return the columns of `side_by_side`; the last is the lead of the search over the best of the others, in points."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    others = [system for system in systems if system != "qlm"]

    def more(line: experiment.Result) -> float:
        return 100 * float(line["qlm"] - max(line[system] for system in others if system in line))

    return (
        Column("mix", "mix"),
        *(_share_of(system) for system in systems),
        Column("qlm over the best of the others", more, "{:+.2f}"),
    )


def _share_of(system: str) -> Column:
    """Return a column of the share of requests that were in time by *system*, empty where it was not tried."""
    return Column(system, lambda line: line.get(system), lambda value: experiment.percent(value, sign=False))


def _of_class(name: str) -> Column:
    """Return a column of the share of requests of a class that were in time."""
    return Column(name, lambda row: row["by_class"].get(name), lambda value: experiment.percent(value, sign=False))


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    cases = [each for part in settings["parts"] for each in PARTS[part].cases(part, PARTS[part], settings["scale"])]
    seeds = range(settings["seed"], settings["seed"] + settings["seeds"])
    rows = experiment.run_cases("qlm", cases, measured, progress, seeds)
    return {**{name: settings[name] for name in ("parts", "scale", "seed", "seeds")}, "rows": experiment.rounded(rows)}


def show(console: Console, result: experiment.Result) -> None:
    console.print(
        f"[bold]QLM, section 8[/], scale {result['scale']:g}, the mean of {result['seeds']} seeds from"
        f" {result['seed']} on."
    )
    for part in result["parts"]:
        rows = [row for row in result["rows"] if row["part"] == part]
        if part == "mixes":
            console.print(table(PARTS[part].title, mix_columns(rows), side_by_side(rows)))
        else:
            console.print(table(PARTS[part].title, columns(part), rows))


COMPARED: Final = (
    ("requests in time over vLLM, one model, points", "single", 0.9, "fcfs", "attainment"),
    ("requests in time over EDF, one model, points", "single", 0.4, "edf", "attainment"),
    ("requests in time over SHEPHERD-like, one model, points", "single", 0.9, "shepherd", "attainment"),
    ("throughput over vLLM, one model", "single", 0.2, "fcfs", "throughput"),
    ("throughput over EDF, one model", "single", 0.2, "edf", "throughput"),
    ("throughput over SHEPHERD-like, one model", "single", 0.5, "shepherd", "throughput"),
    ("requests in time without eviction, one model, points lost", "without", 0.8, "without-eviction", "attainment"),
    ("requests in time over EDF, five models, points", "multi", 0.9, "edf", "attainment"),
    ("throughput over EDF, five models", "multi", 3.0, "edf", "throughput"),
    ("requests in time over EDF, five models on three nodes, points", "few", 0.9, "edf", "attainment"),
    ("throughput over EDF, five models on three nodes", "few", 3.0, "edf", "throughput"),
    ("throughput by swapping, five models", "multi", 3.0, "without-swapping", "throughput"),
)
"""Measure, part, the paper's figure, the other system, and our measure."""


def compare(result: experiment.Result) -> list[experiment.Comparison]:
    """Return the largest lead of `qlm` over the varied values: in points of attainment, or as a share of throughput."""
    of = {(row["part"], row["varied"], row["system"]): row for row in result["rows"]}

    def most(part: str, other: str, name: str) -> float | None:
        gains = []
        for (which, varied, system), row in of.items():
            base = of.get((part, varied, other))
            if which == part and system == "qlm" and base is not None:
                gain = row[name] - base[name]
                gains.append(gain if name == "attainment" else gain / base[name])
        return max(gains, default=None)

    return [
        experiment.Comparison(f"{measure}, at the most", PARTS[part].section, paper, most(part, other, name))
        for measure, part, paper, other, name in COMPARED
    ]


QLM: Final = experiment.Experiment(
    name="qlm",
    paper="QLM",
    section="8",
    measures="SLO attainment and throughput against EDF, vLLM's FCFS and SHEPHERD's batches: one model and five, each"
    " operation left out, mega prompts, two GPU types, queue sizes, group sizes",
    results="queueing.md#qlms-evaluation",
    options=(
        experiment.Option(
            "parts", "parts of the evaluation, separated by commas (default all)", among=tuple(PARTS), several=True
        ),
        experiment.Option("scale", "factor on GPUs and demand alike", 1.0, float, above=0.0, at_most=4.0),
        experiment.SEED,
        experiment.Option("seeds", "runs that are averaged, with seeds from the first one on", 2, int, at_least=1),
    ),
    run=run,
    show=show,
    compare=compare,
)
