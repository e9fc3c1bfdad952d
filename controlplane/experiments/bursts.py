"""Promises under bursts, ours: days of even and uneven arrivals under each strategy, with and without a reserve."""

from dataclasses import asdict
from typing import Any, Final

from rich.console import Console

from controlplane.experiments import experiment, sageserve
from controlplane.experiments.shared.scenes import INTERACTIVE, JUDGED, two_models
from controlplane.terminal import Column, table
from forecasting.workload import FORECASTERS, rests

STRATEGIES: Final = tuple(name for name in sageserve.STRATEGIES if name not in sageserve.PAPERS)
CAPABILITIES: Final = ("smooth", "bursts")
"""Measured under Poisson arrivals on four instances, or under bursts on fleets of several sizes."""
DAYS: Final = {"two-models": two_models, **JUDGED}
KEPT: Final = 0.95
"""Share of the interactive requests that are promised to be in time."""
NOT_COMPARED: Final = ("foreknown", "static")
"""Strategies that know the future demand."""


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    days, seed, runs = settings["days"], settings["seed"], []
    for demand in settings["demands"]:
        scene = DAYS[demand](settings["scale"])
        for capability in settings["capabilities"]:
            made = sageserve.prepare(scene, days, seed, False, settings["forecaster"], progress, capability == "smooth")
            runs.append(
                {
                    "demand": demand,
                    "capability": capability,
                    "requests": len(made.workload),
                    "models": {name: experiment.rounded(asdict(one)) for name, one in made.capability.items()},
                    "cv": [round(cv, 2) for cv in made.cvs],
                    "ttft_s": scene.promises[INTERACTIVE].ttft_s,
                    "rows": experiment.rounded(sageserve.rows_of(made, settings["strategies"], progress)),
                }
            )
    return {**{name: settings[name] for name in ("days", "scale", "seed", "forecaster")}, "runs": runs}


def show(console: Console, result: experiment.Result) -> None:
    for each in result["runs"]:
        console.print(
            f"[bold]{each['demand']}[/], capability under {each['capability']}, {result['days']:g} day(s):"
            f" {each['requests']:,} requests, seed {result['seed']}, scale {result['scale']:g}; arrivals of CV"
            f" {min(each['cv']):.1f} to {max(each['cv']):.1f} by endpoint."
        )
        keeping = [
            row["instance_hours"]
            for row in each["rows"]
            if row["slo_met"] >= KEPT and row["strategy"] not in NOT_COMPARED
        ]
        rows = [{**row, "cheapest": min(keeping, default=None)} for row in each["rows"]]
        console.print(table(f"TTFT within {each['ttft_s']:g} s is promised to {KEPT:.0%}", COLUMNS, rows))


def _over_cheapest(row: dict[str, Any]) -> float | None:
    """Return the hours over those of the cheapest strategy that keeps the promise without knowing the future."""
    return float(row["instance_hours"] / row["cheapest"] - 1) if row["cheapest"] else None


COLUMNS: Final = (
    Column("Strategy", "strategy"),
    Column("hours", "instance_hours", "{:,.1f}"),
    Column("over cheapest", _over_cheapest, experiment.percent),
    Column("USD", "usd", "{:,.0f}"),
    Column("in time", "slo_met", experiment.share),
    Column("TTFT p95", "ttft_p95_s", experiment.seconds),
    Column("TTFT p99", "ttft_p99_s", experiment.seconds),
    Column("out/in", lambda row: f"{row['scale_outs']:,}/{row['scale_ins']:,}", "{}"),
)
BURSTS: Final = experiment.Experiment(
    name="bursts",
    paper="ours",
    section="own",
    measures="requests in time and hours by strategy over days of uneven arrivals, with and without a reserve",
    results="sageserve.md#promises-under-bursts",
    options=(
        experiment.Option("days", "days simulated", 1.0, float, above=0.0, at_most=7.0),
        experiment.SCALE,
        experiment.SEED,
        experiment.Option(
            "demands", "days of demand, separated by commas", "two-models", among=tuple(DAYS), several=True
        ),
        experiment.Option("capabilities", "separated by commas (default all)", among=CAPABILITIES, several=True),
        experiment.Option(
            "strategies", "strategies, separated by commas (default all)", among=STRATEGIES, several=True
        ),
        experiment.Option("forecaster", "of all strategies", "ets", among=tuple(FORECASTERS), rests=rests),
    ),
    run=run,
    show=show,
)
