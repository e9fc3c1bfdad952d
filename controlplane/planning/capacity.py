"""Demand, capacity and load of endpoints: one definition for pages and REST.

All in the planner's unit, prompt plus output tokens, of the classes that it counts: interactive and deferred. Demand is
what callers of a region asked for, capacity what its ready instances serve by the newest plan's capability, and load is
demand over capacity.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from controlplane.fleet.models import Deployment, Instance
from controlplane.planning.forecasts.demand import EVERY_CLASS, TOKENS
from controlplane.planning.forecasts.selectors import demand_now, omitted_from_sums
from controlplane.planning.models import WHAT_IF, ScalingMove, ScalingPlan
from controlplane.rows import narrowed, newest_of_each

Place = tuple[str, str]
"""(model, region) names."""


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """Current load of one model in one region, or of several: tokens per second, GPUs, on-demand dollars per hour."""

    model: str
    region: str
    ready: int
    """Instances that take requests now."""
    gpus: int
    """GPUs of instances that serve or are starting."""
    usd_per_hour: float
    demand_tokens_per_s: float | None
    """Demand over the last ten minutes; None while nothing is counted."""
    capacity_tokens_per_s: float | None
    """Capacity; None until a plan has valued an instance."""

    @property
    def load(self) -> float | None:
        """Demand as a share of capacity."""
        demand, capacity = self.demand_tokens_per_s, self.capacity_tokens_per_s
        return None if demand is None or not capacity else demand / capacity


def capabilities() -> dict[tuple[str, str], float]:
    """Return tokens per second of one instance by (model, GPU type), as in the newest plans.

    Models that were never planned are left out.
    """
    planned = ScalingPlan.objects.exclude(strategy=WHAT_IF)
    rows = newest_of_each(planned, "model").values_list("model__name", "inputs")
    return {
        (model, gpu_type): measured["used"]
        for model, inputs in rows
        for gpu_type, measured in inputs.get("capability_tokens_per_s", {}).items()
    }


def endpoint_loads(now: datetime, live: Iterable[Mapping[str, Any]] = ()) -> dict[tuple[str, str], EndpointLoad]:
    """Return the load of every endpoint with an active deployment, by (model, region).

    *live* are rows of the summary's endpoints; of one without a row, instances in the state ready count as ready.
    """
    taking = {(row["model"], row["region"]): int(row["instances_ready"]) for row in live}
    able, asked = capabilities(), demand_now(TOKENS, now, EVERY_CLASS)
    counts: dict[int, list[str]] = defaultdict(list)
    for deployment, state in Instance.objects.values_list("deployment_id", "state"):
        counts[deployment].append(state)
    groups: dict[tuple[str, str], list[Deployment]] = defaultdict(list)
    active = Deployment.objects.filter(active=True, model__active=True, region__active=True)
    for row in active.select_related("model", "region", "gpu_type").order_by("model__name", "region__name", "pk"):
        groups[row.model.name, row.region.name].append(row)
    loads = {}
    for (model, region), group in groups.items():
        ready = {row.pk: counts[row.pk].count(InstanceState.READY) for row in group}
        gpus = {row.pk: sum(state in PRESENT for state in counts[row.pk]) * row.tensor_parallel for row in group}
        valued = [row for row in group if (model, row.gpu_type.name) in able]
        loads[model, region] = EndpointLoad(
            model=model,
            region=region,
            ready=taking.get((model, region), sum(ready.values())),
            gpus=sum(gpus.values()),
            usd_per_hour=sum(gpus[row.pk] * float(row.gpu_type.on_demand_usd_per_hour) for row in group),
            demand_tokens_per_s=None if asked is None else asked.get((model, region), 0.0),
            capacity_tokens_per_s=sum(able[model, row.gpu_type.name] * ready[row.pk] for row in valued)
            if valued
            else None,
        )
    return loads


def total(loads: Iterable[EndpointLoad]) -> EndpointLoad:
    """Return *loads* as one. Demand and capacity of several models leave out those that `omitted_from_sums` names."""
    loads = list(loads)
    omitted = omitted_from_sums() if len({each.model for each in loads}) > 1 else set()
    counted = [each for each in loads if each.model not in omitted] or loads
    return EndpointLoad(
        model="",
        region="",
        ready=sum(each.ready for each in loads),
        gpus=sum(each.gpus for each in loads),
        usd_per_hour=sum(each.usd_per_hour for each in loads),
        demand_tokens_per_s=_known_sum(each.demand_tokens_per_s for each in counted),
        capacity_tokens_per_s=_known_sum(each.capacity_tokens_per_s for each in counted),
    )


def _known_sum(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return sum(known) if known else None


def capacity_over_time(
    model: str, region: str, moments: Sequence[datetime], loads: Mapping[Place, EndpointLoad]
) -> list[float | None]:
    """Return the capacity at each of *moments* (oldest first): that of *loads*, without what scaling has moved since.

    Summed over all regions, or all models that `omitted_from_sums` does not name, where one is empty. None until a plan has
    valued an instance.
    """
    omitted = set() if model else omitted_from_sums()
    here = [
        load.capacity_tokens_per_s
        for place, load in loads.items()
        if model in ("", place[0]) and region in ("", place[1]) and place[0] not in omitted
    ]
    known = [each for each in here if each is not None]
    if not known or not moments:
        return [None] * len(moments)
    able, total = capabilities(), sum(known)
    rows = narrowed(ScalingMove.objects.filter(at__gt=moments[0]), model=model, region=region)
    moves = list(rows.exclude(model__in=omitted).order_by("at").values_list("at", "model", "gpu_type", "delta"))
    values: list[float | None] = []
    for moment in reversed(moments):
        while moves and moves[-1][0] > moment:
            _, name, gpu_type, delta = moves.pop()
            total -= delta * able.get((name, gpu_type), 0.0)
        values.append(max(0.0, total))
    return values[::-1]
