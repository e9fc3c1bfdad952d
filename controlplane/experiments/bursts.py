"""Promises under bursts, ours: a day of two models with uneven arrivals, planned with and without a reserve for them."""

from dataclasses import asdict
from typing import Any, Final

from rich.console import Console

from controlplane.experiments import sageserve
from controlplane.experiments.experiment import (
    SCALE,
    SEED,
    Comparison,
    Experiment,
    Option,
    Progress,
    Result,
    Settings,
    seconds,
    share,
)
from controlplane.experiments.shared.measures import rounded
from controlplane.experiments.shared.scenes import INTERACTIVE, two_models
from controlplane.terminal import Column, table
from forecasting.workload import FORECASTERS, rests

STRATEGIES: Final = tuple(name for name in sageserve.STRATEGIES if name not in sageserve.PAPERS)
CAPABILITIES: Final = ("smooth", "bursts")
"""Measured as if arrivals were smooth, on four instances; or with their bursts, at several sizes."""


class Bursts(Experiment):
    name = "bursts"
    paper = "ours"
    section = "own"
    measures = (
        "requests answered in time and instance-hours, with and without a reserve for bursts, over a day of two models"
    )
    results = "scaling.md#promises-under-bursts"
    options = (
        Option("days", "days simulated", 1.0, float, above=0.0, at_most=7.0),
        SCALE,
        SEED,
        Option("strategies", "strategies, separated by commas (default all)", among=STRATEGIES, several=True),
        Option("forecaster", "of all strategies", "ets", among=tuple(FORECASTERS), rests=rests),
    )

    def run(self, settings: Settings, progress: Progress) -> Result:
        scene = two_models(settings["scale"])
        days, seed, forecaster = settings["days"], settings["seed"], settings["forecaster"]
        runs = []
        for capability in CAPABILITIES:
            smooth = capability == "smooth"
            setting = sageserve.prepare(scene, days, seed, False, forecaster, progress, smooth)
            runs.append(
                {
                    "capability": capability,
                    "requests": len(setting.workload),
                    "models": {name: rounded(asdict(one)) for name, one in setting.capability.items()},
                    "cv": [round(cv, 2) for cv in setting.cvs],
                    "rows": [rounded(asdict(row)) for row in sageserve.run(setting, settings["strategies"], progress)],
                }
            )
        return {
            **{name: settings[name] for name in ("days", "scale", "seed", "forecaster")},
            "ttft_s": scene.promises[INTERACTIVE].ttft_s,
            "runs": runs,
        }

    def show(self, console: Console, result: Result) -> None:
        first, cvs = result["runs"][0], [cv for each in result["runs"] for cv in each["cv"]]
        console.print(
            f"[bold]Promises under bursts[/], {result['days']:g} days: {first['requests']:,} requests, seed"
            f" {result['seed']}, scale {result['scale']:g}; arrivals of CV {min(cvs):.1f} to {max(cvs):.1f} by endpoint."
        )
        rows = [
            {"capability": each["capability"], **row, "before": before}
            for each in result["runs"]
            for row, before in zip(each["rows"], first["rows"], strict=True)
        ]
        title = f"Interactive requests; TTFT within {result['ttft_s']:g} s is promised to 95 %"
        console.print(table(title, COLUMNS, rows))

    def compare(self, result: Result) -> list[Comparison]:
        """No paper has this day."""
        return []


def _more_hours(row: dict[str, Any]) -> float:
    return float(row["instance_hours"] / row["before"]["instance_hours"] - 1)


COLUMNS: Final = (
    Column("Capability", "capability"),
    Column("Strategy", "strategy"),
    Column("hours", "instance_hours", "{:,.1f}"),
    Column("more", _more_hours, "{:+.1%}"),
    Column("in time", "slo_met", share),
    Column("TTFT p95", "ttft_p95_s", seconds),
    Column("TTFT p99", "ttft_p99_s", seconds),
    Column("out/in", lambda row: f"{row['scale_outs']:,}/{row['scale_ins']:,}", "{}"),
)
