"""What a run still needs, by recorded runs at the same moment: a distribution, of which each part has earned its weight.

Three opinions are drawn from. The table: what was left in recorded runs when this unit began for as many times. The forest:
what was left at recorded moments that look alike, the leaves of extremely randomized trees (Geurts 2006) over what a run has
shown: visits, calls, tokens by unit, the prompt at hand, the predicted length. The demand graph: its walks (`remaining`).

An opinion is judged by the mean completion time of recorded runs, were they served by it, which it has not seen: the
forest by trees grown without the run, the graph by one of half of the runs; of the table it sees a cell. One that does not
better the table's by `MARGIN` has no weight. Runs that begin with the same prompt are of one task, left out together.
"""

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

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
"""Of the mean completion time, by which a mixture must be below the table's, beside two standard errors."""
FEWEST_BATCHES: Final = 3
"""That judge an opinion."""
BATCH: Final = 16
"""Runs that wait at once while an opinion is judged."""
SHARES: Final = (0.25, 0.5, 0.75, 1.0)
"""Weights that are tried."""
TABLE: Final = (1.0, 0.0, 0.0)
MAX_JUDGED: Final = 1_024
MAX_WALKED: Final = 512
"""Moments by which the forest is judged, and by which the graph is, of so many walks each."""
WALKS: Final = 50
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

    `weights` are those of the table, the forest and the graph; `worth` is the mean completion time of recorded runs by the
    table, the forest and both mixed (`served_s`). It has the table alone unless it is *learned*, which takes half its time.
    """

    def __init__(
        self, graph: DemandGraph, rates: Mapping[str, ServiceRate], seed: int = 1, *, learned: bool = True
    ) -> None:
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
        self._task = _tasks(graph)
        self._cells = self._table(np.minimum(visits, MOST_VISITS))
        self.left_s = self._seconds(self._service, self._rate)
        """What was left at each moment."""
        self.weights, self.worth, self._learned = TABLE, dict[str, float](), learned
        if learned:
            self._forest, self._seen = self._grown()
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
        return np.asarray(np.log1p(np.array(values)), np.float64)

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
        seen, parts, first, moved = np.zeros((TREES, runs), np.bool_), list[list[NDArray[Any]]](), [0], 0
        random = np.random.default_rng(int(self._random[0]))
        tasks = np.unique(self._task[self._run])
        for tree in range(TREES):
            seen[tree] = np.isin(self._task, random.permutation(tasks)[: max(1, round(BAGGED * tasks.size))])
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
        left_s, judged = self.left_s, self._runs_within(self._run >= 0, MAX_JUDGED)
        sums = np.concatenate([np.zeros(1), np.cumsum(left_s[self._forest.moments])])
        leaf_s = (sums[self._forest.end] - sums[self._forest.begin]) / np.maximum(
            1, self._forest.end - self._forest.begin
        )
        tree_of = np.repeat(np.arange(TREES), np.diff(self._forest.first))
        table, forest = np.full((2, left_s.size), left_s.mean())
        for at in judged.tolist():
            cell = self._cells[int(self._unit[at]), _visits(self._features[at])]
            leaves = self._leaves(int(self._unit[at]), self._features[at])
            leaves = leaves[~self._seen[tree_of[leaves], self._run[at]]]
            table[at] = left_s[cell].mean()  # without its run it would rank those of a cell the wrong way round
            forest[at] = leaf_s[leaves].mean() if leaves.size else table[at]
        share, mixed = self._share(judged, table, forest)
        walks = np.zeros(left_s.size)
        walked = self._walked(graph, rates, walks)
        of_graph = self._share(walked, mixed, walks)[0]
        self.weights = (1.0 - share) * (1.0 - of_graph), share * (1.0 - of_graph), of_graph
        served = {"table": table, "forest": forest, "mixture": mixed}
        self.worth = {name: float(self.served_s(judged, keys).mean()) for name, keys in served.items()}

    def _runs_within(self, wanted: NDArray[np.bool_], count: int) -> Ints:
        """Return the moments of the latest runs with *wanted* ones that have no more than *count* together."""
        moments = np.flatnonzero(wanted)
        return (
            moments
            if moments.size <= count
            else moments[:count][self._run[moments[:count]] != self._run[moments[count]]]
        )

    def served_s(self, judged: Ints, keys: Floats) -> Floats:
        """Return the mean completion times of the runs of the *judged* moments, `BATCH` of them at a time on one server that
        serves a step of the run with the least of *keys*.

        A rank correlation does not do: keys that err from step to step change the run that is served, and all end late.
        """
        runs = np.flatnonzero(np.diff(self._run[judged], prepend=-1)).tolist()
        means_s, last = list[float](), {*(np.array([*runs[1:], judged.size]) - 1).tolist()}
        for batch in range(0, len(runs), BATCH):
            waiting, now_s, total_s = [(keys[judged[at]], at) for at in runs[batch : batch + BATCH]], 0.0, 0.0
            size = len(waiting)
            heapq.heapify(waiting)
            while waiting:
                _, at = heapq.heappop(waiting)
                left_s = self.left_s[judged[at]]
                if at in last:
                    now_s += left_s
                    total_s += now_s
                else:
                    now_s += left_s - self.left_s[judged[at + 1]]
                    heapq.heappush(waiting, (keys[judged[at + 1]], at + 1))
            means_s.append(total_s / size)
        return np.array(means_s)

    def _share(self, judged: Ints, held: Floats, other: Floats) -> tuple[float, Floats]:
        """Return which share the *other* opinion has earned at the *judged* moments beside the one that is *held*, and the
        means of both together.
        """
        base_s, best, share = self.served_s(judged, held), 0.0, 0.0
        for tried in SHARES if base_s.size >= FEWEST_BATCHES else ():
            gains = 1.0 - self.served_s(judged, held + tried * (other - held)) / base_s
            if gains.mean() > best and gains.mean() - 2 * gains.std(ddof=1) / gains.size**0.5 > MARGIN:
                best, share = gains.mean(), tried
        return share, held + share * (other - held)

    def _walked(self, graph: DemandGraph, rates: Mapping[str, ServiceRate], means: Floats) -> Ints:
        """Write the *means* of walks of the graph of every other run at moments of runs between; return these moments."""
        odd = self._runs_within(self._run % 2 == 1, MAX_WALKED)
        if not odd.size or len(graph.records) < 2 * FEWEST_MATCHES:
            return np.zeros(0, np.int64)
        half = build(DemandGraph(graph.application, graph.units, graph.records[::2]), rates)
        steps = list(executions(graph))
        first = np.cumsum([0, *(len(record.steps) for record in graph.records)])
        begins = {int(run): int(np.flatnonzero(self._run == run)[0]) for run in np.unique(self._run)}
        for at in odd.tolist():
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
            means[at] = remaining(half, position, WALKS, at).service_s.mean()
        return odd

    def draw(
        self,
        shown: Shown,
        opening: Opening,
        rate: Floats,
        count: int,
        walks: Remaining | None,
        learned: bool = True,
        ended: bool = False,
    ) -> Remaining | None:
        """Return *count* samples of what is left of a run from the step that has just begun on, after it if it has *ended*;
        None for a unit that no record has. *rate* (U, 3) is that of its endpoints, *walks* are the graph's samples where it
        has a weight; not *learned*, the table's.
        """
        unit = self.units.get(opening.unit, -1)
        features = self._vector(shown, opening)
        cell = self._cells.get((unit, _visits(features)))
        if cell is None:
            return None
        weights, leaves = TABLE, np.zeros(0, np.int64)
        if learned and self._learned:
            weights, leaves = self.weights, self._leaves(unit, features)
        of_graph = round(weights[2] * count) if walks is not None and not ended else 0
        of_forest = round(weights[1] * count) if leaves.size else 0
        chosen = _spaced(cell, count - of_graph - of_forest)
        if of_forest:
            leaf = leaves[np.arange(of_forest) * leaves.size // of_forest]
            begin, size = self._forest.begin[leaf], self._forest.end[leaf] - self._forest.begin[leaf]
            members = begin + (np.arange(of_forest) * GOLDEN % 1.0 * size).astype(np.int64)
            chosen = np.concatenate([chosen, self._forest.moments[members]])
        if ended:  # the next moment of its run is left, if there is one
            left = np.append(self._run[1:] == self._run[:-1], False)[chosen]
            chosen = np.where(left, chosen + 1, chosen)
        service_s, path_s = self._seconds(self._service[chosen], rate), self._seconds(self._path[chosen], rate)
        if ended:
            service_s, path_s = service_s * left, path_s * left
        if walks is None or not of_graph:
            return Remaining(service_s, path_s)
        at_walks = _spaced(np.arange(walks.service_s.size), of_graph)
        return Remaining(
            np.concatenate([service_s, walks.service_s[at_walks]]), np.concatenate([path_s, walks.path_s[at_walks]])
        )


def _tasks(graph: DemandGraph) -> Ints:
    """Return the task of each run: those that begin with as long a prompt, if they are a quarter of the runs at the most."""
    prompts = [record.steps[0].input_tokens for record in graph.records]
    _, tasks, counts = np.unique(prompts, return_inverse=True, return_counts=True)
    return np.asarray(tasks) if 4 * counts.max() <= len(prompts) else np.arange(len(prompts))


def _visits(features: Floats) -> int:
    return min(MOST_VISITS, round(float(np.expm1(features[0]))))


def _spaced(values: Ints, count: int) -> Ints:
    """Return *count* of *values*, evenly."""
    return values[(np.arange(count) * values.size + values.size // 2) // max(1, count) % values.size]
