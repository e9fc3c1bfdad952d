"""Planner's view of the fleet: deployments, instances and GPUs, read from rows."""

import time
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from controlplane.fleet import places
from controlplane.fleet.lifecycle import start_times
from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from controlplane.fleet.models import Deployment, Instance, Maintenance, Node, Region
from controlplane.fleet.selectors import schedules
from controlplane.fleet.weights import remote
from scheduling.scaling.schedule import EARLY_S

if TYPE_CHECKING:
    from scheduling.planning.places import Fleet as PlannedFleet

Place = tuple[str, str, str]
"""(model, region, GPU type) names."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Active deployments and their instance counts, by place."""

    deployments: dict[Place, Deployment]
    present: Counter[Place]
    spare: Counter[Place]
    """Donated instances, and sleeping ones, which wake in seconds."""
    units: dict[tuple[str, str], int]
    """GPUs by (region, GPU type) available to planned instances; empty where no hardware is recorded."""
    starts: start_times.StartTimes
    pulls_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """Seconds of a pull by (model, region), where the weights are missing."""
    models: tuple[str, ...] = field(default=())
    regions: tuple[str, ...] = field(default=())

    def to_plan(self) -> "PlannedFleet":
        """Return the fleet as the planner's Django-free type."""
        from scheduling.planning.places import Deployed
        from scheduling.planning.places import Fleet as PlannedFleet

        starts = {place: self.starts.of(place[0], place[2]) for place in self.deployments}
        deployments = {
            place: Deployed(
                instances=self.present[place],
                spot=self.spare[place],
                min_instances=row.min_instances,
                max_instances=row.max_instances,
                gpus=row.tensor_parallel,
                usd_per_hour=float(row.gpu_type.on_demand_usd_per_hour),
                start_s=starts[place].seconds,
                starts=starts[place].measured,
                machine_s=0.0,  # included in the measured start
                pull_s=self.pulls_s.get(place[:2], 0.0),
            )
            for place, row in self.deployments.items()
        }
        return PlannedFleet(deployments, self.units)


def read(models: Set[str] | None = None, at: datetime | None = None) -> Fleet:
    """Read the fleet of *models* (names; None: all), without GPUs held by other models.

    As of *at* (None: now) are the scheduled minimums, and places in maintenance, which then hold nothing.
    """
    windows = list(Maintenance.objects.open().filter(from_at__lte=at).select_related("node", "region")) if at else []
    shut = {one.place for one in windows if at and one.until > at}
    lifted = {one.place for one in windows if one.cordon} - shut
    rows = Deployment.objects.filter(active=True, model__active=True, region__active=True)
    if models is not None:
        rows = rows.filter(model__name__in=models)
    deployments = {
        (row.model.name, row.region.name, row.gpu_type.name): row
        for row in rows.select_related("model", "region", "gpu_type").order_by("model__name", "region__name", "pk")
    }
    bounds = places.bounds(deployments.values())
    for row in deployments.values():  # adjusted for planning only, never saved
        if row.region.dark_since or row.region in shut:
            row.min_instances, row.max_instances = 0, 0
        elif not any(row.region in (place, getattr(place, "region", None)) for place in lifted):
            row.min_instances, row.max_instances = bounds[row.pk]
    starts, at_s = start_times.read(), at.timestamp() if at else time.time()
    for endpoint, schedule in schedules().items():
        own = [(row, place) for place, row in deployments.items() if place[:2] == endpoint]
        ahead_s = max((starts.of(place[0], place[2]).p95_s for _, place in own), default=0.0)
        more = schedule.minimum(at_s, ahead_s + EARLY_S) - sum(row.min_instances for row, _ in own)
        for row, _ in own:
            added = max(0, min(more, row.max_instances - row.min_instances))
            row.min_instances, more = row.min_instances + added, more - added
    present: Counter[Place] = Counter()
    spare: Counter[Place] = Counter()
    taken: Counter[tuple[str, str]] = Counter()  # by unplanned instances
    planned: Counter[tuple[str, str]] = Counter()
    there = Instance.objects.exclude(state=InstanceState.STOPPED).filter(deployment__region__dark_since=None)
    there = there.exclude(deployment__region__in=[place for place in shut if isinstance(place, Region)])
    there = there.exclude(node__in=[place for place in shut if isinstance(place, Node)])
    instances = there.values_list(  # what is in a dark region serves nothing: its load is planned elsewhere
        "deployment__model__name",
        "deployment__region__name",
        "deployment__gpu_type__name",
        "deployment__tensor_parallel",
        "state",
        "node",
        "swap_group",
    )
    for model, region, gpu_type, gpus, state, node, swap_group in instances:
        place = model, region, gpu_type
        if swap_group is not None and state == InstanceState.SLEEPING:
            continue  # its GPUs are counted with the awake member
        if place in deployments and state in PRESENT:
            present[place] += 1
            planned[region, gpu_type] += gpus
        elif place in deployments and state in (InstanceState.SLEEPING, InstanceState.DONATED):
            spare[place] += 1
            planned[region, gpu_type] += gpus
        elif node is not None and (place not in deployments or state == InstanceState.FAILED):
            taken[region, gpu_type] += gpus  # draining instances free their GPUs soon
    units: Counter[tuple[str, str]] = Counter()
    for machine in Node.objects.filter(active=True).select_related("region", "gpu_type").prefetch_related("gpus"):
        for host in (machine, machine.region):
            host.cordoned = "" if host in lifted else host.cordoned
        usable = places.plannable_gpus(machine) if not shut & {machine, machine.region} else 0
        units[machine.region.name, machine.gpu_type.name] += usable
    free = {place: max(count - taken[place], planned[place]) for place, count in units.items()}
    return Fleet(
        deployments,
        present,
        spare,
        free,
        starts,
        remote(),
        tuple(sorted({model for model, _, _ in deployments})),
        tuple(sorted({region for _, region, _ in deployments})),
    )
