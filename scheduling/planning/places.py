"""The fleet as planners see it: deployments and GPUs, as one planning problem for all models together.

The problem knows GPU types, not deployments. A GPU type on which other models may run in one region than in another is
therefore split into *pools*: GPU type and the set of models deployed on it. In a region a GPU type is one pool.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import LOCAL_WEIGHTS_S, MACHINE_S, SAME_SPOT_S, Problem, StartCosts
from scheduling.scaling.endpoint import EndpointView

Place = tuple[str, str, str]
"""(model, region, GPU type), by name."""
Endpoint = tuple[str, str]
"""(model, region), by name."""
Pool = tuple[str, tuple[str, ...]]
"""(GPU type, models deployed on it)."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Deployed:
    """One deployment: how many instances there are, and may be."""

    instances: int
    """Serving, or on their way to it."""
    spot: int
    """Lent out or asleep, and quickly back."""
    min_instances: int
    max_instances: int
    gpus: int
    """Units that an instance takes."""
    usd_per_hour: float
    """Of one unit."""
    start_s: float = LOCAL_WEIGHTS_S
    """From asking for an instance until it serves, on GPUs that are there. SageServe's where nothing was measured."""
    machine_s: float = MACHINE_S
    """What GPUs that are acquired again take alongside it."""
    pull_s: float = 0.0
    """To pull the weights of the model into the region first; 0 where they are there."""
    starts: int = 0
    """Starts by which `start_s` was measured."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All deployments that are planned together, and the units of each GPU type that they may have."""

    deployments: Mapping[Place, Deployed]
    units: Mapping[tuple[str, str], int]
    """By (region, GPU type); none where no hardware is kept: then what the deployments may take at most."""

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({model for model, _, _ in self.deployments}))

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(sorted({region for _, region, _ in self.deployments}))

    def slowest_start_s(self, model: str) -> float:
        return max((row.start_s for place, row in self.deployments.items() if place[0] == model), default=0.0)

    def endpoints(self) -> list[Endpoint]:
        return sorted({(model, region) for model, region, _ in self.deployments})

    def pools(self) -> dict[tuple[str, str], Pool]:
        """The pool that each (region, GPU type) with a deployment is."""
        models: dict[tuple[str, str], set[str]] = defaultdict(set)
        for model, region, gpu_type in self.deployments:
            models[region, gpu_type].add(model)
        return {place: (place[1], tuple(sorted(names))) for place, names in models.items()}

    def only(self, models: Set[str]) -> "Fleet":
        """The fleet as far as it has *models*; GPUs that instances of others hold are not there to plan with."""
        left = dict(self.units)
        for (model, region, gpu_type), row in self.deployments.items():
            if model not in models and (region, gpu_type) in left:
                left[region, gpu_type] -= row.gpus * row.instances
        deployments = {place: row for place, row in self.deployments.items() if place[0] in models}
        return Fleet(deployments, {place: max(0, count) for place, count in left.items()})

    def with_instances(self, views: Iterable[EndpointView]) -> "Fleet":
        """The same with the instances and minimums that *views* show, on an endpoint's deployments in their order, and none
        lent out.
        """
        left = Counter({(view.model, view.region): view.instances for view in views})
        minimum = Counter({(view.model, view.region): view.min_instances for view in views})
        deployments = {}
        for place, row in self.deployments.items():
            count, least = min(left[place[:2]], row.max_instances), min(minimum[place[:2]], row.max_instances)
            left[place[:2]] -= count
            minimum[place[:2]] -= least
            deployments[place] = replace(row, instances=count, spot=0, min_instances=least)
        return replace(self, deployments=deployments)


@dataclass(frozen=True, slots=True)
class Planned:
    """A problem, and which of its pools each (region, GPU type) is."""

    problem: Problem
    pool_at: Mapping[tuple[str, str], int]

    def index(self, place: Place) -> tuple[int, int, int]:
        """Where *place* is in the problem's arrays."""
        model, region, gpu_type = place
        return self.problem.models.index(model), self.problem.regions.index(region), self.pool_at[region, gpu_type]

    def asking(self, demand_tokens_per_s: Mapping[Endpoint, Floats], fixed: Collection[Endpoint] = ()) -> Problem:
        """The problem with another demand of the same endpoints, as `problem_of` poses it."""
        problem = self.problem
        return problem.asking(_demand(problem.models, problem.regions, demand_tokens_per_s, fixed))


def problem_of(
    fleet: Fleet,
    demand_tokens_per_s: Mapping[Endpoint, Floats],
    buffer_tokens_per_s: Mapping[Endpoint, float],
    capability_tokens_per_s: Mapping[tuple[str, str], float],
    horizon_s: float,
    epsilon: float,
    fixed: Mapping[Endpoint, int] | None = None,
    load_tokens_per_s: Mapping[Endpoint, float] | None = None,
) -> Planned:
    """The planning problem for the next *horizon_s*. Raises ValueError, naming the field, for numbers that cannot be.

    Demand, buffer and load are by endpoint, capability by (model, GPU type). *fixed* endpoints have that many instances,
    whatever their demand: only where they run is sought.
    """
    pool_of = fleet.pools()
    pools = tuple(sorted(set(pool_of.values())))
    pool_at = {place: pools.index(pool) for place, pool in pool_of.items()}
    models, regions = fleet.models, fleet.regions
    shape = len(models), len(regions), len(pools)
    instances, spot = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    capability, gpus = np.zeros((shape[0], shape[2])), np.ones((shape[0], shape[2]), np.int64)
    least, most = np.zeros(shape[:2], np.int64), np.zeros(shape[:2], np.int64)
    unbounded = np.zeros(shape[1:], np.int64)
    price, machine_s = np.zeros(shape[2]), np.zeros(shape[2])
    start_s, pull_s = np.zeros((shape[0], shape[2])), np.zeros(shape[:2])
    buffer, load = np.zeros(shape[:2]), np.zeros(shape[:2])
    for place, row in fleet.deployments.items():
        model, region, gpu_type = place
        i, j, k = models.index(model), regions.index(region), pool_at[region, gpu_type]
        instances[i, j, k], spot[i, j, k] = row.instances, row.spot
        capability[i, k] = capability_tokens_per_s.get((model, gpu_type), 0.0)
        gpus[i, k] = max(gpus[i, k], row.gpus)
        least[i, j] += row.min_instances
        most[i, j] += row.max_instances
        unbounded[j, k] += row.gpus * max(row.max_instances, row.instances + row.spot)
        pull_s[i, j] = max(pull_s[i, j], row.pull_s)
        price[k] = row.usd_per_hour * horizon_s / 3600
        start_s[i, k], machine_s[k] = max(start_s[i, k], row.start_s), max(machine_s[k], row.machine_s)
    capacity = np.zeros(shape[1:], np.int64)
    for (region, gpu_type), k in pool_at.items():
        j = regions.index(region)
        capacity[j, k] = fleet.units.get((region, gpu_type), unbounded[j, k])
    # An operator may have started more than the bounds allow, or more than the nodes are known to have.
    capacity = np.maximum(capacity, (gpus[:, None, :] * (instances + spot)).sum(axis=0))
    fixed = fixed or {}
    for model, region in demand_tokens_per_s:
        if model not in models or region not in regions:
            continue
        i, j = models.index(model), regions.index(region)
        if (model, region) in fixed:
            least[i, j] = most[i, j] = min(max(fixed[model, region], least[i, j]), most[i, j])
            continue
        buffer[i, j] = buffer_tokens_per_s.get((model, region), 0.0)
        load[i, j] = (load_tokens_per_s or {}).get((model, region), 0.0)
    problem = Problem(
        models=models,
        regions=regions,
        gpu_types=_names(pools),
        instances=instances,
        capability_tokens_per_s=capability,
        demand_tokens_per_s=_demand(models, regions, demand_tokens_per_s, fixed),
        vm_cost_usd=price,
        start_cost_usd=StartCosts.paid_while_starting(
            price,
            horizon_s,
            len(models),
            gpus=gpus,
            same_spot_s=np.minimum(SAME_SPOT_S, start_s),
            other_spot_s=start_s,
            remote_weights_s=pull_s[:, :, None],
            new_vm_s=machine_s,
        ),
        min_instances=least,
        max_instances=most,
        capacity=capacity,
        spot=spot,
        gpus=gpus,
        weights_local=pull_s == 0.0,
        epsilon=np.array(epsilon),
        buffer_tokens_per_s=buffer,
        load_tokens_per_s=load,
    )
    return Planned(problem, pool_at)


def _demand(
    models: Sequence[str],
    regions: Sequence[str],
    demand_tokens_per_s: Mapping[Endpoint, Floats],
    fixed: Collection[Endpoint],
) -> Floats:
    """(models, regions, windows): 0 for *fixed* endpoints, and beyond the windows of those with fewer than others."""
    windows = max((len(values) for values in demand_tokens_per_s.values()), default=1)
    demand = np.zeros((len(models), len(regions), windows))
    for (model, region), values in demand_tokens_per_s.items():
        if model in models and region in regions and (model, region) not in fixed:
            demand[models.index(model), regions.index(region), : len(values)] = values
    return demand


def _names(pools: tuple[Pool, ...]) -> list[str]:
    """A name for each pool: the GPU type, with the models behind it where several pools have that type."""
    types = Counter(gpu_type for gpu_type, _ in pools)
    return [gpu_type if types[gpu_type] == 1 else f"{gpu_type} ({', '.join(shared)})" for gpu_type, shared in pools]
