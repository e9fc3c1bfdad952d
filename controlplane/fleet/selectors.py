"""Reads of the inventory."""

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import product
from math import inf
from typing import Any, cast

from django.core.exceptions import ValidationError
from django.db.models import Count, Q, QuerySet

from controlplane.fleet.lifecycle.states import ACTION_STATES, Action, InstanceState
from controlplane.fleet.models import (
    Adapter,
    Deployment,
    Instance,
    InstanceCommand,
    Launcher,
    Maintenance,
    Model,
    Node,
    Region,
    ScheduledMinimum,
    WeightedTarget,
)
from controlplane.fleet.models.maintenance import MaintenanceQuerySet
from controlplane.fleet.services import open_command
from controlplane.rows import narrowed
from scheduling.routing.regions import latency_ms
from scheduling.scaling.schedule import Schedules, schedules_of


def scheduled_minimums() -> list[ScheduledMinimum]:
    """Return those in force: without rows that cannot be read, which an older release or SQL wrote."""
    rows = ScheduledMinimum.objects.filter(active=True).select_related("model", "region")
    return [row for row in rows if not row.unreadable]


def schedules() -> Schedules:
    """Return the scheduled minimums of each endpoint that has some."""
    rules = [(row.model.name, row.region.name if row.region else "", row.rule) for row in scheduled_minimums()]
    return schedules_of(rules, list(Region.objects.values_list("name", flat=True))) if rules else {}


def instances(model: str = "") -> QuerySet[Instance]:
    """Return instances with their related rows in one query, of *model* if given."""
    every = Instance.objects.select_related(
        "deployment__model", "deployment__region", "deployment__gpu_type", "node", "swap_group"
    )
    return narrowed(every, deployment__model__name=model)


def deployments() -> QuerySet[Deployment]:
    """Return deployments with `instances_total` (stopped ones not counted) and `instances_ready`, by their state."""
    return Deployment.objects.select_related("model", "region", "gpu_type").annotate(
        instances_total=Count("instances", filter=~Q(instances__state=InstanceState.STOPPED)),
        instances_ready=Count("instances", filter=Q(instances__state=InstanceState.READY)),
    )


def nodes() -> QuerySet[Node]:
    """Return nodes with `gpus_used`."""
    return Node.objects.with_gpus_used().select_related("region", "gpu_type")


def maintenance_windows(start: datetime, end: datetime) -> MaintenanceQuerySet:
    """Return maintenance between *start* and *end*: what ended, is under way, or is to come."""
    rows = Maintenance.objects.select_related("node__region", "region")
    return rows.ending_after(start).filter(from_at__lt=end)


def cordoned_for_good(region: str = "") -> list[str]:
    """Return the regions and nodes, of *region* if given, that are cordoned and stay so: no maintenance ends it."""
    ends = Maintenance.objects.under_way().exclude(cordon="")
    shut = Region.objects.exclude(cordoned="").exclude(pk__in=ends.exclude(region=None).values("region"))
    nodes = Node.objects.exclude(cordoned="").exclude(pk__in=ends.exclude(node=None).values("node")).filter(active=True)
    rows = [*narrowed(shut, name=region), *narrowed(nodes, region__name=region)]
    return sorted(str(row) for row in rows)


def gpus_of(node: Any) -> dict[str, int]:
    """Count GPUs of *node*, with its `gpus_used`, by state; where it or its region is cordoned, none is free."""
    used, cordoned = node.gpus_used, node.gpus_cordoned
    if node.cordoned or node.region.cordoned:
        return {"used": used, "free": 0, "cordoned": node.gpu_count - used}
    free = max(0, node.free_gpus() if cordoned else node.gpu_count - used)
    return {"used": used, "free": free, "cordoned": cordoned}


def without_prefix_cache() -> set[int]:
    """Return the deployments with servers that are emulated without a prefix cache; all others have one."""
    emulated = Deployment.objects.filter(instances__launcher=Launcher.EMULATED).distinct()
    return {row.pk for row in emulated if not row.emulated_with_prefix_cache}


def gpus_fitted() -> dict[tuple[str, str], int]:
    """Return GPUs of active nodes that are not cordoned by (region, GPU type)."""
    fitted: Counter[tuple[str, str]] = Counter()
    for node in Node.objects.filter(active=True).with_gpus_used().select_related("region", "gpu_type"):
        fitted[node.region.name, node.gpu_type.name] += node.gpu_count - cast(Any, node).gpus_cordoned
    return dict(fitted)


def region_latencies_ms() -> dict[tuple[str, str], float]:
    """Return known one-way latencies by (origin, target)."""
    rows = Region.objects.values_list("name", "latency_ms")
    return {(origin, target): ms for origin, by_target in rows for target, ms in by_target.items()}


def near_zones(regions: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the other zones of each, the one with the nearest region first. *regions* have their zones."""
    given, zones, nearest_ms = region_latencies_ms(), {"", *regions.values()}, dict[tuple[str, str], float]()
    for one, to in product(regions, regions):
        way = regions[one], regions[to]
        nearest_ms[way] = min(nearest_ms.get(way, inf), latency_ms(given, one, to))
    return {one: tuple(sorted(zones - {one}, key=lambda to: (nearest_ms.get((one, to), inf), to))) for one in zones}


def recent_commands(instance: Instance, limit: int = 10) -> list[InstanceCommand]:
    return list(instance.commands.order_by("-pk")[:limit])


def possible_actions(instance: Instance) -> list[Action]:
    """Return the actions allowed for *instance* now, in the order of `Action`.

    For buttons only: the state may change before one is pressed, so services check again.
    """
    actions = [action for action in Action if instance.state in ACTION_STATES[action]]
    if instance.launcher == Launcher.EXTERNAL:
        return [action for action in actions if action != Action.RESTART]
    command = open_command(instance)
    if command is None:
        return actions
    return [action for action in actions if action == Action.STOP and command.verb != Action.STOP]


def adapters_of(*tenant_ids: int | None) -> QuerySet[Adapter]:
    """Return the adapters that keys of tenants may ask for: their own, and those of all tenants."""
    return Adapter.objects.filter(Q(tenant=None) | Q(tenant_id__in=tenant_ids))


def names_to_ask_for(*tenant_ids: int | None) -> set[str]:
    """Return the names that requests of tenants may ask for: of models, adapters and weighted targets."""
    rows: tuple[QuerySet[Any], ...] = (Model.objects.all(), adapters_of(*tenant_ids), WeightedTarget.objects.all())
    return {name for row in rows for name in row.values_list("name", flat=True)}


def allowed_models(names: Iterable[str], tenant_id: int | None) -> list[str]:
    """Return *names* for a tenant's API key, without empty ones. Raises ValidationError for one it may not ask for."""
    given = [name.strip() for name in names if name.strip()]
    if unknown := sorted(set(given) - names_to_ask_for(tenant_id)):
        raise ValidationError({"allowed_models": f"There is no model {unknown[0]!r}."})
    return given
