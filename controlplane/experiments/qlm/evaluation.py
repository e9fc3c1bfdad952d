"""`manage.py reproduce qlm`: every part of section 8, and the paper's figures with ours."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.qlm.systems import (
    BATCH_1,
    BATCH_2,
    CLASSES,
    DATA,
    INTERACTIVE,
    MODELS,
    TUNED,
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

PARTS: Final[Mapping[str, Mapping[str, Any]]] = DATA["parts"]
DELTA: Final = EndpointPolicy().group_batches
GPUS: Final = 50
NODES: Final = 12
"""Of four A100 each, for W_B: 48 of the paper's 50."""
ARRIVING_S: Final = 60.0
ARRIVING_B_S: Final = 180.0
BATCH_1_LOAD: Final = 0.2
WAITING_S: Final = 40.0
"""Of the whole fleet: the work of the Batch-2 requests that wait at the start."""
WAITING_B_S: Final = 120.0
BUSY_LOAD: Final = 1.4
"""At which operations are left out of QLM, and mega prompts and group sizes are varied."""
MIX_VARIATIONS: Final = (1.0, 3.0)


def cases_of(name: str, scale: float) -> Iterator[experiment.Case]:
    """Return the cases of the part *name*, with *scale* times the GPUs and the demand."""
    part = PARTS[name]
    if part["on"] == "mixes":
        return mixes(DATA["mixes"], part["values"], MIX_VARIATIONS, scale)
    return (on_one_model if part["on"] == "one model" else on_nodes)(name, part, scale)


def on_one_model(name: str, part: Mapping[str, Any], scale: float) -> Iterator[experiment.Case]:
    """W_A: interactive requests at a load of the fleet's throughput, Batch-1 with them, and Batch-2 waiting at the start."""
    for value in part["values"]:
        values: dict[str, Any] = {
            "load": part.get("load", BUSY_LOAD), "mega": 0.0, "waiting_s": WAITING_S, "group_batches": DELTA, "a10": None,
        } | {part.get("varies", "load"): value}  # fmt: skip
        count = max(1, round(GPUS * scale))
        a10s = 0 if values["a10"] is None else round(values["a10"] * count)
        a100 = MODELS["vicuna_a100" if values["a10"] is None else "mistral_a100"]
        served = [(MODELS["mistral_a10"], "A10")] * a10s + [(a100, "A100")] * (count - a10s)
        rate = sum(full_per_s(model) for model, _ in served)
        for system in part["systems"]:
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


def on_nodes(name: str, part: Mapping[str, Any], scale: float) -> Iterator[experiment.Case]:
    """W_B: two models of Batch-1 at a rate each, three of Batch-2 with requests that wait at the start, on `nodes` of
    the part, by default at least one for each model.
    """
    count = part.get("nodes", max(len(TUNED), round(NODES * scale)))
    per_s = [full_per_s(each.base) for each in TUNED]
    first = [at for at, each in enumerate(TUNED) if each.slo_class == BATCH_1]
    second = [at for at, each in enumerate(TUNED) if each.slo_class == BATCH_2]
    rate = count * len(first) / sum(1.0 / per_s[at] for at in first)
    waiting = WAITING_B_S * count / sum(1.0 / per_s[at] for at in second)

    def drawn(load: float, system: str, seed: int) -> Drawn:
        streams = [Stream(BATCH_1, load * rate / len(first), at) for at in first]
        streams += [Stream(BATCH_2, 0.0, at, waiting=round(waiting)) for at in second]
        return nodes(count, system, draw(streams, [each.name for each in TUNED], ARRIVING_B_S, seed))

    for load in part["values"]:
        for system in part["systems"]:
            yield case(name, load, system, load * rate, partial(drawn, load, system))


def columns(part: Mapping[str, Any]) -> Sequence[Column]:
    """Return the columns of *part*."""
    shown, of_class = DATA["columns"], []
    for name in part.get("classes", CLASSES):
        of_class += experiment.columns(shown["of_class"], name=name)
    varied = (part.get("head", "load"), "varied", part.get("format", "{:g}"))
    return [*experiment.columns([varied, *shown["start"]]), *of_class, *experiment.columns(shown["end"])]


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

    shown = [Column("mix", "mix")]
    for system in systems:
        shown += experiment.columns(DATA["columns"]["system"], name=system)
    return [*shown, Column("qlm over the best of the others", more, "{:+.2f}")]


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    cases = [each for part in settings["parts"] for each in cases_of(part, settings["scale"])]
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
            console.print(table(PARTS[part]["title"], mix_columns(rows), side_by_side(rows)))
        else:
            console.print(table(PARTS[part]["title"], columns(PARTS[part]), rows))


def compare(result: experiment.Result) -> list[experiment.Comparison]:
    """Return the largest lead of `qlm`, and of the simplest rule, over the varied values.

    It is in points of attainment, or a share of throughput.
    """
    of = {(row["part"], row["varied"], row["system"]): row for row in result["rows"]}

    def most(leader: str | None, part: str, other: str, name: str) -> float | None:
        gains = []
        for (which, varied, system), row in of.items():
            base = of.get((part, varied, other))
            if which == part and system == leader and base is not None:
                gain = row[name] - base[name]
                gains.append(gain if name == "attainment" else gain / base[name])
        return max(gains, default=None)

    return [
        experiment.Comparison(
            f"{measure}, at the most",
            PARTS[part]["section"],
            paper,
            most("qlm", part, other, name),
            simplest=most(DATA["reported"]["simplest"].get(part), part, other, name),
        )
        for measure, part, paper, other, name in DATA["reported"]["leads"]
    ]


QLM: Final = experiment.Experiment.read("qlm", run=run, show=show, compare=compare)
