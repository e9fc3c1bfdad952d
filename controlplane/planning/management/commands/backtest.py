import json
import math
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError
from rich.console import Console

from controlplane.planning.forecasts import backtests
from controlplane.planning.forecasts.backtests import FIT_DAYS, HORIZON, BacktestSource
from controlplane.terminal import Column, console, progress, table
from forecasting.workload import BEST, FORECASTERS, rests
from forecasting.workload.series import DAY_S, QUANTITIES, Series, aggregate, from_trace
from scheduling.simulation.workload.traces import FORMATS, SERVEGEN_BIN_S, UNITS, TraceError, load_trace
from scheduling.table_files import Row, csv_rows

MOST_BINS = 1_000_000


class Command(BaseCommand):
    help = (
        "Say how well each forecaster would have done: fit it on the first days of a series, then forecast every further"
        " window. Reads the ledger's minutes, or a trace; docs/papers/forecasting.md explains the table."
    )
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", type=Path, nargs="?", help="a trace; without one, the ledger's minute rows")
        parser.add_argument("--unit", default="", choices=UNITS, help="of times in mooncake's format that are numbers")
        parser.add_argument(
            "--format", choices=sorted(FORMATS), default="servegen", help="of the file (default servegen)"
        )
        parser.add_argument("--window", type=float, default=600.0, metavar="S", help="seconds (default 600)")
        parser.add_argument(
            "--horizon", type=int, default=HORIZON, metavar="N", help=f"windows ahead (default {HORIZON})"
        )
        parser.add_argument(
            "--fit-days",
            type=float,
            metavar="D",
            help=f"days to fit on (default {FIT_DAYS:g}, or 70%% of a shorter series)",
        )
        parser.add_argument(
            "--forecasters", nargs="+", choices=list(FORECASTERS), metavar="NAME",
            help=f"of {', '.join(FORECASTERS)} (default all that can be fitted here)",
        )  # fmt: skip
        parser.add_argument("--model", default="", help="of this model only, where the source names models")
        parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        parser.add_argument("--no-store", action="store_true", help="do not keep the result for the console")

    def handle(self, *args: Any, **options: Any) -> None:
        window_s, horizon = options["window"], options["horizon"]
        if not 1 <= window_s <= DAY_S or not math.isfinite(window_s):
            raise CommandError("--window is from 1 s to a day.")
        if horizon < 1:
            raise CommandError("--horizon is at least 1.")
        if options["fit_days"] is not None and not 0 < options["fit_days"] < math.inf:
            raise CommandError("--fit-days is above 0.")
        resting = {name: reason for name in options["forecasters"] or FORECASTERS if (reason := rests(name))}
        if options["forecasters"] and resting:
            raise CommandError(" ".join(resting.values()), returncode=2)
        forecasters = [name for name in options["forecasters"] or FORECASTERS if name not in resting]
        try:
            demand = read(options)
        except TraceError as error:
            raise CommandError(str(error)) from error
        with progress(quiet=options["json"]) as report:
            try:
                made = backtests.judge(
                    demand,
                    list(dict.fromkeys(forecasters)),
                    horizon,
                    fit_days=options["fit_days"],
                    report=report,
                )
            except ValueError as error:
                raise CommandError(str(error)) from error
        if not options["no_store"]:
            try:
                backtests.store(demand.source, round(window_s), horizon, made.rows)
            except ValidationError as error:
                raise CommandError("; ".join(error.messages)) from error
            except DatabaseError as error:  # keep minutes of work
                self.stderr.write(f"The result could not be stored: {error}")
        about = {
            "source": demand.source,
            "window_s": window_s,
            "horizon_windows": horizon,
            "best": BEST,
            "series": made.judged,
            "left_out": resting,
        }
        if options["json"]:
            self.stdout.write(json.dumps({**about, "rows": made.rows}, allow_nan=False))
        else:
            show(console(self.stdout), about, made.rows)


def read(options: dict[str, Any]) -> BacktestSource:
    """Read the source named by the options. Raises TraceError for a file, CommandError for other errors."""
    file, window_s = options["file"], options["window"]
    if file is None:
        if window_s % 60:
            raise CommandError("--window: the ledger has minutes; windows are a whole number of them.")
        try:
            return backtests.read_ledger(window_s, options["model"])
        except ValueError as error:
            raise CommandError(str(error)) from error
    if options["format"] == "servegen":
        if options["model"]:
            raise CommandError("--model: a servegen file is one model.")
        return BacktestSource(
            file.name, {file.name.removesuffix(".gz").removesuffix(".csv"): read_servegen(file, window_s)}
        )
    workload = load_trace(file, options["format"], unit=options["unit"])
    if not len(workload.arrival_s):
        raise CommandError(f"{file}: no request in it has a prompt and an output.")
    names = workload.model.names
    series = {}
    for code, model in enumerate(names):
        if options["model"] and model != options["model"]:
            continue
        chosen = workload.model.codes == code
        # All models' series end with the trace, so that a model without further requests shows zero demand.
        arrivals = np.append(workload.arrival_s[chosen], workload.arrival_s[-1])
        counts = {"prompt": workload.prompt_tokens[chosen], "output": workload.output_tokens[chosen]}
        series[model or file.stem] = {
            quantity: from_trace(arrivals, np.append(tokens, 0), window_s, name=f"{model} {quantity}")
            for quantity, tokens in counts.items()
        }
    if not series:
        raise CommandError(f"{file}: no request is for {options['model']!r}; there are {', '.join(names)}.")
    return BacktestSource(file.name, series)


def read_servegen(path: Path, window_s: float) -> dict[str, Series]:
    """Read prompt and output series from a file of ten-minute bins, summed into windows of *window_s*.

    Missing bins, and those without any request, were not collected: they are gaps.
    """
    if window_s % SERVEGEN_BIN_S:
        raise CommandError(f"--window: this file has bins of {SERVEGEN_BIN_S:g} s; windows are a whole number of them.")
    bins: list[int] = []
    rates: dict[str, list[float]] = {quantity: [] for quantity in QUANTITIES}
    row: Row | None = None
    for row in csv_rows(path, "t_s", "requests", "prompt_tokens", "output_tokens"):
        index = row.number("t_s") / SERVEGEN_BIN_S
        if index != int(index):
            raise TraceError(path, row.line, "t_s", f"{row.values['t_s']!r} is no multiple of {SERVEGEN_BIN_S:g} s")
        if bins and index <= bins[-1]:
            raise TraceError(path, row.line, "t_s", f"{row.values['t_s']!r} is not after the row above it")
        if index - (bins[0] if bins else index) > MOST_BINS:
            raise TraceError(path, row.line, "t_s", f"{row.values['t_s']!r} is over {MOST_BINS:,} bins after the first")
        empty = row.number("requests") == 0
        bins.append(int(index))
        for quantity in QUANTITIES:
            tokens = row.number(f"{quantity}_tokens")
            rates[quantity].append(math.nan if empty else tokens / SERVEGEN_BIN_S)
    if row is None:
        raise TraceError(path, 1, "", "holds no bin")
    places = np.array(bins) - bins[0]
    series = {}
    for quantity in QUANTITIES:
        values = np.full(places[-1] + 1, np.nan)
        values[places] = rates[quantity]
        series[quantity] = aggregate(Series(bins[0] * SERVEGEN_BIN_S, SERVEGEN_BIN_S, values, quantity), window_s)
    return series


def step_column(step: int) -> Column:
    return Column(f"step {step}", lambda row: row["error_by_horizon"][step - 1], percent)


def columns(horizon: int) -> list[Column]:
    """Return the columns of one series' table: errors over all and some steps, bands, one origin, and times."""
    return [
        Column("Forecaster", "forecaster"),
        Column("error", "error", percent),
        Column("max APE", "max_ape", percent),
        *(step_column(step) for step in sorted({1, min(2, horizon), horizon})),
        Column("pinball", "pinball", percent),
        Column("in 80%", "coverage_80", percent),
        Column("in 95%", "coverage_95", percent),
        Column("once mean", "one_origin_mean_ape", percent),
        Column("once max", "one_origin_max_ape", percent),
        Column("fit", "fit_s", "{:.2f} s"),
        Column("update", lambda row: 1000 * row["update_s"], "{:.1f} ms"),
        Column("predict", lambda row: 1000 * row["predict_s"], "{:.1f} ms"),
    ]


def show(shown: Console, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print one table per series and quantity, smallest error first: mean APE, or WAPE where windows were empty."""
    horizon = about["horizon_windows"]
    shown.print(
        f"[bold]{about['source']}[/], windows of {about['window_s'] / 60:g} min, forecast {horizon} ahead before each window"
    )
    for judged in about["series"]:
        title = (
            f"{judged['series']}, {judged['quantity']} tokens: fitted on {judged['fit_windows']:,} windows,"
            f" judged on {judged['test_windows']:,} ({judged['gaps']:,} gaps in both)"
        )
        mine = [row for row in rows if (row["series"], row["quantity"]) == (judged["series"], judged["quantity"])]
        ranked = [
            {**row, "style": "" if place else "bold"}
            for place, row in enumerate(sorted(mine, key=lambda row: row["error"]))
        ]
        shown.print(table(title, columns(horizon), ranked, itemgetter("style")))
        for row in mine:
            words = ". ".join(filter(None, (row["note"], row["parameters"])))
            if words:
                shown.print(f"  {row['forecaster']}: {words}", highlight=False, markup=False)
    for reason in about["left_out"].values():
        shown.print(f"Left out: {reason}", highlight=False, markup=False)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%" if value < 10 else f"{100 * value:,.0f}%"
