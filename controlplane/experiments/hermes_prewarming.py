"""Hermes' evaluation of prewarming (section 5.4, figures 13 and 14), in our simulator.

Runs of the workload suite come to Llama-2-7B on one A100, as in `hermes`. Parts, by the paper's settings:

- `lora`: 1,000 runs within 25 minutes; an instance holds 10 adapters on its GPU and 20 in CPU memory, and all calls of a run
  use one of 200. A call comes to an adapter that is on the GPU or not, and again when its instance gets it.
- `kv`: 500 runs within 15 minutes with 8, 16 or 32 GB for keys and values. Calls of a unit share its system prompt, of which
  there are several versions; vLLM's prefix cache keeps what running calls leave free. The paper does not say what its cache
  holds; how many versions there are is our choice.
- `k`: the knob K. Code Generation starts containers and Plan-and-Execution DNN models, each alone, with adapters for the mix
  besides. The paper's cold starts are in a figure without numbers, up to 18 times a call of 1,000 and 100 tokens, which
  takes 2.1 s here; those by backend are our choice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.hermes import LLAMA_7B, MOONCAKE, OWN_CV, against, changed
from controlplane.experiments.shared.scenes import HERE, INTERACTIVE, scenario_of
from controlplane.simulation.running import Simulated
from controlplane.terminal import Column, table
from scheduling.applications.prewarming import EAGER, EPWQ, HERMES, LATEST, LRU, USUAL_SHARE, Prewarming
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.applications import MIXED
from scheduling.simulation.workload.columns import Workload

ADAPTERS: Final = 200
ON_GPU: Final = 10
IN_MEMORY: Final = 20
KV_BYTES: Final = 524_288
"""Of a token of Llama-2-7B."""
MEMORIES_GB: Final = (8, 16, 32)
K_SWEEP: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
SHORT_S: Final = 10.0
"""Keep-alive of idle containers and models."""
LONG_S: Final = 600.0
BACKENDS: Final[Mapping[str, Any]] = {
    "container": {"start_s": 2.0, "capacity": 16},
    "dnn": {"start_s": 5.0, "starts_s": {"diffusion": 20.0, "text-to-video": 40.0}, "capacity": 4},
}
RARE: Final = "text-to-video"
"""The paper leaves runs that use it out (figure 14)."""


@dataclass(frozen=True, slots=True)
class System:
    prewarming: Prewarming
    k: float = 0.5
    keep_alive_s: float = SHORT_S
    share: float = USUAL_SHARE
    """Most of an instance's time for system prompts."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Runs of *suite*, and what can be cold."""

    suite: str
    runs: int
    window_min: float
    cold: str
    memory_gb: float | None = None
    """For keys and values; None: all that the card has."""


SYSTEMS: Final[Mapping[str, System]] = {
    "LRU": System(LRU),
    "EPWQ": System(EPWQ),
    "Hermes": System(HERMES),
    "at once": System(EAGER),
}
PROMPTED: Final[Mapping[str, System]] = {**SYSTEMS, "Hermes, any time": System(HERMES, share=1.0)}
SWEEP: Final[Mapping[str, System]] = {
    "LRU": System(LRU),
    "LRU, kept for 10 min": System(LRU, keep_alive_s=LONG_S),
    "at once": System(EAGER),
    **{f"K = {k:g}": System(HERMES, k) for k in K_SWEEP},
    **{f"as printed, K = {k:g}": System(LATEST, k) for k in K_SWEEP},
}
LORA: Final = Setting(MIXED, 1_000, 25.0, "adapter")
PARTS: Final[dict[str, tuple[Mapping[str, Setting], Mapping[str, System]]]] = {
    "lora": ({"adapters": LORA}, SYSTEMS),
    "kv": ({f"{gb} GB": Setting(MIXED, 500, 15.0, "prefix", gb) for gb in MEMORIES_GB}, PROMPTED),
    "k": (
        {
            "containers (CG)": Setting("CG", 60, 60.0, "container"),
            "DNN models (PE)": Setting("PE", 120, 60.0, "dnn"),
            "adapters": replace(LORA, runs=300, window_min=30.0),
        },
        SWEEP,
    ),
}


def scenario(setting: Setting, system: System, settings: experiment.Settings, data: Path, seed: int) -> Scenario:
    """Return *setting* under *system*, with `scale` times as many runs in a window as much longer."""
    count = max(1, round(setting.runs * settings["scale"]))
    trace = data / MOONCAKE
    runs = {
        "suite": setting.suite,
        "model": LLAMA_7B.name,
        "slo_class": INTERACTIVE,
        "runs": count,
        "tenants": count,
        "window_h": setting.window_min * settings["scale"] / 60,
        **({"arrivals": {"file": str(trace), "format": "mooncake"}} if trace.exists() else {"cv": OWN_CV}),
        **({"prompts": settings["prompts"]} if setting.cold == "prefix" else {}),
    }
    group = LLAMA_7B.group(instances=settings["instances"], regions=[HERE])
    model: dict[str, Any] = {"context_tokens": LLAMA_7B.context_tokens}
    if setting.cold == "adapter":
        group |= {"max_loras": ON_GPU, "max_cpu_loras": IN_MEMORY}
        model["adapters"] = {"count": ADAPTERS}
    if setting.memory_gb is not None:
        group |= {"prefix_caching": True, "kv_tokens": int(setting.memory_gb * 1e9 / KV_BYTES)}
    cold = {kind: table | {"keep_alive_s": system.keep_alive_s} for kind, table in BACKENDS.items()}
    return scenario_of(
        [group],
        policies={
            "ordering": "hermes",
            "prewarming": system.prewarming,
            "prewarm_k": system.k,
            "prewarm_share": system.share,
            **({"routing": "least_delay"} if setting.cold == "prefix" else {}),  # prompts are warmed by its index
        },
        models={LLAMA_7B.name: model},
        applications=[runs],
        backends={kind: table for kind, table in cold.items() if kind == setting.cold},
        demand={"too_long": "clip"},
        seed=seed,
    )


def cases(part: str, settings: experiment.Settings) -> Iterator[tuple[Setting, experiment.Case]]:
    def draw(setting: Setting, system: System, seed: int) -> tuple[Scenario, Workload | None]:
        return scenario(setting, system, settings, settings["data"], seed), None

    of, systems = PARTS[part]
    for title, setting in of.items():
        for name, system in systems.items():
            about = {"part": part, "setting": title, "system": name}
            yield setting, experiment.Case(about, partial(draw, setting, system))


def measured(setting: Setting, run: Simulated) -> experiment.Row:
    """Return how often a call finds what it needs, what prewarming does, and completion times in seconds."""
    counters, runs, to_come = run.result.counters, run.result.runs, run.staged.runs
    assert runs is not None
    assert to_come is not None
    usual = np.array([all(step.unit != RARE for step in each.record.steps) for each in to_come.runs])
    taken_s = runs.completion_s[usual & np.isfinite(runs.completion_s)]
    row: experiment.Row = {"mean_s": float(taken_s.mean()), "p95_s": float(np.percentile(taken_s, 95))}
    kind, count = setting.cold, len(to_come.runs)
    if kind == "adapter":
        tiers = ("not_loaded", "in_memory", "on_gpu")
        calls = sum(counters[f"adapter_{name}"] for name in tiers)
        row |= {f"{name}": counters[f"adapter_{name}"] / calls for name in tiers}
        row |= {"came_hits": counters["adapter_came_warm"] / counters["adapter_came"], "hits": row.pop("on_gpu")}
    elif kind == "prefix":
        shared = np.diff(run.result.requests.prefix_first) * LLAMA_7B.block_tokens
        cached = run.result.outcomes["cached_tokens"]
        row |= {
            "came_hits": counters["prefix_came_warm"] / counters["prefix_came"],
            "hits": float((cached >= shared)[shared > 0].mean()),
            "hit_tokens": counters["prefix_hit_tokens"] / counters["prefix_queried_tokens"],
        }
    else:
        calls = sum(counters[f"{kind}_{fate}"] for fate in ("hit", "late", "miss"))
        row |= {
            "hits": counters[f"{kind}_hit"] / calls,
            "waited_s": counters[f"{kind}_waited_s"] / count,
            "idle_s": counters[f"{kind}_idle_s"] / count,
        }
    counted = "prewarmed" if kind == "adapter" else kind
    warmed = counters.get(f"{counted}_warmed", 0)
    fates = {name: counters.get(f"{counted}_{name}", 0) for name in ("used", "wasted")}
    return row | {"warmed": warmed} | {name: each / warmed if warmed else None for name, each in fates.items()}


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    """Run every system of the parts for each seed; rows are means over seeds, with the mean completion time of each."""
    seeds = range(settings["seed"], settings["seed"] + settings["seeds"])
    listed = [case for part in settings["parts"] for case in cases(part, settings)]
    rows = []
    for at, (setting, case) in enumerate(listed):
        progress("hermes-prewarming", at, len(listed))
        values = [measured(setting, case.simulate(seed)) for seed in seeds]
        rows.append(case.about | experiment.mean_of(values) | {"means_s": [each["mean_s"] for each in values]})
    progress("hermes-prewarming", len(listed), len(listed))
    return {
        **{name: settings[name] for name in ("parts", "scale", "instances", "prompts", "seed", "seeds")},
        "rows": experiment.rounded(rows),
    }


TITLES: Final[Mapping[str, str]] = {
    "lora": f"{ADAPTERS} adapters, {ON_GPU} on the GPU and {IN_MEMORY} in memory (figure 13b)",
    "kv": "System prompts in the prefix cache (figure 13a)",
    "k": "The knob K (figure 14)",
}


def columns(rows: list[experiment.Row]) -> list[Column]:
    """Return the columns of *rows*, those that any of them has."""
    share, seconds = partial(experiment.percent, sign=False), "{:,.1f}"
    known = [
        Column("", "setting"),
        Column("System", "system"),
        Column("warm when it comes", "came_hits", share),
        Column("warm when it begins", "hits", share),
        Column("in memory", "in_memory", share),
        Column("not loaded", "not_loaded", share),
        Column("of prompt tokens", "hit_tokens", share),
        Column("waited a run (s)", "waited_s", seconds),
        Column("idle a run (s)", "idle_s", seconds),
        Column("prewarmed", "warmed", "{:,.0f}"),
        Column("used", "used", share),
        Column("wasted", "wasted", share),
        Column("mean (s)", "mean_s", seconds),
        Column("p95 (s)", "p95_s", seconds),
    ]
    shown = [each for each in known if any(each.value in row for row in rows)]
    if len(rows[0].get("means_s", ())) > 1:
        shown.append(Column(f"against {rows[0]['system']}", lambda row: against(row, rows[0], "means_s"), changed))
    return shown


def show(console: Console, result: experiment.Result) -> None:
    console.print(
        f"[bold]Hermes, section 5.4[/]: scale {result['scale']:g}, {result['instances']} instance(s), {result['prompts']}"
        f" versions of system prompts, means over {result['seeds']} seeds."
    )
    for part in result["parts"]:
        for setting in dict.fromkeys(row["setting"] for row in result["rows"] if row["part"] == part):
            rows = [row for row in result["rows"] if (row["part"], row["setting"]) == (part, setting)]
            console.print(table(f"{TITLES[part]}: {setting}", columns(rows)[1:], rows))


def compare(result: experiment.Result) -> list[experiment.Comparison]:
    """Return the changes from the baselines to Hermes, of those that the paper gives as numbers."""
    of = {(row["part"], row["setting"], row["system"]): row for row in result["rows"]}

    def change_of(part: str, setting: str, base: str, name: str) -> float | None:
        ours, other = of.get((part, setting, "Hermes")), of.get((part, setting, base))
        return ours[name] / other[name] - 1 if ours and other and other[name] else None

    kept = []
    if "lora" in result["parts"]:
        ours = change_of("lora", "adapters", "EPWQ", "came_hits")
        kept.append(experiment.Comparison("hits of adapters, Hermes against EPWQ", "5.4", 0.211, ours))
    if "kv" in result["parts"]:
        for base, hits, time in (("LRU", 1.11, -0.18), ("EPWQ", 0.33, -0.06)):
            for measure, name, paper, pick in (
                ("hits", "came_hits", hits, max),
                ("mean completion", "mean_s", time, min),
            ):
                changes = [change_of("kv", f"{gb} GB", base, name) for gb in MEMORIES_GB]
                known = [each for each in changes if each is not None]
                what = f"{measure} of system prompts" if name == "came_hits" else f"{measure} with system prompts"
                kept.append(
                    experiment.Comparison(
                        f"{what}, Hermes against {base}, at most", "5.4", paper, pick(known) if known else None
                    )
                )
    return kept


HERMES_PREWARMING: Final = experiment.Experiment(
    name="hermes-prewarming",
    paper="Hermes",
    section="5.4",
    measures="hits of adapters and system prompts without prewarming, by the waiting queue, and by demand graphs; the knob K"
    " for adapters, containers and DNN models",
    results="hermes.md#prewarming",
    options=(
        experiment.Option(
            "parts", "parts of the evaluation, separated by commas (default all)", among=tuple(PARTS), several=True
        ),
        experiment.DATA,
        experiment.Option("scale", "factor on runs and window alike", 1.0, float, above=0.0, at_most=4.0),
        experiment.Option("instances", "instances of the model", 1, int, at_least=1),
        experiment.Option("prompts", "versions of each system prompt", 10, int, at_least=1),
        experiment.SEED,
        experiment.Option("seeds", "seeds from the first one on", 3, int, at_least=1),
    ),
    run=run,
    show=show,
    compare=compare,
)
