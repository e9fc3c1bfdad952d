"""Requests of the ledger sent again to the fleet as it is, simulated under one strategy."""

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from django.db.models import Case, F, QuerySet, When
from numpy.typing import NDArray

from controlplane.fleet.models import Deployment, SloClass, SloKind
from controlplane.gateway.models import LedgerRow
from controlplane.gateway.selectors import OWN_REGION
from controlplane.planning.comparison.advisor import Advisor
from controlplane.planning.comparison.cluster import cluster_of
from controlplane.planning.execution import strategies
from controlplane.planning.forecasts import demand
from controlplane.planning.plans import inventory
from controlplane.tuning.selectors import tuned

if TYPE_CHECKING:
    from scheduling.simulation.cluster.description import Cluster
    from scheduling.simulation.measures.results import Promise
    from scheduling.simulation.strategies import StrategyRun
    from scheduling.simulation.workload.requests import Requests

logger = logging.getLogger(__name__)
SETTLE_S = 600.0
"""After the last request came: hours are counted so long at the most, or one that waits would add hours of everything."""


@dataclass(slots=True)
class Replay:
    """Requests of the ledger and the fleet that they are sent to."""

    fleet: inventory.Fleet
    deployments: list[Deployment]
    from_at: datetime
    to_at: datetime
    arrived_s: list[float]
    cluster: "Cluster"
    requests: "Requests"
    promises: list["Promise"]
    interactive: list[bool]
    """By number of the class: whether latencies of its requests are reported."""
    usd_per_hour: NDArray[np.float64]
    """By instance of the cluster."""
    cut: bool = False
    """Whether there were more requests than are simulated."""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, rows: QuerySet[LedgerRow], fleet: inventory.Fleet, now: datetime) -> "Replay | None":
        """The newest requests that the fleet as it is could serve; None if there are none.

        Each comes from the region of its caller. One that was not served is as long as it was predicted to be.
        """
        from scheduling.queueing.ordering import hold_s
        from scheduling.simulation.workload.requests import make_requests

        deployments = simulated(fleet)
        endpoints = {(row.model.name, row.region.name) for row in deployments}
        columns = (
            "arrived_at",
            "model",
            "own",
            "slo_class",
            "prompt",
            "output",
            "predicted_output_tokens",
        )
        asked = rows.annotate(
            own=OWN_REGION,
            prompt=_if_unserved("predicted_prompt_tokens", "prompt_tokens"),
            output=_if_unserved("predicted_output_tokens", "output_tokens"),
        )
        newest = asked.order_by("-arrived_at").values_list(*columns)[: tuned().COMPARE_REQUESTS]
        replayed = [row for row in reversed(newest) if (row[1], row[2]) in endpoints]
        if not replayed:
            return None
        cluster, usd = cluster_of(fleet, rows)
        from_at = replayed[0][0]
        classes = list(SloClass.objects.order_by("priority", "name"))
        numbers = {row.name: number for number, row in enumerate(classes)}
        promises = [_promise(row) for row in classes]
        _, models, regions, names, prompt, output, predicted = zip(*replayed, strict=True)
        model = np.array([cluster.models.index(name) for name in models])
        longest = np.array(cluster.longest_tokens())[model]
        output_tokens = np.minimum(output, longest - 1)
        prompt_tokens = np.minimum(prompt, longest - output_tokens)
        slo_class = np.array([numbers.get(name, 0) for name in names])
        arrived_s = [(row[0] - from_at).total_seconds() for row in replayed]
        requests = make_requests(
            arrived_s,
            prompt_tokens,
            output_tokens,
            model=model,
            region=np.array([cluster.regions.index(name) for name in regions]),
            predicted_tokens=np.clip(predicted, 1, longest - prompt_tokens),
            slo_class=slo_class,
            priority=np.array([row.priority for row in classes])[slo_class],
            deadline_s=np.array([each.ttft_s for each in promises])[slo_class],
            end_s=np.array([each.end_s for each in promises])[slo_class],
            hold_s=np.array([hold_s(each.deadline_s, tuned().MAX_HOLD_S) for each in promises])[slo_class],
        )
        notes = []
        cut = len(newest) == tuned().COMPARE_REQUESTS
        if cut:
            minutes = (now - replayed[0][0]).total_seconds() / 60
            notes.append(f"the newest {tuned().COMPARE_REQUESTS:,} requests, of {minutes:.1f} min")
        return cls(
            fleet=fleet,
            deployments=deployments,
            from_at=from_at,
            to_at=now,
            arrived_s=arrived_s,
            cluster=cluster,
            requests=requests,
            promises=promises,
            interactive=[row.kind == SloKind.INTERACTIVE for row in classes],
            usd_per_hour=usd,
            cut=cut,
            notes=notes,
        )

    def line(self, name: str) -> dict[str, Any]:
        """What came of the strategy *name* with the marks of each model's settings."""
        from controlplane.tuning.rules import beneath
        from scheduling.scaling import Assigned
        from scheduling.simulation.strategies import Bounds, run_strategy

        of_model = {model: strategies.make(name, {}, tuned(model)) for model, _ in self.cluster.endpoints}
        strategy = Assigned({endpoint: of_model[endpoint[0]] for endpoint in self.cluster.endpoints})
        least, most = Counter[demand.Endpoint](), Counter[demand.Endpoint]()
        for row in self.deployments:
            least[row.model.name, row.region.name] += row.min_instances
            most[row.model.name, row.region.name] += row.max_instances
        bounds = {endpoint: Bounds(least[endpoint], most[endpoint]) for endpoint in self.cluster.endpoints}
        advisor = Advisor(self.fleet, self.from_at, self.to_at, name) if strategy.uses_advice else None
        began = time.perf_counter()
        until_s = self.arrived_s[-1] + SETTLE_S
        floors = {endpoint: beneath(tuned(endpoint[0])) for endpoint in self.cluster.endpoints}
        run = run_strategy(
            self.cluster,
            self.requests,
            strategy,
            bounds=bounds,
            floor=floors if tuned().FLOOR else None,
            advisor=advisor,
            until_s=until_s,
            interactive=self.interactive,
        )
        logger.info("planning: %s over %d requests in %.2f s", name, len(self.arrived_s), time.perf_counter() - began)
        return {"strategy": name, **self._measured(run)}

    def _measured(self, run: "StrategyRun") -> dict[str, Any]:
        from scheduling.simulation.cluster.world import UNPAID
        from scheduling.simulation.measures.results import PROVISIONING, kept, latency_s

        result = run.result
        hours = result.state_s / 3600
        paid = hours.sum(axis=1) - hours[:, UNPAID].sum(axis=1)
        judged, met = kept(result, self.promises)
        shown = np.array(self.interactive)[result.requests.slo_class]
        shown = shown if shown.any() else np.ones_like(shown)

        def p95_ms(which: str) -> float | None:
            values = latency_s(result, which)[shown]
            return round(float(np.nanpercentile(values, 95)) * 1000, 1) if np.isfinite(values).any() else None

        return {
            "instance_hours": round(float(paid.sum()), 3),
            "usd": round(float((paid * self.usd_per_hour).sum()), 3),
            "p95_ttft_ms": p95_ms("ttft"),
            "p95_e2e_ms": p95_ms("e2e"),
            "slo_met": round(float(met.sum() / judged.sum()), 4) if judged.any() else None,
            "waste_hours": round(float(hours[:, list(PROVISIONING)].sum()), 3),
            "moves": int(result.counters["scale_outs"] + result.counters["scale_ins"]),
        }


def simulated(fleet: inventory.Fleet) -> list[Deployment]:
    """The deployments of *fleet* that may have instances, and whose performance profile says how long these take."""
    return [row for row in fleet.deployments.values() if row.max_instances and row.profile() is not None]


def left_out(fleet: inventory.Fleet) -> str:
    """Which endpoints are not simulated for want of a performance profile, in words; empty for none."""
    known = {(row.model.name, row.region.name) for row in simulated(fleet)}
    asked = {(row.model.name, row.region.name) for row in fleet.deployments.values() if row.max_instances}
    names = ", ".join(f"{model} in {region}" for model, region in sorted(asked - known))
    return f"{names} left out, without a performance profile" if names else ""


def _if_unserved(predicted: str, served: str) -> Case:
    return Case(When(unserved=True, then=F(predicted)), default=F(served))


def _promise(row: SloClass) -> "Promise":
    from scheduling.simulation.measures.results import Promise

    def seconds(value: int | None) -> float:
        return np.inf if value is None else value / 1000

    deadline_s = np.inf if row.deadline_s is None else float(row.deadline_s)
    return Promise(seconds(row.ttft_target_ms), seconds(row.itl_target_ms), seconds(row.e2e_target_ms), deadline_s)
