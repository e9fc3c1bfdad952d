"""What planners know of the fleet: deployments, instances and GPUs, as one planning problem for all models together.

The problem knows GPU types, not deployments. A GPU type on which other models may run in one region than in another is
therefore split into *pools*: GPU type and the set of models deployed on it. In a region a GPU type is one pool.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from controlplane.fleet.models import Deployment, Instance, Node

if TYPE_CHECKING:
    from scheduling.planning.problem import Problem

Place = tuple[str, str, str]
"""(model, region, GPU type), by name."""
Pool = tuple[str, tuple[str, ...]]
"""(GPU type, models deployed on it)."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Active deployments and how many instances each has, by place."""

    deployments: dict[Place, Deployment]
    present: Counter[Place]
    spare: Counter[Place]
    """Sleeping instances, which wake in seconds: the live fleet's equivalent of spot."""
    units: dict[tuple[str, str], int]
    """GPUs by (region, GPU type) that planned instances may have; none where no hardware is kept."""
    models: tuple[str, ...] = field(default=())
    regions: tuple[str, ...] = field(default=())

    def pools(self) -> dict[tuple[str, str], Pool]:
        """The pool that each (region, GPU type) with a deployment is."""
        models: dict[tuple[str, str], set[str]] = defaultdict(set)
        for model, region, gpu_type in self.deployments:
            models[region, gpu_type].add(model)
        return {place: (place[1], tuple(sorted(names))) for place, names in models.items()}


def read(models: set[str]) -> Fleet:
    """The fleet as far as *models* (names) are planned; GPUs that others hold are not theirs to plan with."""
    rows = Deployment.objects.filter(active=True, model__active=True, region__active=True, model__name__in=models)
    deployments = {
        (row.model.name, row.region.name, row.gpu_type.name): row
        for row in rows.select_related("model", "region", "gpu_type").order_by("model__name", "region__name", "pk")
    }
    present: Counter[Place] = Counter()
    spare: Counter[Place] = Counter()
    taken: Counter[tuple[str, str]] = Counter()  # by what is not planned
    planned: Counter[tuple[str, str]] = Counter()
    instances = Instance.objects.exclude(state=InstanceState.STOPPED).values_list(
        "deployment__model__name",
        "deployment__region__name",
        "deployment__gpu_type__name",
        "deployment__tensor_parallel",
        "state",
        "node",
    )
    for model, region, gpu_type, gpus, state, node in instances:
        place = model, region, gpu_type
        if place in deployments and state in PRESENT:
            present[place] += 1
            planned[region, gpu_type] += gpus
        elif place in deployments and state == InstanceState.SLEEPING:
            spare[place] += 1
            planned[region, gpu_type] += gpus
        elif node is not None and (place not in deployments or state == InstanceState.FAILED):
            taken[region, gpu_type] += gpus  # what drains gives its GPUs back soon
    units: Counter[tuple[str, str]] = Counter()
    for region, gpu_type, count in Node.objects.filter(active=True).values_list(
        "region__name", "gpu_type__name", "gpu_count"
    ):
        units[region, gpu_type] += count
    free = {place: max(count - taken[place], planned[place]) for place, count in units.items()}
    return Fleet(
        deployments,
        present,
        spare,
        free,
        tuple(sorted({model for model, _, _ in deployments})),
        tuple(sorted({region for _, region, _ in deployments})),
    )


@dataclass(frozen=True, slots=True)
class Planned:
    """A problem, and which of its pools each (region, GPU type) is."""

    problem: "Problem"
    pool_at: dict[tuple[str, str], int]

    def index(self, place: Place) -> tuple[int, int, int]:
        """Where *place* is in the problem's arrays."""
        model, region, gpu_type = place
        return self.problem.models.index(model), self.problem.regions.index(region), self.pool_at[region, gpu_type]


def problem_of(
    fleet: Fleet,
    demand_tokens_per_s: dict[tuple[str, str], NDArray[np.float64]],
    buffer_tokens_per_s: dict[tuple[str, str], float],
    capability_tokens_per_s: dict[tuple[str, str], float],
    horizon: timedelta,
    epsilon: float,
) -> Planned:
    """The planning problem for the next *horizon*. Raises ValueError, naming the field, for numbers that cannot be.

    Demand and buffer are by (model, region), capability by (model, GPU type). A GPU type without nodes in a region has
    as many units as its deployments may take at most.
    """
    from scheduling.planning.problem import Problem, StartCosts

    pool_of = fleet.pools()
    pools = tuple(sorted(set(pool_of.values())))
    pool_at = {place: pools.index(pool) for place, pool in pool_of.items()}
    models, regions = fleet.models, fleet.regions
    shape = len(models), len(regions), len(pools)
    windows = max((len(values) for values in demand_tokens_per_s.values()), default=1)
    instances, spot = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    capability, gpus = np.zeros((shape[0], shape[2])), np.ones((shape[0], shape[2]), np.int64)
    least, most = np.zeros(shape[:2], np.int64), np.zeros(shape[:2], np.int64)
    unbounded = np.zeros(shape[1:], np.int64)
    price = np.zeros(shape[2])
    demand = np.zeros((*shape[:2], windows))
    buffer = np.zeros(shape[:2])
    hours = horizon.total_seconds() / 3600
    for place, deployment in fleet.deployments.items():
        model, region, gpu_type = place
        i, j, k = models.index(model), regions.index(region), pool_at[region, gpu_type]
        instances[i, j, k] = fleet.present[place]
        capability[i, k] = capability_tokens_per_s.get((model, gpu_type), 0.0)
        gpus[i, k] = max(gpus[i, k], deployment.tensor_parallel)
        least[i, j] += deployment.min_instances
        most[i, j] += deployment.max_instances
        spot[i, j, k] = fleet.spare[place]
        held = fleet.present[place] + fleet.spare[place]
        unbounded[j, k] += deployment.tensor_parallel * max(deployment.max_instances, held)
        price[k] = float(deployment.gpu_type.on_demand_usd_per_hour) * hours
    capacity = np.zeros(shape[1:], np.int64)
    for (region, gpu_type), k in pool_at.items():
        j = regions.index(region)
        capacity[j, k] = fleet.units.get((region, gpu_type), unbounded[j, k])
    # An operator may have started more than the bounds allow, or more than the nodes are known to have.
    capacity = np.maximum(capacity, (gpus[:, None, :] * (instances + spot)).sum(axis=0))
    for (model, region), values in demand_tokens_per_s.items():
        if model in models and region in regions:
            demand[models.index(model), regions.index(region), : len(values)] = values
            buffer[models.index(model), regions.index(region)] = buffer_tokens_per_s.get((model, region), 0.0)
    problem = Problem(
        models=models,
        regions=regions,
        gpu_types=_names(pools),
        instances=instances,
        capability_tokens_per_s=capability,
        demand_tokens_per_s=demand,
        vm_cost_usd=price,
        start_cost_usd=StartCosts.paid_while_starting(price, horizon.total_seconds(), len(models), gpus=gpus),
        min_instances=least,
        max_instances=most,
        capacity=capacity,
        spot=spot,
        gpus=gpus,
        epsilon=np.array(epsilon),
        buffer_tokens_per_s=buffer,
    )
    return Planned(problem, pool_at)


def _names(pools: tuple[Pool, ...]) -> list[str]:
    """A name for each pool: the GPU type, with the models behind it where several pools have that type."""
    types = Counter(gpu_type for gpu_type, _ in pools)
    return [gpu_type if types[gpu_type] == 1 else f"{gpu_type} ({', '.join(shared)})" for gpu_type, shared in pools]
