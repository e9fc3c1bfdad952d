"""The least fleet for a demand: the planner's programme over GPUs that are still to be bought, corrected by simulation.

`least` solves the programme for each model by itself, since nothing bounds what can be bought. Throughputs of single
instances are estimates, so `settle` then simulates: fleets for more and for less demand, of which the cheapest that keeps
the promises is trimmed, instance by instance, until one less breaks them. A fleet keeps them only where it does with each of
several draws of requests, so that neither the answer nor the frontier is the luck of one.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

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
    met: list[Floats]
    """By draw of requests, of the first ones: share of requests by class, the lowest over the losses of a region."""

    @property
    def worst(self) -> Floats:
        """The lowest share by class over the draws."""
        return np.asarray(np.fmin.reduce(self.met))


def keeps(met: Floats, wanted: Floats | float) -> bool:
    return bool(np.all(np.isnan(met) | (met >= wanted)))


class Point(NamedTuple):
    """Of the frontier of cost against attainment."""

    attainment: float
    usd_per_month: float | None
    """Of the cheapest fleets that were found to have it; None without."""
    why: str
    """Why there are none, or why cheaper ones may be."""


Asked = tuple[int, Ints]
"""Number of a draw, and instances (r, g) to be simulated with it."""


@dataclass(slots=True)
class Settled:
    """What `settle` found."""

    sought: Sought
    draws: Sequence[Judge]
    targets: Sequence[Floats]
    """Shares by class that are sought one after another: the promises, then the nines."""
    found: list[dict[bytes, Found]]
    """Simulated fleets by model."""
    factor: Floats
    """Of the demand, by model: the lowest of `FACTORS` whose fleet keeps the promises; the highest where none does."""
    tried: NDArray[np.bool_]
    """(l, r, g): places of which one less was simulated, and breaks a promise."""
    done: Ints
    """Targets that were sought to the end, by model."""
    runs: int = 0

    def cheapest(self, wanted: Floats | float) -> list[Found | None]:
        """Return the cheapest fleet of each model that keeps *wanted* (by class) with every draw."""
        return [
            min(
                (one for one in of.values() if len(one.met) == len(self.draws) and keeps(one.worst, wanted)),
                key=lambda one: one.usd_per_month,
                default=None,
            )
            for of in self.found
        ]

    def frontier(self) -> list[Point]:
        """Return the cost of each of the nines that were sought."""
        points = []
        for number, target in enumerate(self.targets[1:], 1):
            best, sought = self.cheapest(target), self.done > number
            over = [
                f"{self.highest(at):.1%} for {self.sought.models[at]}"
                for at, one in enumerate(best)
                if one is None and sought[at]
            ]
            why = "" if sought.all() else "the time of the check ended first"
            if over:
                why = f"fleets for up to {FACTORS[-1]:g} times the demand reach {', '.join(over)}"
            usd = None if None in best else sum(one.usd_per_month for one in best if one is not None)
            points.append(Point(float(target[0]), usd, why))
        return points

    def highest(self, at: int) -> float:
        """Return the highest share of a model's worst class, over its simulated fleets."""
        return max(float(np.nanmin(one.worst)) for one in self.found[at].values() if one.met)

    def kept(self, at: int, counts: Ints, wanted: Floats) -> Generator[Asked, Floats, bool]:
        """Simulate *counts* of a model with one draw after another; return whether each keeps *wanted*."""
        key = counts.tobytes()
        if key not in self.found[at]:
            usd = float(self.sought.of(at).usd_per_month(counts[None])[0])
            self.found[at][key] = Found(counts.copy(), usd, [])
        met = self.found[at][key].met
        for draw in range(len(self.draws)):
            if draw == len(met):
                met.append((yield draw, counts))
            if not keeps(met[draw], wanted):
                return False
        return True

    def simulated(self, draw: int, counts: Ints) -> Floats:
        """Simulate *counts* (l, r, g); without each region where their loss is asked about, harder than with all."""
        worst = np.full((len(counts), self.targets[0].size), np.nan)
        for region in range(counts.shape[1]) if self.sought.survives_loss else (None,):
            left = counts.copy()
            if region is not None:
                left[:, region, :] = 0
            self.runs += 1
            worst = np.fmin(worst, self.draws[draw](left))
        return worst


def settle(
    sought: Sought,
    draws: Sequence[Judge],
    wanted: Floats,
    nines: Sequence[float] = NINES,
    late: Callable[[], bool] = lambda: False,
    enter: Callable[[str], None] = lambda phase: None,
) -> Settled:
    """Simulate fleets, with each of *draws* of requests, until the least is known that keeps *wanted*, the share of requests
    by class; then, until *late*, the least for each attainment of *nines*. Raise SolverLost.

    Models share no GPUs here, so each is sought by itself, and a simulation has a fleet of each that is not done.
    """
    size = len(sought.models)
    targets = [wanted, *(np.full(wanted.size, share) for share in nines)]
    phases = ["The promises", *(f"{100 * share:g}% attainment" for share in nines), ""]
    settled = Settled(
        sought,
        draws,
        targets,
        found=[{} for _ in sought.models],
        factor=np.zeros(size),
        tried=np.zeros(sought.shape, np.bool_),
        done=np.zeros(size, np.int64),
    )
    searches = [_search(settled, at) for at in range(size)]
    asked = {at: step for at, of in enumerate(searches) if (step := next(of, None)) is not None}
    while asked and not (late() and settled.factor.all()):
        enter(phases[int(settled.done.min())])
        for draw in sorted({draw for draw, _ in asked.values()}):
            counts = np.zeros(sought.shape, np.int64)
            own = {at: step for at, step in asked.items() if step[0] == draw}
            for at, (_, of) in own.items():
                counts[at] = of
            met = settled.simulated(draw, counts)
            for at in own:
                try:
                    asked[at] = searches[at].send(met[at])
                except StopIteration:
                    del asked[at]
    return settled


def _search(settled: Settled, at: int) -> Generator[Asked, Floats, None]:
    """Seek the least fleet of a model for one target after another."""
    one, last, fleets = settled.sought.of(at), len(FACTORS) - 1, dict[int, Ints]()
    for number, wanted in enumerate(settled.targets):
        low, high = -1, last + 1
        while high - low > 1:
            middle = (low + high) // 2
            if middle not in fleets:
                fleets[middle] = least(one, FACTORS[middle])[0]
            low, high = (low, middle) if (yield from settled.kept(at, fleets[middle], wanted)) else (middle, high)
        if not number:
            settled.factor[at] = FACTORS[min(high, last)]
        if (best := settled.cheapest(wanted)[at]) is not None:
            yield from _trim(settled, at, best.counts, wanted, settled.tried[at] if not number else None)
        settled.done[at] += 1


def _trim(
    settled: Settled, at: int, counts: Ints, wanted: Floats, tried: NDArray[np.bool_] | None
) -> Generator[Asked, Floats, None]:
    """Take instances of a model away from *counts* while they keep *wanted*; mark in *tried* where one less does not."""
    counts, needed, step = counts.copy(), np.zeros(counts.shape, np.bool_), np.maximum(1, counts // PARTS)
    usd = settled.sought.gpus[at] * settled.sought.usd_per_hour
    while places := [tuple(place) for place in np.argwhere((counts > 0) & ~needed).tolist()]:
        place = max(places, key=lambda place: (usd[place[1]], counts[place]))
        trial = counts.copy()
        trial[place] -= min(step[place], counts[place])
        if (yield from settled.kept(at, trial, wanted)):
            counts = trial
        elif step[place] > 1:
            step[place] //= 2
        else:
            needed[place] = True
            if tried is not None:
                tried[place] = True
