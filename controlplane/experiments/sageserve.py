"""SageServe's evaluation (section 7): a week of four models in three regions under each strategy."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from rich.console import Console

from controlplane.experiments import experiment
from controlplane.experiments.shared import scenes, setting
from controlplane.experiments.shared.measures import of_run
from controlplane.experiments.shared.scenes import INTERACTIVE, OTHER, Scene
from controlplane.experiments.shared.setting import Setting
from controlplane.terminal import table
from forecasting.workload import FORECASTERS, unavailable_reason
from scheduling.scaling import EndpointView, make_strategy
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.workload.columns import Workload
from scheduling.simulation.workload.generator import random_bursts

PAPERS: Final = ("per_arrival", "siloed")
"""The paper's baselines in their own form: the reactive heuristic on every arrival, without patience and without a floor."""
STRATEGIES: Final = (*PAPERS, "reactive", "lt_i", "lt_u", "lt_ua", "preserve", "pilothouse", "foreknown", "static")
"""The others in their live form. `foreknown` is the oracle: LT-I every window, for the actual demand. `static` always keeps
the most instances that `foreknown` has in any window.
"""
STANDS_FOR: Final = {"foreknown": "lt_i", "per_arrival": "reactive", "static": "reactive"}
HISTORY_WEEKS: Final = 2
BURSTS_A_DAY: Final = 2
BURST_S: Final = 600.0
BURST_FACTOR: Final = 8.0

DATA: Final = experiment.read_data("sageserve")
PAPER: Final[Mapping[str, Mapping[str, float]]] = DATA["reported"]


def prepare(
    scene: Scene,
    days: float,
    seed: int,
    bursts: bool,
    forecaster: str,
    progress: experiment.Progress,
    smooth: bool = False,
) -> Setting:
    """Return the setting of *scene* with the promise of interactive requests; *bursts*: two bursts a day, of eight times
    the load of every model (section 7.3.4).
    """
    count = max(1, round(BURSTS_A_DAY * days))
    drawn = random_bursts(days * scenes.DAY_S, count, BURST_S, factor=BURST_FACTOR, seed=seed) if bursts else ()
    return setting.prepare(
        scene, days, seed, forecaster, progress,
        weeks=HISTORY_WEEKS, bursts=drawn, smooth=smooth, ttft_s=scene.promises[INTERACTIVE].ttft_s,
    )  # fmt: skip


def peaks(made: Setting) -> list[dict[str, Any]]:
    """Return `[[endpoints]]` that always have the most instances that the actual demand needs in any window."""
    scene = made.scene
    oracle = made.planner(make_strategy("lt_i").plans_for, scene.usd_per_hour, foreknown=True)
    views = [
        EndpointView(*key, spot=scene.instances, min_instances=scene.min_instances, max_instances=scene.max_instances)
        for key in scene.streams
    ]
    asked = [oracle.advise(at * setting.WINDOW_S, views) for at in range(len(made.foreknown.prompt.mean))]
    most = [max(each.target_instances for each in of if each is not None) for of in zip(*asked, strict=True)]
    return [
        {"model": model, "region": region, "min_instances": peak, "max_instances": peak}
        for (model, region), peak in zip(scene.streams, most, strict=True)
    ]


def cases(made: Setting, names: Sequence[str], floor: bool = True) -> Iterator[experiment.Case]:
    """Yield a case for each of the strategies *names*; *floor*: over the reactive floor, but for the paper's baselines."""
    scene = made.scene
    for name in names:
        strategy, siloed = make_strategy(STANDS_FOR.get(name, name)), name == "siloed"
        scaling = {
            "strategy": strategy.name, "min_instances": scene.min_instances, "max_instances": scene.max_instances,
            "floor": floor, "per_arrival": name in PAPERS,
        }  # fmt: skip
        scenario = scene.scenario(siloed, scaling=scaling, endpoints=peaks(made) if name == "static" else [])
        hooks: dict[str, Any] = {"until_s": made.until_s, "seed": made.seed}
        if strategy.uses_advice:
            hooks["advisor"] = made.planner(strategy.plans_for, scene.usd_per_hour, name == "foreknown")
        yield experiment.Case({"strategy": name}, partial(_drawn, made, scenario, siloed), hooks)


def _drawn(made: Setting, scenario: Scenario, siloed: bool, _: int) -> tuple[Scenario, Workload]:
    return scenario, made.scene.requests(made.workload, made.seed, siloed)


def rows_of(
    made: Setting, names: Sequence[str], progress: experiment.Progress, floor: bool = True
) -> list[experiment.Row]:
    """Simulate the demand under each of *names*: a row each."""
    promises = [made.scene.promises[name] for name in (INTERACTIVE, OTHER)]
    measure = partial(of_run, promises=promises, usd_per_hour=made.scene.usd_per_hour)
    return experiment.run_cases("simulating", cases(made, names, floor), measure, progress)


CHANGED: Final = ("instance_hours", "busiest_hours", "waste_hours", "ttft_p95_s")


def against_reactive(rows: Sequence[experiment.Row]) -> dict[str, dict[str, float | None]]:
    """Return changes against the paper's reactive heuristic (`per_arrival`) by strategy, None where that measured nothing;
    empty if it was not run. `busiest_hours` are those of the busiest model.
    """
    by = {row["strategy"]: row | {"busiest_hours": next(iter(row["hours_by_model"].values()))} for row in rows}
    base = by.pop("per_arrival", None)
    if base is None:
        return {}
    return {
        name: {each: experiment.change(row[each], base[each], 1e-6) for each in CHANGED} for name, row in by.items()
    }


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    scene = scenes.sageserve(settings["scale"])
    demands = ("plain", "bursts") if settings["demand"] == "both" else (settings["demand"],)
    return {
        "paper": "sageserve",
        **{name: settings[name] for name in ("days", "scale", "seed", "forecaster")},
        "floor": not settings["no_floor"],
        "models": [model.name for model in scene.models],
        "reported": PAPER,
        "runs": [_run_demand(scene, demand, settings, progress) for demand in demands],
    }


def _run_demand(
    scene: Scene, demand: str, settings: experiment.Settings, progress: experiment.Progress
) -> dict[str, Any]:
    """Return the result of all strategies under *demand*, plain or bursts."""
    made = prepare(scene, settings["days"], settings["seed"], demand == "bursts", settings["forecaster"], progress)
    rows = rows_of(made, settings["strategies"], progress, not settings["no_floor"])
    return {
        "demand": demand,
        "requests": len(made.workload),
        "capability_tokens_per_s": [round(each.total_tokens_per_s, 1) for each in made.capability.values()],
        "reserve": [round(each.reserve, 3) for each in made.capability.values()],
        "cv": [round(each.cv, 2) for each in made.capability.values()],
        "forecast_error": {
            f"{quantity} tokens, {each.forecaster}": round(each.error, 4)
            for quantity, each in (("prompt", made.expected.prompt), ("output", made.expected.output))
        },
        "rows": experiment.rounded(rows),
        "against_reactive": against_reactive(rows),
    }


def show(console: Console, result: experiment.Result) -> None:
    busiest, over = result["models"][0], "over" if result["floor"] else "without"
    for each in result["runs"]:
        errors = ", ".join(
            f"{name}: {experiment.percent(error, sign=False)}" for name, error in each["forecast_error"].items()
        )
        console.print(
            f"[bold]SageServe[/], {result['days']:g} day(s), {each['demand']}: {each['requests']:,} requests, seed"
            f" {result['seed']}. Error of the forecasts: {errors}."
        )
        rows = [{**row, "changes": each["against_reactive"].get(row["strategy"], {})} for row in each["rows"]]
        shown = experiment.columns(DATA["columns"]["strategies"], busiest=busiest)
        console.print(table(f"Interactive latencies; {over} the reactive floor", shown, rows))


SECTIONS: Final = {
    "instance_hours": ("busiest_hours", "7.3.1, figure 11"),
    "waste_hours": ("waste_hours", "7.3.3, figure 15"),
}
"""Our measure and the paper's section; instance-hours are those of the busiest model, as in figure 11."""


def compare(result: experiment.Result) -> list[experiment.Comparison]:
    """Return the changes against reactive."""
    return [
        experiment.Comparison(
            f"{strategy}, {each['demand']}: {measure.replace('_', ' ')}",
            SECTIONS[measure][1],
            figure,
            each["against_reactive"].get(strategy, {}).get(SECTIONS[measure][0]),
        )
        for each in result["runs"]
        for strategy, figures in PAPER.items()
        for measure, figure in figures.items()
    ]


SAGESERVE: Final = experiment.Experiment.read(
    "sageserve",
    among={"strategies": STRATEGIES, "forecaster": tuple(FORECASTERS)},
    missing={"forecaster": unavailable_reason},
    run=run,
    show=show,
    compare=compare,
)
