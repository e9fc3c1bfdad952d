"""SageServe's evaluation (section 7): a week of four models in three regions under each strategy."""

import time
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from controlplane.experiments.experiment import (
    SCALE,
    SEED,
    Comparison,
    Experiment,
    Option,
    Progress,
    Result,
    Settings,
    percent,
    seconds,
    share,
)
from controlplane.experiments.shared import scenes, setting
from controlplane.experiments.shared.measures import Row, of_run, rounded
from controlplane.experiments.shared.scenes import INTERACTIVE, OTHER, Scene
from controlplane.experiments.shared.setting import Setting
from controlplane.terminal import Column, table
from forecasting.workload import BEST, FORECASTERS, rests
from scheduling.scaling import FLOOR, ByEndpoint, Floor, make_strategy
from scheduling.scaling.view import Instances, Load, endpoint_view
from scheduling.simulation.cluster.description import EndpointKey
from scheduling.simulation.strategies import Bounds, Demand, run_strategy
from scheduling.simulation.workload.generator import Burst, random_bursts

PAPERS: Final = ("per_arrival", "siloed")
"""The paper's baselines in its own form: the reactive heuristic on every arrival, without patience and without a floor."""
STRATEGIES: Final = (*PAPERS, "reactive", "lt_i", "lt_u", "lt_ua", "preserve", "pilothouse", "foreknown", "static")
"""The others in their live form; `foreknown` is the oracle: LT-I every window, by the demand that will come. `static` keeps
the most that this asks for in any window, all the time."""
HISTORY_WEEKS: Final = 2
BURSTS_A_DAY: Final = 2
BURST_S: Final = 600.0
BURST_FACTOR: Final = 8.0

PAPER: Final = {
    "lt_i": {"instance_hours": -0.248},
    "lt_u": {"instance_hours": -0.182},
    "lt_ua": {"instance_hours": -0.228, "waste_hours": -0.70},
}
"""Change against reactive that the paper reports: figures 11 and 15, Llama-2 on a peak day."""


def prepare(
    scene: Scene, days: float, seed: int, bursts: bool, forecaster: str, progress: Progress, smooth: bool = False
) -> Setting:
    """As `setting.prepare`, with the promise of interactive requests, and the bursts of section 7.3.4 if *bursts*."""
    return setting.prepare(
        scene, days, seed, forecaster, progress,
        weeks=HISTORY_WEEKS, bursts=burst_times(days, seed) if bursts else (), smooth=smooth,
        ttft_s=scene.promises[INTERACTIVE].ttft_s,
    )  # fmt: skip


def burst_times(days: float, seed: int) -> list[Burst]:
    """Two a day, of eight times the load, on every model (section 7.3.4)."""
    count = max(1, round(BURSTS_A_DAY * days))
    return random_bursts(days * scenes.DAY_S, count, BURST_S, factor=BURST_FACTOR, seed=seed)


def peaks(made: Setting) -> dict[EndpointKey, int]:
    """The most instances of each endpoint that foreknown demand asks for in any window."""
    scene = made.scene
    oracle = made.planner(make_strategy("lt_i").plans_for, scene.usd_per_hour, foreknown=True)
    spare, bounds = Instances(0, 0, 0, scene.instances, -inf), (scene.min_instances, scene.max_instances)
    views = [endpoint_view(*key, spare, bounds, Load(0.0, 0.0, 0, 0.0), 0.0, -inf) for key in scene.streams]
    asked = [oracle.advise(at * setting.WINDOW_S, views) for at in range(len(made.foreknown.prompt.mean))]
    return {
        key: max(advice.target_instances for advised in asked if (advice := advised[at]) is not None)
        for at, key in enumerate(scene.streams)
    }


def run(made: Setting, names: Sequence[str], progress: Progress, floor: Floor | None = FLOOR) -> list[Row]:
    """Simulate the demand under each of *names*: a row each."""
    scene, rows, demand = made.scene, [], None
    within = Bounds(scene.min_instances, scene.max_instances)
    promises = [scene.promises[INTERACTIVE], scene.promises[OTHER]]
    for name in names:
        cluster = scene.cluster(siloed=name == "siloed")
        requests = scene.requests(cluster, made.workload, made.seed)
        strategy: ByEndpoint = make_strategy(
            {"foreknown": "lt_i", "per_arrival": "reactive", "static": "reactive"}.get(name, name)
        )
        planner = None
        if strategy.uses_advice:
            planner = made.planner(strategy.plans_for, scene.usd_per_hour, name == "foreknown")
        if name not in PAPERS and demand is None:
            demand = Demand(cluster, requests, interactive=(True, False))
        began_s = time.monotonic()
        came = run_strategy(
            cluster,
            requests,
            strategy,
            bounds={key: Bounds(peak, peak) for key, peak in peaks(made).items()} if name == "static" else within,
            floor=floor,
            advisor=planner,
            demand=demand,
            seed=made.seed,
            until_s=made.until_s,
            progress=partial(progress, f"simulating {name}"),
            per_arrival=name in PAPERS,
        )
        rows.append(of_run(name, came, promises, scene.usd_per_hour, time.monotonic() - began_s))
    return rows


def against_reactive(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """Change of hours, hours of the busiest model, waste and TTFT against the paper's reactive heuristic (`per_arrival`), by
    strategy; empty without that. None where it had none.
    """
    base = next((row for row in rows if row["strategy"] == "per_arrival"), None)
    if base is None:
        return {}
    busiest = next(iter(base["hours_by_model"]))

    def change(value: float, before: float) -> float | None:
        return round(value / before - 1, 4) if before > 1e-6 else None

    return {
        row["strategy"]: {
            "instance_hours": change(row["instance_hours"], base["instance_hours"]),
            "busiest_hours": change(row["hours_by_model"][busiest], base["hours_by_model"][busiest]),
            "waste_hours": change(row["waste_hours"], base["waste_hours"]),
            "ttft_p95_s": change(row["ttft_p95_s"], base["ttft_p95_s"]),
        }
        for row in rows
        if row is not base
    }


class SageServe(Experiment):
    name = "sageserve"
    paper = "SageServe"
    section = "7.3"
    measures = "instance-hours, waste by scaling, latencies by strategy, over a week of four models in three regions"
    results = "scaling.md#sageserves-week"
    options = (
        Option("days", "days simulated", 7.0, float, above=0.0, at_most=7.0),
        SCALE,
        SEED,
        Option("strategies", "strategies, separated by commas (default all)", among=STRATEGIES, several=True),
        Option("demand", "plain, bursts or both", "both", among=("plain", "bursts", "both")),
        Option("no-floor", "plans alone, without the reactive floor, as in the paper", flag=True, default=False),
        Option(
            "forecaster", "of prompt and output tokens, for all strategies", BEST, among=tuple(FORECASTERS), rests=rests
        ),
    )

    def run(self, settings: Settings, progress: Progress) -> Result:
        scene = scenes.sageserve(settings["scale"])
        demands = ("plain", "bursts") if settings["demand"] == "both" else (settings["demand"],)
        return {
            "paper": self.name,
            **{name: settings[name] for name in ("days", "scale", "seed", "forecaster")},
            "floor": not settings["no_floor"],
            "models": [model.name for model in scene.models],
            "reported": PAPER,
            "runs": [_run_demand(scene, demand, settings, progress) for demand in demands],
        }

    def show(self, console: Console, result: Result) -> None:
        for each in result["runs"]:
            errors = ", ".join(
                f"{name}: {percent(error, sign=False)}" for name, error in each["forecast_error"].items()
            )
            console.print(
                f"[bold]SageServe[/], {result['days']:g} day(s), {each['demand']}: {each['requests']:,} requests, seed"
                f" {result['seed']}. Error of the forecasts: {errors}."
            )
            console.print(_table(result, each))

    def compare(self, result: Result) -> list[Comparison]:
        """Changes against reactive; instance-hours are those of the busiest model, as in figure 11."""
        about = {
            "instance_hours": ("busiest_hours", "7.3.1, figure 11"),
            "waste_hours": ("waste_hours", "7.3.3, figure 15"),
        }
        return [
            Comparison(
                f"{strategy}, {each['demand']}: {measure.replace('_', ' ')}",
                about[measure][1],
                figure,
                each["against_reactive"].get(strategy, {}).get(about[measure][0]),
            )
            for each in result["runs"]
            for strategy, figures in PAPER.items()
            for measure, figure in figures.items()
        ]


def _run_demand(scene: Scene, demand: str, settings: Settings, progress: Progress) -> dict[str, Any]:
    """Result of all strategies under *demand*, plain or bursts."""
    made = prepare(scene, settings["days"], settings["seed"], demand == "bursts", settings["forecaster"], progress)
    rows = run(made, settings["strategies"], progress, None if settings["no_floor"] else FLOOR)
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
        "rows": [rounded(row) for row in rows],
        "against_reactive": against_reactive(rows),
    }


def _table(result: Result, each: dict[str, Any]) -> Table:
    """Strategies of one demand."""
    busiest, changes = result["models"][0], each["against_reactive"]

    def change(measure: str) -> Column:
        return Column("change", lambda row: changes.get(row["strategy"], {}).get(measure), percent)

    columns = (
        Column("Strategy", "strategy"),
        Column("hours", "instance_hours", "{:,.0f}"),
        change("instance_hours"),
        Column(f"{busiest} hours", lambda row: row["hours_by_model"][busiest], "{:,.0f}"),
        change("busiest_hours"),
        Column("waste (h)", "waste_hours", "{:,.1f}"),
        change("waste_hours"),
        Column("USD", "usd", "{:,.0f}"),
        Column("TTFT p95", "ttft_p95_s", seconds),
        Column("TTFT p99", "ttft_p99_s", seconds),
        Column("E2E p95", "e2e_p95_s", seconds),
        Column("SLO met", "slo_met", share),
        Column("out/in", lambda row: f"{row['scale_outs']:,}/{row['scale_ins']:,}", "{}"),
    )
    floor = "over" if result["floor"] else "without"
    return table(f"Interactive latencies; {floor} the reactive floor", columns, each["rows"])
