"""The ledger's last hours under each strategy: cost and SLO attainment with the present fleet.

A strategy varies the live fleet's scenario. Requests are the ledger's, unserved ones included, and plans use the
forecasts of that time.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from django.db.models import Q, QuerySet
from numpy.typing import NDArray

from controlplane.fleet.models import Deployment, Model
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.planning.comparison.scenario import scenario_of
from controlplane.planning.execution import strategies
from controlplane.planning.forecasts import demand
from controlplane.planning.json_values import plain
from controlplane.planning.models import Forecast, Quantity, StrategyComparison
from controlplane.planning.plans import capability, inventory
from controlplane.planning.plans.expected import RECENT, expected_at, fresh_for, levels
from controlplane.planning.plans.round import plan_settings
from controlplane.simulation.selectors import own_rows, workload_of
from controlplane.tuning.selectors import tuned
from scheduling.model_task import POOLING_TASKS

if TYPE_CHECKING:
    from scheduling.planning.advisor import Demand, SimulatedPlanner
    from scheduling.simulation.scenario import Scenario
    from scheduling.simulation.staging import Stage
    from scheduling.simulation.workload.columns import Workload

logger = logging.getLogger(__name__)
LEAST_REQUESTS = 200
LEAST = timedelta(minutes=5)
TOO_LITTLE = "Too little to compare"
AGAIN_S = 120.0
"""Retry period in seconds after too little data."""
SETTLE_S = 600.0
"""Maximum simulated time after the last arrival, in seconds: a waiting request would add hours of every instance."""
RECENT_MINUTES = int(RECENT.total_seconds()) // demand.MINUTE_S


def compare_strategies(
    hours: float, now: datetime, requested_work_waits: Callable[[], bool] = lambda: False
) -> StrategyComparison | None:
    """Simulate the last *hours* under every strategy and store the result; None once *requested_work_waits*.

    With too few requests, the row has a note and no lines. Requests and time are bounded by settings.
    """
    since = now - timedelta(hours=hours)
    pooled = Q(model__in=list(Model.objects.filter(task__in=POOLING_TASKS).values_list("name", flat=True)))
    served = Q(outcome=Outcome.DONE, repeated=False, prompt_tokens__gt=0) & (pooled | Q(output_tokens__gt=0))
    unserved = Q(unserved=True, predicted_prompt_tokens__gt=0) & (pooled | Q(predicted_output_tokens__gt=0))
    rows = LedgerRow.objects.filter(served | unserved, arrived_at__gte=since, arrived_at__lt=now)
    fleet = inventory.read(set(Deployment.objects.filter(active=True).values_list("model__name", flat=True)))
    replay = Replay.read(rows, fleet, now)
    missing = _missing(replay)
    if replay is None or missing:
        # Keep only the newest such row.
        StrategyComparison.objects.filter(note__startswith=TOO_LITTLE).delete()
        count = len(replay.workload) if replay else 0
        note = f"{TOO_LITTLE}: {'; '.join(filter(None, (missing, left_out(fleet))))}."
        return StrategyComparison.objects.create(from_at=since, to_at=now, requests=count, note=note[:255])
    began = time.monotonic()
    lines: list[dict[str, Any]] = []
    notes = list(filter(None, (left_out(fleet), replay.note)))
    names = strategies.names()
    for done, name in enumerate(names):
        if requested_work_waits():
            return None
        if time.monotonic() - began > tuned().COMPARE_LIMIT_S:
            notes.append(f"the time was over after {done} of {len(names)} strategies")
            break
        try:
            lines.append(replay.line(name))
        except Exception as error:
            logger.exception("planning: %s could not be simulated", name)
            notes.append(f"{name}: {type(error).__name__}: {error}")
    return StrategyComparison.objects.create(
        from_at=replay.from_at,
        to_at=replay.to_at,
        requests=len(replay.workload),
        rows=plain(lines),
        note="; ".join(notes)[:255],
    )


def _missing(replay: "Replay | None") -> str:
    """Describe the requests or time missing for a comparison; empty if there is enough.

    A busy fleet's newest requests, cut at `COMPARE_REQUESTS`, are compared whatever time they cover.
    """
    count = len(replay.workload) if replay else 0
    if replay is None or count < LEAST_REQUESTS:
        return f"{count} requests of the {LEAST_REQUESTS} that are needed"
    covered = replay.to_at - replay.from_at
    if covered < LEAST and not replay.note:
        return f"requests of {covered.seconds} s; {LEAST.seconds // 60} minutes are needed"
    return ""


def due(now: datetime) -> bool:
    """Return whether the next comparison is due."""
    if tuned().COMPARE_EVERY_S <= 0:
        return False
    newest = StrategyComparison.objects.order_by("-pk").first()
    if newest is None:
        return True
    too_little = newest.note.startswith(TOO_LITTLE)
    every_s: float = min(AGAIN_S, tuned().COMPARE_EVERY_S) if too_little else tuned().COMPARE_EVERY_S
    return (now - newest.made_at).total_seconds() >= every_s


@dataclass(frozen=True, slots=True)
class Replay:
    """Ledger requests and the scenario of the fleet that serves them."""

    fleet: inventory.Fleet
    scenario: dict[str, Any]
    workload: "Workload"
    from_at: datetime
    to_at: datetime
    note: str
    """Note that requests were cut; empty if all are simulated."""

    @classmethod
    def read(cls, rows: QuerySet[LedgerRow], fleet: inventory.Fleet, now: datetime) -> "Replay | None":
        """Return the newest requests that the present fleet could serve; None if there are none."""
        endpoints = {(row.model.name, row.region.name) for row in _simulated(fleet)}
        newest = own_rows(rows).order_by("-arrived_at")[: tuned().COMPARE_REQUESTS]
        replayed = [row for row in reversed(newest) if (row[1], row[2]) in endpoints]
        if not replayed:
            return None
        from_at, note = replayed[0][0], ""
        if len(newest) == tuned().COMPARE_REQUESTS:
            note = f"the newest {len(newest):,} requests, of {(now - from_at).total_seconds() / 60:.1f} min"
        return cls(fleet, scenario_of(fleet, rows), workload_of(replayed, from_at), from_at, now, note)

    def varied(self, strategy: str) -> "tuple[Scenario, Stage]":
        """Return the scenario with every model scaled by *strategy*, with the marks of the model's settings, and staged."""
        from scheduling.simulation.scenario import Scenario
        from scheduling.simulation.staging import stage

        endpoints = [{**each, "strategy": None, "parameters": {}} for each in self.scenario["endpoints"]]
        for model in dict.fromkeys(each["model"] for each in endpoints):
            parameters = strategies.marks(strategy, tuned(model))
            endpoints.append({"model": model, "strategy": strategy, "parameters": parameters})
        until_h = (float(self.workload.arrival_s[-1]) + SETTLE_S) / 3600
        varied = {"endpoints": endpoints, "until_h": until_h, "sample_s": 0.0, "demand": {"too_long": "clip"}}
        scenario = Scenario.model_validate(self.scenario | varied)
        return scenario, stage(scenario, seed=0, workload=self.workload)

    def line(self, strategy: str) -> dict[str, Any]:
        """Simulate *strategy*, with plans by the forecasts of that time; return its cost and SLO attainment."""
        from controlplane.simulation.running import simulate
        from scheduling.simulation.cluster.world import UNPAID
        from scheduling.simulation.measures.results import PROVISIONING, kept, latency_s

        scenario, staged = self.varied(strategy)
        advisor = recorded_planner(self.fleet, self.from_at, self.to_at, strategy)
        ran = simulate(scenario, replace(staged, advisor=advisor))
        result = ran.result
        logger.info("planning: %s over %d requests in %.2f s", strategy, len(self.workload), ran.about["took_s"])
        hours = result.state_s / 3600
        paid = hours.sum(axis=1) - hours[:, UNPAID].sum(axis=1)
        judged, met = kept(result, staged.promises)
        shown = np.array(staged.interactive)[result.requests.slo_class]
        shown = shown if shown.any() else np.ones_like(shown)

        def p95_ms(which: str) -> float | None:
            values = latency_s(result, which)[shown]
            return round(float(np.nanpercentile(values, 95)) * 1000, 1) if np.isfinite(values).any() else None

        return {
            "strategy": strategy,
            "instance_hours": round(float(paid.sum()), 3),
            "usd": round(float(paid @ [spec.usd_per_hour for spec in staged.cluster.instances]), 3),
            "p95_ttft_ms": p95_ms("ttft"),
            "p95_e2e_ms": p95_ms("e2e"),
            "slo_met": round(float(met.sum() / judged.sum()), 4) if judged.any() else None,
            "waste_hours": round(float(hours[:, list(PROVISIONING)].sum()), 3),
            "moves": int(result.counters["scale_outs"] + result.counters["scale_ins"]),
        }


def recorded_planner(
    fleet: inventory.Fleet, from_at: datetime, to_at: datetime, strategy: str = ""
) -> "SimulatedPlanner":
    """Return the planner of a simulation from *from_at* to *to_at*: live plans, from the forecasts of that time.

    *strategy* follows the plans.
    """
    from scheduling.planning.advisor import SimulatedPlanner

    endpoints = dict.fromkeys(((model, region) for model, region, _ in fleet.deployments), strategy)
    counted = demand.read(from_at - RECENT - timedelta(minutes=1), to_at, demand.MINUTE_S)
    known: dict[tuple[str, str, str], tuple[list[float], list[Forecast]]] = {}
    rows = Forecast.objects.filter(slo_class="", made_at__gte=from_at - fresh_for(), made_at__lt=to_at)
    for row in rows.order_by("made_at"):
        times, forecasts = known.setdefault((row.model, row.region, row.quantity), ([], []))
        times.append(row.made_at.timestamp())
        forecasts.append(row)

    def demand_at(now_s: float) -> "Demand":
        at = from_at + timedelta(seconds=now_s)
        until = int((at - counted.start).total_seconds() // demand.MINUTE_S)

        def forecast_of(endpoint: demand.Endpoint, quantity: Quantity) -> Forecast | None:
            times, forecasts = known.get((*endpoint, quantity), ([], []))
            newest = bisect_right(times, at.timestamp()) - 1
            return forecasts[newest] if newest >= 0 and at - forecasts[newest].made_at <= fresh_for() else None

        def recent_of(endpoint: demand.Endpoint, quantity: Quantity) -> NDArray[np.float64]:
            return counted.of(endpoint, quantity)[max(0, until - RECENT_MINUTES) : until]

        return expected_at(at, endpoints, forecast_of, recent_of).to_plan(from_at.timestamp())

    planned = fleet.to_plan()
    return SimulatedPlanner(
        demand_at=demand_at,
        fleet_at=lambda _, views: planned.with_instances(views),
        capability=capability.read(fleet, to_at),
        follows={model: levels(model, strategy)[1] for model, _ in endpoints},
        settings=plan_settings(),
        due_shares={model: tuned(model).PLAN_NIW_BUFFER for model, _ in endpoints},
    )


def _simulated(fleet: inventory.Fleet) -> list[Deployment]:
    """Return deployments that may have instances and have a performance profile."""
    return [row for row in fleet.deployments.values() if row.max_instances and row.profile() is not None]


def left_out(fleet: inventory.Fleet) -> str:
    """Describe endpoints that are not simulated for lack of a performance profile; empty if none."""
    known = {(row.model.name, row.region.name) for row in _simulated(fleet)}
    asked = {(row.model.name, row.region.name) for row in fleet.deployments.values() if row.max_instances}
    names = ", ".join(f"{model} in {region}" for model, region in sorted(asked - known))
    return f"{names} left out, without a performance profile" if names else ""
