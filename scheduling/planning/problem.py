"""The planning problem: SageServe section 5, with the rows that it leaves out.

Models are numbered i of l, regions j of r, GPU types k of g, windows of the planning horizon w. The paper's letters are
given alongside our names. Differences from the paper, and reasons, are in docs/papers/planner.md.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

TOLERANCE = 1e-6
"""Share of a row's need that may be missing by rounding while the row still holds."""
SAME_SPOT_S, LOCAL_WEIGHTS_S, REMOTE_WEIGHTS_S = 60.0, 600.0, 7200.0
"""Start times (SageServe 7.1): of an instance taken back from spot, with weights in the region, and elsewhere."""
MACHINE_S = 300.0
"""Additional time for newly acquired GPUs, which SageServe does not state."""
OWN_REGION_SHARE = 0.25
"""Weight of a token that only its own region cannot serve, relative to one that no region can serve."""
SECOND_HALF_WEIGHT = 4.0
"""Factor on the weight of a token once more than half of its row's need is missing, so that shortages are shared."""

OF_DEMAND = ("peak_tokens_per_s", "need_tokens_per_s", "need_total_tokens_per_s")
"""Fields of a `Problem` derived from its demand."""


def _array(name: str, value: ArrayLike, shape: tuple[int, ...], whole: bool = False) -> NDArray[Any]:
    """Return *value* broadcast to *shape*, read-only. Raise ValueError naming the fault."""
    array = np.asarray(value)
    try:
        spread = np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} has the shape {array.shape}, not {shape}") from None
    if not np.all(np.isfinite(spread)):
        raise ValueError(f"{name} must hold finite numbers")
    if np.any(spread < 0):
        raise ValueError(f"{name} must not be negative")
    if whole and np.any(spread != np.floor(spread)):
        raise ValueError(f"{name} must hold whole numbers")
    copy = np.array(spread, np.int64 if whole else np.float64)
    copy.setflags(write=False)
    return copy


@dataclass(frozen=True, eq=False)
class StartCosts:
    """sigma: what starting one instance costs in USD, by what must be loaded. The parts add up.

    | the GPUs come from                      | weights in the region          | weights elsewhere           |
    |-----------------------------------------|--------------------------------|-----------------------------|
    | an instance of the model, lent as spot  | same_spot                      | same_spot                   |
    | another model's instance, lent or freed | other_spot                     | other_spot + remote_weights |
    | GPUs acquired again (cold)               | other_spot + new_vm            | all three                   |
    """

    same_spot: NDArray[np.float64]
    """(l, g)"""
    other_spot: NDArray[np.float64]
    """(l, g); never below `same_spot`."""
    remote_weights: NDArray[np.float64]
    """(l, r, g)"""
    new_vm: NDArray[np.float64]
    """(g,): per unit of `Problem.capacity`."""

    @staticmethod
    def paid_while_starting(
        vm_cost_usd: ArrayLike,
        horizon_s: float,
        models: int,
        gpus: ArrayLike = 1,
        same_spot_s: ArrayLike = SAME_SPOT_S,
        other_spot_s: ArrayLike = LOCAL_WEIGHTS_S,
        remote_weights_s: ArrayLike = REMOTE_WEIGHTS_S,
        new_vm_s: ArrayLike = MACHINE_S,
    ) -> "StartCosts":
        """Return the costs of GPUs that are paid for while they cannot serve: times at the
        price *vm_cost_usd* per *horizon_s*.

        Times are numbers, or arrays that broadcast over (models, GPU types); *remote_weights_s* over (models, regions, GPU
        types), *new_vm_s* over the GPU types.
        """
        price = np.asarray(vm_cost_usd, np.float64) / horizon_s
        shape = (models, price.size)
        by_instance = price * np.broadcast_to(np.asarray(gpus, np.float64), shape)
        return StartCosts(
            same_spot=by_instance * np.asarray(same_spot_s),
            other_spot=by_instance * np.asarray(other_spot_s),
            remote_weights=by_instance[:, None, :] * np.asarray(remote_weights_s),
            new_vm=price * np.asarray(new_vm_s),
        )


@dataclass(frozen=True, eq=False)
class Problem:
    """Present instances, demand of the next horizon, and constraints. Raises ValueError naming an invalid field.

    Arrays are copied and broadcast to their shapes, so a number stands for an array of it.
    """

    models: Sequence[str]
    regions: Sequence[str]
    gpu_types: Sequence[str]
    instances: NDArray[np.int64]
    """n (l, r, g): serving now, or starting."""
    capability_tokens_per_s: NDArray[np.float64]
    """theta (l, g): tokens per second that one instance serves within SLO; 0 if it cannot serve the model."""
    demand_tokens_per_s: NDArray[np.float64]
    """rho (l, r, w): interactive demand by window."""
    vm_cost_usd: NDArray[np.float64]
    """alpha (g,): of one unit of `capacity` over the whole horizon."""
    start_cost_usd: StartCosts
    min_instances: NDArray[np.int64]
    """(l, r)"""
    max_instances: NDArray[np.int64]
    """(l, r)"""
    capacity: NDArray[np.int64]
    """(r, g): units of each GPU type in a region, serving, lent out as spot or not acquired yet."""
    spot: NDArray[np.int64] = field(default_factory=lambda: np.array(0))
    """(l, r, g): instances of the model lent out as spot that can be reclaimed."""
    gpus: NDArray[np.int64] = field(default_factory=lambda: np.array(1))
    """(l, g): units of `capacity` per instance. 1 if the unit is a VM, as in the paper."""
    weights_local: NDArray[np.bool_] = field(default_factory=lambda: np.array(True))
    """(l, r): whether the model's weights are in the region."""
    epsilon: NDArray[np.float64] = field(default_factory=lambda: np.array(0.8))
    """(l, r) of (0, 1]: share of its own peak demand that a region must be able to serve."""
    buffer_tokens_per_s: NDArray[np.float64] = field(default_factory=lambda: np.array(0.0))
    """beta (l, r): room for non-interactive work, added to every window. See `capacity.niw_buffer`."""
    load_tokens_per_s: NDArray[np.float64] = field(default_factory=lambda: np.array(0.0))
    """(l, r): what serves the load of now. No region is taken below it, and all together serve its sum."""
    survives_loss: bool = False
    """Whether all regions' demand must be served without any one region."""
    waived: "Shortage | None" = None
    """Accepted shortages: the rows ask for that much less."""

    def __post_init__(self) -> None:
        for name in ("models", "regions", "gpu_types"):
            names = tuple(getattr(self, name))
            if not names or len(set(names)) != len(names):
                raise ValueError(f"{name} must be different names, at least one, not {names}")
            object.__setattr__(self, name, names)
        n, r, g = self.shape
        demand = np.asarray(self.demand_tokens_per_s)
        if demand.ndim != 3 or demand.shape[2] == 0:
            raise ValueError(f"demand_tokens_per_s must be (models, regions, windows), not of shape {demand.shape}")
        shapes: dict[str, tuple[tuple[int, ...], bool]] = {
            "instances": ((n, r, g), True),
            "capability_tokens_per_s": ((n, g), False),
            "demand_tokens_per_s": ((n, r, demand.shape[2]), False),
            "vm_cost_usd": ((g,), False),
            "min_instances": ((n, r), True),
            "max_instances": ((n, r), True),
            "capacity": ((r, g), True),
            "spot": ((n, r, g), True),
            "gpus": ((n, g), True),
            "epsilon": ((n, r), False),
            "buffer_tokens_per_s": ((n, r), False),
            "load_tokens_per_s": ((n, r), False),
        }
        for name, (shape, whole) in shapes.items():
            object.__setattr__(self, name, _array(name, getattr(self, name), shape, whole))
        object.__setattr__(self, "weights_local", np.broadcast_to(np.asarray(self.weights_local, np.bool_), (n, r)))
        start = self.start_cost_usd
        checked = StartCosts(
            **{name: _array(name, getattr(start, name), (n, g)) for name in ("same_spot", "other_spot")},
            remote_weights=_array("remote_weights", start.remote_weights, (n, r, g)),
            new_vm=_array("new_vm", start.new_vm, (g,)),
        )
        object.__setattr__(self, "start_cost_usd", checked)
        if np.any(checked.other_spot < checked.same_spot):
            raise ValueError("other_spot must not be below same_spot: a model's own spot instance is the cheaper one")
        for i, j in np.argwhere(self.min_instances > self.max_instances).tolist():
            raise ValueError(
                f"min_instances must not be above max_instances: {self.min_instances[i, j]} and {self.max_instances[i, j]}"
                f" of {self.models[i]} in {self.regions[j]}"
            )
        if np.any(self.epsilon <= 0) or np.any(self.epsilon > 1):
            raise ValueError("epsilon must be above 0 and at most 1")
        if np.any(self.gpus < 1):
            raise ValueError("gpus must be at least 1")

    def asking(self, demand_tokens_per_s: NDArray[np.float64]) -> "Problem":
        """Return the same with another demand (l, r, w); the rest is neither validated nor derived again."""
        other = copy(self)
        for name in OF_DEMAND:
            other.__dict__.pop(name, None)
        shape = *self.shape[:2], demand_tokens_per_s.shape[2]
        demand = _array("demand_tokens_per_s", demand_tokens_per_s, shape)
        object.__setattr__(other, "demand_tokens_per_s", demand)
        return other

    @property
    def shape(self) -> tuple[int, int, int]:
        """(l, r, g)"""
        return len(self.models), len(self.regions), len(self.gpu_types)

    @cached_property
    def peak_tokens_per_s(self) -> NDArray[np.float64]:
        """Return (l, r): the highest window of a region's own demand, buffer included."""
        return np.asarray(self.demand_tokens_per_s.max(axis=2) + self.buffer_tokens_per_s)

    @cached_property
    def guarded_tokens_per_s(self) -> NDArray[np.float64]:
        """Return (l, r): the load of now, as far as present instances serve it."""
        return np.asarray(np.minimum(self.load_tokens_per_s, self.served_tokens_per_s(self.instances)))

    @cached_property
    def need_tokens_per_s(self) -> NDArray[np.float64]:
        """Return (l, r): what a region must be able to serve itself: epsilon of its peak, and `guarded_tokens_per_s`."""
        need = np.asarray(np.maximum(self.epsilon * self.peak_tokens_per_s, self.guarded_tokens_per_s))
        return need if self.waived is None else np.maximum(need - self.waived.own_region_tokens_per_s, 0.0)

    @cached_property
    def need_total_tokens_per_s(self) -> NDArray[np.float64]:
        """Return (l,): what all regions together must be able to serve: their highest window, and the load of now."""
        need = np.asarray(self.demand_tokens_per_s.sum(axis=1).max(axis=1) + self.buffer_tokens_per_s.sum(axis=1))
        need = np.asarray(np.maximum(need, self.load_tokens_per_s.sum(axis=1)))
        return need if self.waived is None else np.maximum(need - self.waived.total_tokens_per_s, 0.0)

    @cached_property
    def least_instances(self) -> NDArray[np.int64]:
        """Return (l, r): the minimum, less what is waived."""
        return self.min_instances if self.waived is None else self.min_instances - self.waived.instances

    @cached_property
    def instance_cost_usd(self) -> NDArray[np.float64]:
        """Return (l, g): cost of one instance over the horizon."""
        return np.asarray(self.vm_cost_usd * self.gpus)

    @cached_property
    def redeploy_cost_usd(self) -> NDArray[np.float64]:
        """Return (l, r, g): cost of starting an instance on GPUs that another model had."""
        start = self.start_cost_usd
        remote = np.where(self.weights_local[:, :, None], 0.0, start.remote_weights)
        return np.asarray(start.other_spot[:, None, :] + remote)

    @cached_property
    def acquired_units(self) -> NDArray[np.int64]:
        """Return (r, g): units that serve now or are lent out as spot; more must be acquired."""
        held = self.gpus[:, None, :] * (self.instances + self.spot)
        return np.asarray(held.sum(axis=0))

    @cached_property
    def usable(self) -> NDArray[np.bool_]:
        """Return (l, r, g): where the model can be served at all."""
        return np.broadcast_to(self.capability_tokens_per_s[:, None, :] > 0, self.shape)

    @cached_property
    def shortage_weight_usd(self) -> NDArray[np.float64]:
        """Return (l,): USD per token per second that is not served: the cheapest cost of serving it.

        Shortages are compared by it. 0 for a model that no GPU type can serve, because nothing can be done about it.
        """
        theta = self.capability_tokens_per_s
        rates = np.where(theta > 0, self.instance_cost_usd / np.where(theta > 0, theta, 1.0), np.inf)
        cheapest = rates.min(axis=1)
        weight_usd = np.where(np.isfinite(cheapest), cheapest, 0.0)
        # Free GPUs must not make shortage free.
        least = 1.0 / np.maximum(theta.max(axis=1), 1e-12)
        return np.asarray(np.where((theta.max(axis=1) > 0) & (weight_usd <= 0), least, weight_usd))

    @cached_property
    def instance_weight_usd(self) -> NDArray[np.float64]:
        """Return (l,): weight of an instance below the minimum among shortages: the most that one could serve."""
        return np.asarray(self.shortage_weight_usd * self.capability_tokens_per_s.max(axis=1))

    def served_tokens_per_s(self, targets: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (l, r): what *targets* (l, r, g) instances serve."""
        return np.asarray(np.einsum("ijk,ik->ij", targets, self.capability_tokens_per_s))

    def start_usd(self, targets: NDArray[np.int64]) -> float:
        """Return mu: the cost of the starts from the present instances to *targets* (l, r, g)."""
        started = np.maximum(targets - self.instances, 0)
        own = np.minimum(started, self.spot)
        cost = (self.start_cost_usd.same_spot[:, None, :] * own).sum()
        cost += (self.redeploy_cost_usd * (started - own)).sum()
        anew = np.maximum(self.used_units(targets) - self.acquired_units, 0)
        return float(cost + (self.start_cost_usd.new_vm * anew).sum())

    def cost_usd(self, targets: NDArray[np.int64]) -> float:
        """Return the objective: the cost of *targets* over the horizon, and of the starts.

        The paper counts only the change of instances. This differs by a constant, so that a relative gap is meaningful.
        """
        return float((self.instance_cost_usd[:, None, :] * targets).sum()) + self.start_usd(targets)

    def used_units(self, targets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return (r, g): units of capacity that *targets* take."""
        return np.asarray((self.gpus[:, None, :] * targets).sum(axis=0))

    def shortage(self, targets: NDArray[np.int64]) -> "Shortage":
        """Return the shortage of *targets*."""
        served = self.served_tokens_per_s(targets)
        own_region = np.maximum(self.need_tokens_per_s - served, 0.0)
        lost = served.max(axis=1) if self.survives_loss else 0.0
        total = np.maximum(self.need_total_tokens_per_s - (served.sum(axis=1) - lost), 0.0)
        own_region[own_region <= TOLERANCE * self.need_tokens_per_s] = 0.0
        total[total <= TOLERANCE * self.need_total_tokens_per_s] = 0.0
        return Shortage(own_region, total, np.maximum(self.least_instances - targets.sum(axis=2), 0))


@dataclass(frozen=True, eq=False)
class Shortage:
    """Shortage of the soft rows; 0 if they hold."""

    own_region_tokens_per_s: NDArray[np.float64]
    """(l, r): below epsilon of a region's peak."""
    total_tokens_per_s: NDArray[np.float64]
    """(l,): below the demand of all regions."""
    instances: NDArray[np.int64]
    """(l, r): below the minimum."""

    @property
    def any(self) -> bool:
        return bool(self.own_region_tokens_per_s.any() or self.total_tokens_per_s.any() or self.instances.any())


def broken_rows(problem: Problem, targets: NDArray[np.int64]) -> list[str]:
    """Return the hard rows that *targets* (l, r, g) break, in words; independent of every planner, as a check."""
    rows = []
    names = problem.models, problem.regions, problem.gpu_types
    if targets.shape != problem.shape or not np.issubdtype(targets.dtype, np.integer):
        return [f"targets are {targets.dtype} of shape {targets.shape}, not whole numbers of shape {problem.shape}"]
    for i, j, k in np.argwhere(targets < 0):
        rows.append(f"{names[0][i]} in {names[1][j]} has {targets[i, j, k]} instances on {names[2][k]}")
    for i, j, k in np.argwhere((targets > 0) & ~problem.usable):
        rows.append(f"{names[0][i]} in {names[1][j]} is put on {names[2][k]}, which cannot serve it")
    counts = targets.sum(axis=2)
    for i, j in np.argwhere(counts > problem.max_instances):
        rows.append(
            f"{names[0][i]} in {names[1][j]}: {counts[i, j]} of at most {problem.max_instances[i, j]} instances"
        )
    used = problem.used_units(targets)
    for j, k in np.argwhere(used > problem.capacity):
        rows.append(f"{names[1][j]}: {used[j, k]} of {problem.capacity[j, k]} {names[2][k]}")
    return rows
