"""Remaining demand of a run, by Monte Carlo over its application's demand graph (Hermes section 3.2).

Each draw walks the graph from where the run is to its end: input, output and parallelism of a unit are drawn from its
records, and then the units that it leads to. Where two demands correlate, records are those whose known demand fell into the
same of ten buckets; the five correlations that count are the paper's: input by the input and the output of the unit before,
output by the output of the unit before and by the own input, parallelism by that of the unit before. With fewer than
`FEWEST_MATCHES` matching records the stronger correlation alone is used, then the other one, then neither.

A unit depends on its nearest ancestor that is an LLM's: what a tool between two of them takes says nothing of the second.
Four things are ours: a step of n requests ends with its longest, drawn from what recorded ones had above the mean of as
many; a unit's n-th execution in a run leads to what n-th executions led to, or the nearest if these are few, so a loop
that always runs three times ends after three; a step whose requests just come has as many as recorded steps
of at least so many had; and a walk ends after `MOST_PASSES` executions of a unit.
"""

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.demand_graph import DemandGraph, ServiceRate, demand, executions, longest
from scheduling.compiled import compiled, compiled_inline, compiled_internal
from scheduling.struct_of_arrays import struct_of_arrays

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CORRELATED: Final = 0.5
"""Pearson coefficients above it count (Hermes section 3.2)."""
DEMAND_BUCKETS: Final = 10
FEWEST_MATCHES: Final = 8
"""Also for what follows the n-th execution of a unit, or as many as there are records: if n-th ones are fewer, those next to
them count too. By executions of any number, no loop ended by its number of passes while few runs were recorded."""
MOST_TRIES: Final = 16
"""Draws of a parallelism that is to be at least what has come."""
MOST_VISITS: Final = 16
"""Executions of a unit from the sixteenth on are alike."""
MOST_PASSES: Final = 64
MOST_PENDING: Final = 256
"""Steps that wait at once in a walk."""

INPUT, OUTPUT, PARALLELISM = 0, 1, 2
CONDITIONS: Final = ((INPUT, OUTPUT), (OUTPUT, INPUT), (PARALLELISM, PARALLELISM))
"""Of each demand: the demand of the unit before on which it depends, and a second one: for the input that unit's output, for
the output the own input."""
BOTH, FIRST, SECOND, NEITHER = 0, DEMAND_BUCKETS**2, DEMAND_BUCKETS**2 + DEMAND_BUCKETS, DEMAND_BUCKETS**2 + 20
CELLS: Final = NEITHER + 1
UNKNOWN: Final = -1.0
"""A demand that is not known yet. A parallelism of -n is n at least."""


@struct_of_arrays
class GraphArrays(NamedTuple):
    """Records of a graph with U units, E executions, K edges (a unit, and the unit before or none)."""

    edge: Ints
    """(U + 1, U): edge from a unit, the last row from none; the edge of any unit before where there is no record of it."""
    value: Floats
    """(E, 3): input, output, parallelism."""
    longest: Floats
    """(E,): logarithm of the longest request's output over the mean, by the root of the logarithm of the number of requests,
    as extremes grow; the mean of its unit where the execution had one request."""
    is_llm: NDArray[np.uint8]
    """(U,)"""
    low: Floats
    """(U, 3): least demand recorded."""
    width: Floats
    """(U, 3): width of a bucket; 0 where all demands are equal."""
    correlates: NDArray[np.uint8]
    """(K, 3, 2): whether each demand depends on the first and on the second condition."""
    second_first: NDArray[np.uint8]
    """(K, 3): 1 where the second one is the stronger."""
    cell: Ints
    """(K, 3, CELLS + 1): where the matches of each condition begin: by both buckets, by the first, by the second, all."""
    matches: Ints
    """Executions that match."""
    outcome_range: Ints
    """(U, MOST_VISITS + 1, 2): where the executions begin and end that say what follows one, by its visits before."""
    outcome: Ints
    """(E,): executions of each unit, by visits before."""
    child_first: Ints
    """(E + 1,): where the units that an execution led to begin."""
    child: Ints
    """Units."""
    rate: Floats
    """(U, 3): seconds of service of a request, by input and by output."""


class Position(NamedTuple):
    """Where a run is: the steps that run or are due, each with what is known of it and of the step before it."""

    unit: Ints
    """(S,): units by index."""
    before: Ints
    """(S,): unit of the step before, U for none."""
    known: Floats
    """(S, 3): input, output, parallelism; below 0 what is `UNKNOWN`."""
    known_before: Floats
    """(S, 3): of the step before."""
    visits: Ints
    """(U,): executions of each unit that have ended."""


class Remaining(NamedTuple):
    """Samples of what a run takes from a position to its end, in seconds."""

    service_s: Floats
    """Summed over parallel requests."""
    path_s: Floats
    """Along its longest chain of steps, of which each ends with its longest request; requests run as if alone."""


def _coefficient(a: Floats, b: Floats) -> float:
    if a.size < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _rows(graph: DemandGraph) -> tuple[Ints, Ints, Ints, Floats, Floats, list[tuple[int, ...]]]:
    """Return (units, units before, visits, demands, demands before, children) of every execution recorded."""
    index = {name: number for number, name in enumerate(graph.units)}
    unit, before, visits, own, earlier, children = [], [], [], [], [], []
    for step, parent, led_to, visit in executions(graph):
        unit.append(index[step.unit])
        before.append(index[parent.unit] if parent else len(index))
        visits.append(visit)
        own.append(demand(step, graph.units[step.unit]))
        earlier.append(demand(parent, graph.units[parent.unit]) if parent else (0.0, 0.0, 0.0))
        children.append(tuple(index[name] for name in led_to))
    shape = (len(unit), 3)
    return (
        np.array(unit, np.int64),
        np.array(before, np.int64),
        np.array(visits, np.int64),
        np.array(own, float).reshape(shape),
        np.array(earlier, float).reshape(shape),
        children,
    )


def _coefficients(own: Floats, earlier: Floats) -> Floats:
    """Return (3, 2): coefficients of each demand with its two conditions."""
    table = np.zeros((3, 2))
    for variable, (first, second) in enumerate(CONDITIONS):
        table[variable, 0] = _coefficient(own[:, variable], earlier[:, first])
        if variable == INPUT:
            table[variable, 1] = _coefficient(own[:, variable], earlier[:, second])
        elif variable == OUTPUT:
            table[variable, 1] = _coefficient(own[:, variable], own[:, second])
    return table


@compiled_inline
def bucket_of(graph: GraphArrays, unit: int, variable: int, value: float) -> int:
    """Bucket of a demand; demands beyond those recorded are in the first or the last one."""
    width = graph.width[unit, variable]
    if width == 0.0:
        return 0
    return min(DEMAND_BUCKETS - 1, max(0, int((value - graph.low[unit, variable]) / width)))


def build(graph: DemandGraph, rates: Mapping[str, ServiceRate], *, refined: bool = True) -> GraphArrays:
    """Return the arrays of *graph*. Without *refined* no correlation counts. ValueError if nothing is recorded."""
    unit, before, visits, own, earlier, children = _rows(graph)
    if not unit.size:
        raise ValueError(f"{graph.application} has no records")
    units = len(graph.units)
    low, width = np.zeros((units, 3)), np.zeros((units, 3))
    for number in np.unique(unit).tolist():
        mine = own[unit == number]
        low[number], width[number] = mine.min(axis=0), np.ptp(mine, axis=0) / DEMAND_BUCKETS

    def placed(of: Ints, values: Floats) -> Ints:
        """(E, 3): buckets of *values* of the units *of*; 0 where there is none."""
        known = np.minimum(of, units - 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            at = np.nan_to_num((values - low[known]) / width[known], nan=0.0, posinf=0.0, neginf=0.0)
        return np.clip(at, 0, DEMAND_BUCKETS - 1).astype(np.int64)

    own_bucket, earlier_bucket = placed(unit, own), placed(before, earlier)
    edges = [*sorted({*zip(before.tolist(), unit.tolist(), strict=True)}), *((-1, number) for number in range(units))]
    edge = np.tile(len(edges) - units + np.arange(units), (units + 1, 1))
    correlates = np.zeros((len(edges), 3, 2), np.uint8)
    second_first = np.zeros((len(edges), 3), np.uint8)
    cell, matches, count = np.zeros((len(edges), 3, CELLS + 1), np.int64), [], 0
    for number, (b, u) in enumerate(edges):
        rows = np.flatnonzero((unit == u) & (before == b)) if b >= 0 else np.flatnonzero(unit == u)
        if b >= 0:
            edge[b, u] = number
        table = _coefficients(own[rows], earlier[rows])
        if b < 0 or b == units:  # no unit before: only the own input is known
            table[:, 0] = table[INPUT, 1] = 0.0
        correlates[number] = refined & (table > CORRELATED)
        second_first[number] = table[:, 1] > table[:, 0]
        for variable, (first, second) in enumerate(CONDITIONS):
            i = earlier_bucket[rows, first] * correlates[number, variable, 0]
            j = (own_bucket if variable == OUTPUT else earlier_bucket)[rows, second] * correlates[number, variable, 1]
            for offset, key, size in (
                (BOTH, i * DEMAND_BUCKETS + j, FIRST),
                (FIRST, i, DEMAND_BUCKETS),
                (SECOND, j, DEMAND_BUCKETS),
                (NEITHER, np.zeros_like(i), 1),
            ):
                cell[number, variable, offset : offset + size] = count + np.searchsorted(np.sort(key), np.arange(size))
                matches.append(rows[np.argsort(key, kind="stable")])
                count += rows.size
            cell[number, variable, CELLS] = count
    seen = np.minimum(visits, MOST_VISITS)
    by_visit = np.lexsort((seen, unit))
    keys = unit[by_visit] * (MOST_VISITS + 1) + seen[by_visit]
    ends = np.arange(units)[:, None] * (MOST_VISITS + 1) + np.arange(MOST_VISITS + 2)
    sizes = [len(led_to) for led_to in children]
    steps = [step for record in graph.records for step in record.steps]
    most = np.array([longest(step, graph.units[step.unit]) for step in steps])
    with np.errstate(divide="ignore", invalid="ignore"):
        above = np.log(most / own[:, OUTPUT]) / np.sqrt(np.log(own[:, PARALLELISM]))
    for number in np.unique(unit).tolist():
        mine = unit == number
        known = mine & np.isfinite(above)
        above[mine & ~known] = above[known].mean() if known.any() else 0.0
    return GraphArrays(
        edge=edge,
        value=own,
        longest=above,
        is_llm=np.array([backend.kind == "llm" for backend in graph.units.values()], np.uint8),
        low=low,
        width=width,
        correlates=correlates,
        second_first=second_first,
        cell=cell,
        matches=np.concatenate(matches) if matches else np.zeros(0, np.int64),
        outcome_range=_outcome_ranges(np.searchsorted(keys, ends), min(FEWEST_MATCHES, len(graph.records))),
        outcome=by_visit.astype(np.int64),
        child_first=np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)]),
        child=np.array([each for led_to in children for each in led_to], np.int64),
        rate=np.array([(rate.base_s, rate.input_s, rate.output_s) for rate in (rates[unit] for unit in graph.units)]),
    )


def _outcome_ranges(first: Ints, fewest: int) -> Ints:
    """Return `GraphArrays.outcome_range`; *first* (U, MOST_VISITS + 2) is where executions begin by visits before."""
    visit = np.arange(MOST_VISITS + 1)
    ranges = np.zeros((first.shape[0], MOST_VISITS + 1, 2), np.int64)
    for distance in range(MOST_VISITS, -1, -1):
        begin, end = first[:, np.maximum(0, visit - distance)], first[:, np.minimum(MOST_VISITS, visit + distance) + 1]
        enough = (end - begin >= fewest) | (distance == MOST_VISITS)
        ranges[enough] = np.stack([begin, end], axis=2)[enough]
    return ranges


@compiled_inline
def next_random(random: NDArray[np.uint64]) -> float:
    """A number in [0, 1), by splitmix64; *random* (1,) is its state."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    mixed = random[0]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled_internal
def matching(graph: GraphArrays, edge: int, variable: int, i: int, j: int) -> tuple[int, int]:
    """Where the matches begin and end that a demand is drawn from, of the buckets *i* and *j* of its conditions."""
    at = graph.cell[edge, variable]
    first, second = graph.correlates[edge, variable, 0], graph.correlates[edge, variable, 1]
    i, j = i * first, j * second
    by_first = (FIRST + i, first)
    by_second = (SECOND + j, second)
    if first and second and at[BOTH + i * DEMAND_BUCKETS + j + 1] - at[BOTH + i * DEMAND_BUCKETS + j] >= FEWEST_MATCHES:
        key = BOTH + i * DEMAND_BUCKETS + j
        return at[key], at[key + 1]
    if graph.second_first[edge, variable]:
        by_first, by_second = by_second, by_first
    for key, counts in (by_first, by_second):
        if counts and at[key + 1] - at[key] >= FEWEST_MATCHES:
            return at[key], at[key + 1]
    return at[NEITHER], at[CELLS]


@compiled_internal
def draw_match(
    graph: GraphArrays, unit: int, before: int, variable: int, taken: float, earlier: Floats, random: NDArray[np.uint64]
) -> int:
    """An execution of *unit* for one of its demands, given those of the LLM unit *before* it and, for the output, the own
    input *taken*; -1 for a unit that no record has.
    """
    i = j = 0
    units = graph.low.shape[0]
    if before < units:
        i = bucket_of(graph, before, variable, earlier[variable])
        if variable == INPUT:
            j = bucket_of(graph, before, OUTPUT, earlier[OUTPUT])
    if variable == OUTPUT:
        j = bucket_of(graph, unit, INPUT, taken)
    begin, end = matching(graph, graph.edge[before, unit], variable, i, j)
    if begin == end:
        return -1
    return int(graph.matches[begin + int(next_random(random) * (end - begin))])


@compiled_internal
def draw_demand(
    graph: GraphArrays, unit: int, before: int, variable: int, taken: float, earlier: Floats, random: NDArray[np.uint64]
) -> float:
    """A demand of *unit*, as `draw_match`; 0 for a unit that no record has."""
    at = draw_match(graph, unit, before, variable, taken, earlier, random)
    return float(graph.value[at, variable]) if at >= 0 else 0.0


@compiled
def sample_remaining(
    graph: GraphArrays,
    unit: Ints,
    before: Ints,
    known: Floats,
    known_before: Floats,
    visits: Ints,
    passes: Ints,
    units: Ints,
    demands: Floats,
    begins_s: Floats,
    random: NDArray[np.uint64],
    service_s: Floats,
    path_s: Floats,
) -> None:
    """Write samples (n,) of what a run takes from a `Position` to its end, in seconds: its service, the steps there whole,
    and its longest path, on which a step ends with its longest request and the steps there that have ended count not at all.

    *passes* (U,), *units* (2, MOST_PENDING), *demands* (2, MOST_PENDING, 3) and *begins_s* (MOST_PENDING,) are room to work.
    """
    pending_unit, pending_before = units[0], units[1]
    pending, earlier = demands[0], demands[1]
    for sample in range(service_s.size):
        for at in range(visits.size):
            passes[at] = visits[at]
        waiting = min(unit.size, MOST_PENDING)
        for at in range(waiting):
            pending_unit[at], pending_before[at] = unit[at], before[at]
            for variable in range(3):
                pending[at, variable], earlier[at, variable] = known[at, variable], known_before[at, variable]
            begins_s[at] = 0.0
        service_s[sample] = path_s[sample] = 0.0
        while waiting > 0:
            waiting -= 1
            now, last = pending_unit[waiting], pending_before[waiting]
            taken, given, parallel = pending[waiting, 0], pending[waiting, 1], pending[waiting, 2]
            has_ended, above = given >= 0.0, 0.0
            if taken < 0.0:
                taken = draw_demand(graph, now, last, INPUT, 0.0, earlier[waiting], random)
            if given < 0.0:
                at = draw_match(graph, now, last, OUTPUT, taken, earlier[waiting], random)
                if at >= 0:
                    given, above = graph.value[at, OUTPUT], graph.longest[at]
                else:
                    given = 0.0
            if parallel < 0.0:
                least, parallel, tries = -parallel, 0.0, 0
                while parallel < least and tries < MOST_TRIES:
                    parallel = draw_demand(graph, now, last, PARALLELISM, taken, earlier[waiting], random)
                    tries += 1
                parallel = max(parallel, least)
            takes_s = graph.rate[now, 0] + graph.rate[now, 1] * taken + graph.rate[now, 2] * given
            service_s[sample] += parallel * takes_s
            ends_s = begins_s[waiting]
            if not has_ended:
                most = given * math.exp(above * math.sqrt(math.log(parallel))) if parallel > 1.0 else given
                ends_s += takes_s + graph.rate[now, 2] * (most - given)
            path_s[sample] = max(path_s[sample], ends_s)
            visit = min(passes[now], MOST_VISITS)
            begin, end = graph.outcome_range[now, visit, 0], graph.outcome_range[now, visit, 1]
            passes[now] += 1
            if begin == end or passes[now] > MOST_PASSES:
                continue
            chosen = graph.outcome[begin + int(next_random(random) * (end - begin))]
            if not graph.is_llm[now]:
                now, taken, given, parallel = last, earlier[waiting, 0], earlier[waiting, 1], earlier[waiting, 2]
            for at in range(graph.child_first[chosen], graph.child_first[chosen + 1]):
                if waiting < MOST_PENDING:
                    pending_unit[waiting], pending_before[waiting] = graph.child[at], now
                    for variable in range(3):
                        pending[waiting, variable] = UNKNOWN
                    earlier[waiting, 0], earlier[waiting, 1], earlier[waiting, 2] = taken, given, parallel
                    begins_s[waiting] = ends_s
                    waiting += 1


def remaining(arrays: GraphArrays, position: Position, count: int, seed: int) -> Remaining:
    """Return *count* samples of what a run takes from *position* to its end."""
    service_s, path_s, passes = np.empty(count), np.empty(count), np.empty_like(position.visits)
    units, demands = np.empty((2, MOST_PENDING), np.int64), np.empty((2, MOST_PENDING, 3))
    random = np.array([seed], np.uint64)
    sample_remaining(arrays, *position, passes, units, demands, np.empty(MOST_PENDING), random, service_s, path_s)
    return Remaining(service_s, path_s)
