"""Hermes' evaluation (sections 5.2, 5.3 and figure 15b): completion times of applications by order, in our simulator.

Runs are those of the workload suite, in the paper's mix of sizes; demand graphs are learned from other runs than those
simulated. Parts, systems and models are in `data/hermes.toml`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.shared.scenes import HERE, INTERACTIVE, ServedModel, scenario_of
from controlplane.simulation.running import Simulated
from controlplane.terminal import table
from scheduling.applications.suite import SUITE
from scheduling.simulation.measures.comparison import Interval, over_seeds
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.applications import MIXED
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.runs import alone_s

DATA: Final = experiment.read_data("hermes")
MODELS: Final = {name: ServedModel.read(name, each) for name, each in DATA["models"].items()}
LLAMA_7B: Final = MODELS["llama-2-7b"]
PARTS: Final[Mapping[str, Mapping[str, Any]]] = DATA["parts"]
MOONCAKE: Final = "mooncake/conversation_trace.jsonl"
OWN_CV: Final = 3.0
"""Of the gaps between runs without that trace: those of its own gaps."""
FACTORS: Final = (1.2, 1.5, 2.0)
"""Of a run's time without waiting on a busy instance, until it is due (section 5.2)."""
SIMPLEST: Final = "table"
"""The mean of recorded calls by unit and visit, instead of a demand graph."""
SLACK: Final = ("Hermes-DDL", "Pilothouse, late last")
QUANTILES: Final = tuple(range(0, 101, 4))
"""Percentages of runs whose completion times are kept, for the distributions of figures 9b and 10b."""
CALL_TOKENS: Final = 1_800
"""Of a call of the mix, on average."""


def slowdown(model: ServedModel) -> float:
    """Return how much longer a decode step of *model* takes with full memory than with one call."""
    sequences = min(model.max_num_seqs, model.kv_tokens // CALL_TOKENS)
    busy_s = model.profile.step_time_s(0, sequences, model.kv_tokens)
    return busy_s / model.profile.step_time_s(0, 1, CALL_TOKENS)


def runs_of(suite: str, model: ServedModel, runs: int, window_min: float, scale: float, data: Path) -> dict[str, Any]:
    """Return an `[[applications]]`: *scale* times *runs*, each of another tenant, in a window as much longer."""
    count, trace = max(1, round(runs * scale)), data / MOONCAKE
    return {
        "suite": suite,
        "model": model.name,
        "slo_class": INTERACTIVE,
        "runs": count,
        "tenants": count,
        "window_h": window_min * scale / 60,
        **({"arrivals": {"file": str(trace), "format": "mooncake"}} if trace.exists() else {"cv": OWN_CV}),
    }


def scenario(
    part: Mapping[str, Any], system: Mapping[str, Any], window_min: float, settings: experiment.Settings, seed: int
) -> tuple[Scenario, Workload | None]:
    """Return *part* under *system* with the runs of *seed*."""
    model = MODELS[part["model"]]
    runs = runs_of(part.get("suite", MIXED), model, part["runs"], window_min, settings["scale"], settings["data"])
    if part.get("deadlines"):
        runs["deadline_factor"] = [factor * slowdown(model) for factor in FACTORS]
    made = scenario_of(
        [model.group(instances=part["instances"], regions=[HERE])],
        policies={
            "ordering": system["ordering"],
            "ordering_stretch": system.get("stretch", 1e5),
            "late_runs_last": system.get("late_last", False),
            "run_demand": system.get("demand", "graph"),
        },
        applications=[runs],
        demand={"too_long": "clip"},
        predictions={
            "runs": system.get("runs", "graph"), "buckets": system.get("buckets", 10), "recorded_runs": 1_000,
            "worst": system.get("worst", 1.0),
        },
        seed=seed,
    )  # fmt: skip
    return made, None


def cases(name: str, settings: experiment.Settings) -> Iterator[experiment.Case]:
    """Yield each system of the part *name* at each intensity."""
    part = PARTS[name]
    for window in [each for each in part["windows"] if each in settings["intensities"]]:
        for title, system in DATA[part["systems"]].items():
            if not settings["systems"] or title in settings["systems"].split(";"):
                about = {"part": name, "intensity": window, "system": title}
                yield experiment.Case(about, partial(scenario, part, system, DATA["intensities"][window], settings))


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
    listed = [case for name in settings["parts"] for case in cases(name, settings)]
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


def show(console: Console, result: experiment.Result) -> None:
    console.print(
        f"[bold]Hermes, section 5[/], scale {result['scale']:g}, seeds {result['seed']} to"
        f" {result['seed'] + result['seeds'] - 1}; runs begin as in {result['arrivals']}. Completion times are means over"
        " seeds, changes are paired by seed with 95 % intervals."
    )
    for name in result["parts"]:
        rows, part = [row for row in result["rows"] if row["part"] == name], PARTS[name]
        kind, first = "deadlines" if part.get("deadlines") else "completion", next(iter(DATA[part["systems"]]))
        bases = {row["intensity"]: row for row in rows if row["system"] == first}
        shown = experiment.columns(DATA["columns"][kind], first=first)
        console.print(table(part["title"], shown, [_shown(row, bases.get(row["intensity"])) for row in rows]))


def _shown(row: experiment.Row, base: experiment.Row | None) -> experiment.Row:
    """Return the means of *row* over seeds, and its changes against *base*."""
    changes = {name: changed(against(row, base, name)) for name in ("mean_s", "p95_s")}
    means = {name: _mean(value) for name, value in row.items() if name.endswith("_s") or name.startswith("met")}
    return row | means | {"changes": changes}


def _mean(values: Sequence[Any]) -> float | None:
    known = [each for each in values if isinstance(each, float | int)]
    return float(np.mean(known)) if known else None


def compare(result: experiment.Result) -> list[experiment.Comparison]:
    """Return changes of the mean over seeds, and the deadlines met by Hermes-DDL over EDF as a factor."""
    of = {(row["part"], row["intensity"], row["system"]): row for row in result["rows"]}
    rows = []
    for measure, part, intensity, system, base, name, paper in DATA["reported"]["changes"]:
        if part in result["parts"]:
            other = of.get((part, intensity, base))
            found = [of.get((part, intensity, each)) for each in (system, SIMPLEST)]
            changes = [against(one, other, name) if one is not None else None for one in found]
            ours, simplest = (each.mean if each else None for each in changes)
            row = experiment.Comparison(measure, PARTS[part]["section"], paper, ours)
            rows.append(replace(row, simplest=simplest) if base in DATA["systems"] and base != "Hermes" else row)
    if "deadlines" in result["parts"]:
        edf, simplest, *found = (_met(of, each) for each in ("EDF", "EDF, late last", *SLACK))
        for name, met in zip(SLACK, found, strict=True):
            ratio, least = (each / edf if each and edf else None for each in (met, simplest))
            measure = f"deadlines met, {name} over EDF"
            rows.append(experiment.Comparison(measure, "5.2", 2.0, ratio, "factor", least))
    return rows


def _met(of: Mapping[tuple[str, str, str], experiment.Row], system: str) -> float | None:
    row = of.get(("deadlines", "2x", system))
    return None if row is None else float(np.mean(row["met"]))


HERMES: Final = experiment.Experiment.read("hermes", run=run, show=show, compare=compare)
