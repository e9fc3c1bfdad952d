import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO, cast

from django.core.management.base import BaseCommand, CommandError, CommandParser
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from controlplane.experiments import length_models as lengths
from controlplane.experiments import preserve_routing, sageserve, scenes, shipped_lengths, ssjf
from controlplane.experiments import preserve_scaling as preserve
from controlplane.experiments.foreseen_demand import Told
from forecasting.workload import BEST, FORECASTERS
from scheduling.scaling import FLOOR

WIDTH = 170  # where no terminal says otherwise
WEEK_DAYS, ONE_DAY = 7.0, 1.0
FURTHER = {
    "lengths": lengths,
    "lengths-shipped": shipped_lengths,
    "preserve-routing": preserve_routing,
    "ssjf": ssjf,
}
"""Modules by paper: `measure(options, told) -> result` and `show(console, result)`. They take data, seed and scale."""


class Command(BaseCommand):
    help = "Measure again, in our simulator, what a paper reports. docs/scaling.md and docs/ordering.md explain the tables."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("paper", choices=("sageserve", "preserve-scaling", *FURTHER))
        parser.add_argument("--data", type=Path, default=Path("data"), help="folder of traces and lengths, for ssjf")
        parser.add_argument("--days", type=float, help="simulated (default: a week for sageserve, else a day)")
        parser.add_argument("--scale", type=float, default=1.0, help="times the demand (default 1)")
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--strategies", help="some of them, with commas between")
        parser.add_argument("--demand", choices=("plain", "bursts", "both"), default="both", help="for sageserve")
        parser.add_argument("--no-floor", action="store_true", help="for sageserve: plans alone, as in the paper")
        parser.add_argument("--forecaster", help="the paper's: default arima, or mlstm for preserve-scaling")
        parser.add_argument("--own-forecaster", default=BEST, help=f"of our own strategy (default {BEST})")
        parser.add_argument("--out", type=Path, help="file for the result as JSON")
        parser.add_argument("--encoder", default="minilm", help="for lengths: minilm, a folder or a hub's name")
        effort = parser.add_mutually_exclusive_group()
        effort.add_argument(
            "--quick", action="store_true", help="for lengths: fewer samples for encoders, smaller test"
        )
        effort.add_argument(
            "--thorough", action="store_true", help="for lengths: encoders read all prompts; hours for all of them"
        )
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    def handle(self, *args: Any, **options: Any) -> None:
        self._check(options)
        progress_console = Console(stderr=True, quiet=options["json"])
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        with Progress(*columns, console=progress_console, refresh_per_second=4) as progress:
            bars: dict[str, Any] = {}

            def told(what: str, done: int, total: int) -> None:
                if what not in bars:
                    for bar in bars.values():
                        progress.update(bar, visible=False)
                    bars[what] = progress.add_task(what, total=total)
                progress.update(bars[what], completed=done)

            try:
                if options["paper"] in FURTHER:
                    result = FURTHER[options["paper"]].measure(options, told)
                else:
                    result = _sageserve(options, told) if options["paper"] == "sageserve" else _preserve(options, told)
            except (ValueError, RuntimeError) as error:
                raise CommandError(str(error)) from error
        if options["out"]:
            try:
                options["out"].parent.mkdir(parents=True, exist_ok=True)
                options["out"].write_text(json.dumps(result, indent=1), encoding="utf-8")
            except OSError as error:
                raise CommandError(str(error)) from error
        if options["json"]:
            self.stdout.write(json.dumps(result))
        else:
            console = Console(file=cast(TextIO, self.stdout), width=None if sys.stdout.isatty() else WIDTH)
            if options["paper"] in FURTHER:
                FURTHER[options["paper"]].show(console, result)
            else:
                (_show_sageserve if options["paper"] == "sageserve" else _show_preserve)(console, result)

    @staticmethod
    def _check(options: dict[str, Any]) -> None:
        if options["days"] is None:
            options["days"] = WEEK_DAYS if options["paper"] == "sageserve" else ONE_DAY
        for name, most in (("days", WEEK_DAYS), ("scale", 100.0)):
            if not 0 < options[name] <= most:
                raise CommandError(f"--{name} must be above 0 and at most {most:g}.")
        if options["seed"] < 0:
            raise CommandError("--seed must be at least 0.")
        if options["paper"] in FURTHER:
            return
        known = sageserve.STRATEGIES if options["paper"] == "sageserve" else preserve.STRATEGIES
        names = options["strategies"].split(",") if options["strategies"] else list(known)
        for name in names:
            if name not in known:
                raise CommandError(f"--strategies: {name!r} is none of {', '.join(known)}.")
        options["strategies"] = [name for name in known if name in names]
        options["forecaster"] = options["forecaster"] or ("arima" if options["paper"] == "sageserve" else "mlstm")
        for name in ("forecaster", "own_forecaster"):
            if options[name] not in FORECASTERS:
                raise CommandError(
                    f"--{name.replace('_', '-')}: {options[name]!r} is none of {', '.join(FORECASTERS)}."
                )


def _about(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in ("paper", "days", "scale", "seed", "forecaster")}


def _sageserve(options: dict[str, Any], told: Told) -> dict[str, Any]:
    scene = scenes.sageserve(options["scale"])
    floor = None if options["no_floor"] else FLOOR
    runs = []
    for demand in ("plain", "bursts"):
        if options["demand"] not in (demand, "both"):
            continue
        setting = sageserve.prepare(
            scene,
            options["days"],
            options["seed"],
            demand == "bursts",
            options["forecaster"],
            options["own_forecaster"],
            told,
        )
        rows = sageserve.run(setting, options["strategies"], told, floor)
        runs.append(
            {
                "demand": demand,
                "requests": len(setting.workload),
                "capability_tokens_per_s": [round(float(each), 1) for each in setting.capability_tokens_per_s],
                "forecast_error": {
                    f"{setting.paper_forecasts.forecaster}, next hour": round(setting.paper_forecasts.error, 4),
                    f"{setting.own_forecasts.forecaster}, next window": round(setting.own_forecasts.error, 4),
                },
                "rows": [row.as_dict() for row in rows],
                "against_reactive": sageserve.against_reactive(rows),
            }
        )
    return {
        **_about(options),
        "own_forecaster": options["own_forecaster"],
        "floor": floor is not None,
        "models": [model.name for model in scene.models],
        "reported": sageserve.PAPER,
        "runs": runs,
    }


def _preserve(options: dict[str, Any], told: Told) -> dict[str, Any]:
    rows, services = [], []
    for service in preserve.SERVICES:
        setting = preserve.prepare(
            service, options["scale"], options["days"], options["seed"], options["forecaster"], told
        )
        rows += preserve.run(setting, options["strategies"], told)
        services.append(
            {
                "service": service,
                "requests": len(setting.workload),
                "capability_tokens_per_s": {
                    "prompt": round(setting.capability.prompt_tokens_per_s, 1),
                    "output": round(setting.capability.output_tokens_per_s, 1),
                    "total": round(setting.capability.total_tokens_per_s, 1),
                },
                "forecast_error": {
                    "prompt": round(setting.prompt.error, 4),
                    "output": round(setting.output.error, 4),
                },
            }
        )
    return {
        **_about(options),
        "services": services,
        "rows": [row.as_dict() for row in rows],
        "found": preserve.found(rows),
        "reported": preserve.PAPER,
    }


def _show_sageserve(console: Console, result: dict[str, Any]) -> None:
    for run in result["runs"]:
        errors = ", ".join(f"{name}: {_change(error, sign=False)}" for name, error in run["forecast_error"].items())
        console.print(
            f"[bold]SageServe[/], {result['days']:g} days, {run['demand']}: {run['requests']:,} requests, seed"
            f" {result['seed']}. Error of the forecasts: {errors}."
        )
        busiest = result["models"][0]
        table = Table(title=f"Interactive latencies; {'over' if result['floor'] else 'without'} the reactive floor")
        table.add_column("Strategy")
        heads = (
            "hours", "change", f"{busiest} hours", "change", "paper", "waste (h)", "change", "paper", "USD",
            "TTFT p95", "E2E p95", "SLO met", "out/in",
        )  # fmt: skip
        for head in heads:
            table.add_column(head, justify="right")
        for row in run["rows"]:
            name = row["strategy"]
            change, paper = run["against_reactive"].get(name, {}), result["reported"].get(name, {})
            table.add_row(
                name,
                f"{row['instance_hours']:,.0f}",
                _change(change.get("instance_hours")),
                f"{row['hours_by_model'][busiest]:,.0f}",
                _change(change.get("busiest_hours")),
                _change(paper.get("instance_hours")),
                f"{row['waste_hours']:,.1f}",
                _change(change.get("waste_hours")),
                _change(paper.get("waste_hours")),
                f"{row['usd']:,.0f}",
                _seconds(row["ttft_p95_s"]),
                _seconds(row["e2e_p95_s"]),
                f"{100 * row['slo_met']:.2f} %",
                f"{row['scale_outs']:,}/{row['scale_ins']:,}",
            )
        console.print(table)


def _show_preserve(console: Console, result: dict[str, Any]) -> None:
    table = Table(title=f"PreServe, section 5.3: {result['days']:g} day(s), seed {result['seed']}")
    for head in ("Service", "Queues", "Strategy"):
        table.add_column(head)
    for head in (
        "instance-hours",
        "peak 5 min",
        "peak minute",
        "mean",
        f"within {preserve.SLO_S} s",
        "TTFT p95",
        "out/in",
    ):
        table.add_column(head, justify="right")
    for row in result["rows"]:
        latencies = (row[name] for name in ("peak_normalised_s", "peak_minute_normalised_s", "normalised_mean_s"))
        table.add_row(
            row["service"],
            row["depth"],
            row["strategy"],
            f"{row['instance_hours']:,.1f}",
            *(_seconds(value) for value in latencies),
            f"{100 * row['slo_met']:.2f} %",
            _seconds(row["ttft_p95_s"]),
            f"{row['scale_outs']:,}/{row['scale_ins']:,}",
        )
    console.print(table)
    for name, reported in result["reported"].items():
        values: Sequence[tuple[str, float]] = list(result["found"].get(name, {}).items())
        said = ", ".join(f"{service} {_change(value)}" for service, value in values) or "not measured"
        console.print(f"PreServe, {name.replace('_', ' ')}: {said}; the paper: {_change(reported)}")


def _change(value: float | None, sign: bool = True) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"


def _seconds(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{1000 * value:,.0f} ms" if value < 1 else f"{value:,.2f} s"
