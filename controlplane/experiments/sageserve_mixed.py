"""SageServe's day of interactive and other work on one fleet (section 4), and its long-term strategies in the paper's form.

Five parts: `pools` compares silos with one pool under each release rule of the queue manager, scaled by the reactive
heuristic on every arrival; `plans` compares the reactive heuristic and LT-I, LT-U and LT-UA, followed without reserve and
floor, with ours, `memory` likewise, by memory with the published numbers, on fleets whose models take each
other's instances, `bursts` with two bursts of eight times the load, `week` over seven days.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from controlplane.experiments import experiment, sageserve
from controlplane.experiments.shared import scenes
from controlplane.experiments.shared.measures import INTERACTIVE_CLASS, hours_by_model, percentiles
from controlplane.experiments.shared.scenes import DAY_S, SILO, Scene
from controlplane.experiments.shared.setting import Setting
from controlplane.simulation.running import Simulated
from controlplane.terminal import Column, table
from forecasting.workload import BEST
from scheduling.queueing.release_rule import SLACK, USE
from scheduling.scaling import make_strategy
from scheduling.simulation.cluster.world import UNPAID, Outcome, State
from scheduling.simulation.measures.results import PROVISIONING, latency_s, paid_hours, spells
from scheduling.simulation.workload.columns import Floats, Workload

DATA: Final = experiment.read_data("sageserve-mixed")
PARTS: Final[Mapping[str, Mapping[str, Any]]] = DATA["parts"]
SILOED: Final = "silos"
UNIFIED: Final = "one pool, by use"
REACTIVE: Final = "Reactive"
PAPERS: Final = {REACTIVE: "reactive", "LT-I": "lt_i", "LT-U": "lt_u", "LT-UA": "lt_ua"}
OURS: Final = "Pilothouse (ours)"
BETA: Final = 0.1
"""Share of the last hour's non-interactive load that the paper's plans keep free (section 6.4)."""
OUT_ABOVE: Final = 0.7
"""Use above which the paper adds an instance: it has to act where memory is the signal."""
BIN_S: Final = 10_800.0
"""Of the latencies of figure 17."""
SHOWN_REGION: Final = "us-west"
"""Of figure 6."""


def pools(scene: Scene, drawn: Workload, seed: int) -> Iterator[experiment.Case]:
    """Yield the silos and the one pool under each release rule."""
    for name, release in DATA["pools"].items():
        siloed = name == SILOED
        scaling = {
            "strategy": "reactive", "min_instances": scene.min_instances, "max_instances": scene.max_instances,
            "floor": False, "per_arrival": True,
        }  # fmt: skip
        scenario = scene.scenario(siloed, release=release, scaling=scaling, sample_s=PARTS["pools"]["sample_s"])
        requests = scene.requests(drawn, seed, siloed)
        yield experiment.Case.of({"strategy": name}, scenario, requests, until_s=DAY_S, seed=seed)


def plans(paper: Setting, ours: Setting, sample_s: float) -> Iterator[experiment.Case]:
    """Yield the paper's strategies in its own form, and ours; reactive is the paper's heuristic on every arrival."""
    for name, strategy in (*PAPERS.items(), (OURS, "pilothouse")):
        made, faithful = (ours, False) if name == OURS else (paper, True)
        scene, chosen = made.scene, make_strategy(strategy)
        scaling = {
            "strategy": strategy, "min_instances": scene.min_instances, "max_instances": scene.max_instances,
            "floor": not faithful, "per_arrival": name == REACTIVE,
        }  # fmt: skip
        scenario = scene.scenario(release=USE if faithful else SLACK, scaling=scaling, sample_s=sample_s)
        requests = scene.requests(made.workload, made.seed)
        hooks: dict[str, Any] = {"until_s": made.until_s, "seed": made.seed}
        if chosen.uses_advice:
            beta = BETA if faithful else 0.0
            hooks["advisor"] = made.planner(chosen.plans_for, scene.usd_per_hour, niw_share=beta)
        yield experiment.Case.of({"strategy": name}, scenario, requests, **hooks)


def measured(run: Simulated, course: Callable[[Simulated], dict[str, Any]]) -> experiment.Row:
    """Return the measures of a run. Latencies are those of interactive requests, by model; `donated_hours` were lent out;
    *course* returns series.

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
    hours, other, series = result.state_s.sum(axis=0) / 3600, ~interactive, course(run)
    took_s, own_hours, kv_use = e2e[other & done], hours_by_model(result), _kv_use(run)
    judged = other & (done | (requests.arrival_s + DAY_S <= result.end_s))
    return {
        "instance_hours": paid_hours(result),
        "donated_hours": float(hours[State.SPOT]),
        "hours_by_model": own_hours,
        "waste_hours": float(hours[list(PROVISIONING)].sum()),
        "redeploy_hours": float(hours[State.LOADING]),
        "usd": paid_hours(result) * scenes.USD_PER_HOUR,
        "kv_use": float(np.nanmean(list(kv_use.values()))),
        "kv_use_max": _kv_use_max(run),
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
        "series": {"kv_use": kv_use, **series},
        "wall_s": run.about["took_s"],
    }


def _kv_use(run: Simulated) -> dict[str, float]:
    """Return by model the mean use of the KV memory of ready instances."""
    return {name: float(np.mean(_use(run, mine))) for name, mine in _by_model_of(run).items()}


def _kv_use_max(run: Simulated) -> float:
    """Return the highest use of the KV memory of any endpoint's ready instances at any sample."""
    series = run.result.series
    assert series is not None
    tokens, capacity = series["kv_tokens"], series["kv_capacity_tokens"]
    return float(np.divide(tokens, capacity, where=capacity > 0, out=np.zeros(tokens.shape)).max())


def _by_model_of(run: Simulated) -> dict[str, NDArray[np.bool_]]:
    """Return by model which endpoints are its; its silos count together."""
    names = np.array([model.removesuffix(SILO) for model, _ in run.result.cluster.endpoints])
    return {name: names == name for name in dict.fromkeys(names.tolist())}


def _in_region(run: Simulated, name: str) -> NDArray[np.bool_]:
    return np.array([region == name for _, region in run.result.cluster.endpoints])


def _use(run: Simulated, of: NDArray[np.bool_]) -> Floats:
    """Return the use of the KV memory of ready instances of the endpoints *of* at every sample."""
    series = run.result.series
    assert series is not None
    used, most = (series[column][:, of].sum(axis=1) for column in ("kv_tokens", "kv_capacity_tokens"))
    return np.asarray(used / np.maximum(1, most), np.float64)


def _places(values: Floats, places: int = 3) -> list[float]:
    return [round(float(value), places) for value in values]


def by_model(run: Simulated) -> dict[str, Any]:
    """Return use of KV memory and ready instances of every model in `SHOWN_REGION`: figures 5 and 6."""
    here, series = _in_region(run, SHOWN_REGION), run.result.series
    assert series is not None
    of = {name: mine & here for name, mine in _by_model_of(run).items()}
    return {
        "kv_use_course": {name: _places(_use(run, mine)) for name, mine in of.items()},
        "ready_course": {name: series["ready"][:, mine].sum(axis=1).tolist() for name, mine in of.items()},
    }


def of_busiest(run: Simulated) -> dict[str, Any]:
    """Return the measures of figures 12 to 15 and 17: of the busiest model by region paid instance-hours in each hour, use
    of KV memory and latencies (s) of interactive requests, and their p95 by `BIN_S`; of every model the hours between the
    decision to add an instance and its first request, by where the instance came from.
    """
    result, regions = run.result, run.result.cluster.regions
    requests, endpoints = result.requests, result.cluster.endpoints
    model = result.cluster.models[0]
    mine = (requests.slo_class == INTERACTIVE_CLASS) & (requests.model == 0)
    latencies = {name: latency_s(result, name) for name in ("ttft", "e2e")}
    hourly = {region: np.zeros(math.ceil(result.end_s / 3600)) for region in regions}
    added = {name: {"own spot": 0.0, "another model's spot": 0.0} for name in result.cluster.models}
    for _, endpoint, state, began_s, ended_s in zip(*spells(result, result.end_s), strict=True):
        name, region = endpoints[endpoint]
        if state in PROVISIONING:
            source = "own spot" if state == State.RECLAIMING else "another model's spot"
            added[name][source] += (ended_s - began_s) / 3600
        if name == model and state not in UNPAID:
            starts_s = 3600.0 * np.arange(len(hourly[region]))
            inside_s = np.minimum(ended_s, starts_s + 3600) - np.maximum(began_s, starts_s)
            hourly[region] += np.maximum(0.0, inside_s) / 3600
    own = _by_model_of(run)[model]
    of_bin, of_region = (requests.arrival_s // BIN_S).astype(int), requests.region
    return {
        "hours_course": {region: _places(hours) for region, hours in hourly.items()},
        "kv_use_course": {name: _places(_use(run, own & _in_region(run, name))) for name in regions},
        "added_hours": added,
        **{
            f"{latency}_by_region_s": {
                region: dict(zip(("p50", "p95"), percentiles(values[mine & (of_region == at)], 50, 95), strict=True))
                for at, region in enumerate(regions)
            }
            for latency, values in latencies.items()
        },
        **{
            f"{latency}_p95_course_s": [
                percentiles(values[mine & (of_bin == at)], 95)[0] for at in range(math.ceil(result.end_s / BIN_S))
            ]
            for latency, values in latencies.items()
        },
    }


def arrivals(made: Setting, step_s: float) -> dict[str, list[float]]:
    """Return interactive requests a second for the busiest model, by region and step of *step_s*: the load of figure 16."""
    requests, edges = made.workload, np.arange(0.0, made.until_s + step_s, step_s)
    of_class, of_model = (
        np.array([each == wanted for each in column.names])[column.codes]
        for column, wanted in ((requests.slo_class, scenes.INTERACTIVE), (requests.model, made.scene.models[0].name))
    )
    mine = of_class & of_model
    return {
        region: _places(np.histogram(requests.arrival_s[mine & (requests.region.codes == at)], edges)[0] / step_s)
        for at, region in enumerate(requests.region.names)
    }


def followed(part: str, scene: Scene, seed: int, progress: experiment.Progress) -> experiment.Result:
    """Return the result of the *part* `plans`, `bursts` or `week`: a row for each strategy, and the forecasts' errors."""
    days, bursty, sample_s = 7.0 if part == "week" else 1.0, part == "bursts", PARTS[part]["sample_s"]
    prepared = partial(sageserve.prepare, scene, days, seed, bursty)
    paper = prepared("arima", progress, smooth=True)
    ours = replace(prepared(BEST, progress), workload=paper.workload)
    measure = partial(measured, course=of_busiest)
    rows = experiment.run_cases(part, plans(paper, ours, sample_s), measure, progress)
    if part == "memory" and (most := min(row["kv_use_max"] for row in rows)) <= OUT_ABOVE:
        raise ValueError(f"use of memory never passed {OUT_ABOVE:.0%}, only {most:.0%}: the rule did not act")
    return {
        part: experiment.rounded(rows),
        "forecast_error": {
            each.forecaster: round(each.error, 4) for each in (paper.expected.prompt, ours.expected.prompt)
        },
        **({"load": arrivals(paper, sample_s)} if bursty else {}),
    }


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    scene, seed, scale = scenes.mixed(settings["scale"]), settings["seed"], settings["scale"]
    result: experiment.Result = {
        "paper": "sageserve",
        **{name: settings[name] for name in ("scale", "seed", "parts")},
        "models": [model.name for model in scene.models],
    }
    if "pools" in settings["parts"]:
        drawn = scene.demand(1.0, seed)
        other = np.array([name == scenes.OTHER for name in drawn.slo_class.names])[drawn.slo_class.codes]
        result["interactive"], result["other"] = int(np.count_nonzero(~other)), int(np.count_nonzero(other))
        measure = partial(measured, course=by_model)
        result["pools"] = experiment.rounded(
            experiment.run_cases("silos and one pool", pools(scene, drawn, seed), measure, progress)
        )
    for part in list(PARTS)[1:]:
        if part in settings["parts"]:
            result |= {"forecast_error": {}} | result
            made = followed(part, scenes.published(scale) if part == "memory" else scene, seed, progress)
            result["forecast_error"][part] = made.pop("forecast_error")
            result |= made
    return result


def show(console: Console, result: experiment.Result) -> None:
    if "interactive" in result:
        console.print(
            f"[bold]SageServe, section 4[/]: {result['interactive']:,} interactive and {result['other']:,} other requests"
            f" in a day, seed {result['seed']}."
        )
    names, shown = result["models"], DATA["columns"]
    by_model = [Column("Strategy", "strategy")]
    for name in names:
        by_model += experiment.columns(shown["by_model"], model=name)
    for part, table_of in PARTS.items():
        if part in result:
            base, title = result[part][0], table_of["title"]
            rows = [row | {"changes": _changes(row, base, names[0])} for row in result[part]]
            more = [*(shown["against_reactive"] if part != "pools" else []), *shown.get(part, [])]
            console.print(table(title, experiment.columns([*shown["strategies"], *more], busiest=names[0]), rows))
            console.print(table(f"{title}: interactive p95 and KV use by model", by_model, rows))
    for part, errors in result.get("forecast_error", {}).items():
        said = ", ".join(f"{name}: {experiment.percent(error, sign=False)}" for name, error in errors.items())
        console.print(f"{PARTS[part]['title']}: error of the forecasts of prompt tokens: {said}.")


def _changes(row: experiment.Row, base: experiment.Row, busiest: str) -> dict[str, float | None]:
    """Return the changes from *base* to *row*: paid hours of the busiest model, waste, and p95 TTFT by model."""
    ttft_s = row["ttft_p95_by_model_s"]
    return {
        "busiest_hours": experiment.change(row["hours_by_model"][busiest], base["hours_by_model"][busiest]),
        "waste_hours": experiment.change(row["waste_hours"], base["waste_hours"]),
        **{name: experiment.change(ttft_s[name], base["ttft_p95_by_model_s"][name]) for name in ttft_s},
    }


def compare(result: experiment.Result) -> list[experiment.Comparison]:
    """Return donated hours and the largest change of a model's TTFT, one pool against silos; and where plans were followed,
    the hours of the busiest model and the waste of scaling against the reactive heuristic.
    """
    compared = []
    if "pools" in result or not any(part in result for part in PARTS):
        rows = {row["strategy"]: row for row in result.get("pools", [])}
        siloed, unified = rows.get(SILOED), rows.get(UNIFIED)
        donated = most = None
        if siloed and unified:
            donated = unified["donated_hours"] - siloed["donated_hours"]
            changes = [
                experiment.change(unified["ttft_p95_by_model_s"][name], before)
                for name, before in siloed["ttft_p95_by_model_s"].items()
            ]
            most = max((each for each in changes if each is not None), default=None)
        reported, about = DATA["reported"], "largest change of a model's p95 TTFT, one pool against silos"
        compared = [
            experiment.Comparison(
                "instance-hours donated more by one pool than by silos",
                "4",
                reported["donated_hours"],
                donated,
                "hours",
            ),
            experiment.Comparison(about, "4", reported["ttft_change"], most),
        ]
    for part, of in (("plans", ""), ("memory", ", by memory")):
        planned = {row["strategy"]: row for row in result.get(part, [])}
        for name, strategy in PAPERS.items() if planned else ():
            for measure, figure in sageserve.PAPER.get(strategy, {}).items():
                base, own = (_of_paper(measure, planned[each], result["models"][0]) for each in (REACTIVE, name))
                section, what = sageserve.SECTIONS[measure][1], f"{name}{of}: {measure.replace('_', ' ')}"
                compared.append(experiment.Comparison(what, section, figure, experiment.change(own, base)))
    return compared


def _of_paper(measure: str, row: experiment.Row, busiest: str) -> float:
    """Return *measure* of *row* as the paper has it: instance-hours are those of the busiest model (figure 11)."""
    return float(row["hours_by_model"][busiest] if measure == "instance_hours" else row[measure])


SAGESERVE_MIXED: Final = experiment.Experiment.read("sageserve-mixed", run=run, show=show, compare=compare)
