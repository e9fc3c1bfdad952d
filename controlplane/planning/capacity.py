"""Demand, capacity and load of endpoints: one definition for pages, REST and history.

All in the planner's unit, prompt plus output tokens, of the classes that it counts: interactive and deferred. Demand is
what callers of a region asked for, capacity what its ready instances serve by the newest plan's capability, and load is
demand over capacity.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from django.db.models import QuerySet

from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from controlplane.fleet.models import Deployment, Instance
from controlplane.gateway.models import CapacityStep
from controlplane.planning.forecasts.demand import EVERY_CLASS, TOKENS
from controlplane.planning.forecasts.selectors import demand_now, omitted_from_sums
from controlplane.planning.models import WHAT_IF, ScalingPlan
from controlplane.rows import narrowed, newest_of_each


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """Current load of one model in one region: tokens per second, GPUs, on-demand dollars per hour."""

    model: str
    region: str
    ready: int
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


def endpoint_loads(now: datetime) -> dict[tuple[str, str], EndpointLoad]:
    """Return the load of every endpoint with an active deployment, by (model, region)."""
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
            ready=sum(ready.values()),
            gpus=sum(gpus.values()),
            usd_per_hour=sum(gpus[row.pk] * float(row.gpu_type.on_demand_usd_per_hour) for row in group),
            demand_tokens_per_s=None if asked is None else asked.get((model, region), 0.0),
            capacity_tokens_per_s=sum(able[model, row.gpu_type.name] * ready[row.pk] for row in valued)
            if valued
            else None,
        )
    return loads


# History


def record_capacity(now: datetime) -> int:
    """Record capacity from *now* for endpoints where it changed; return their number.

    Past capacity stays as recorded: later plans with other capabilities, and removed instances, do not change it.
    """
    newest = newest_of_each(CapacityStep.objects.all(), "model", "region")
    before = {(row.model, row.region): (row.ready, row.tokens_per_s) for row in newest}
    present: dict[tuple[str, str], tuple[int, float | None]] = dict.fromkeys(before, (0, None))
    for place, load in endpoint_loads(now).items():
        present[place] = load.ready, load.capacity_tokens_per_s
    changed = {place: step for place, step in present.items() if step != before.get(place, (0, None))}
    CapacityStep.objects.bulk_create(
        CapacityStep(at=now, model=model, region=region, ready=ready, tokens_per_s=tokens_per_s)
        for (model, region), (ready, tokens_per_s) in changed.items()
    )
    return len(changed)


def capacity_over_time(model: str, region: str, moments: Sequence[datetime]) -> list[float | None]:
    """Return recorded capacity at each of *moments* (oldest first), summed over all regions, or all models that
    `omitted_from_sums` does not name, where one is empty.

    None before the first record.
    """
    if not moments:
        return []
    steps = narrowed(CapacityStep.objects.filter(at__lte=moments[-1]), model=model, region=region)
    if not model:
        steps = steps.exclude(model__in=omitted_from_sums())
    by_place: dict[tuple[str, str], list[tuple[datetime, float | None]]] = defaultdict(list)
    first = newest_of_each(steps.filter(at__lte=moments[0]), "model", "region")
    for row in first:
        by_place[row.model, row.region].append((row.at, row.tokens_per_s))
    for row in steps.filter(at__gt=moments[0]).order_by("at", "pk"):
        by_place[row.model, row.region].append((row.at, row.tokens_per_s))
    values: list[float | None] = []
    for moment in moments:
        known = [
            value
            for series in by_place.values()
            if (place := bisect_right(series, moment, key=_at)) and (value := series[place - 1][1]) is not None
        ]
        values.append(sum(known) if known else None)
    return values


def _at(step: tuple[datetime, float | None]) -> datetime:
    return step[0]


def out_of_date(oldest: datetime) -> QuerySet[CapacityStep]:
    """Return steps before *oldest*, except each endpoint's newest, which is still current."""
    newest = newest_of_each(CapacityStep.objects.all(), "model", "region").values("pk")
    return CapacityStep.objects.filter(at__lt=oldest).exclude(pk__in=newest).order_by("pk")
