"""How good forecasts and their bands are where most windows are empty: single clients, hours without a request.

By default series made here: visits of a few minutes to hours with a level of their own, and gaps in what was measured. With
--clients FILE, clients of a ServeGen trace (columns client, t_s, req_per_s; .csv.gz) that are active in 3 to 85 % of the
windows of the first days; --odd and --even take half of them, so that one half can be looked at while a forecaster is built
and the other judges it. Rolling origin, an hour ahead in windows of ten minutes, as `manage.py backtest` does it.

`pinball` judges forecast and bands together, as a share of the mean rate; its mean over series is at the top, with the share
of series on which each forecaster is best.
"""

import argparse
import csv
import gzip
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from forecasting.workload import FORECASTERS, Series, backtest

WINDOW_S = 600.0
DAY = 144
HORIZON = 6
SHARES = (0.03, 0.85)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forecasters", nargs="+", choices=list(FORECASTERS), default=["blend", "arima", "ets"])
    parser.add_argument("--clients", type=Path, help="a ServeGen file of single clients")
    parser.add_argument("--odd", action="store_true", help="only clients with an odd number")
    parser.add_argument("--even", action="store_true", help="only clients with an even number")
    parser.add_argument("--most", type=int, default=8, help="series at most, evenly spread over how active they are")
    parser.add_argument("--fit-days", type=int, default=7)
    parser.add_argument("--test-days", type=int, default=3)


def made(days: int, number: int) -> Series:
    """Visits whose number, length and level are drawn; one window in a hundred begins a gap of an hour."""
    random = np.random.default_rng(number)
    values = np.zeros(days * DAY)
    at = 0
    while (at := at + 1 + round(random.exponential(DAY / (1 + number)))) < len(values):
        long = 1 + round(random.exponential(1 + 2 * number))
        values[at : at + long] = 500 * np.exp(random.standard_normal())
        at += long
    for gap in np.flatnonzero(random.random(len(values)) < 0.001):
        values[gap : gap + 6] = np.nan
    return Series(0.0, WINDOW_S, values, f"made {number}")


def clients(path: Path, fit: int) -> list[Series]:
    """Request rates of the clients in *path*, the least active first. A window in which no client is active is a gap."""
    rates: defaultdict[int, dict[int, float]] = defaultdict(dict)
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rates[int(row["client"])][int(float(row["t_s"]) // WINDOW_S)] = float(row["req_per_s"])
    count = 1 + max(max(one) for one in rates.values())
    watched = np.zeros(count, bool)
    for one in rates.values():
        watched[list(one)] = True
    series = []
    for client, one in rates.items():
        values = np.where(watched, 0.0, np.nan)
        values[list(one)] = list(one.values())
        share = np.mean(values[:fit][watched[:fit]] > 0)
        if SHARES[0] < share < SHARES[1]:
            series.append((share, client, Series(0.0, WINDOW_S, values, f"client {client}")))
    return [each for _, _, each in sorted(series, key=lambda row: row[:2])]


def run(options: argparse.Namespace) -> dict[str, Any]:
    fit, test = options.fit_days * DAY, options.test_days * DAY
    if options.clients is None:
        chosen = [made(options.fit_days + options.test_days, number) for number in range(options.most)]
    else:
        chosen = [
            each
            for each in clients(options.clients, fit)
            if not (options.odd or options.even) or int(each.name.split()[-1]) % 2 == options.odd
        ]
        chosen = [
            chosen[place] for place in np.unique(np.linspace(0, len(chosen) - 1, options.most).round().astype(int))
        ]
    by_series: dict[str, Any] = {}
    for series in chosen:
        try:
            rows = backtest(
                series, {name: FORECASTERS[name] for name in options.forecasters}, fit, HORIZON, test_windows=test
            )
        except ValueError as error:  # nothing was asked for in the days that judge
            by_series[series.name] = str(error)
            continue
        by_series[series.name] = {
            row["forecaster"]: {
                "pinball": round(row["pinball"], 4),
                "mean_ape": round(row["mean_ape"], 3),
                "coverage_80": round(row["coverage_80"], 3),
                "width_80": round(row["width_80"], 3),
            }
            for row in rows
        }
    judged = [each for each in by_series.values() if isinstance(each, dict)]
    best = [min(each, key=lambda name, each=each: each[name]["pinball"]) for each in judged]
    return {
        "series": len(judged),
        "pinball": {
            name: round(float(np.mean([each[name]["pinball"] for each in judged])), 4) for name in options.forecasters
        },
        "best_on": {name: best.count(name) for name in options.forecasters},
        "by_series": by_series,
    }
