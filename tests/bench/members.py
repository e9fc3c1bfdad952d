"""Forecasts on days that nothing was chosen on: the blend beside each of its members, ARIMA, ETS and the day before.

DATA is ServeGen's folder. Rolling origin with a fit every day, as live; errors are of the next window and of the sixth.
Series: tokens and requests of the three classes by ten minutes, and single clients by the hour (`sparse`). Settings were
chosen on days 5 to 8 of m-small and m-mid, with looks at the same days of m-large and, for sparse ones, at clients up to day
10; days 8 to 10 of the three classes judge them.

By series: APE where something was asked for all the time, else WAPE (the sum of errors as a share of the sum of rates), in
per cent; `best` is the best member that speaks throughout, known only afterwards. On top: on how many series and horizons
the blend is within 1 % of it or better, and mean ratios to it and to the others.
"""

import argparse
import csv
import gzip
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forecasting.workload import FORECASTERS, Series
from forecasting.workload.forecasters.blend import NAMES, Blend
from forecasting.workload.series import without_partial

WINDOW_S = 600.0
DAY = 144
STEPS = {"next": 1, "sixth": 6}
QUANTITIES = {"prompt": "prompt_tokens", "output": "output_tokens", "requests": "requests"}
SHARES = (0.03, 0.85)
"""Of windows with requests, of a client that is sparse."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", type=Path, help="ServeGen's folder")
    parser.add_argument("--classes", nargs="*", default=["m-small", "m-mid", "m-large"])
    parser.add_argument("--quantities", nargs="+", choices=QUANTITIES, default=list(QUANTITIES))
    parser.add_argument("--sparse", nargs="*", default=["m-small", "m-mid"], help="classes whose clients are judged")
    parser.add_argument("--clients", type=int, default=5, help="of a class, evenly spread over how active they are")
    parser.add_argument("--beside", nargs="*", choices=list(FORECASTERS), default=["arima", "ets", "seasonal_naive"])
    parser.add_argument("--fit-days", type=int, default=7)
    parser.add_argument("--test-days", type=int, default=3)


def of_classes(options: argparse.Namespace) -> Iterator[Series]:
    for name in options.classes:
        with (options.data / f"{name}_10min_days1-10.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        for quantity in options.quantities:
            values = np.full(1 + int(float(rows[-1]["t_s"]) // WINDOW_S), np.nan)
            for row in rows:
                if float(row["requests"]) > 0:  # else it was not collected
                    values[int(float(row["t_s"]) // WINDOW_S)] = float(row[QUANTITIES[quantity]]) / WINDOW_S
            yield without_partial(Series(0.0, WINDOW_S, values, f"{name} {quantity}"))


def of_clients(options: argparse.Namespace) -> Iterator[Series]:
    """Requests of sparse clients with odd numbers by the hour. A window in which no client is active is a gap."""
    for name in options.sparse:
        rates: defaultdict[int, dict[int, float]] = defaultdict(dict)
        with gzip.open(options.data / f"{name}_clients_days1-10.csv.gz", "rt", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                rates[int(row["client"])][int(float(row["t_s"]) // WINDOW_S)] = float(row["req_per_s"])
        count = 1 + max(max(one) for one in rates.values())
        watched = np.zeros(count, bool)
        for one in rates.values():
            watched[list(one)] = True
        clients = []
        for client, one in rates.items():
            values = np.where(watched, 0.0, np.nan)
            values[list(one)] = list(one.values())
            share = float(np.mean(values[: options.fit_days * DAY][watched[: options.fit_days * DAY]] > 0))
            if client % 2 and SHARES[0] < share < SHARES[1] and np.nansum(values[options.fit_days * DAY :]) > 0:
                hours = values[: count // 6 * 6].reshape(-1, 6)
                known = (~np.isnan(hours)).sum(axis=1)
                hourly = np.where(known >= 3, np.nansum(hours, axis=1) / np.maximum(known, 1), np.nan)
                clients.append(
                    (share, client, Series(0.0, 6 * WINDOW_S, hourly, f"{name} client {client}, by the hour"))
                )
        clients.sort(key=lambda each: each[:2])
        for place in np.unique(np.linspace(0, len(clients) - 1, options.clients).round().astype(int)):
            yield clients[place][2]


def rolled(
    forecaster: Any, series: Series, fit: int, end: int, say: Callable[[Any, int], np.ndarray]
) -> dict[int, np.ndarray]:
    """What *say* says before each window of the test part, by step and target: (names, windows)."""
    forecaster.fit(series.part(0, fit))
    said: dict[int, list[np.ndarray]] = {step: [] for step in STEPS.values()}
    for at in range(fit, end):
        rates = say(forecaster, max(STEPS.values()))
        for step in said:
            said[step].append(rates[:, step - 1])
        forecaster.update(series.tokens_per_s[at : at + 1])
    # Step s said before window t is of window t + s - 1.
    return {step: np.stack(each, axis=1) for step, each in said.items()}


def by_forecast(forecaster: Any, steps: int) -> np.ndarray:
    return forecaster.predict(steps).mean[None]


def by_blend(forecaster: Blend, steps: int) -> np.ndarray:
    """The blend, then its members."""
    model: Any = forecaster._own
    horizons = np.arange(1, steps + 1)
    said = model._said(np.full(steps, len(model.trail) - 1), horizons)
    return np.concatenate([by_forecast(forecaster, steps), np.maximum(model.trail.rate(said), 0.0)])


def errors(said: np.ndarray, actual: np.ndarray, step: int) -> np.ndarray:
    """Per cent, by name: APE, or WAPE where a window was empty; NaN for one that was silent at any."""
    said, actual = said[:, : said.shape[1] - step + 1], actual[step - 1 :]
    known = ~np.isnan(actual)
    error = np.abs(said[:, known] - actual[known])
    if (actual[known] == 0).any():
        return 100 * error.sum(axis=1) / actual[known].sum()
    return 100 * (error / actual[known]).mean(axis=1)


def run(options: argparse.Namespace) -> dict[str, Any]:
    by_series: dict[str, Any] = {}
    for series in [*of_classes(options), *of_clients(options)]:
        day = round(86_400 / series.window_s)
        fit, end = options.fit_days * day, min(len(series), (options.fit_days + options.test_days) * day)
        said = rolled(Blend(), series, fit, end, by_blend)
        beside = {name: rolled(FORECASTERS[name](), series, fit, end, by_forecast) for name in options.beside}
        actual = series.tokens_per_s[fit:end]
        for what, step in STEPS.items():
            blend, *members = errors(said[step], actual, step).tolist()
            best = int(np.nanargmin(members))
            by_series[f"{series.name}, {what}"] = {
                "blend": round(blend, 2),
                "best": round(members[best], 2),
                "best_is": NAMES[best],
                "boosted trees": round(members[NAMES.index("boosted trees")], 2),
                **{name: round(float(errors(each[step], actual, step)[0]), 2) for name, each in beside.items()},
            }
            print(f"{series.name}, {what}", by_series[f"{series.name}, {what}"], flush=True)
    rows = list(by_series.values())
    return {
        "series": len(rows),
        "within_1_percent_of_best": sum(row["blend"] <= 1.01 * row["best"] for row in rows),
        "mean_ratio_to": {
            name: round(float(np.exp(np.nanmean([np.log(row["blend"] / row[name]) for row in rows]))), 4)
            for name in ("best", "boosted trees", *options.beside)
        },
        "by_series": by_series,
    }
