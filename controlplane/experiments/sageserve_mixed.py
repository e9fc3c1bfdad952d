"""SageServe's day of interactive and other work on one fleet (section 4), and its long-term strategies in the paper's form.

Two parts: `pools` compares silos with one pool under each release rule of the queue manager, scaled by the reactive
heuristic on every arrival; `plans` compares LT-I, LT-U and LT-UA, followed without reserve and floor, with ours.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from rich.console import Console

from controlplane.experiments import sageserve
from controlplane.experiments.experiment import (
    SCALE,
    SEED,
    Case,
    Comparison,
    Experiment,
    Option,
    Progress,
    Result,
    Row,
    Settings,
    change,
    percent,
    rounded,
    run_cases,
    seconds,
    share,
)
from controlplane.experiments.shared import scenes, setting
from controlplane.experiments.shared.measures import INTERACTIVE_CLASS, percentiles
from controlplane.experiments.shared.scenes import DAY_S, SILO, Scene
from controlplane.experiments.shared.setting import Setting
from controlplane.simulation.running import Simulated
from controlplane.terminal import Column, table
from forecasting.workload import BEST
from scheduling.queueing.release_rule import AT_ONCE, SLACK, USE
from scheduling.scaling import make_strategy
from scheduling.simulation.cluster.world import UNPAID, Outcome, State
from scheduling.simulation.measures.results import latency_s
from scheduling.simulation.workload.columns import Workload

PARTS: Final = ("pools", "plans")
SILOED: Final = "silos"
POOLS: Final = {
    SILOED: AT_ONCE,
    "one pool, by use": USE,
    "one pool, at once": AT_ONCE,
    "one pool, by slack (ours)": SLACK,
}
"""Release rule by name of the row; the second is the paper's unified pool."""
UNIFIED: Final = "one pool, by use"
PAPERS: Final = {"LT-I": "lt_i", "LT-U": "lt_u", "LT-UA": "lt_ua"}
OURS: Final = "Pilothouse (ours)"
BETA: Final = 0.1
"""Share of the last hour's non-interactive load that the paper's plans keep free (section 6.4)."""
SAMPLE_S: Final = 900.0
"""Step of the memory series, as in figures 5 and 6."""
SHOWN_REGION: Final = "us-west"
"""Of figure 6."""
PAPER_DONATED_H: Final = 52.0
PAPER_TTFT_CHANGE: Final = 0.12
"""Section 4: the largest change of a model's p95 TTFT from silos to one pool."""


def pools(scene: Scene, drawn: Workload, seed: int) -> Iterator[Case]:
    """Yield the silos and the one pool under each release rule."""
    for name, release in POOLS.items():
        siloed = name == SILOED
        scaling = {
            "strategy": "reactive", "min_instances": scene.min_instances, "max_instances": scene.max_instances,
            "floor": False, "per_arrival": True,
        }  # fmt: skip
        scenario = scene.scenario(siloed, release=release, scaling=scaling)
        requests = scene.requests(drawn, seed, siloed)
        yield Case.of({"strategy": name}, scenario, requests, until_s=DAY_S, seed=seed, sample_s=SAMPLE_S)


def plans(paper: Setting, ours: Setting) -> Iterator[Case]:
    """Yield the paper's strategies in its own form, and ours."""
    for name, strategy in (*PAPERS.items(), (OURS, "pilothouse")):
        made, faithful = (ours, False) if name == OURS else (paper, True)
        scene, plans_for = made.scene, make_strategy(strategy).plans_for
        scaling = {
            "strategy": strategy, "min_instances": scene.min_instances, "max_instances": scene.max_instances,
            "floor": not faithful,
        }  # fmt: skip
        scenario = scene.scenario(release=USE if faithful else SLACK, scaling=scaling)
        advisor = made.planner(plans_for, scene.usd_per_hour, niw_share=BETA if faithful else 0.0)
        requests = scene.requests(made.workload, made.seed)
        hooks = {"until_s": DAY_S, "seed": made.seed, "sample_s": SAMPLE_S, "advisor": advisor}
        yield Case.of({"strategy": name}, scenario, requests, **hooks)


def measured(run: Simulated) -> Row:
    """Return the measures of a day. Latencies are those of interactive requests, by model; `donated_hours` were lent out.

    `deadlines_met` is the share of the other requests that were due in the day or have ended that met their deadline of a
    day; `kv_use` is the mean use of the KV memory of ready instances.
    """
    result = run.result
    requests, outcomes, cluster = result.requests, result.outcomes, result.cluster
    names = [model.removesuffix(SILO) for model in cluster.models]
    models = list(dict.fromkeys(names))
    of_model = np.array([models.index(name) for name in names])[requests.model]
    interactive = requests.slo_class == INTERACTIVE_CLASS
    done = outcomes["state"] == Outcome.DONE
    ttft, e2e = latency_s(result, "ttft"), latency_s(result, "e2e")
    hours, other = result.state_s.sum(axis=0) / 3600, ~interactive
    took_s = e2e[other & done]
    judged = other & (done | (requests.arrival_s + DAY_S <= result.end_s))
    series = _memory(run)
    return {
        "instance_hours": float(hours.sum() - hours[list(UNPAID)].sum()),
        "donated_hours": float(hours[State.SPOT]),
        "usd": float(hours.sum() - hours[list(UNPAID)].sum()) * scenes.USD_PER_HOUR,
        "kv_use": float(np.nanmean(list(series["kv_use"].values()))),
        "ttft_p95_s": percentiles(ttft[interactive], 95)[0],
        "e2e_p95_s": percentiles(e2e[interactive], 95)[0],
        "ttft_p95_by_model_s": {
            name: percentiles(ttft[interactive & (of_model == at)], 95)[0] for at, name in enumerate(models)
        },
        "e2e_p95_by_model_s": {
            name: percentiles(e2e[interactive & (of_model == at)], 95)[0] for at, name in enumerate(models)
        },
        "interactive_done": int(np.count_nonzero(interactive & done)),
        "interactive_in_2_s": float(np.count_nonzero(ttft[interactive] <= 2.0))
        / max(1, int(np.count_nonzero(interactive))),
        "other_done": int(np.count_nonzero(other & done)),
        "other_left": int(np.count_nonzero(other & ~done)),
        "other_p95_h": percentiles(took_s, 95)[0] / 3600,
        "deadlines_met": float(np.count_nonzero(took_s <= DAY_S)) / max(1, int(np.count_nonzero(judged))),
        "moves": f"{result.counters['scale_outs']:,}/{result.counters['scale_ins']:,}",
        "series": series,
        "wall_s": run.about["took_s"],
    }


def _memory(run: Simulated) -> dict[str, Any]:
    """Return by model the mean use of KV memory, and in `SHOWN_REGION` its course with that of ready instances."""
    result, series = run.result, run.result.series
    assert series is not None
    names = [model.removesuffix(SILO) for model, _ in result.cluster.endpoints]
    here = np.array([region == SHOWN_REGION for _, region in result.cluster.endpoints])
    mean: dict[str, float] = {}
    course: dict[str, list[float]] = {}
    ready: dict[str, list[int]] = {}
    for name in dict.fromkeys(names):
        mine = np.array([each == name for each in names])
        used, most = (series[column][:, mine].sum(axis=1) for column in ("kv_tokens", "kv_capacity_tokens"))
        mean[name] = float(used.sum() / max(1, most.sum()))
        used, most = (series[column][:, mine & here].sum(axis=1) for column in ("kv_tokens", "kv_capacity_tokens"))
        course[name] = [round(float(value), 3) for value in used / np.maximum(1, most)]
        ready[name] = series["ready"][:, mine & here].sum(axis=1).tolist()
    return {"kv_use": mean, "kv_use_course": course, "ready_course": ready}


def run(settings: Settings, progress: Progress) -> Result:
    scene, seed = scenes.mixed(settings["scale"]), settings["seed"]
    result: Result = {
        "paper": "sageserve",
        **{name: settings[name] for name in ("scale", "seed", "parts")},
        "models": [model.name for model in scene.models],
    }
    if "pools" in settings["parts"]:
        drawn = scene.demand(1.0, seed)
        other = np.array([name == scenes.OTHER for name in drawn.slo_class.names])[drawn.slo_class.codes]
        result["interactive"], result["other"] = int(np.count_nonzero(~other)), int(np.count_nonzero(other))
        result["pools"] = rounded(run_cases("silos and one pool", pools(scene, drawn, seed), measured, progress))
    if "plans" in settings["parts"]:
        ttft_s, weeks = scene.promises[scenes.INTERACTIVE].ttft_s, sageserve.HISTORY_WEEKS
        prepared = partial(setting.prepare, scene, 1.0, seed, weeks=weeks, ttft_s=ttft_s)
        paper = prepared(forecaster="arima", progress=progress, smooth=True)
        ours = prepared(forecaster=BEST, progress=progress)
        result["forecast_error"] = {
            each.forecaster: round(each.error, 4) for each in (paper.expected.prompt, ours.expected.prompt)
        }
        paper, ours = (replace(made, workload=ours.workload) for made in (paper, ours))
        result["plans"] = rounded(run_cases("plans", plans(paper, ours), measured, progress))
    return result


def show(console: Console, result: Result) -> None:
    if "interactive" in result:
        console.print(
            f"[bold]SageServe, section 4[/]: {result['interactive']:,} interactive and {result['other']:,} other requests"
            f" in a day, seed {result['seed']}."
        )
    for part, title in (("pools", "Silos and one pool, scaled on every arrival"), ("plans", "Long-term strategies")):
        if part in result:
            console.print(table(title, _COLUMNS, result[part]))
            base = result[part][0]
            rows = [{**row, "base": base} for row in result[part]]
            console.print(table(f"{title}: interactive p95 and KV use by model", _by_model(result["models"]), rows))
    if "forecast_error" in result:
        errors = ", ".join(f"{name}: {percent(error, sign=False)}" for name, error in result["forecast_error"].items())
        console.print(f"Error of the forecasts of prompt tokens: {errors}.")


_COLUMNS: Final = (
    Column("Strategy", "strategy"),
    Column("hours", "instance_hours", "{:,.0f}"),
    Column("donated (h)", "donated_hours", "{:,.0f}"),
    Column("KV use", "kv_use", share),
    Column("TTFT p95", "ttft_p95_s", seconds),
    Column("E2E p95", "e2e_p95_s", seconds),
    Column("TTFT in 2 s", "interactive_in_2_s", share),
    Column("other done", "other_done", "{:,}"),
    Column("left", "other_left", "{:,}"),
    Column("p95 (h)", "other_p95_h", "{:,.2f}"),
    Column("deadlines met", "deadlines_met", share),
    Column("out/in", "moves", "{}"),
)


def _by_model(models: list[str]) -> list[Column]:
    def of(name: str, measure: str) -> Any:
        return lambda row: row[measure][name]

    def use(name: str) -> Any:
        return lambda row: row["series"]["kv_use"][name]

    def changed(name: str) -> Any:
        return lambda row: change(row["ttft_p95_by_model_s"][name], row["base"]["ttft_p95_by_model_s"][name])

    columns = [Column("Strategy", "strategy")]
    for name in models:
        columns += [
            Column(f"{name} TTFT", of(name, "ttft_p95_by_model_s"), seconds),
            Column("change", changed(name), percent),
            Column("E2E", of(name, "e2e_p95_by_model_s"), seconds),
            Column("KV use", use(name), partial(percent, sign=False)),
        ]
    return columns


def compare(result: Result) -> list[Comparison]:
    """Return donated hours and the largest change of a model's TTFT, one pool against silos."""
    rows = {row["strategy"]: row for row in result.get("pools", [])}
    siloed, unified = rows.get(SILOED), rows.get(UNIFIED)
    donated = most = None
    if siloed and unified:
        donated = unified["donated_hours"] - siloed["donated_hours"]
        changes = [
            change(unified["ttft_p95_by_model_s"][name], before)
            for name, before in siloed["ttft_p95_by_model_s"].items()
        ]
        most = max((each for each in changes if each is not None), default=None)
    return [
        Comparison("instance-hours donated more by one pool than by silos", "4", PAPER_DONATED_H, donated, "hours"),
        Comparison("largest change of a model's p95 TTFT, one pool against silos", "4", PAPER_TTFT_CHANGE, most),
    ]


SAGESERVE_MIXED: Final = Experiment(
    name="sageserve-mixed",
    paper="SageServe",
    section="4, 7.3",
    measures="interactive and other work in silos or one pool, by release rule; the paper's LT strategies and ours",
    results="batches.md#sageserves-day",
    options=(SCALE, SEED, Option("parts", "parts, separated by commas (default all)", among=PARTS, several=True)),
    run=run,
    show=show,
    compare=compare,
)
