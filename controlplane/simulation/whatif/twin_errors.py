"""Simulator errors: the last hours' requests simulated again and compared with their measurements.

By performance profile: (model, GPUs of an instance). Routing and ordering are the present ones, requests and lengths the
ledger's, from an idle fleet; the first minutes warm it up and are not judged. The mean number of serving instances is
fixed: the simulator is judged, not its scaling. Signs of the errors show the cause: times between tokens come from the
profile, times to the first token also from queues.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controlplane.fleet.models import Instance
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.planning.plans import inventory
from controlplane.planning.scenario import scenario_of
from controlplane.simulation.selectors import (
    WORKLOAD_COLUMNS,
    as_asked,
    fallbacks_of_targets,
    ledger_rows,
    workload_of,
)
from controlplane.simulation.whatif.models import TwinError
from controlplane.tuning.selectors import tuned
from scheduling.simulation.measures.results import kept, latency_s
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.scenario.fleet import gpus_as_type
from scheduling.simulation.staging import stage

WARM_UP: Final = timedelta(minutes=5)
"""Longest simulated time before the window, from an idle fleet."""
MIN_REQUESTS: Final = 30
"""Minimum requests of a judged profile; fewer give no 95th percentile."""
WINDOWS: Final = 12
"""Number of newest windows in a profile's band."""
MEASURES: Final = ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95")
"""Milliseconds, of finished requests with a timed first token; `slo_met` is a share."""
SETTLE_S: Final = 600.0
"""Longest simulated time after the last request, in seconds."""
SCALED_BY: Final = (
    "strategy", "parameters", "min_instances", "max_instances", "floor_above", "floor_cooldown_s", "forecaster",
    "demand_level",
)  # fmt: skip
"""Scaling keys of a scenario's endpoints."""
MAX_REQUESTS: Final = 60_000
"""Maximum number of simulated requests."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TwinBand:
    """Twin errors of the last windows: simulated over measured, less one; of `slo_met` points between 0 and 1."""

    windows: int
    requests: int
    last: dict[str, float]
    """Signed errors of the newest window, by measure."""
    within: dict[str, float]
    """Absolute error, by measure, not exceeded in nine of ten windows."""
    to_at: datetime


def twin_errors() -> dict[tuple[str, str], TwinBand]:
    """Return the bands of recently judged profiles, by (model, GPUs)."""
    known = TwinError.objects.order_by("model", "gpu").values_list("model", "gpu").distinct()
    return {
        (model, gpu): band_of(list(TwinError.objects.filter(model=model, gpu=gpu).order_by("-pk")[:WINDOWS]))
        for model, gpu in known
    }


def band_of(rows: list[TwinError]) -> TwinBand:
    """Return the band of *rows*, newest first."""
    errors, within = [row.errors for row in rows], {}
    for name in (*MEASURES, "slo_met"):
        if known := [abs(each[name]) for each in errors if name in each]:
            within[name] = float(np.quantile(known, 0.9))
    return TwinBand(len(rows), sum(row.requests for row in rows), errors[0], within, rows[0].to_at)


def fleet_error() -> dict[str, float]:
    """Return one band over all profiles, weighted by requests, for what-ifs; empty before the first window."""
    bands, error = list(twin_errors().values()), {}
    for name in (*MEASURES, "slo_met"):
        if known := [(band.within[name], band.requests) for band in bands if name in band.within]:
            values, weights = zip(*known, strict=True)
            error[name] = float(np.average(values, weights=weights))
    return error


def due(now: datetime) -> bool:
    """Return whether the next window is due."""
    newest = TwinError.objects.order_by("-pk").values_list("made_at", flat=True).first()
    every_s = tuned().TWIN_ERROR_EVERY_S
    return every_s > 0 and (newest is None or (now - newest).total_seconds() >= every_s)


def judge(now: datetime) -> list[TwinError]:
    """Simulate the newest window again and store a row for each profile with enough requests."""
    until = now - timedelta(seconds=30)  # later requests may still run
    since = until - timedelta(seconds=tuned().TWIN_ERROR_EVERY_S)
    asked = ledger_rows(since - WARM_UP, until)
    values = scenario_of(inventory.read(), asked, since)
    newest = asked.order_by("-arrived_at", "-pk")[:MAX_REQUESTS].select_related("tenant").defer("error_message")
    rows = _of_the_fleet(values, reversed(newest))
    if len(rows) < MIN_REQUESTS:
        return []
    gpus = {
        name: gpus_as_type(gpu, degree)
        for name, gpu, degree in Instance.objects.values_list(
            "name", "deployment__gpu_type__name", "deployment__tensor_parallel"
        )
    }
    keys = [(row.model, gpus.get(row.instance, "")) for row in rows]
    judged = [
        row.arrived_at >= since and row.outcome == Outcome.DONE and row.ttft_ms is not None and row.instance in gpus
        for row in rows
    ]
    columns = [[row.ttft_ms, row.itl_ms, row.slo_met] for row in rows]
    measured = np.array(columns, np.float64).T  # NaN for missing values
    simulated = _simulated(_as_served(values, rows), rows)
    made = []
    for model, gpu in sorted(set(keys)):
        own = np.array([is_judged and key == (model, gpu) for is_judged, key in zip(judged, keys, strict=True)])
        if own.sum() >= MIN_REQUESTS:
            made.append(
                TwinError(
                    model=model,
                    gpu=gpu,
                    from_at=since,
                    to_at=until,
                    requests=int(own.sum()),
                    measured=_measures(*measured[:, own]),
                    simulated=_measures(*simulated[:, own]),
                )
            )
    return TwinError.objects.bulk_create(made)


def _of_the_fleet(values: dict[str, Any], rows: Iterable[LedgerRow]) -> list[LedgerRow]:
    """Return those of *rows* that a simulation of *values* takes: a request that was cancelled while held has no region,
    and models and classes may be gone."""
    shared = fallbacks_of_targets()
    return [
        row
        for row in rows
        if row.caller_region in values["regions"]
        and row.slo_class in values["classes"]
        and {row.model, as_asked(row.model, row.asked_model, row.model_rule, shared)[0]} <= values["models"].keys()
    ]


def _as_served(values: dict[str, Any], rows: list[LedgerRow]) -> dict[str, Any]:
    """Return scenario *values* without scaling, with the mean number of instances that served *rows*.

    An instance counts from its first request's start to its last one's end.
    """
    spans: dict[str, tuple[float, float]] = {}
    for row in rows:
        from_s, until_s = row.arrived_at.timestamp(), row.arrived_at.timestamp() + (row.e2e_ms or 0.0) / 1000
        known = spans.get(row.instance, (from_s, until_s))
        spans[row.instance] = min(known[0], from_s), max(known[1], until_s)
    whole_s = max(until_s for _, until_s in spans.values()) - rows[0].arrived_at.timestamp()
    served: defaultdict[tuple[Any, ...], float] = defaultdict(float)
    columns = ("name", "deployment__model__name", "deployment__region__name", "deployment__gpu_type__name")
    for name, *place in Instance.objects.values_list(*columns, "deployment__tensor_parallel"):
        if name in spans and whole_s > 0:
            served[tuple(place)] += (spans[name][1] - spans[name][0]) / whole_s
    fleet = []
    for table in values["fleet"]:
        count = served[table["model"], table["regions"][0], table["gpu"], table["tensor_parallel"]]
        alone = count and table.get("sharing") is None
        fleet.append({**table, "instances": max(1, round(count)), "empty": 0} if alone else table)
    endpoints = [{name: value for name, value in each.items() if name not in SCALED_BY} for each in values["endpoints"]]
    models = {name: {**each, "bundle": None} for name, each in values["models"].items()}
    kept = {name: value for name, value in values.items() if name not in ("scaling", "planner")}
    return {**kept, "models": models, "fleet": fleet, "endpoints": endpoints}


def _simulated(values: dict[str, Any], rows: list[LedgerRow]) -> Floats:
    """Return TTFT and ITL in milliseconds and SLO met of *rows*, simulated from the first of them."""
    # Imported here for solvers and forecasters, which a web process does not need.
    from controlplane.simulation.running import simulate

    start = rows[0].arrived_at
    last_s = (rows[-1].arrived_at - start).total_seconds()
    demand = {"demand": {"too_long": "clip"}, "until_h": (last_s + SETTLE_S) / 3600}
    as_columns = {"own": "caller_region", "tenant__name": "tenant.name"}
    columns = attrgetter(*(as_columns.get(name, name) for name in WORKLOAD_COLUMNS))
    scenario = Scenario.model_validate(values | demand)
    staged = stage(scenario, seed=0, workload=workload_of(map(columns, rows), start))
    result = simulate(scenario, staged).result
    _, met = kept(result, result.cluster.promises)
    return np.array([1000 * latency_s(result, "ttft"), 1000 * latency_s(result, "itl"), met.astype(np.float64)])


def _measures(ttft_ms: Floats, itl_ms: Floats, met: Floats) -> dict[str, float]:
    made: dict[str, float] = {}
    for name, values in (("ttft", ttft_ms), ("itl", itl_ms)):
        finite = values[np.isfinite(values)]
        if finite.size:
            made |= {f"{name}_p{each}": round(float(np.percentile(finite, each)), 3) for each in (50, 95)}
    if np.isfinite(met).any():
        made["slo_met"] = round(float(np.nanmean(met)), 5)
    return made
