"""Forecasts of real series: the blend against each of its members, ARIMA, ETS and the day before.

FOLDERS are ServeGen's (tokens and requests of its classes by ten minutes, and single clients by the hour) and that of
the Azure traces of 2023 (an hour, by ten seconds). Each model is fitted before every judged day and forecasts one and
six windows ahead. Weights were chosen on days 6 and 7 of the three classes of ten days, on clients with even numbers
and on drawn weeks, trees on days 9 and 10 too; days 8 to 10 and odd clients judge them. Series of one day are judged on
their last 30 %.

By series: APE if there were requests in every window, else WAPE (the sum of errors as a share of the sum of rates), in
per cent; `best` is the best member with a forecast throughout, known only in hindsight. At the top: on how many series
and horizons the blend is within 1 % of it or better, the worst ratio to it, and mean ratios to it and to the others.
"""

import argparse
import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from forecasting.workload import FORECASTERS, Series
from forecasting.workload.blend import NAMES, BlendModel
from forecasting.workload.forecaster import PointModel
from forecasting.workload.series import from_trace, windows_in_a_day, without_partial
from scheduling.simulation.workload.traces import load_trace

WINDOW_S = 600.0
AZURE_WINDOW_S = 10.0
STEPS = {"next": 1, "sixth": 6}
QUANTITIES = {"prompt": "prompt_tokens", "output": "output_tokens", "requests": "requests"}
CLASSES, SHORT, AZURE = ("m-small", "m-mid", "m-large"), ("deepseek-r1", "mm-image"), ("code", "conv")
SHARES = (0.03, 0.85)
"""Of windows with requests, of a sparse client."""
FIT_DAYS, TEST_DAYS = 7, 3
FIT_SHARE = 0.7  # of a series of a day or less
BESIDE = ("boosted trees", "forest")
"""Members that are always listed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", help="ServeGen's, Azure's, or both")
    parser.add_argument("--only", default="", metavar="TEXT", help="series whose names have this in them")
    parser.add_argument("--clients", type=int, default=5, help="of a class, evenly spread over how active they are")
    parser.add_argument("--beside", nargs="*", choices=list(FORECASTERS), default=["arima", "ets", "seasonal_naive"])


def of_classes(folder: Path) -> Iterator[Series]:
    for name in (*CLASSES, *SHORT):
        for path in folder.glob(f"{name}_10min*.csv"):
            with path.open(encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
            for quantity, column in QUANTITIES.items():
                values = np.full(1 + int(float(rows[-1]["t_s"]) // WINDOW_S), np.nan)
                for row in rows:
                    if float(row["requests"]) > 0:  # else it was not collected
                        values[int(float(row["t_s"]) // WINDOW_S)] = float(row[column]) / WINDOW_S
                yield without_partial(Series(0.0, WINDOW_S, values, f"{name}, {quantity}"))


def of_azure(folder: Path) -> Iterator[Series]:
    for name in AZURE:
        for path in folder.glob(f"AzureLLMInferenceTrace_{name}.csv"):
            asked = load_trace(path, "azure")
            counts = (asked.prompt_tokens, asked.output_tokens, np.ones(len(asked.arrival_s)))
            for quantity, tokens in zip(QUANTITIES, counts, strict=True):
                yield from_trace(asked.arrival_s, tokens, AZURE_WINDOW_S, name=f"azure {name}, {quantity}")


def of_clients(folder: Path, count: int) -> Iterator[Series]:
    """Return hourly requests of sparse clients with odd numbers. A window without an active client is a gap."""
    day = windows_in_a_day(WINDOW_S)
    for name in CLASSES:
        rates: defaultdict[int, dict[int, float]] = defaultdict(dict)
        for path in folder.glob(f"{name}_clients_days1-10.csv.gz"):
            with gzip.open(path, "rt", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    rates[int(row["client"])][int(float(row["t_s"]) // WINDOW_S)] = float(row["req_per_s"])
        watched = np.zeros(1 + max((max(one) for one in rates.values()), default=0), bool)
        for one in rates.values():
            watched[list(one)] = True
        clients = []
        for client, one in rates.items():
            values = np.where(watched, 0.0, np.nan)
            values[list(one)] = list(one.values())
            share = float(np.mean(values[: FIT_DAYS * day][watched[: FIT_DAYS * day]] > 0))
            if client % 2 and SHARES[0] < share < SHARES[1] and np.nansum(values[FIT_DAYS * day :]) > 0:
                hours = values[: len(values) // 6 * 6].reshape(-1, 6)
                known = (~np.isnan(hours)).sum(axis=1)
                hourly = np.where(known >= 3, np.nansum(hours, axis=1) / np.maximum(known, 1), np.nan)
                clients.append(
                    (share, client, Series(0.0, 6 * WINDOW_S, hourly, f"{name} client {client}, by the hour"))
                )
        clients.sort(key=lambda each: each[:2])
        for place in np.unique(np.linspace(0, len(clients) - 1, count).round().astype(int)) if clients else ():
            yield clients[place][2]


def every_series(options: argparse.Namespace) -> Iterator[Series]:
    for folder in options.folders:
        for series in (*of_classes(folder), *of_clients(folder, options.clients), *of_azure(folder)):
            if options.only in series.name:
                yield series


def judged(series: Series) -> tuple[int, int]:
    """Return the first judged window, and the end of the judged range."""
    day = windows_in_a_day(series.window_s)
    if len(series) <= FIT_DAYS * day:
        return round(FIT_SHARE * len(series)), len(series)
    return FIT_DAYS * day, min(len(series), (FIT_DAYS + TEST_DAYS) * day)


def rolled(model: PointModel, series: Series) -> np.ndarray:
    """Return the forecasts of *model* before each judged window, and its members' if any: (1 + members, windows,
    steps).
    """
    day, steps = windows_in_a_day(series.window_s), np.array(list(STEPS.values()))
    said, (begin, end) = [], judged(series)
    for at in range(begin, end, day):
        model.fit(series.tokens_per_s[:at], day)
        following = series.tokens_per_s[at : min(end, at + day)]
        rates = [model.walk(following)[:, steps - 1]]
        if isinstance(model, BlendModel) and model.trail is not None:
            origins = at - 1 + np.arange(len(following))
            # The trail covers the series from here on; earlier forecasts of the members still apply.
            rates.extend(model.trail.rate(model.said(origins[:, None], steps)))
        said.append(np.maximum(rates, 0.0))
    return np.concatenate(said, axis=1)


def errors(said: np.ndarray, actual: np.ndarray, step: int) -> np.ndarray:
    """Return per cent by name: APE, or WAPE if a window was empty; NaN if any forecast is missing."""
    # The forecast of step s before window t is of window t + s - 1.
    said, actual = said[:, : len(actual) - step + 1], actual[step - 1 :]
    known = ~np.isnan(actual)
    error = np.abs(said[:, known] - actual[known])
    if (actual[known] == 0).any():
        return 100 * error.sum(axis=1) / actual[known].sum()
    return 100 * (error / actual[known]).mean(axis=1)


def run(options: argparse.Namespace) -> dict[str, Any]:
    by_series: dict[str, Any] = {}
    for series in every_series(options):
        said = rolled(BlendModel(), series)
        beside = {name: rolled(FORECASTERS[name].model_class(), series) for name in options.beside}
        begin, end = judged(series)
        actual = series.tokens_per_s[begin:end]
        for place, (what, step) in enumerate(STEPS.items()):
            blend, *members = errors(said[..., place], actual, step).tolist()
            best = int(np.nanargmin(members))
            by_name = {
                "blend": blend,
                "best": members[best],
                **{name: members[NAMES.index(name)] for name in BESIDE},
                **{name: float(errors(each[..., place], actual, step)[0]) for name, each in beside.items()},
            }
            row = {name: None if np.isnan(error) else round(error, 2) for name, error in by_name.items()}
            by_series[f"{series.name}, {what}"] = {**row, "best_is": NAMES[best]}
            print(f"{series.name}, {what}", by_series[f"{series.name}, {what}"], flush=True)
    rows = list(by_series.values())
    ratios = {
        name: [row["blend"] / row[name] for row in rows if row[name]] for name in ("best", *BESIDE, *options.beside)
    }
    return {
        "command": f"python -m tests.bench members --json -- {' '.join(folder.name for folder in options.folders)}",
        "series": len(rows),
        "within_1_percent_of_best": sum(ratio <= 1.01 for ratio in ratios["best"]),
        "worst_ratio_to_best": round(max(ratios["best"]), 3),
        "mean_ratio_to": {
            name: round(float(np.exp(np.mean(np.log(each)))), 4) for name, each in ratios.items() if each
        },
        "by_series": by_series,
    }
