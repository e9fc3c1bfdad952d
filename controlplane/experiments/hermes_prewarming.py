"""Hermes' evaluation of prewarming LoRA adapters (section 5.4, figure 13b), in our simulator.

One instance holds 10 adapters on its GPU and 20 in CPU memory; 1,000 runs of the workload suite come within 25 minutes, and
all requests of a run use one of 200 adapters. A hit is a request whose adapter is on the GPU when its instance gets it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

from controlplane.experiments.experiment import (
    DATA,
    SEED,
    Case,
    Comparison,
    Experiment,
    Option,
    Progress,
    Result,
    Row,
    Settings,
    mean_of,
    percent,
    rounded,
)
from controlplane.experiments.hermes import LLAMA_7B, MOONCAKE, OWN_CV
from controlplane.experiments.shared.scenes import HERE, INTERACTIVE, scenario_of
from controlplane.simulation.running import Simulated
from controlplane.terminal import Column, table
from scheduling.applications.prewarming import EPWQ, HERMES, LRU
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.applications import MIXED
from scheduling.simulation.workload.columns import Workload

ADAPTERS: Final = 200
ON_GPU: Final = 10
IN_MEMORY: Final = 20
RUNS: Final = 1_000
WINDOW_MIN: Final = 25.0
K_SWEEP: Final = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class System:
    prewarming: str
    k: float = 0.5


SYSTEMS: Final[Mapping[str, System]] = {"LRU": System(LRU), "EPWQ": System(EPWQ), "Hermes": System(HERMES)}
SWEEP: Final[Mapping[str, System]] = {f"K = {k:g}": System(HERMES, k) for k in K_SWEEP}
PARTS: Final[Mapping[str, Mapping[str, System]]] = {"lora": SYSTEMS, "k": SWEEP}


def scenario(system: System, settings: Settings, data: Path, seed: int) -> Scenario:
    """Return the workload under *system*, with `scale` times as many runs in a window as much longer."""
    count = max(1, round(RUNS * settings["scale"]))
    trace = data / MOONCAKE
    runs = {
        "suite": MIXED,
        "model": LLAMA_7B.name,
        "slo_class": INTERACTIVE,
        "runs": count,
        "tenants": count,
        "window_h": WINDOW_MIN * settings["scale"] / 60,
        **({"arrivals": {"file": str(trace), "format": "mooncake"}} if trace.exists() else {"cv": OWN_CV}),
    }
    group = LLAMA_7B.group(instances=settings["instances"], regions=[HERE])
    return scenario_of(
        [group | {"max_loras": ON_GPU, "max_cpu_loras": IN_MEMORY}],
        policies={"ordering": "hermes", "prewarming": system.prewarming, "prewarm_k": system.k},
        models={LLAMA_7B.name: {"context_tokens": LLAMA_7B.context_tokens, "adapters": {"count": ADAPTERS}}},
        applications=[runs],
        demand={"too_long": "clip"},
        seed=seed,
    )


def cases(systems: Mapping[str, System], part: str, settings: Settings) -> Iterator[Case]:
    def draw(system: System, seed: int) -> tuple[Scenario, Workload | None]:
        return scenario(system, settings, settings["data"], seed), None

    for name, system in systems.items():
        yield Case({"part": part, "system": name}, partial(draw, system))


def measured(run: Simulated) -> Row:
    """Return where adapters were when their requests came, what prewarming did, and completion times in seconds."""
    counters, runs = run.result.counters, run.result.runs
    assert runs is not None
    count = {name: counters[f"adapter_{name}"] for name in ("not_loaded", "in_memory", "on_gpu")}
    requests, warmed = sum(count.values()), counters.get("prewarmed_warmed", 0)
    taken_s = runs.completion_s[np.isfinite(runs.completion_s)]
    return {
        "requests": requests,
        "hits": count["on_gpu"] / requests,
        "in_memory": count["in_memory"] / requests,
        "not_loaded": count["not_loaded"] / requests,
        "warmed": warmed,
        "used": counters.get("prewarmed_used", 0) / warmed if warmed else None,
        "wasted": counters.get("prewarmed_wasted", 0) / warmed if warmed else None,
        "mean_s": float(taken_s.mean()),
        "p95_s": float(np.percentile(taken_s, 95)),
    }


def run(settings: Settings, progress: Progress) -> Result:
    """Run every system of the parts for each seed; rows are means over seeds."""
    seeds = range(settings["seed"], settings["seed"] + settings["seeds"])
    listed = [case for part in settings["parts"] for case in cases(PARTS[part], part, settings)]
    rows = []
    for at, case in enumerate(listed):
        progress("hermes-prewarming", at, len(listed))
        rows.append(case.about | mean_of([measured(case.simulate(seed)) for seed in seeds]))
    progress("hermes-prewarming", len(listed), len(listed))
    return {
        **{name: settings[name] for name in ("parts", "scale", "instances", "seed", "seeds")},
        "rows": rounded(rows),
    }


def show(console: Console, result: Result) -> None:
    console.print(
        f"[bold]Hermes, section 5.4[/]: {ADAPTERS} adapters, {ON_GPU} on the GPU and {IN_MEMORY} in memory, scale"
        f" {result['scale']:g}, {result['instances']} instance(s), means over {result['seeds']} seeds."
    )
    share = partial(percent, sign=False)
    columns = [
        Column("System", "system"),
        *(Column(title, name, share) for title, name in (
            ("on the GPU", "hits"), ("in memory", "in_memory"), ("not loaded", "not_loaded"),
        )),
        Column("prewarmed", "warmed", "{:,.0f}"),
        Column("used", "used", share),
        Column("wasted", "wasted", share),
        Column("mean (s)", "mean_s", "{:,.1f}"),
        Column("p95 (s)", "p95_s", "{:,.1f}"),
    ]  # fmt: skip
    for part in result["parts"]:
        rows = [row for row in result["rows"] if row["part"] == part]
        console.print(table("Prewarming" if part == "lora" else "The knob K", columns, rows))


def compare(result: Result) -> list[Comparison]:
    """Return the change of the hit ratio from EPWQ to Hermes."""
    of = {row["system"]: row for row in result["rows"] if row["part"] == "lora"}
    ours = of["Hermes"]["hits"] / of["EPWQ"]["hits"] - 1 if {"Hermes", "EPWQ"} <= of.keys() else None
    return [Comparison("hits of adapters, Hermes against EPWQ", "5.4", 0.211, ours)]


HERMES_PREWARMING: Final = Experiment(
    name="hermes-prewarming",
    paper="Hermes",
    section="5.4",
    measures="hits of LoRA adapters without prewarming, by the waiting queue, and by demand graphs; the knob K",
    results="applications.md#prewarming",
    options=(
        Option("parts", "parts of the evaluation, separated by commas (default all)", among=tuple(PARTS), several=True),
        DATA,
        Option("scale", "factor on runs and window alike", 1.0, float, above=0.0, at_most=4.0),
        Option("instances", "instances of the model", 1, int, at_least=1),
        SEED,
        Option("seeds", "seeds from the first one on", 3, int, at_least=1),
    ),
    run=run,
    show=show,
    compare=compare,
)
