"""The linear relaxation: instances may be split. Its optimum is a bound for every plan, and where the fast method starts.

What instances cost is convex in their number: those present are cheapest, then the model's own spot, then others. So each
(model, region, type) has up to three columns, one for each price, and no row for starts. Units acquired anew are one more
column of each (region, type). Columns are written as arrays and handed to HiGHS in one call; cuts are added to them as rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import OWN_REGION_SHARE, SECOND_HALF_WEIGHT, Problem
from scheduling.planning.solvers.exact import Cut, SolverLost

SHORTAGE_PRICE = 1e3
"""USD by USD of shortage in the relaxation; see `Problem.shortage_usd`."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The relaxation column by column. Rows: own region (l r), total (l), instances (l r), units (r g)."""

    cost: NDArray[np.float64]
    upper: NDArray[np.float64]
    place: NDArray[np.int64]
    """Flat index into (l, r, g) of the first columns, which stand for instances; ascending. The others come after them."""
    starts: NDArray[np.int32]
    rows: NDArray[np.int32]
    values: NDArray[np.float64]
    row_lower: NDArray[np.float64]
    row_upper: NDArray[np.float64]


def columns(problem: Problem, shortage: bool) -> Columns:
    """Write *problem* as columns; with *shortage* the rows that may give have columns for what they miss."""
    n, r, g = problem.shape
    theta, gpus = problem.capability_tokens_per_s, problem.gpus
    i, j, k = (axis.ravel() for axis in np.indices((n, r, g)))
    first_count, first_units = n * r + n, 2 * n * r + n

    room = np.minimum(problem.max_instances[i, j], problem.capacity[j, k] // gpus[i, k])
    most = np.where(problem.usable.ravel(), room, 0)
    present = np.minimum(problem.instances.ravel(), most)
    own = np.minimum(problem.spot.ravel(), most - present)
    widths = np.stack([present, own, most - present - own], axis=1)
    base = problem.instance_cost_usd[i, k]
    prices = np.stack(
        [base, base + problem.start_cost_usd.same_spot[i, k], base + problem.redeploy_cost_usd.ravel()], axis=1
    )
    kept = widths.ravel() > 0
    place = np.repeat(np.arange(n * r * g), 3)[kept]
    i, j, k = i[place], j[place], k[place]
    rate = theta[i, k]
    rows = np.stack([i * r + j, n * r + i, first_count + i * r + j, first_units + j * g + k], axis=1)
    values = np.stack([rate, rate, np.ones(place.size), gpus[i, k].astype(np.float64)], axis=1)

    acquired = np.minimum(problem.acquired_units, problem.capacity).ravel()
    free = problem.capacity.ravel() - acquired
    anew = np.flatnonzero(free > 0)
    # Cost, upper bound, row and value of the columns with a single entry.
    single = [
        (
            np.tile(problem.start_cost_usd.new_vm, r)[anew],
            free[anew].astype(float),
            first_units + anew,
            np.full(anew.size, -1.0),
        )
    ]
    if shortage:
        for first, need, weight in (
            (0, problem.need_tokens_per_s.ravel(), np.repeat(OWN_REGION_SHARE * problem.shortage_weight_usd, r)),
            (n * r, problem.need_total_tokens_per_s, problem.shortage_weight_usd),
        ):
            row, one = first + np.arange(need.size), np.ones(need.size)
            single += [
                (SHORTAGE_PRICE * steepness * weight, need / 2.0, row, one) for steepness in (1.0, SECOND_HALF_WEIGHT)
            ]
        below = problem.least_instances.ravel().astype(float)
        weight = SHORTAGE_PRICE * np.repeat(problem.instance_weight_usd, r)
        single.append((weight, below, first_count + np.arange(n * r), np.ones(n * r)))
    single_cost, single_upper, single_row, single_value = (np.concatenate(parts) for parts in zip(*single, strict=True))
    starts = np.concatenate([np.arange(place.size) * 4, place.size * 4 + np.arange(single_row.size + 1)])
    most_instances = problem.max_instances.ravel().astype(float)
    return Columns(
        cost=np.concatenate([prices.ravel()[kept], single_cost]),
        upper=np.concatenate([widths.ravel()[kept].astype(np.float64), single_upper]),
        place=place,
        starts=starts.astype(np.int32),
        rows=np.concatenate([rows.ravel(), single_row]).astype(np.int32),
        values=np.concatenate([values.ravel(), single_value]),
        row_lower=np.concatenate(
            [
                problem.need_tokens_per_s.ravel(),
                problem.need_total_tokens_per_s,
                problem.least_instances.ravel().astype(float),
                np.full(r * g, -np.inf),
            ]
        ),
        row_upper=np.concatenate([np.full(n * r + n, np.inf), most_instances, acquired.astype(float)]),
    )


@dataclass(frozen=True, eq=False)
class Relaxed:
    """An optimum of the relaxation."""

    shares: NDArray[np.float64]
    """(l, r, g): instances, not whole."""
    objective_usd: float
    """With shortages allowed it holds their price too."""


class Relaxation:
    """A problem's relaxation, held by HiGHS so that cuts can be added and it be solved again from where it was."""

    def __init__(self, problem: Problem, shortage: bool = False) -> None:
        """Raises SolverLost when HiGHS is not installed or refuses the problem."""
        try:
            import highspy
        except ImportError as error:
            raise SolverLost(f"HiGHS cannot be imported: {error}") from error
        self.problem = problem
        self._highs: Any = highspy
        self._columns = written = columns(problem, shortage)
        self._first = np.searchsorted(written.place, np.arange(np.prod(problem.shape) + 1))
        self._solver: Any = self._highs.Highs()
        self._solver.setOptionValue("output_flag", False)
        self._solver.setOptionValue("threads", 1)
        self._solver.setOptionValue("presolve", "off")  # it takes longer than it saves here
        loaded = self._solver.passModel(
            written.cost.size,
            written.row_lower.size,
            written.values.size,
            int(highspy.MatrixFormat.kColwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            written.cost,
            np.zeros(written.cost.size),
            written.upper,
            written.row_lower,
            written.row_upper,
            written.starts,
            written.rows,
            written.values,
            np.zeros(written.cost.size, np.int32),
        )
        if loaded == highspy.HighsStatus.kError:
            raise SolverLost("HiGHS did not take the relaxation")

    def solve(self, time_limit_s: float = 60.0) -> Relaxed | None:
        """The optimum, or None if the rows cannot hold together. SolverLost when HiGHS ends in any other way."""
        self._solver.setOptionValue("time_limit", self._solver.getRunTime() + time_limit_s)
        self._solver.run()
        status = self._solver.getModelStatus()
        if status == self._highs.HighsModelStatus.kInfeasible:
            return None
        if status == self._highs.HighsModelStatus.kModelEmpty:  # nothing can be placed anywhere
            idle = Relaxed(np.zeros(self.problem.shape), 0.0)
            return idle if np.all(self._columns.row_lower <= 0) else None
        if status != self._highs.HighsModelStatus.kOptimal:
            raise SolverLost(f"HiGHS ended the relaxation with: {self._solver.modelStatusToString(status)}")
        place = self._columns.place
        values = np.asarray(self._solver.getSolution().col_value)[: place.size]
        shares = np.bincount(place, values, int(np.prod(self.problem.shape))).reshape(self.problem.shape)
        return Relaxed(shares.astype(np.float64), float(self._solver.getInfo().objective_function_value))

    def add(self, cuts: Sequence[Cut]) -> None:
        """Add *cuts* as rows."""
        _, r, g = self.problem.shape
        starts, indices, values = [0], [], []
        for cut in cuts:
            first, last = (cut.region, cut.region + 1) if cut.region >= 0 else (0, r)
            begin, end = self._first[(cut.model * r + first) * g], self._first[(cut.model * r + last) * g]
            value = cut.coefficients[self._columns.place[begin:end] % g]
            kept = np.flatnonzero(value)
            indices.append(begin + kept)
            values.append(value[kept])
            starts.append(starts[-1] + kept.size)
        if cuts:
            self._solver.addRows(
                len(cuts),
                np.array([cut.least for cut in cuts]),
                np.full(len(cuts), np.inf),
                starts[-1],
                np.array(starts[:-1], np.int32),
                np.concatenate(indices).astype(np.int32),
                np.concatenate(values),
            )
