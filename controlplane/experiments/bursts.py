"""Promises under bursts, ours: days of even and uneven arrivals under each strategy, with and without a reserve."""

from dataclasses import asdict
from typing import Final

from rich.console import Console

from controlplane.experiments import experiment, sageserve
from controlplane.experiments.shared.scenes import INTERACTIVE, JUDGED, two_models
from controlplane.terminal import table
from forecasting.workload import FORECASTERS, unavailable_reason

STRATEGIES: Final = tuple(name for name in sageserve.STRATEGIES if name not in sageserve.PAPERS)
DATA: Final = experiment.read_data("bursts")
DAYS: Final = {"two-models": two_models, **JUDGED}
KEPT: Final = 0.95
"""Share of the interactive requests that are promised to be in time."""
NOT_COMPARED: Final = ("foreknown", "static")
"""Strategies that know the future demand."""


def run(settings: experiment.Settings, progress: experiment.Progress) -> experiment.Result:
    days, seed, runs = settings["days"], settings["seed"], []
    for demand in settings["demands"]:
        scene = DAYS[demand](settings["scale"])
        for capability in settings["capabilities"]:  # under Poisson arrivals on four instances, or bursts on several
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
        rows = each["rows"]
        keeping = [row for row in rows if row["slo_met"] >= KEPT and row["strategy"] not in NOT_COMPARED]
        cheapest = min((row["instance_hours"] for row in keeping), default=None)
        rows = [row | {"over_cheapest": experiment.change(row["instance_hours"], cheapest)} for row in rows]
        shown = experiment.columns(DATA["columns"]["strategies"])
        console.print(table(f"TTFT within {each['ttft_s']:g} s is promised to {KEPT:.0%}", shown, rows))


BURSTS: Final = experiment.Experiment.read(
    "bursts",
    among={"demands": tuple(DAYS), "strategies": STRATEGIES, "forecaster": tuple(FORECASTERS)},
    missing={"forecaster": unavailable_reason},
    run=run,
    show=show,
)
