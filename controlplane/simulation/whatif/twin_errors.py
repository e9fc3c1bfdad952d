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
from django.db import transaction
from numpy.typing import NDArray

from controlplane.events.services import record
from controlplane.fleet.models import Deployment, Instance
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.planning.plans import inventory
from controlplane.planning.scenario import scenario_of
from controlplane.simulation.selectors import (
    WORKLOAD_COLUMNS,
    as_asked,
    fallbacks_of_targets,
    ledger_measurements,
    ledger_rows,
    workload_of,
)
from controlplane.simulation.services import store_profiles
from controlplane.simulation.whatif.models import TwinError
from controlplane.tuning.selectors import tuned
from scheduling.fleet.profile_fitting import Fit
from scheduling.fleet.published_profiles import fit_all
from scheduling.simulation.measures.results import kept, latency_s
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging import stage
from scheduling.simulation.staging.fleet import gpus_as_type

WARM_UP: Final = timedelta(minutes=5)
"""Longest simulated time before the window, from an idle fleet."""
FEWEST: Final = 30
"""Minimum requests of a judged profile; fewer give no 95th percentile."""
WINDOWS: Final = 12
"""Number of newest windows in a profile's band."""
MEASURES: Final = ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95")
"""Milliseconds, of finished requests with a timed first token; `slo_met` is a share."""
SETTLE_S: Final = 600.0
"""Longest simulated time after the last request, in seconds."""
SCALED_BY: Final = frozenset(
    {
        "strategy",
        "parameters",
        "min_instances",
        "max_instances",
        "floor_above",
        "floor_cooldown_s",
        "forecaster",
        "demand_level",
    }
)
"""Scaling keys of a scenario's endpoints."""
ACTOR: Final = "twin"
NEWEST: Final = 60_000
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


def band_of(rows: list[TwinError]) -> TwinBand | None:
    """Return the band of *rows*, newest first; None without rows."""
    if not rows:
        return None
    errors = [row.errors for row in rows]
    within = {
        name: float(np.quantile([abs(each[name]) for each in errors if name in each], 0.9))
        for name in (*MEASURES, "slo_met")
        if any(name in each for each in errors)
    }
    return TwinBand(len(rows), sum(row.requests for row in rows), errors[0], within, rows[0].to_at)


def twin_error(model: str, gpu: str) -> TwinBand | None:
    """Return the band of *model* on *gpu* (`instance_gpu`); None before the first window."""
    return band_of(list(TwinError.objects.filter(model=model, gpu=gpu).order_by("-pk")[:WINDOWS]))


def twin_errors() -> dict[tuple[str, str], TwinBand]:
    """Return the bands of recently judged profiles, by (model, GPUs)."""
    known = TwinError.objects.order_by("model", "gpu").values_list("model", "gpu").distinct()
    return {key: band for key in known if (band := twin_error(*key)) is not None}


def fleet_error() -> dict[str, float]:
    """Return one band over all profiles, weighted by requests, for what-ifs; empty before the first window."""
    bands = list(twin_errors().values())
    names = [name for name in (*MEASURES, "slo_met") if any(name in band.within for band in bands)]
    return {
        name: float(
            np.average(
                [band.within[name] for band in bands if name in band.within],
                weights=[band.requests for band in bands if name in band.within],
            )
        )
        for name in names
    }


def due(now: datetime) -> bool:
    """Return whether the next window is due."""
    newest = TwinError.objects.order_by("-pk").values_list("made_at", flat=True).first()
    every_s = tuned().TWIN_ERROR_EVERY_S
    return every_s > 0 and (newest is None or (now - newest).total_seconds() >= every_s)


def judge(now: datetime) -> list[TwinError]:
    """Simulate the newest window again and store a row for each profile with enough requests.

    Profiles are refitted if `REFIT_PROFILES` is set, else a better fit is an event for operators.
    """
    until = now - timedelta(seconds=30)  # later requests may still run
    since = until - timedelta(seconds=tuned().TWIN_ERROR_EVERY_S)
    made = _judged(since, until)
    if made:
        refit(since, until, made)
    return made


def _judged(since: datetime, until: datetime) -> list[TwinError]:
    fleet = inventory.read(set(Deployment.objects.filter(active=True).values_list("model__name", flat=True)))
    asked = ledger_rows(since - WARM_UP, until)
    values = scenario_of(fleet, asked)
    newest = asked.order_by("-arrived_at", "-pk")[:NEWEST].select_related("tenant").defer("error_message")
    rows = _of_the_fleet(values, reversed(newest))
    if len(rows) < FEWEST:
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
        if own.sum() >= FEWEST:
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
    _, met = kept(result, staged.promises)
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


def refit(since: datetime, until: datetime, judged: list[TwinError]) -> list[str]:
    """Fit the profiles of *judged* to the ledger's window; return names of those with a better fit than at present.

    Better means held-out errors below the present twin errors. The fit is stored if `REFIT_PROFILES` is set; else it is
    an event that an operator may follow by `simulate --fit ledger --write`.
    """
    fits, _ = fit_all(ledger_measurements(ledger_rows(since, until)), seed=0)
    errors = {(row.model, row.gpu): row.errors for row in judged}
    better = []
    for fit in fits:
        key = fit.setting.model, gpus_as_type(fit.setting.gpu_type, fit.setting.tensor_parallel)
        now = errors.get(key)
        if now is not None and "itl_p50" in now and _is_better(fit, now):
            better.append(fit)
    if better and tuned().REFIT_PROFILES:
        store_profiles(better, "own ledger", ACTOR)
        return [str(fit.setting) for fit in better]
    with transaction.atomic():  # after the fits: they take seconds, which blocks SQLite's other writers
        for fit in better:
            record(
                "profile.refit_proposed",
                None,
                actor=ACTOR,
                reason=f"{fit.setting}: the simulator is off, and the ledger fits better",
                inputs={
                    "twin_error": errors[
                        fit.setting.model, gpus_as_type(fit.setting.gpu_type, fit.setting.tensor_parallel)
                    ]
                },
                after={name: getattr(fit.profile, name) for name in fit.profile.__dataclass_fields__},
            )
    return [str(fit.setting) for fit in better]


WORTH: Final = 0.1
"""Twin error of the time between tokens from which a better fit is worth an event."""


def _is_better(fit: Fit, errors: dict[str, float]) -> bool:
    """Return whether the held-out error of *fit* is below the simulator's."""
    off = abs(errors.get("itl_p50", 0.0))
    held_out = fit.decode_error.held_out_pct if fit.decode_error else None
    return off > WORTH and held_out is not None and held_out / 100 < off
