"""The least fleet for a demand: the planner's programme over GPUs that are still to be bought, corrected by simulation.

`least` solves the programme for each model by itself, since nothing bounds what can be bought. Throughputs of single
instances are estimates, so `settle` then simulates: fleets for more and for less demand, of which the cheapest that keeps
the promises is trimmed, instance by instance, until one less breaks them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.planner import solve
from scheduling.planning.problem import Problem, StartCosts
from scheduling.planning.programme import SolverLost, solve_exact

HOURS_A_MONTH: Final = 730.0
FACTORS: Final = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.4, 1.6, 1.9, 2.3, 3.0)
"""Of the demand, among which the lowest is sought whose fleet keeps the promises."""
NINES: Final = (0.9, 0.95, 0.99, 0.999)
"""Attainments of the frontier."""
GAP: Final = 0.005
MOST: Final = 10_000
"""Instances of a model in a region, where nothing bounds them."""
PARTS: Final = 16
"""Share of a place's instances that the first step of a trim takes away."""
HIGHEST: Final = 64.0
STEPS: Final = 9
"""Of the bisection for what given GPUs carry."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Judge = Callable[[Ints], Floats]
"""Simulates instances (l, r, g) and returns the share of requests whose promise was kept, by model and class; NaN without
any."""


@dataclass(frozen=True, eq=False)
class Sought:
    """Question for the least fleet of l models in r regions on g GPU types."""

    models: Sequence[str]
    regions: Sequence[str]
    gpu_types: Sequence[str]
    demand_tokens_per_s: Floats
    """(l, r), with the reserve for bursts."""
    capability_tokens_per_s: Floats
    """(l, g): of one instance within its promise; 0 if it cannot serve the model."""
    gpus: Ints
    """(l, g): of one instance."""
    usd_per_hour: Floats
    """(g,): of one GPU."""
    survives_loss: bool = False
    epsilon: float = 0.8

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.models), len(self.regions), len(self.gpu_types)

    def usd_per_month(self, counts: Ints) -> Floats:
        """Return the price of instances (l, r, g) by model."""
        each = HOURS_A_MONTH * self.gpus * self.usd_per_hour
        return np.asarray((counts * each[:, None, :]).sum(axis=(1, 2)))

    def problem(self, demand_tokens_per_s: Floats, units: Ints | None = None) -> Problem:
        """Return the planning problem for a fleet that has nothing yet; *units* (r, g) bound what it may have."""
        size, regions, types = self.shape
        nothing = np.zeros((size, types))
        most = np.full((regions, types), size * MOST * int(self.gpus.max())) if units is None else units
        return Problem(
            models=self.models,
            regions=self.regions,
            gpu_types=self.gpu_types,
            instances=np.array(0),
            capability_tokens_per_s=self.capability_tokens_per_s,
            demand_tokens_per_s=demand_tokens_per_s[:, :, None],
            vm_cost_usd=HOURS_A_MONTH * self.usd_per_hour,
            start_cost_usd=StartCosts(nothing, nothing, np.zeros(self.shape), np.zeros(types)),
            min_instances=np.array(0),
            max_instances=np.array(MOST),
            capacity=most,
            gpus=self.gpus,
            epsilon=np.array(self.epsilon),
            survives_loss=self.survives_loss,
        )

    def of(self, at: int) -> "Sought":
        """Return the question of one model."""
        rows = {name: getattr(self, name)[at : at + 1] for name in ("models", "demand_tokens_per_s", "gpus")}
        return replace(self, **rows, capability_tokens_per_s=self.capability_tokens_per_s[at : at + 1])


def least(sought: Sought, factor: float | Floats = 1.0, time_limit_s: float = 5.0) -> Ints:
    """Return the cheapest instances (l, r, g) for *factor* times the demand. Raise SolverLost."""
    counts = []
    for at, of_demand in enumerate(np.broadcast_to(factor, len(sought.models))):
        one = sought.of(at)
        problem = one.problem(float(of_demand) * one.demand_tokens_per_s)
        counts.append(solve(problem, gap=GAP, time_limit_s=time_limit_s).targets[0])
    return np.array(counts)


def carried(sought: Sought, units: Ints, factor: Floats) -> float:
    """Return how many times the demand, with *factor* by model, *units* (r, g) of GPUs carry at most: 0 to `HIGHEST`."""

    def fits(times: float) -> bool:
        try:
            problem = sought.problem(times * factor[:, None] * sought.demand_tokens_per_s, units)
            return solve_exact(problem, 1.0, 1.0) is not None
        except SolverLost:
            return False

    low, high = 1.0 / HIGHEST, HIGHEST
    if not fits(low) or fits(high):
        return high if fits(high) else 0.0
    for _ in range(STEPS):
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Found(NamedTuple):
    """A simulated fleet of one model."""

    counts: Ints
    """(r, g)"""
    usd_per_month: float
    met: Floats
    """Share of requests by class, the lowest over the losses of a region."""

    def keeps(self, wanted: Floats) -> bool:
        return bool(np.all(np.isnan(self.met) | (self.met >= wanted)))


@dataclass(slots=True)
class Settled:
    """What `settle` found; `found` has every simulated fleet by model."""

    sought: Sought
    found: list[list[Found]]
    runs: int = 0
    factor: Floats = field(default_factory=lambda: np.zeros(0))
    """Of the demand, by model: the lowest whose fleet keeps the promises."""
    tried: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """(l, r, g): places of which one less was simulated, and breaks a promise."""

    def cheapest(self, wanted: Floats | float) -> list[Found | None]:
        """Return the cheapest fleet of each model that keeps *wanted* (by class)."""
        return [
            min((one for one in of if one.keeps(np.asarray(wanted))), key=lambda one: one.usd_per_month, default=None)
            for of in self.found
        ]

    def frontier(self) -> list[tuple[float, float]]:
        """Return the attainments of `NINES` that some simulated fleet has, and dollars a month."""
        points = []
        for share in NINES:
            best = [one.usd_per_month for one in self.cheapest(share) if one is not None]
            if len(best) == len(self.found):
                points.append((share, sum(best)))
        return points


def settle(
    sought: Sought,
    judge: Judge,
    wanted: Floats,
    nines: Sequence[float] = NINES,
    late: Callable[[], bool] = lambda: False,
    enter: Callable[[str], None] = lambda phase: None,
) -> Settled:
    """Simulate fleets until the least is known that keeps *wanted*, the share of requests by class; then, until *late*, the
    least for each attainment of *nines*. Raise SolverLost.
    """
    settled = Settled(sought, [[] for _ in sought.models], tried=np.zeros(sought.shape, np.bool_))
    known: dict[bytes, Floats] = {}

    def simulated(counts: Ints) -> Floats:
        """Simulate *counts*; without each region, where their loss is asked about, which is harder than with all."""
        worst = np.full((len(sought.models), wanted.size), np.nan)
        for region in range(sought.shape[1]) if sought.survives_loss else (None,):
            left = counts.copy()
            if region is not None:
                left[:, region, :] = 0
            if (key := left.tobytes()) not in known:
                settled.runs += 1
                known[key] = judge(left)
            worst = np.fmin(worst, known[key])
        for of, own, usd, met in zip(settled.found, counts, sought.usd_per_month(counts), worst, strict=True):
            of.append(Found(own.copy(), float(usd), met))
        return worst

    enter("Fleets for less and for more demand")
    settled.factor = _bracket(settled, simulated, wanted, late)
    enter("One instance less")
    settled.tried = _trim(settled, simulated, wanted, late)
    for share in nines:
        enter(f"{100 * share:g}% attainment")
        _bracket(settled, simulated, np.full(wanted.size, share), late)
        _trim(settled, simulated, np.full(wanted.size, share), late)
    return settled


def _bracket(settled: Settled, simulated: Judge, wanted: Floats, late: Callable[[], bool]) -> Floats:
    """Return by model the lowest of `FACTORS` whose fleet keeps *wanted*, by bisection; the highest where none does."""
    last = len(FACTORS) - 1
    low, high = np.full(len(settled.found), -1), np.full(len(settled.found), last + 1)
    while (high - low > 1).any() and not (late() and settled.factor.size):
        middle = np.minimum(np.where(high - low > 1, (low + high) // 2, high), last)
        met = simulated(least(settled.sought, np.array(FACTORS)[middle]))
        kept = np.all(np.isnan(met) | (met >= wanted), axis=1)
        low, high = np.where(kept, low, np.maximum(low, middle)), np.where(kept, np.minimum(high, middle), high)
    return np.asarray(np.array(FACTORS)[np.minimum(high, last)])


def _trim(settled: Settled, simulated: Judge, wanted: Floats, late: Callable[[], bool]) -> NDArray[np.bool_]:
    """Take instances away from the cheapest fleets that keep *wanted* while they do; return where one less does not.

    Models share no GPUs here, so one simulation tries a place of each.
    """
    sought, best = settled.sought, settled.cheapest(wanted)
    counts = np.array([np.zeros(sought.shape[1:], np.int64) if one is None else one.counts for one in best])
    needed, step = np.zeros(counts.shape, np.bool_), np.maximum(1, counts // PARTS)
    usd = sought.gpus * sought.usd_per_hour
    while not late():
        trial, places = counts.copy(), dict[int, tuple[int, ...]]()
        for at, own in enumerate(counts):
            if open_places := [tuple(place) for place in np.argwhere((own > 0) & ~needed[at]).tolist()]:
                places[at] = max(open_places, key=lambda place: (usd[at, place[1]], own[place]))
                trial[(at, *places[at])] -= min(step[(at, *places[at])], own[places[at]])
        if not places:
            break
        met = simulated(trial)
        for at, place in places.items():
            where = (at, *place)
            if np.all(np.isnan(met[at]) | (met[at] >= wanted)):
                counts[at] = trial[at]
            elif step[where] > 1:
                step[where] //= 2
            else:
                needed[where] = True
    return needed


def confirm(sought: Sought, counts: Ints, judge: Judge, wanted: Floats, rounds: int = 12) -> tuple[Ints, Floats]:
    """Add instances to *counts* until *judge*, with other requests, finds *wanted* kept, at most *rounds* times; return them
    and what it found.
    """
    rate: Any = np.where(sought.capability_tokens_per_s > 0, sought.capability_tokens_per_s, np.nan)
    for left in range(rounds, -1, -1):
        met = judge(counts)
        if sought.survives_loss:
            for lost in range(sought.shape[1]):
                without = counts.copy()
                without[:, lost, :] = 0
                met = np.fmin(met, judge(without))
        missing = np.flatnonzero(~np.all(np.isnan(met) | (met >= wanted), axis=1))
        if not missing.size or not left:
            break
        counts = counts.copy()
        for at in missing:
            usd = np.where(counts[at].any(axis=0), sought.gpus[at] * sought.usd_per_hour / rate[at], np.inf)
            served = (counts[at] * np.nan_to_num(rate[at])).sum(axis=1)
            region = int(np.argmin(served / np.maximum(sought.demand_tokens_per_s[at], 1e-9)))
            counts[at, region, int(np.nanargmin(usd))] += 1
    return counts, met
