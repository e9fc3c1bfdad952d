"""Demand of a capacity plan: the requests of the last hour, at the busiest ten minutes of the last week, grown."""

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controlplane.fleet.models import SloKind
from controlplane.planning.forecasts import demand
from controlplane.planning.models import Quantity
from controlplane.planning.sizing.question import Question
from controlplane.planning.sizing.selectors import classes_of
from controlplane.simulation.whatif.arrivals import forecast_arrivals
from scheduling.planning.bursts import POISSON_CV

WEEK: Final = timedelta(days=7)
WINDOW_S: Final = 600
CLASS, PROMPT, OUTPUT, RUN = 3, 5, 6, 12
"""Positions in the rows of a stream (`simulation.selectors.WORKLOAD_COLUMNS`)."""
NO_RUN: Final = ["", "", "", None]
"""Requests come one by one: the order of an application's calls changes little at a level rate, and is slow to simulate."""
LEAST_S, MOST_S, REQUESTS = 300.0, 1800.0, 10_000
"""Simulated time, by which a run has some `REQUESTS`."""
WARM_UP_S: Final = 120.0


@dataclass(slots=True)
class OfModel:
    """Demand of one model, today."""

    tokens_per_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By region of the callers."""
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    interactive: list[bool] = field(default_factory=list)
    cv: float = POISSON_CV
    classes: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Demand:
    """Demand of the classes of a question, grown by `factor`."""

    arrivals: dict[str, Any]
    """As `forecast_arrivals`, with the rates that are planned for."""
    models: dict[str, OfModel]
    factor: float
    remarks: list[str]

    @property
    def horizon_s(self) -> float:
        return float(self.arrivals["horizon_s"])


def read(question: Question, now: datetime) -> Demand:
    """Return the demand that *question* plans for. Raise ValueError where no request of its classes is known."""
    chosen = classes_of(question)
    kinds = {name: str(row.kind) for name, row in chosen.items()}
    arrivals, remarks = forecast_arrivals(now, MOST_S)
    busiest = {} if question.growth == "forecast" else _busiest(now)
    factor, until = question.factor(question.over_months), demand.last_complete(now, demand.MINUTE_S)
    recent = demand.read(until - demand.BURSTS_OVER, until, demand.MINUTE_S)
    models: dict[str, OfModel] = defaultdict(OfModel)
    streams = []
    for stream in arrivals["streams"]:
        rows = [row[:RUN] + NO_RUN + row[RUN + len(NO_RUN) :] for row in stream["rows"] if row[CLASS] in chosen]
        if not rows:
            continue
        lengths = np.array([[row[PROMPT], row[OUTPUT]] for row in rows], np.float64)
        of_all = sum(row[PROMPT] + row[OUTPUT] for row in stream["rows"])  # whose are rates and busiest times
        part, mean = float(lengths.sum() / max(1.0, of_all)), of_all / len(stream["rows"])
        place, tokens = (stream["model"], stream["region"]), float(lengths.sum(axis=1).mean())
        rates = stream["requests_per_s"]
        level = max(rates["upper"]) * mean
        if question.growth != "forecast" and any(kinds[row[CLASS]] == SloKind.INTERACTIVE for row in rows):
            level = busiest.get(place) or max(rates["mean"]) * mean
        level *= part
        own = models[place[0]]
        own.tokens_per_s[place[1]] += level
        own.prompt += lengths[:, 0].astype(int).tolist()
        own.output += np.maximum(lengths[:, 1], 1).astype(int).tolist()
        own.interactive += [kinds[row[CLASS]] == SloKind.INTERACTIVE for row in rows]
        own.classes |= {row[CLASS] for row in rows}
        if place in recent.requests:
            own.cv = max(own.cv, recent.arrival_cv(place))
        per_s = factor * level / max(tokens, 1.0)
        streams.append(stream | {"rows": rows, "calls": 1.0, "requests_per_s": per_s})
    if not streams:
        raise ValueError("No request of these classes came in the last hour, and lengths are taken from them.")
    total = sum(stream["requests_per_s"] for stream in streams)
    horizon_s = WARM_UP_S + float(np.clip(REQUESTS / total, LEAST_S, MOST_S))
    for stream in streams:
        rate = [stream["requests_per_s"]]
        flat = {"start_s": 0.0, "window_s": horizon_s} | dict.fromkeys(("mean", "lower", "upper"), rate)
        stream["requests_per_s"] = flat
    grown = {"kind": "forecast", "horizon_s": horizon_s, "streams": streams}
    return Demand(grown, dict(models), factor, remarks if question.growth == "forecast" else [])


def _busiest(now: datetime) -> dict[demand.Endpoint, float]:
    """Return tokens per second of each endpoint in its model's busiest ten minutes of the last week: interactive classes."""
    known = demand.read(now - WEEK, demand.last_complete(now, WINDOW_S), WINDOW_S)
    of_model: dict[str, dict[str, NDArray[np.float64]]] = defaultdict(dict)
    for model, region in known.requests:
        both = [np.nan_to_num(known.of((model, region), quantity)) for quantity in Quantity]
        of_model[model][region] = both[0] + both[1]
    levels: dict[demand.Endpoint, float] = {}
    for model, regions in of_model.items():
        total = np.sum(list(regions.values()), axis=0)
        if total.size and total.any():
            levels |= {(model, region): float(each[total.argmax()]) for region, each in regions.items()}
    return levels
