"""The integer programme of `exact` for HiGHS, without PuLP: the same rows and columns in the same order, as arrays.

PuLP makes an object of every entry and hands them over one by one, which takes ten times as long as a small problem's
solution. Tests compare the two models entry by entry.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.planning.problem import OWN_REGION_SHARE, SECOND_HALF_WEIGHT, Problem
from scheduling.planning.solvers.exact import Cut, Solved, SolverLost, solve_by_cbc, whole_numbers


@dataclass(frozen=True, eq=False)
class Programme:
    """Columns in the order of their names, as PuLP has them; entries of a column in the order of their rows."""

    cost: NDArray[np.float64]
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    integer: NDArray[np.int32]
    """1 for columns of whole numbers."""
    starts: NDArray[np.int32]
    rows: NDArray[np.int32]
    values: NDArray[np.float64]
    row_lower: NDArray[np.float64]
    row_upper: NDArray[np.float64]
    parts: NDArray[np.int32]
    """(3, l, r, g): the columns of instances given up, restarted and started."""


@lru_cache(maxsize=64)
def _order(shape: tuple[int, int, int], free: tuple[tuple[int, int], ...], shortage: bool) -> NDArray[np.int64]:
    """The place of each column among all, sorted by name as text: instances, shortages, units acquired, what is present."""
    places = ["_".join(map(str, at)) for at in np.ndindex(*shape)]
    names = [f"{part}_{place}" for part in "vab" for place in places]
    if shortage:
        endpoints = [f"{i}_{j}" for i, j in np.ndindex(*shape[:2])]
        names += [f"own_region_{at}_{part}" for part in (0, 1) for at in endpoints]
        names += [f"below_{at}" for at in endpoints]
        names += [f"total_{i}_{part}" for part in (0, 1) for i in range(shape[0])]
    names += [f"e_{j}_{k}" for j, k in free]
    if not shortage:
        names.append("present")
    at = np.empty(len(names), np.int64)
    at[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    at.setflags(write=False)
    return at


class _Entries:
    """Entries of the matrix, as they are written."""

    def __init__(self) -> None:
        self.rows: list[NDArray[np.int64]] = []
        self.columns: list[NDArray[np.int64]] = []
        self.values: list[NDArray[np.float64]] = []

    def add(self, rows: Any, columns: NDArray[np.int64], values: Any) -> None:
        """Rows and values spread over *columns*."""
        self.rows.append(np.broadcast_to(rows, columns.shape).ravel())
        self.columns.append(columns.ravel())
        self.values.append(np.broadcast_to(np.asarray(values, np.float64), columns.shape).ravel())

    def change(self, rows: Any, parts: NDArray[np.int64], values: Any) -> None:
        """As `add` for what is started and restarted, and less for what is given up; *parts* are (3, ...)."""
        for part, sign in zip(parts, (-1.0, 1.0, 1.0), strict=True):
            self.add(rows, part, sign * np.asarray(values, np.float64))


def programme(problem: Problem, cuts: Sequence[Cut] = (), shortage: bool = False) -> Programme:
    """*problem* as `exact.write_model` writes it, row by row."""
    n, r, g = problem.shape
    theta, gpus, start = problem.capability_tokens_per_s, problem.gpus, problem.start_cost_usd
    present, spot = problem.instances, problem.spot
    room = np.minimum(problem.max_instances[:, :, None], problem.capacity // gpus[:, None, :])
    most = np.where(problem.usable, room, 0)
    own = np.minimum(spot, np.maximum(most - present, 0))
    size = n * r * g
    alpha = np.broadcast_to(problem.instance_cost_usd[:, None, :], problem.shape)
    free_units = problem.capacity - problem.acquired_units
    free = np.argwhere(free_units > 0)
    nothing = np.zeros(size)

    # Columns: cost, lower and upper bound, by what they stand for.
    columns: list[tuple[Any, Any, Any]] = [
        (nothing if shortage else -alpha.ravel(), np.maximum(present - most, 0).ravel(), present.ravel()),
        (nothing if shortage else (alpha + start.same_spot[:, None, :]).ravel(), nothing, own.ravel()),
        (
            nothing if shortage else (alpha + problem.redeploy_cost_usd).ravel(),
            nothing,
            np.maximum(most - present - own, 0).ravel(),
        ),
    ]
    need, need_total = problem.need_tokens_per_s, problem.need_total_tokens_per_s
    if shortage:
        weight = problem.shortage_weight_usd
        own_weight = np.repeat(OWN_REGION_SHARE * weight, r)
        below = np.repeat(problem.instance_weight_usd, r), np.zeros(n * r), problem.least_instances.ravel()
        columns += [(own_weight * steep, np.zeros(n * r), need.ravel() / 2.0) for steep in (1.0, SECOND_HALF_WEIGHT)]
        columns.append(below)
        columns += [(weight * steep, np.zeros(n), need_total / 2.0) for steep in (1.0, SECOND_HALF_WEIGHT)]
    acquired_usd = np.zeros(len(free)) if shortage else start.new_vm[free[:, 1]]
    columns.append((acquired_usd, np.zeros(len(free)), free_units[free[:, 0], free[:, 1]]))
    if not shortage:
        # A column, since solvers leave a constant out of the gap.
        columns.append(([float((problem.instance_cost_usd[:, None, :] * present).sum())], [1.0], [1.0]))
    cost, lower, upper = (np.concatenate(each).astype(np.float64) for each in zip(*columns, strict=True))
    at = _order(problem.shape, tuple(map(tuple, free.tolist())), shortage)
    parts = at[: 3 * size].reshape(3, n, r, g)

    # Rows: of each model in each region its maximum, need and minimum; its total; cuts; units of each region and type.
    block = 3 * r + 1
    maximum = (block * np.arange(n)[:, None] + 3 * np.arange(r))[:, :, None]
    total = block * np.arange(n) + 3 * r
    entries = _Entries()
    entries.change(maximum, parts, 1.0)
    entries.change(maximum + 1, parts, theta[:, None, :])
    entries.change(maximum + 2, parts, 1.0)
    entries.change(total[:, None, None], parts, theta[:, None, :])
    if shortage:
        first = 3 * size
        for rows, count in ((maximum[:, :, 0] + 1, 2), (maximum[:, :, 0] + 2, 1), (total, 2)):
            for _ in range(count):
                entries.add(rows.ravel(), at[first : first + rows.size], 1.0)
                first += rows.size
    row = n * block
    for number, cut in enumerate(cuts):
        regions = slice(None) if cut.region < 0 else slice(cut.region, cut.region + 1)
        entries.change(row + number, parts[:, cut.model, regions], cut.coefficients)
    row += len(cuts)
    has_free = (free_units > 0).ravel()
    units_row = (row + np.arange(r * g) + np.cumsum(has_free) - has_free).reshape(r, g)
    entries.change(units_row, parts, gpus[:, None, :])
    acquired_row = units_row[free[:, 0], free[:, 1]] + 1
    first = 3 * size + ((3 * n * r + 2 * n) if shortage else 0)
    entries.add(acquired_row, at[first : first + len(free)], 1.0)
    entries.change(acquired_row, parts[:, :, free[:, 0], free[:, 1]], -gpus[:, free[:, 1]])
    row += r * g + len(free)

    row_lower, row_upper = np.full(row, -np.inf), np.full(row, np.inf)
    served = problem.served_tokens_per_s(present)
    counts = present.sum(axis=2)
    row_upper[maximum[:, :, 0]] = problem.max_instances - counts
    row_lower[maximum[:, :, 0] + 1] = need - served
    row_lower[maximum[:, :, 0] + 2] = problem.least_instances - counts
    row_lower[total] = need_total - [float(each.sum()) for each in served]
    for number, cut in enumerate(cuts):
        regions = slice(None) if cut.region < 0 else slice(cut.region, cut.region + 1)
        row_lower[n * block + number] = cut.least - float((present[cut.model, regions] * cut.coefficients).sum())
    held = (gpus[:, None, :] * present).sum(axis=0)
    row_upper[units_row] = problem.capacity - held
    row_lower[acquired_row] = (held - problem.acquired_units)[free[:, 0], free[:, 1]]

    at_row, at_column, value = (np.concatenate(each) for each in (entries.rows, entries.columns, entries.values))
    kept = value != 0.0
    at_row, at_column, value = at_row[kept], at_column[kept], value[kept]
    by_column = np.lexsort((at_row, at_column))
    integer = np.zeros(at.size, np.int32)
    integer[: 3 * size] = 1
    back = np.empty(at.size, np.int64)
    back[at] = np.arange(at.size)
    return Programme(
        cost=cost[back],
        lower=lower[back],
        upper=upper[back],
        integer=integer[back],
        starts=np.searchsorted(at_column[by_column], np.arange(at.size)).astype(np.int32),
        rows=at_row[by_column].astype(np.int32),
        values=value[by_column],
        row_lower=row_lower,
        row_upper=row_upper,
        parts=parts.astype(np.int32),
    )


def solve_exact(
    problem: Problem,
    gap: float,
    time_limit_s: float,
    start: NDArray[np.int64] | None = None,
    cuts: Sequence[Cut] = (),
    shortage: bool = False,
    solver: str = "HiGHS",
) -> Solved:
    """A plan within *gap* of the best by *solver*, `HiGHS` or `CBC`; *start* (l, r, g) is a plan for HiGHS to begin from.

    The time limit is only asked for: HiGHS was seen to take four times as long. `exact_subprocess` has one that holds.
    Raises SolverLost when the solver is not installed, fails, or returns nothing that can be used.
    """
    if solver == "CBC":
        return solve_by_cbc(problem, gap, time_limit_s, cuts, shortage)
    try:
        import highspy
    except ImportError as error:
        raise SolverLost(f"HiGHS cannot be imported: {error}") from error
    written = programme(problem, cuts, shortage)
    highs = loaded(written, gap, time_limit_s)
    if start is not None:
        added = np.maximum(start - problem.instances, 0)
        own = np.minimum(added, problem.spot)
        values = np.stack([np.maximum(problem.instances - start, 0), own, added - own])
        highs.setSolution(written.parts.size, written.parts.ravel(), values.ravel().astype(np.float64))
    highs.run()
    status, ends = highs.getModelStatus(), highspy.HighsModelStatus
    limited = status in (ends.kTimeLimit, ends.kIterationLimit) and highs.getObjectiveValue() != np.inf
    if status != ends.kOptimal and not limited:
        raise SolverLost(f"HiGHS found no plan: {highs.modelStatusToString(status)}")
    values = np.asarray(highs.getSolution().col_value)[written.parts]
    given_up, restarted, started = whole_numbers("HiGHS", values)
    targets = problem.instances + (restarted + started - given_up)
    return Solved(targets, float(highs.getInfo().mip_dual_bound), status == ends.kOptimal, "HiGHS")


def loaded(written: Programme, gap: float, time_limit_s: float) -> Any:
    """HiGHS with *written*. Raises SolverLost when it does not take it."""
    import highspy

    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("mip_rel_gap", gap)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("time_limit", float(time_limit_s))
    taken = highs.passModel(
        written.cost.size,
        written.row_lower.size,
        written.values.size,
        int(highspy.MatrixFormat.kColwise),
        int(highspy.ObjSense.kMinimize),
        0.0,
        written.cost,
        written.lower,
        written.upper,
        written.row_lower,
        written.row_upper,
        written.starts,
        written.rows,
        written.values,
        written.integer,
    )
    if taken == highspy.HighsStatus.kError:
        raise SolverLost("HiGHS did not take the model")
    return highs
