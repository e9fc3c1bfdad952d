"""Hermes' evaluation of prewarming (section 5.4, figures 13 and 14), in our simulator.

Runs of the workload suite come to Llama-2-7B on one A100, as in `hermes`. Parts, by the paper's settings:

- `lora`: 1,000 runs within 25 minutes; an instance holds 10 adapters on its GPU and 20 in CPU memory, and all calls of a run
  use one of 200. A call comes to an adapter that is on the GPU or not, and again when its instance gets it.
- `kv`: 500 runs within 15 minutes with 8, 16 or 32 GB for keys and values. Calls of a unit share its system prompt, of which
  there are several versions; vLLM's prefix cache keeps what running calls leave free. The paper does not say what its cache
  holds; how many versions there are is our choice.
- `offload`: the same with 8 GB on the GPU, and 32 GB of CPU memory for what leaves it, over links of several speeds.
- `k`: the knob K. Code Generation starts containers and Plan-and-Execution DNN models, each alone, with adapters for the mix
  besides. The paper's cold starts are in a figure without numbers, up to 18 times a call of 1,000 and 100 tokens, which
  takes 2.1 s here; those by backend are our choice.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.hermes import LLAMA_7B, against, changed, runs_of
from controlplane.experiments.shared.scenes import HERE, scenario_of
from controlplane.simulation.running import Simulated
from controlplane.terminal import table
from scheduling.applications.prewarming import USUAL_SHARE
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.applications import MIXED
from scheduling.simulation.workload.columns import Workload

DATA: Final = experiment.read_data("hermes-prewarming")
ADAPTERS: Final = 200
ON_GPU: Final = 10
IN_MEMORY: Final = 20
KV_BYTES: Final = 524_288
"""Of a token of Llama-2-7B."""
KEEP_ALIVE_S: Final = 10.0
"""Of idle containers and models."""
RARE: Final = "text-to-video"
"""The paper leaves runs that use it out (figure 14)."""
Setting = Mapping[str, Any]
"""Of the experiment's file: runs of a suite, and what can be cold."""


def scenario(
    setting: Setting, system: Mapping[str, Any], settings: experiment.Settings, seed: int
) -> tuple[Scenario, Workload | None]:
    """Return *setting* under *system*, with `scale` times as many runs in a window as much longer."""
    suite = setting.get("suite", MIXED)
    runs = runs_of(suite, LLAMA_7B, setting["runs"], setting["window_min"], settings["scale"], settings["data"])
    group = LLAMA_7B.group(instances=settings["instances"], regions=[HERE])
    model: dict[str, Any] = {"context_tokens": LLAMA_7B.context_tokens}
    policies = {"ordering": "hermes", "prewarm_k": 0.5, "prewarm_share": USUAL_SHARE, **system}
    keep_alive_s = policies.pop("keep_alive_s", KEEP_ALIVE_S)
    if setting["cold"] == "adapter":
        group |= {"max_loras": ON_GPU, "max_cpu_loras": IN_MEMORY}
        model["adapters"] = {"count": ADAPTERS}
    if setting["cold"] == "prefix":
        runs["prompts"] = settings["prompts"]
        group |= {"prefix_caching": True, "kv_tokens": int(setting["memory_gb"] * 1e9 / KV_BYTES)}
        if "link_gb_s" in policies:
            group |= LLAMA_7B.offload(setting["offload_gb"], policies.pop("link_gb_s"), KV_BYTES)
        policies["routing"] = "least_delay"  # prompts are warmed by its index
    backends = DATA["backends"].items()
    made = scenario_of(
        [group],
        policies=policies,
        models={LLAMA_7B.name: model},
        applications=[runs],
        backends={kind: each | {"keep_alive_s": keep_alive_s} for kind, each in backends if kind == setting["cold"]},
        demand={"too_long": "clip"},
        seed=seed,
    )
    return made, None


def cases(part: str, settings: experiment.Settings) -> Iterator[tuple[Setting, experiment.Case]]:
    """Yield each setting of *part* under each of its systems."""
    for title, setting in DATA["parts"][part]["settings"].items():
        for name, system in DATA[DATA["parts"][part]["systems"]].items():
            about = {"part": part, "setting": title, "system": name}
            yield setting, experiment.Case(about, partial(scenario, setting, system, settings))


def measured(setting: Setting, run: Simulated) -> experiment.Row:
    """Return how often a call finds what it needs, what prewarming does, and completion times in seconds."""
    counters, runs, to_come = run.result.counters, run.result.runs, run.staged.runs
    assert runs is not None
    assert to_come is not None
    usual = np.array([all(step.unit != RARE for step in each.record.steps) for each in to_come.runs])
    taken_s = runs.completion_s[usual & np.isfinite(runs.completion_s)]
    row: experiment.Row = {"mean_s": float(taken_s.mean()), "p95_s": float(np.percentile(taken_s, 95))}
    kind, count = setting["cold"], len(to_come.runs)
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
            "restored_tokens": counters["restored_tokens"] / counters["prefix_queried_tokens"],
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


def show(console: Console, result: experiment.Result) -> None:
    console.print(
        f"[bold]Hermes, section 5.4[/]: scale {result['scale']:g}, {result['instances']} instance(s), {result['prompts']}"
        f" versions of system prompts, means over {result['seeds']} seeds."
    )
    for part in result["parts"]:
        for setting in dict.fromkeys(row["setting"] for row in result["rows"] if row["part"] == part):
            rows = [row for row in result["rows"] if (row["part"], row["setting"]) == (part, setting)]
            first = rows[0]
            if len(first.get("means_s", ())) > 1:
                rows = [row | {"change": changed(against(row, first, "means_s"))} for row in rows]
            known = [each for each in DATA["columns"]["all"] if any(each[1] in row for row in rows)]
            shown = experiment.columns(known, first=first["system"])
            console.print(table(f"{DATA['parts'][part]['title']}: {setting}", shown, rows))


def compare(result: experiment.Result) -> list[experiment.Comparison]:
    """Return the changes from the baselines to Hermes, of those that the paper gives as numbers."""
    of = {(row["part"], row["setting"], row["system"]): row for row in result["rows"]}
    kept = []
    for measure, part, base, name, paper, pick in DATA["reported"]["changes"]:
        pairs = [
            (of.get((part, each, "Hermes")), of.get((part, each, base))) for each in DATA["parts"][part]["settings"]
        ]
        changes = [ours[name] / other[name] - 1 for ours, other in pairs if ours and other and other[name]]
        ours = (max if pick == "max" else min)(changes, default=None)
        if part in result["parts"]:
            kept.append(experiment.Comparison(measure, "5.4", paper, ours))
    return kept


HERMES_PREWARMING: Final = experiment.Experiment.read("hermes-prewarming", run=run, show=show, compare=compare)
