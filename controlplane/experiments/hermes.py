"""Hermes' evaluation (sections 5.2, 5.3 and figure 15b): completion times of applications by order, in our simulator.

Runs are those of the workload suite, in the paper's mix of sizes; demand graphs are learned from other runs than those
simulated. The 7B model is Llama-2-7B on one A100 of 40 GB, with a profile from its shape: a step reads 13.5 GB of weights
and the keys and values of its tokens, 0.5 MiB each. The 70B fleet is two instances of Llama-3-70B on four H100, by the step
times that BLIS publishes for vLLM.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.shared.scenes import HERE, INTERACTIVE, ServedModel, scenario_of
from controlplane.simulation.running import Simulated
from controlplane.terminal import Column, table
from scheduling.applications.suite import SUITE
from scheduling.fleet.profile import Profile
from scheduling.policy import EndpointPolicy
from scheduling.simulation.measures.comparison import Interval, over_seeds
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.applications import MIXED
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.runs import alone_s

LLAMA_7B: Final = ServedModel("llama-2-7b", Profile(0.0, 0.02, 7.5e-5, 0.0, 0.018, 1.2e-4, 4e-7), 43_000, 256, 4096)
LLAMA_70B: Final = ServedModel(
    "llama-3-70b", Profile(0.0, 0.0126, 7.64e-5, 0.0, 0.0126, 6.68e-5, 3e-8), 450_000, 256, 8192, gpu="4 x H100"
)
MOONCAKE: Final = "mooncake/conversation_trace.jsonl"
OWN_CV: Final = 3.0
"""Of the gaps between runs without that trace: those of its own gaps."""
INTENSITY_MIN: Final = {"1x": 30.0, "2x": 15.0, "3x": 10.0}
"""Windows in which all runs begin (section 5.2)."""
FACTORS: Final = (1.2, 1.5, 2.0)
"""Of a run's time without waiting on a busy instance, until it is due (section 5.2)."""
QUANTILES: Final = tuple(range(0, 101, 4))
"""Percentages of runs whose completion times are kept, for the distributions of figures 9b and 10b."""
CALL_TOKENS: Final = 1_800
"""Of a call of the mix, on average."""


@dataclass(frozen=True, slots=True)
class Order:
    """A system of the evaluation: the order of its queue, and what is known of runs."""

    ordering: str
    runs: str = "graph"
    """As in `[predictions]`."""
    buckets: int = 10
    stretch: float = 1e5
    """As `ordering_stretch`: so large that runs do not age, as in the paper."""
    worst: float = 1.0
    """Quantile of a run's path that is its worst case, of `run_slack`."""
    late_last: bool = False


SYSTEMS: Final[Mapping[str, Order]] = {
    "vLLM": Order("fcfs"),
    "Parrot": Order("application"),
    "VTC": Order("vtc"),
    "SRPT": Order("srpt"),
    "Hermes": Order("hermes"),
    "oracle": Order("srpt", "exact"),
}
DEADLINES: Final[Mapping[str, Order]] = {
    "vLLM": Order("fcfs"),
    "Parrot": Order("application"),
    "VTC": Order("vtc"),
    "EDF": Order("run_deadline"),
    "Hermes": Order("hermes"),
    "Hermes-DDL": Order("run_slack"),
    "slack, 90 %": Order("run_slack", worst=0.9),
    "slack, median": Order("run_slack", worst=0.5),
    "EDF, late last": Order("run_deadline", late_last=True),
    "Hermes-DDL, late last": Order("run_slack", late_last=True),
    "slack, median, late last": Order("run_slack", worst=0.5, late_last=True),
}
"""`late last`: runs that cannot be in time any more are served after all others."""
ABLATION: Final[Mapping[str, Order]] = {
    "Hermes": Order("hermes"),
    "no correlations": Order("hermes", "unrefined"),
    "no refinement": Order("hermes", "whole"),
    "mean, correlations": Order("srpt"),
    "mean, no correlations": Order("srpt", "unrefined"),
    "mean, no refinement": Order("srpt", "whole"),
    "nothing known": Order("hermes", "none"),
    "Hermes, aged": Order("hermes", stretch=EndpointPolicy().ordering_stretch),
    "oracle": Order("srpt", "exact"),
}
"""`no refinement` knows the distribution of whole runs alone, whatever a run has done so far; `nothing known` has
no graph, but the true outputs of the calls that wait; `aged` bounds starvation as a deployment does by default.
"""
BUCKETS: Final[Mapping[str, Order]] = {
    f"{count} buckets": Order("hermes", buckets=count) for count in (2, 5, 10, 20, 50)
}


@dataclass(frozen=True, slots=True)
class EvaluationPart:
    """*systems* on *count* runs of *model* within each of *windows*."""

    title: str
    section: str
    model: ServedModel
    instances: int
    count: int
    windows: Sequence[str]
    systems: Mapping[str, Order]
    deadlines: bool = False
    suite: str = MIXED


PARTS: Final[Mapping[str, EvaluationPart]] = {
    "7b": EvaluationPart("300 runs on Llama-2-7B, one A100", "5.2", LLAMA_7B, 1, 300, tuple(INTENSITY_MIN), SYSTEMS),
    "70b": EvaluationPart(
        "3,000 runs on Llama-3-70B, two instances", "5.2", LLAMA_70B, 2, 3000, tuple(INTENSITY_MIN), SYSTEMS
    ),
    "deadlines": EvaluationPart(
        "Deadlines at 1.2, 1.5 or 2 times the time without waiting on a busy instance",
        "5.2",
        LLAMA_7B,
        1,
        300,
        ("2x",),
        DEADLINES,
        deadlines=True,
    ),
    "ablation": EvaluationPart(
        "What is known of runs, and Gittins or mean", "5.3", LLAMA_7B, 1, 300, ("3x",), ABLATION
    ),
    "alike": EvaluationPart(
        "120 runs of Code Generation alone, on Llama-2-7B", "5.3", LLAMA_7B, 1, 120, ("3x",), ABLATION, suite="CG"
    ),
    "buckets": EvaluationPart("Buckets of the Gittins rank (figure 15b)", "5.5", LLAMA_7B, 1, 300, ("3x",), BUCKETS),
}


def slowdown(model: ServedModel) -> float:
    """Return how much longer a decode step of *model* takes with full memory than with one call."""
    sequences = min(model.max_num_seqs, model.kv_tokens // CALL_TOKENS)
    busy_s = model.profile.step_time_s(0, sequences, model.kv_tokens)
    return busy_s / model.profile.step_time_s(0, 1, CALL_TOKENS)


def scenario(part: EvaluationPart, order: Order, window_min: float, scale: float, data: Path, seed: int) -> Scenario:
    """Return *part* under *order* with the runs of *seed*: *scale* times as many, in a window as much longer."""
    count = max(1, round(part.count * scale))
    runs: dict[str, Any] = {
        "suite": part.suite,
        "model": part.model.name,
        "slo_class": INTERACTIVE,
        "runs": count,
        "tenants": count,
        "window_h": window_min * scale / 60,
    }
    trace = data / MOONCAKE
    runs |= {"arrivals": {"file": str(trace), "format": "mooncake"}} if trace.exists() else {"cv": OWN_CV}
    if part.deadlines:
        runs["deadline_factor"] = [factor * slowdown(part.model) for factor in FACTORS]
    return scenario_of(
        [part.model.group(instances=part.instances, regions=[HERE])],
        policies={
            "ordering": order.ordering,
            "ordering_stretch": order.stretch,
            "late_runs_last": order.late_last,
        },
        applications=[runs],
        demand={"too_long": "clip"},
        predictions={"runs": order.runs, "buckets": order.buckets, "recorded_runs": 1_000, "worst": order.worst},
        seed=seed,
    )


def cases(name: str, part: EvaluationPart, settings: experiment.Settings) -> Iterator[experiment.Case]:
    """Yield each system of *part* at each intensity."""

    def draw(order: Order, window_min: float, seed: int) -> tuple[Scenario, Workload | None]:
        return scenario(part, order, window_min, settings["scale"], settings["data"], seed), None

    for window in [each for each in part.windows if each in settings["intensities"]]:
        for system, order in part.systems.items():
            if not settings["systems"] or system in settings["systems"].split(";"):
                about = {"part": name, "intensity": window, "system": system}
                yield experiment.Case(about, partial(draw, order, INTENSITY_MIN[window]))


def measured(run: Simulated) -> experiment.Row:
    """Return completion times: mean, p95, means by size; of runs with deadlines, shares that met them, by factor."""
    runs, to_come = run.result.runs, run.staged.runs
    assert runs is not None
    assert to_come is not None
    taken_s = runs.completion_s
    if not np.isfinite(taken_s).all():
        raise RuntimeError(f"{np.isnan(taken_s).sum()} of {taken_s.size} runs did not end")
    sizes = np.array([SUITE[name].size for name in runs.names])[runs.application]
    row: experiment.Row = {
        "runs": taken_s.size,
        "calls": int(run.staged.requests.count),
        "mean_s": float(taken_s.mean()),
        "p50_s": float(np.percentile(taken_s, 50)),
        "p95_s": float(np.percentile(taken_s, 95)),
        "quantiles_s": np.percentile(taken_s, QUANTILES).tolist(),
        **{f"{size}_s": float(taken_s[sizes == size].mean()) for size in ("small", "medium", "large") if size in sizes},
    }
    if np.isfinite(runs.due_s).all():
        engine = run.result.cluster.instances[0].engine
        kv_tokens = engine.kv_blocks * engine.block_size_tokens
        alone = [
            alone_s(
                each.record, to_come.applications[each.application].units, lambda model: (engine.profile, kv_tokens)
            )
            for each in to_come.runs
        ]
        factors = np.array([each.due_in_s for each in to_come.runs]) / alone / slowdown(LLAMA_7B)
        met = runs.ended_s <= runs.due_s
        row["met"] = float(met.mean())
        row |= {f"met_{factor:g}": float(met[np.isclose(factors, factor)].mean()) for factor in FACTORS}
    return row


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    """Run every case for each seed; rows hold the values of all seeds in order."""
    seeds = range(settings["seed"], settings["seed"] + settings["seeds"])
    listed = [case for name in settings["parts"] for case in cases(name, PARTS[name], settings)]
    if not listed:
        raise ValueError("None of the parts has these systems at these intensities.")
    rows = []
    for at, case in enumerate(listed):
        progress("hermes", at, len(listed))
        values = [measured(case.simulate(seed)) for seed in seeds]
        rows.append(case.about | {name: [each.get(name) for each in values] for name in values[0]})
    progress("hermes", len(listed), len(listed))
    bursts = "mooncake" if (settings["data"] / MOONCAKE).exists() else f"gaps of CV {OWN_CV:g}"
    return {**{name: settings[name] for name in ("parts", "scale", "seed", "seeds")}, "arrivals": bursts,
            "rows": experiment.rounded(rows)}  # fmt: skip


def against(row: experiment.Row, base: experiment.Row | None, name: str) -> Interval | None:
    """Return the change of *name* from *base* to *row*, seed by seed; None without *base*."""
    if base is None:
        return None
    return over_seeds([one / other - 1 for one, other in zip(row[name], base[name], strict=True)])


def changed(interval: Interval | None) -> str:
    """Format a change with half its interval, if there is one: not of one seed, nor of the first system."""
    if interval is None:
        return "-"
    half = f" ±{100 * (interval.high - interval.mean):.1f}" if interval.high > interval.mean else ""
    return experiment.percent(interval.mean) + half


def _mean(values: Sequence[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return float(np.mean(known)) if known else None


def columns(part: EvaluationPart, rows: Sequence[experiment.Row]) -> list[Column]:
    """Return the columns of the *rows* of *part*, with changes against its first system."""
    first, *_ = part.systems
    bases = {row["intensity"]: row for row in rows if row["system"] == first}

    def of(name: str) -> Any:
        return lambda row: _mean(row.get(name, []))

    def change_of(name: str) -> Any:
        return lambda row: against(row, bases.get(row["intensity"]), name)

    shown = [Column("Intensity", "intensity"), Column("System", "system")]
    if part.deadlines:
        share = partial(experiment.percent, sign=False)
        shown.append(Column("deadlines met", of("met"), share))
        shown += [Column(f"at {factor:g}x", of(f"met_{factor:g}"), share) for factor in FACTORS]
        return [*shown, Column("mean (s)", of("mean_s"), "{:,.1f}")]
    return [
        *shown,
        Column("mean (s)", of("mean_s"), "{:,.1f}"),
        Column(f"against {first}", change_of("mean_s"), changed),
        Column("p95 (s)", of("p95_s"), "{:,.1f}"),
        Column(f"against {first}", change_of("p95_s"), changed),
        *(Column(f"{size} (s)", of(f"{size}_s"), "{:,.1f}") for size in ("small", "medium", "large")),
    ]


def show(console: Console, result: experiment.Result) -> None:
    console.print(
        f"[bold]Hermes, section 5[/], scale {result['scale']:g}, seeds {result['seed']} to"
        f" {result['seed'] + result['seeds'] - 1}; runs begin as in {result['arrivals']}. Completion times are means over"
        " seeds, changes are paired by seed with 95 % intervals."
    )
    for name in result["parts"]:
        rows = [row for row in result["rows"] if row["part"] == name]
        console.print(table(PARTS[name].title, columns(PARTS[name], rows), rows))


PAPER: Final = (
    ("mean completion, Hermes against vLLM, 7B 1x", "7b", "1x", "Hermes", "vLLM", "mean_s", -0.770),
    ("mean completion, Hermes against Parrot, 7B 1x", "7b", "1x", "Hermes", "Parrot", "mean_s", -0.767),
    ("mean completion, Hermes against VTC, 7B 1x", "7b", "1x", "Hermes", "VTC", "mean_s", -0.667),
    ("p95 completion, Hermes against vLLM, 7B 1x", "7b", "1x", "Hermes", "vLLM", "p95_s", -0.824),
    ("p95 completion, Hermes against Parrot, 7B 1x", "7b", "1x", "Hermes", "Parrot", "p95_s", -0.690),
    ("p95 completion, Hermes against VTC, 7B 1x", "7b", "1x", "Hermes", "VTC", "p95_s", -0.741),
    ("mean completion, Hermes against vLLM, 7B, ours at 2x", "7b", "2x", "Hermes", "vLLM", "mean_s", -0.770),
    ("mean completion, Hermes against Parrot, 7B, ours at 2x", "7b", "2x", "Hermes", "Parrot", "mean_s", -0.767),
    ("mean completion, Hermes against VTC, 7B, ours at 2x", "7b", "2x", "Hermes", "VTC", "mean_s", -0.667),
    ("mean completion, Hermes against vLLM, 70B 3x", "70b", "3x", "Hermes", "vLLM", "mean_s", -0.585),
    ("mean completion, Hermes against Parrot, 70B 3x", "70b", "3x", "Hermes", "Parrot", "mean_s", -0.391),
    ("mean completion, Hermes against VTC, 70B 3x", "70b", "3x", "Hermes", "VTC", "mean_s", -0.503),
    ("p95 completion, Hermes against vLLM, 70B 3x", "70b", "3x", "Hermes", "vLLM", "p95_s", -0.622),
    ("p95 completion, Hermes against Parrot, 70B 3x", "70b", "3x", "Hermes", "Parrot", "p95_s", -0.217),
    ("p95 completion, Hermes against VTC, 70B 3x", "70b", "3x", "Hermes", "VTC", "p95_s", -0.458),
    ("mean completion without refinement", "ablation", "3x", "no refinement", "Hermes", "mean_s", 0.153),
    (
        "mean completion without refinement and Gittins",
        "ablation",
        "3x",
        "mean, no refinement",
        "Hermes",
        "mean_s",
        0.475,
    ),
)
"""Measure, part, intensity, the two systems, and the paper's change."""


def compare(result: experiment.Result) -> list[experiment.Comparison]:
    """Return changes of the mean over seeds, and the deadlines met by Hermes-DDL over EDF as a factor."""
    of = {(row["part"], row["intensity"], row["system"]): row for row in result["rows"]}
    rows = []
    for measure, part, intensity, system, base, name, paper in PAPER:
        if part in result["parts"]:
            one, other = of.get((part, intensity, system)), of.get((part, intensity, base))
            interval = against(one, other, name) if one is not None else None
            rows.append(experiment.Comparison(measure, PARTS[part].section, paper, interval.mean if interval else None))
    if "deadlines" in result["parts"]:
        ours, edf = (of.get(("deadlines", "2x", system)) for system in ("Hermes-DDL", "EDF"))
        ratio = np.mean(ours["met"]) / np.mean(edf["met"]) if ours and edf else None
        rows.append(
            experiment.Comparison(
                "deadlines met, Hermes-DDL over EDF", "5.2", 2.0, None if ratio is None else float(ratio), "factor"
            )
        )
    return rows


HERMES: Final = experiment.Experiment(
    name="hermes",
    paper="Hermes",
    section="5.2, 5.3, 5.5",
    measures="completion times of applications by order at three intensities, deadlines met, what refinement, Gittins ranks"
    " and buckets are worth",
    results="hermes.md#evaluation",
    options=(
        experiment.Option(
            "parts", "parts of the evaluation, separated by commas (default all)", among=tuple(PARTS), several=True
        ),
        experiment.Option("systems", "only these, separated by semicolons (default all)", ""),
        experiment.Option(
            "intensities",
            "of those of a part, separated by commas (default all)",
            among=tuple(INTENSITY_MIN),
            several=True,
        ),
        experiment.DATA,
        experiment.Option("scale", "factor on runs and window alike", 1.0, float, above=0.0, at_most=4.0),
        experiment.SEED,
        experiment.Option("seeds", "seeds from the first one on", 5, int, at_least=1),
    ),
    run=run,
    show=show,
    compare=compare,
)
