"""The rounded relaxation: whole plans from fractional ones, filled up and thinned out instance by instance."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import OWN_REGION_SHARE, SECOND_HALF_WEIGHT, Problem

THRESHOLDS = (0.02, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Fractions from which on a share is rounded up; 1 rounds all down."""
SHORTAGE_PRICE = 1e6
"""USD per USD of shortage: no saving is worth a shortage of a thousandth of an instance."""
LEAST_GAIN = 1e-7
"""Share of an instance's cost that a change must save, so that rounding errors cannot keep the search running."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def price_usd(problem: Problem, targets: Ints) -> float:
    """Objective of the rounding: the cost, and shortages at a prohibitive price."""
    return problem.cost_usd(targets) + SHORTAGE_PRICE * problem.shortage_usd(problem.shortage(targets))


def round_shares(problem: Problem, starts: Sequence[Floats]) -> Ints:
    """Return the cheapest whole plan (l, r, g) from *starts*, fractional plans."""
    made: dict[bytes, Ints] = {}
    for shares in starts:
        for threshold in THRESHOLDS:
            rounded = np.where(problem.usable, np.floor(shares + (1.0 - threshold + 1e-7)), 0.0).astype(np.int64)
            if rounded.tobytes() not in made:
                made[rounded.tobytes()] = _Rounding(problem, rounded.copy()).improved()
    return min(made.values(), key=lambda targets: price_usd(problem, targets))


class _Rounding:
    """A whole plan that is changed one model at a time, and the sums that rows consist of."""

    def __init__(self, problem: Problem, targets: Ints) -> None:
        self.problem, self.targets = problem, targets
        self.least_gain = LEAST_GAIN * max(float(problem.instance_cost_usd.max()), 1e-9)
        self._fit()
        self.served, self.used = problem.served_tokens_per_s(targets), problem.used_units(targets)

    def _fit(self) -> None:
        """Remove instances, the most expensive per token first, until maxima and capacity hold."""
        problem, targets = self.problem, self.targets
        theta = problem.capability_tokens_per_s
        rate = np.where(theta > 0, problem.instance_cost_usd / np.where(theta > 0, theta, 1.0), np.inf)
        for i, j in np.argwhere(targets.sum(axis=2) > problem.max_instances):
            while targets[i, j].sum() > problem.max_instances[i, j]:
                targets[i, j, np.argmax(np.where(targets[i, j] > 0, rate[i], -np.inf))] -= 1
        for j, k in np.argwhere(problem.used_units(targets) > problem.capacity):
            # One by one, from the model with the most, so that no model loses all of its instances first.
            while (problem.gpus[:, k] * targets[:, j, k]).sum() > problem.capacity[j, k]:
                targets[np.argmax(targets[:, j, k]), j, k] -= 1

    def improved(self) -> Ints:
        """Return the plan after adding what is short, then removing what is not needed."""
        for by in (1, -1):
            for i in range(len(self.problem.models)):
                while self._change(i, by):
                    pass
        return self.targets

    def _prices(self, i: int, by: int) -> Floats:
        """Return (r, g): change of the price with *by* more instances of model i; infinity: not allowed."""
        problem = self.problem
        theta, start = problem.capability_tokens_per_s[i], problem.start_cost_usd
        targets, counts = self.targets[i], self.targets[i].sum(axis=1)[:, None]
        after, units = targets + by, self.used + by * problem.gpus[i]
        present, spot = problem.instances[i], problem.spot[i]
        redeploy = problem.redeploy_cost_usd[i]

        def starts_usd(count: Ints) -> Floats:
            started = np.maximum(count - present, 0)
            own = np.minimum(started, spot)
            return np.asarray(start.same_spot[i] * own + redeploy * (started - own))

        acquired = problem.acquired_units
        price = problem.instance_cost_usd[i] * by + starts_usd(after) - starts_usd(targets)
        price = price + start.new_vm * (np.maximum(units - acquired, 0) - np.maximum(self.used - acquired, 0))
        gained, weight = theta * by, SHORTAGE_PRICE * problem.shortage_weight_usd[i]
        need, served = problem.need_tokens_per_s[i][:, None], self.served[i][:, None]
        price = price + OWN_REGION_SHARE * weight * (_missing(need, served + gained) - _missing(need, served))
        need, served = problem.need_total_tokens_per_s[i], self.served[i].sum()
        price = price + weight * (_missing(need, served + gained) - _missing(need, served))
        least = problem.least_instances[i][:, None]
        below = np.maximum(least - counts - by, 0) - np.maximum(least - counts, 0)
        price = price + SHORTAGE_PRICE * problem.instance_weight_usd[i] * below
        fits = (units <= problem.capacity) & (counts + by <= problem.max_instances[i][:, None]) & (theta > 0)
        return np.where(fits if by > 0 else after >= 0, price, np.inf)

    def _change(self, i: int, by: int) -> bool:
        """Make the best change of model i by *by* instances; return False if none improves the plan."""
        prices = self._prices(i, by)
        j, k = np.unravel_index(int(prices.argmin()), prices.shape)
        if prices[j, k] >= -self.least_gain:
            return False
        self.targets[i, j, k] += by
        self.served[i, j] += self.problem.capability_tokens_per_s[i, k] * by
        self.used[j, k] += self.problem.gpus[i, k] * by
        return True


def _missing(need: Floats | float, served: Floats | float) -> Floats:
    """Return the shortage of *need*, the second half weighing more. 0 except for rounding."""
    short = need - served
    weighed = short + (SECOND_HALF_WEIGHT - 1.0) * np.maximum(short - 0.5 * need, 0.0)
    return np.where(short <= 1e-9 * np.asarray(need), 0.0, weighed)
