"""What a run still needs, by recorded runs at the same moment: a distribution, of which each part has earned its weight.

Three opinions are drawn from. The table: what was left in recorded runs when this unit began for as many times. The forest:
what was left at recorded moments that look alike, the leaves of extremely randomized trees (Geurts 2006) over what a run has
shown: visits, calls, tokens by unit, the prompt at hand, the predicted length. The demand graph: its walks (`remaining`).

Weights are those of the best rank correlation with what was left, judged on recorded runs that an opinion has not seen:
of the forest by trees grown without the run, of the table without the run, of the graph by one of half of the runs. An
opinion that does not better the correlation by `MARGIN`, at no larger squared error, has no weight: else it is the table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.demand_graph import DemandGraph, RunRecord, ServiceRate, demand, executions, longest
from scheduling.applications.remaining import (
    FEWEST_MATCHES,
    MOST_VISITS,
    UNKNOWN,
    Position,
    Remaining,
    build,
    next_random,
    remaining,
)
from scheduling.compiled import compiled
from scheduling.struct_of_arrays import struct_of_arrays

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Demand = tuple[float, float, float]
NOTHING: Final[Demand] = (0.0, 0.0, 0.0)

MAX_MOMENTS: Final = 4_096
"""Latest ones that are learned from."""
TREES: Final = 48
LEAF: Final = 5
"""Fewest moments of a leaf, and of a cell of the table: with fewer, the visits next to it count too."""
BAGGED: Final = 2 / 3
"""Share of the runs that a tree sees."""
SHIFT_S: Final = 0.5
"""Added to what was left before its logarithm is taken, which trees split by."""
MARGIN: Final = 0.01
"""Of a rank correlation, by which a mixture must be above the table's."""
SHARES: Final = (0.25, 0.5, 0.75, 1.0)
"""Weights that are tried."""
TABLE: Final = (1.0, 0.0, 0.0)
MAX_JUDGED: Final = 1_024
"""Moments by which the forest is judged, and by which the graph is, of so many walks each."""
MAX_WALKED: Final = 128
WALKS: Final = 100
GOLDEN: Final = 0.6180339887498949
"""Multiples of it spread evenly over members of leaves."""


@dataclass(slots=True)
class Shown:
    """What the ended steps of a run have shown."""

    steps: int = 0
    calls: float = 0.0
    first_input: float = 0.0
    """Of its first LLM step."""
    last: tuple[str, Demand] = ("", NOTHING)
    """The LLM step that ended last."""
    visits: dict[str, int] = field(default_factory=dict)
    output: dict[str, float] = field(default_factory=dict)
    """Sums by unit, of tokens or seconds."""

    def add(self, unit: str, shown: Demand) -> None:
        """Take in a step that ended; the input of one that is no LLM's is 0."""
        taken, given, parallelism = shown
        self.steps += 1
        self.calls += parallelism
        self.visits[unit] = self.visits.get(unit, 0) + 1
        self.output[unit] = self.output.get(unit, 0.0) + parallelism * given
        if taken > 0:
            self.first_input = self.first_input or taken
            self.last = unit, shown


class Opening(NamedTuple):
    """The step that has just begun."""

    unit: str
    input_tokens: float
    predicted_tokens: float
    parallelism: float


@struct_of_arrays
class Forest(NamedTuple):
    """Trees, of which each has a root for each of U units. Leaves are ranges of moments."""

    first: Ints
    """(T + 1,): where the nodes of each tree begin; the first U of these are its roots."""
    feature: Ints
    """(N,): what a node is split by, -1 for a leaf."""
    threshold: Floats
    child: Ints
    """(N,): the node for values up to the threshold; the next one is for those above."""
    begin: Ints
    end: Ints
    """(N,): its moments in `moments`."""
    moments: Ints


@compiled
def grow(
    features: Floats,
    target: Floats,
    rows: Ints,
    roots: Ints,
    leaf: int,
    random: NDArray[np.uint64],
    feature: Ints,
    threshold: Floats,
    child: Ints,
    begin: Ints,
    end: Ints,
) -> int:
    """Grow a tree over *rows*, which are reordered so that each root (U + 1,), and then each node, has a range of them;
    return its number of nodes. Random splits are tried, as many as there are features, and the best is made.
    """
    count = roots.size - 1
    for unit in range(count):
        begin[unit], end[unit] = roots[unit], roots[unit + 1]
    node = 0
    while node < count:
        low, high = begin[node], end[node]
        feature[node], best, size, total = -1, 0.0, high - low, 0.0
        for at in range(low, high):
            total += target[rows[at]]
        base = total * total / max(1, size)
        for _ in range(features.shape[1] if size >= 2 * leaf else 0):
            by = int(next_random(random) * features.shape[1])
            least = most = features[rows[low], by]
            for at in range(low + 1, high):
                least, most = min(least, features[rows[at], by]), max(most, features[rows[at], by])
            if least == most:
                continue
            cut, below, under = least + (most - least) * next_random(random), 0, 0.0
            for at in range(low, high):
                if features[rows[at], by] <= cut:
                    below += 1
                    under += target[rows[at]]
            if below < leaf or size - below < leaf:
                continue
            gain = under * under / below + (total - under) ** 2 / (size - below) - base
            if gain > best + 1e-9:
                best, feature[node], threshold[node] = gain, by, cut
        if feature[node] >= 0:
            middle = low
            for at in range(low, high):
                if features[rows[at], feature[node]] <= threshold[node]:
                    rows[at], rows[middle] = rows[middle], rows[at]
                    middle += 1
            child[node] = count
            begin[count], end[count], begin[count + 1], end[count + 1] = low, middle, middle, high
            count += 2
        node += 1
    return count


@compiled
def find_leaves(forest: Forest, unit: int, features: Floats, leaves: Ints) -> None:
    """Write the leaf (T,) of each tree that a moment of *unit* with these *features* (F,) is in."""
    for tree in range(leaves.size):
        root = forest.first[tree]
        node = root + unit
        while forest.feature[node] >= 0:
            above = features[forest.feature[node]] > forest.threshold[node]
            node = root + forest.child[node] + above
        leaves[tree] = node


class DemandPredictor:
    """Learned from the records of *graph*, by the service *rates* of its units, those of the endpoints that serve them.

    `weights` are those of the table, the forest and the graph; `worth` is the rank correlation with what was left, in runs
    that were not seen, of the table, the forest and both mixed.
    """

    def __init__(self, graph: DemandGraph, rates: Mapping[str, ServiceRate], seed: int = 1) -> None:
        self.units = {name: number for number, name in enumerate(graph.units)}
        self._rate = np.array(
            [(each.base_s, each.input_s, each.output_s) for each in map(rates.get, graph.units) if each]
        )
        self._random = np.array([seed], np.uint64)
        rows, run = list[tuple[int, int, Floats, Floats, Floats]](), list[int]()
        for number in range(len(graph.records) - 1, -1, -1):
            moments = list(self._moments(graph, graph.records[number]))
            if rows and len(rows) + len(moments) > MAX_MOMENTS:
                break
            rows += moments
            run += [number] * len(moments)
        unit, visits, features, service, path = zip(*rows, strict=True)
        self._unit, self._run = np.array(unit, np.int64), np.array(run)
        self._features, self._service, self._path = np.array(features), np.array(service), np.array(path)
        self._cells = self._table(np.minimum(visits, MOST_VISITS))
        self._forest, self._seen = self._grown()
        self.left_s = self._seconds(self._service, self._rate)
        """What was left at each moment."""
        self.weights, self.worth = TABLE, dict[str, float]()
        self._earn(graph, rates)

    def _moments(self, graph: DemandGraph, record: RunRecord) -> Iterator[tuple[int, int, Floats, Floats, Floats]]:
        """Yield of each step of *record*: unit, visits before, features, and the demand from it on by unit, whole and along
        the longest path: requests, input and output.
        """
        size, steps, shown = len(self.units), record.steps, Shown()
        own = np.zeros((len(steps), 2, size, 3))
        for at, step in enumerate(steps):
            (taken, given, count), most = demand(step, graph.units[step.unit]), longest(step, graph.units[step.unit])
            own[at, :, self.units[step.unit]] = (count, count * taken, count * given), (1.0, taken, most)
        whole = own[::-1, 0].cumsum(axis=0)[::-1]
        path, path_s, led_to = own[:, 1].copy(), (own[:, 1] * self._rate).sum(axis=(1, 2)), record.children()
        for at in range(len(steps) - 1, -1, -1):
            if led_to[at]:
                then = max(led_to[at], key=path_s.__getitem__)
                path[at] += path[then]
                path_s[at] += path_s[then]
        parents = np.array([step.parent for step in steps])
        for at, step in enumerate(steps):
            opening = Opening(step.unit, step.input_tokens, step.predicted_tokens, step.parallelism)
            visits, unit = shown.visits.get(step.unit, 0), self.units[step.unit]
            heads = at + np.flatnonzero(parents[at:] < at)  # with those of branches that earlier steps lead to
            head = heads[path_s[heads].argmax()]
            yield unit, visits, self._vector(shown, opening), whole[at].ravel(), path[head].ravel()
            shown.add(step.unit, demand(step, graph.units[step.unit]))

    def _vector(self, shown: Shown, opening: Opening) -> Floats:
        """Return the features of a moment."""
        _, (last_input, last_output, last_parallelism) = shown.last
        values = [
            *(
                shown.visits.get(opening.unit, 0),
                shown.steps,
                shown.calls,
                sum(shown.output.values()),
                shown.first_input,
            ),
            *(last_input, last_output, last_parallelism, *opening[1:]),
            *(shown.output.get(unit, 0.0) for unit in self.units),
            *(shown.visits.get(unit, 0) for unit in self.units),
        ]
        return np.log1p(np.array(values))

    def _table(self, visits: Ints) -> dict[tuple[int, int], Ints]:
        """Return the moments of each cell, by unit and visits before."""
        cells = {}
        for unit in np.unique(self._unit).tolist():
            mine = np.flatnonzero(self._unit == unit)
            for visit in range(MOST_VISITS + 1):
                distance = np.abs(visits[mine] - visit)
                enough = np.sort(distance)[min(LEAF, mine.size) - 1]
                cells[unit, visit] = mine[distance <= enough]
        return cells

    def _grown(self) -> tuple[Forest, NDArray[np.bool_]]:
        """Return the forest, and which runs (T, R) each tree has seen."""
        target, runs = np.log(self._seconds(self._service, self._rate) + SHIFT_S), int(self._run.max()) + 1
        count, size = self._unit.size, len(self.units)
        seen, parts, first, moved = np.zeros((TREES, runs), np.bool_), list[list[NDArray[np.int64]]](), [0], 0
        random = np.random.default_rng(int(self._random[0]))
        present = np.unique(self._run)
        for tree in range(TREES):
            seen[tree, random.permutation(present)[: max(1, round(BAGGED * present.size))]] = True
            rows = np.flatnonzero(seen[tree, self._run])
            rows = rows[np.argsort(self._unit[rows], kind="stable")]
            roots = np.searchsorted(self._unit[rows], np.arange(size + 1))
            feature, child, begin, end = np.zeros((4, 2 * count + size), np.int64)
            threshold = np.zeros(feature.size)
            nodes = grow(
                *(self._features, target, rows, roots, LEAF, self._random),
                *(feature, threshold, child, begin, end),
            )
            parts.append([each[:nodes] for each in (feature, threshold, child, begin + moved, end + moved)] + [rows])
            first.append(first[-1] + nodes)
            moved += rows.size
        return Forest(np.array(first), *map(np.concatenate, zip(*parts, strict=True))), seen

    @staticmethod
    def _seconds(of: Floats, rate: Floats) -> Floats:
        return np.asarray(of @ rate.ravel())

    def _leaves(self, unit: int, features: Floats) -> Ints:
        leaves = np.empty(TREES, np.int64)
        find_leaves(self._forest, unit, features, leaves)
        return leaves[self._forest.end[leaves] > self._forest.begin[leaves]]

    def _earn(self, graph: DemandGraph, rates: Mapping[str, ServiceRate]) -> None:
        """Give each opinion its weight."""
        judged, left_s = _spaced(np.arange(self.left_s.size), min(MAX_JUDGED, self.left_s.size)), self.left_s
        sums = np.concatenate([np.zeros(1), np.cumsum(left_s[self._forest.moments])])
        leaf_s = (sums[self._forest.end] - sums[self._forest.begin]) / np.maximum(
            1, self._forest.end - self._forest.begin
        )
        tree_of = np.repeat(np.arange(TREES), np.diff(self._forest.first))
        table, forest = np.full((2, left_s.size), np.nan)
        for at in judged.tolist():
            cell = self._cells[int(self._unit[at]), _visits(self._features[at])]
            others = left_s[cell[self._run[cell] != self._run[at]]]
            leaves = self._leaves(int(self._unit[at]), self._features[at])
            leaves = leaves[~self._seen[tree_of[leaves], self._run[at]]]
            if others.size and leaves.size:
                table[at], forest[at] = others.mean(), leaf_s[leaves].mean()
        known = np.flatnonzero(~np.isnan(table))
        if known.size < 2 * LEAF:
            return
        share, mixed = self._share(known, table, forest)
        walked = self._walked(graph, rates, known)
        of_graph, _ = self._share(np.array([*walked], np.int64), mixed, walked) if walked else (0.0, mixed)
        self.weights = (1.0 - share) * (1.0 - of_graph), share * (1.0 - of_graph), of_graph
        self.worth = {
            name: rank_correlation(means[known], left_s[known])
            for name, means in (("table", table), ("forest", forest), ("mixture", mixed))
        }

    def _share(self, judged: Ints, held: Floats, other: Floats | Mapping[int, float]) -> tuple[float, Floats]:
        """Return which share the *other* opinion has earned at the *judged* moments beside the one that is *held*, and the
        means of both together.
        """
        left_s, added = self.left_s[judged], np.array([other[at] for at in judged.tolist()])
        best, share = rank_correlation(held[judged], left_s) + MARGIN, 0.0
        error = ((held[judged] - left_s) ** 2).sum()
        for tried in SHARES:
            mixed = (1.0 - tried) * held[judged] + tried * added
            worth = rank_correlation(mixed, left_s)
            if worth > best and ((mixed - left_s) ** 2).sum() <= error:
                best, share = worth, tried
        means = held.copy()
        means[judged] += share * (added - means[judged])
        return share, means

    def _walked(self, graph: DemandGraph, rates: Mapping[str, ServiceRate], known: Ints) -> dict[int, float]:
        """Return the mean of walks of the graph of every other run at moments of the runs between, among those *known*."""
        odd = known[self._run[known] % 2 == 1]
        if not odd.size or len(graph.records) < 2 * FEWEST_MATCHES:
            return {}
        half = build(DemandGraph(graph.application, graph.units, graph.records[::2]), rates)
        steps = list(executions(graph))
        first = np.cumsum([0, *(len(record.steps) for record in graph.records)])
        begins = {int(run): int(np.flatnonzero(self._run == run)[0]) for run in np.unique(self._run)}
        means = {}
        for at in _spaced(odd, min(MAX_WALKED, odd.size)).tolist():
            run = int(self._run[at])
            number = at - begins[run]
            before = steps[first[run] : first[run] + number + 1]
            step, parent, _, _ = before[-1]
            taken, _, count = demand(step, graph.units[step.unit])
            visits = np.zeros(len(self.units), np.int64)
            for earlier, *_ in before[:-1]:
                visits[self.units[earlier.unit]] += 1
            position = Position(
                np.array([self.units[step.unit]]),
                np.array([self.units[parent.unit] if parent else len(self.units)]),
                np.array([[taken, UNKNOWN, count]]),
                np.array([demand(parent, graph.units[parent.unit]) if parent else NOTHING]),
                visits,
            )
            means[at] = float(remaining(half, position, WALKS, at).service_s.mean())
        return means

    def draw(
        self, shown: Shown, opening: Opening, rate: Floats, count: int, walks: Remaining | None, learned: bool = True
    ) -> Remaining | None:
        """Return *count* samples of what is left of a run from the step that has just begun on, or None for a unit that no
        record has. *rate* (U, 3) is that of its endpoints, *walks* are the graph's samples where it has a weight; not
        *learned*, the table's.
        """
        unit = self.units.get(opening.unit, -1)
        features = self._vector(shown, opening)
        cell = self._cells.get((unit, _visits(features)))
        if cell is None:
            return None
        weights, leaves = self.weights if learned else TABLE, self._leaves(unit, features)
        of_graph = round(weights[2] * count) if walks is not None else 0
        of_forest = round(weights[1] * count) if leaves.size else 0
        leaf = leaves[np.arange(of_forest) * leaves.size // max(1, of_forest)]
        begin, size = self._forest.begin[leaf], self._forest.end[leaf] - self._forest.begin[leaf]
        members = begin + (np.arange(of_forest) * GOLDEN % 1.0 * size).astype(np.int64)
        chosen = np.concatenate([_spaced(cell, count - of_graph - of_forest), self._forest.moments[members]])
        service_s, path_s = self._seconds(self._service[chosen], rate), self._seconds(self._path[chosen], rate)
        if walks is None or not of_graph:
            return Remaining(service_s, path_s)
        at_walks = _spaced(np.arange(walks.service_s.size), of_graph)
        return Remaining(
            np.concatenate([service_s, walks.service_s[at_walks]]), np.concatenate([path_s, walks.path_s[at_walks]])
        )


def _visits(features: Floats) -> int:
    return min(MOST_VISITS, round(float(np.expm1(features[0]))))


def _spaced(values: Ints, count: int) -> Ints:
    """Return *count* of *values*, evenly."""
    return values[(np.arange(count) * values.size + values.size // 2) // max(1, count) % values.size]


def rank_correlation(a: Floats, b: Floats) -> float:
    """Return Spearman's correlation, 0 where either is constant; equal values share their mean rank."""
    one, other = (_ranks(each) for each in (a, b))
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    return float(np.corrcoef(one, other)[0, 1])


def _ranks(values: Floats) -> Floats:
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[at])
