"""Backtests: errors of each forecaster on the ledger's demand or on a trace."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.models import Max, Min
from rich.console import Console

from controlplane.gateway.models import MinuteRow
from controlplane.gateway.selectors import OWN_REGION
from controlplane.planning.forecasts import demand
from controlplane.planning.models import Quantity
from controlplane.terminal import Column, console, progress, table
from forecasting.workload import BEST, FORECASTERS, backtest, unavailable_reason
from forecasting.workload.series import (
    DAY_S,
    QUANTITIES,
    Series,
    aggregate,
    from_trace,
    without_partial,
)
from scheduling.simulation.workload.traces import FORMATS, SERVEGEN_BIN_S, UNITS, TraceError, load_trace
from scheduling.table_files import Row, csv_rows

MOST_BINS = 1_000_000
HORIZON = 6  # an hour of ten-minute windows, the planning horizon; steps 1 and 2 are shown separately
FIT_DAYS = 7.0
FIT_SHARE = 0.7  # of a series no longer than FIT_DAYS
Source = tuple[str, Mapping[str, Mapping[str, Series]]]
"""Name of a source, and its series by name, prompt and output separately."""


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

    def handle(self, *args: Any, **options: Any) -> None:
        window_s, horizon = options["window"], options["horizon"]
        if not 1 <= window_s <= DAY_S or not math.isfinite(window_s):
            raise CommandError("--window is from 1 s to a day.")
        if horizon < 1:
            raise CommandError("--horizon is at least 1.")
        if options["fit_days"] is not None and not 0 < options["fit_days"] < math.inf:
            raise CommandError("--fit-days is above 0.")
        left_out = {name: why for name in options["forecasters"] or FORECASTERS if (why := unavailable_reason(name))}
        if options["forecasters"] and left_out:
            raise CommandError(" ".join(left_out.values()), returncode=2)
        forecasters = [name for name in options["forecasters"] or FORECASTERS if name not in left_out]
        try:
            source, of_source = read(options)
        except TraceError as error:
            raise CommandError(str(error)) from error
        with progress(quiet=options["json"]) as report:
            rows, judged = judge(of_source, list(dict.fromkeys(forecasters)), horizon, options["fit_days"], report)
        about = {
            "source": source,
            "window_s": window_s,
            "horizon_windows": horizon,
            "best": BEST,
            "series": judged,
            "left_out": left_out,
        }
        if options["json"]:
            self.stdout.write(json.dumps({**about, "rows": rows}, allow_nan=False))
        else:
            show(console(self.stdout), about, rows)


def read(options: dict[str, Any]) -> Source:
    """Read the source named by the options. Raises TraceError for a file, CommandError for other errors."""
    file, window_s = options["file"], options["window"]
    if file is None:
        if window_s % 60:
            raise CommandError("--window: the ledger has minutes; windows are a whole number of them.")
        return read_ledger(window_s, options["model"])
    if options["format"] == "servegen":
        if options["model"]:
            raise CommandError("--model: a servegen file is one model.")
        return file.name, {file.name.removesuffix(".gz").removesuffix(".csv"): read_servegen(file, window_s)}
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
    return file.name, series


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


def read_ledger(window_s: float, model: str = "") -> Source:
    """Read demand of every model and caller region as it is forecast: of the interactive classes.

    Raises CommandError if the ledger has no minute of *model* (empty: of any).
    """
    rows = MinuteRow.objects.order_by()
    span = rows.aggregate(first=Min("minute"), last=Max("minute"))
    if span["first"] is None:
        raise CommandError("The ledger holds no minute yet: name a file, or come back when requests were served.")
    places = sorted(set(rows.annotate(own=OWN_REGION).values_list("model", "own")))
    known = demand.read(span["first"], span["last"] + timedelta(seconds=demand.MINUTE_S), int(window_s), places)
    series = {
        " ".join(filter(None, place)): {
            str(each): Series(known.start.timestamp(), window_s, known.of(place, each), f"{' '.join(place)} {each}")
            for each in Quantity
        }
        for place in places
        if model in ("", place[0]) and np.nansum(known.requests[place])
    }
    if not series:
        raise CommandError(f"The ledger holds no minute of {model}.")
    return "ledger", series


def split(series: Series, name: str, fit_days: float | None = None) -> tuple[int, int]:
    """Return the windows to fit on and to judge. Raises CommandError if the series is too short."""
    count, day = len(series), DAY_S / series.window_s
    if fit_days is None:
        fit = round(FIT_DAYS * day) if count > FIT_DAYS * day else int(FIT_SHARE * count)
    else:
        fit = round(fit_days * day)
    test = count - fit
    if fit < 1 or test < 1:
        raise CommandError(
            f"{name}: {count} windows of {series.window_s:g} s ({count / day:.2f} days) leave none to judge."
        )
    return fit, test


def judge(
    of_source: Mapping[str, Mapping[str, Series]],
    forecasters: Sequence[str],
    horizon: int,
    fit_days: float | None,
    report: Callable[[str, int, int], None],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Judge *forecasters* on every series of *of_source*, *horizon* windows ahead.

    Return a row of `forecasting.workload.backtest` per forecaster, and the windows fitted, judged and missing per series,
    all with `series` and `quantity`. *report* is called with (step, windows done, all windows of the step). Raises
    CommandError naming a series that cannot be judged.
    """
    rows: list[dict[str, Any]] = []
    judged: list[dict[str, Any]] = []
    for name, pair in of_source.items():
        for quantity in Quantity.values:
            series = without_partial(pair[quantity])
            fit, test = split(series, name, fit_days)
            of_series = {"series": name, "quantity": quantity}
            gaps = int(np.count_nonzero(~series.known[: fit + test]))
            judged.append({**of_series, "fit_windows": fit, "test_windows": test, "gaps": gaps})

            def advance(forecaster: str, done: int, total: int, of: str = f"{name} {quantity}") -> None:
                report(f"{of}: {forecaster}", done, total)

            kinds = {forecaster: FORECASTERS[forecaster] for forecaster in forecasters}
            try:
                made = backtest(series, kinds, fit, horizon, test_windows=test, progress=advance)
            except ValueError as error:
                raise CommandError(f"{name} {quantity}: {error}") from error
            rows.extend({**row, **of_series} for row in made)
    return rows, judged


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
