"""Differences between two simulations of the same requests: the decisions that first differ, and their effects.

Decisions are paired by region and kind: how many instances there are, to which region a request is sent, on which instance
it runs, and in which order what waits is begun. The first difference of each pair is taken, and ranked by how the two
differ in the time after it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from scheduling.simulation.cluster.world import Outcome, State
from scheduling.simulation.measures.results import kept
from scheduling.simulation.result import Result

AFTER_S: Final = 900.0
"""So long after a difference its effect is looked at."""
INSTANCES, SWAP, REGION, INSTANCE, ORDER = "instances", "swap", "region", "instance", "order"


@dataclass(frozen=True, slots=True)
class Log:
    """The decisions of one simulation. Arrays have one element a request; *moves* and *series* are in order of time."""

    instances: list[tuple[str, str, str]]
    """(name, model, region) of each."""
    regions: list[str]
    models: list[str]
    region: NDArray[np.int16]
    """Of the caller."""
    model: NDArray[np.int16]
    arrival_s: NDArray[np.float64]
    instance: NDArray[np.int32]
    """-1 for a request that none took."""
    begin_s: NDArray[np.float64]
    """When an instance took it; NaN for never."""
    judged: NDArray[np.bool_]
    met: NDArray[np.bool_]
    in_run: NDArray[np.bool_]
    """Of calls of runs, which come when those before them have ended."""
    moves: list[tuple[float, str, str, int, str]]
    """(time, model, region, instances more or fewer, reason), those that were carried out."""
    swaps: list[tuple[float, str, str, str]]
    """(time, instance, model, region) that it changed to."""
    series: dict[str, Any]
    """t_s, endpoints, ready, waiting, as `columns.over_time`."""

    @classmethod
    def of(cls, result: Result, series: dict[str, Any]) -> "Log":
        cluster = result.cluster
        judged, met = kept(result, cluster.promises)
        requests, outcomes, endpoints = result.requests, result.outcomes, cluster.endpoints
        taken = outcomes["state"] != Outcome.WAITING
        begin_s = requests.arrival_s + np.where(taken, outcomes["queue_s"], np.nan)
        return cls(
            [(one.name, one.model, one.region) for one in cluster.instances],
            list(cluster.regions),
            list(cluster.models),
            requests.region.astype(np.int16),
            requests.model.astype(np.int16),
            np.asarray(requests.arrival_s),
            np.where(np.isfinite(begin_s), outcomes["instance"], -1).astype(np.int32),
            begin_s,
            judged,
            met,
            np.asarray(requests.run >= 0),
            [(one.time_s, *endpoints[one.endpoint], one.done, one.reason) for one in result.moves if one.done],
            [
                (float(one["time_s"]), cluster.instances[int(one["instance"])].name, *endpoints[one["endpoint"]])
                for one in result.changes
                if one["after"] in (State.WAKING, State.LOADING)
                and one["before"] != State.FAILED
                and cluster.instances[int(one["instance"])].sharing is not None
            ],
            series,
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision of the *other* simulation that the *first* one makes in another way, or not at all."""

    at_s: float
    region: str
    kind: str
    model: str
    first: str
    """The decision of each, in words."""
    other: str
    waiting: float
    """Requests that wait more (below 0: fewer) in the other one, on average over the time after, in the region."""
    slo_met: float | None
    """Share of the requests that came in that time from the region, more in the other one; None if none was judged."""

    @property
    def weight(self) -> float:
        """Return the rank of the difference: a point of SLO met counts as ten waiting requests."""
        return abs(self.waiting) + 1000 * abs(self.slo_met or 0.0)


def differences(first: Log, other: Log) -> list[Difference]:
    """Return the first difference of each region and kind, the greatest effects first.

    Raises ValueError unless both have the same requests.
    """
    of = [(log.region, log.model, log.in_run, np.where(log.in_run, 0.0, log.arrival_s)) for log in (first, other)]
    if not all(map(np.array_equal, *of)):
        raise ValueError("The two simulations do not have the same requests.")
    earliest = []
    for number, region in enumerate(first.regions):
        for at_s, kind, model, ours, theirs in _earliest_of_each(first, other, number, region):
            waiting = _waiting(other, region, at_s) - _waiting(first, region, at_s)
            came = (first.region == number) & (first.arrival_s >= at_s) & (first.arrival_s < at_s + AFTER_S)
            judged = came & first.judged & other.judged
            more = float(other.met[judged].mean() - first.met[judged].mean()) if judged.any() else None
            earliest.append(Difference(at_s, region, kind, model, ours, theirs, round(waiting, 2), more))
    return sorted(earliest, key=lambda each: (-each.weight, each.at_s))


def _earliest_of_each(first: Log, other: Log, number: int, region: str) -> Iterator[tuple[float, str, str, str, str]]:
    """Return (time, kind, model, action of the first, action of the other) of the first differences in *region*."""
    for kind, earliest in (
        (INSTANCES, _moves(first, other, region)),
        (SWAP, _swaps(first, other, region)),
        (REGION, _regions(first, other, number)),
        (INSTANCE, _instances(first, other, number)),
        (ORDER, _order(first, other, number)),
    ):
        if earliest is not None:
            at_s, model, ours, theirs = earliest
            yield at_s, kind, model, ours, theirs


Split = tuple[float, str, str, str] | None


def _moves(first: Log, other: Log, region: str) -> Split:
    """Return the first move of instances that only one of the two makes; reasons do not count."""
    ours, theirs = ([move for move in log.moves if move[2] == region] for log in (first, other))
    for at in range(max(len(ours), len(theirs))):
        one, two = (moves[at] if at < len(moves) else None for moves in (ours, theirs))
        if one is not None and two is not None and one[:4] == two[:4]:
            continue
        earlier = min((move for move in (one, two) if move is not None), key=lambda move: move[0])
        model = earlier[1]
        said = [
            _move(next((move for move in moves[at:] if move[1] == model), None), earlier[0]) for moves in (ours, theirs)
        ]
        return earlier[0], model, said[0], said[1]
    return None


def _move(move: tuple[float, str, str, int, str] | None, at_s: float) -> str:
    if move is None:
        return "makes no further move"
    time_s, model, _, done, reason = move
    does = f"{'adds' if done > 0 else 'takes away'} {abs(done)} {model}"
    when = "" if time_s == at_s else f" {(time_s - at_s) / 60:.0f} min later"
    return f"{does}{when}{f': {reason}' if reason else ''}"


def _swaps(first: Log, other: Log, region: str) -> Split:
    ours, theirs = ([swap for swap in log.swaps if swap[3] == region] for log in (first, other))
    for at in range(max(len(ours), len(theirs))):
        one, two = (swaps[at] if at < len(swaps) else None for swaps in (ours, theirs))
        if one == two:
            continue
        earlier = min((swap for swap in (one, two) if swap is not None), key=lambda swap: swap[0])
        said = [f"swaps {each[1]} to {each[2]}" if each is earlier else "swaps nothing then" for each in (one, two)]
        return earlier[0], earlier[2], said[0], said[1]
    return None


def _served(log: Log, requests: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the region whose instance took each of *requests*; -1 for none."""
    of = np.array([log.regions.index(region) for _, _, region in log.instances] + [-1])
    served: NDArray[np.int64] = of[log.instance[requests]]
    return served


def _regions(first: Log, other: Log, number: int) -> Split:
    own = np.flatnonzero((first.region == number) & (first.instance >= 0) & (other.instance >= 0))
    ours, theirs = _served(first, own), _served(other, own)
    differ = np.flatnonzero(ours != theirs)
    if not differ.size:
        return None
    at = int(differ[0])
    request = int(own[at])
    within = own[(first.arrival_s[own] >= first.arrival_s[request])]
    within = within[first.arrival_s[within] < first.arrival_s[request] + AFTER_S]
    said = []
    for log, chosen in ((first, ours[at]), (other, theirs[at])):
        goes = "serves a request itself" if chosen == number else f"sends a request to {log.regions[chosen]}"
        away = float((_served(log, within) != number).mean())
        said.append(f"{goes} ({100 * away:.1f}% of its requests leave it in the {AFTER_S / 60:.0f} min after)")
    return float(first.arrival_s[request]), first.models[first.model[request]], said[0], said[1]


def _instances(first: Log, other: Log, number: int) -> Split:
    """Return the first request that both serve in the same region, on instances of different names."""
    own = np.flatnonzero((first.region == number) & (first.instance >= 0) & (other.instance >= 0))
    same = own[_served(first, own) == _served(other, own)]
    names, theirs = ([name for name, _, _ in log.instances] for log in (first, other))
    codes = {name: code for code, name in enumerate(dict.fromkeys([*names, *theirs]))}
    one, two = (
        np.array([codes[name] for name in own_names])[log.instance[same]]
        for own_names, log in ((names, first), (theirs, other))
    )
    differ = np.flatnonzero(one != two)
    if not differ.size:
        return None
    request = int(same[differ[0]])
    said = [f"gives a request to {log.instances[log.instance[request]][0]}" for log in (first, other)]
    return float(first.arrival_s[request]), first.models[first.model[request]], said[0], said[1]


def _order(first: Log, other: Log, number: int) -> Split:
    """Return the first pair of waiting requests of one model that the two begin in different order."""
    earliest: Split = None
    for model, name in enumerate(first.models):
        ours, theirs = _begun_order(first, other, number, model)
        differ = np.flatnonzero(ours != theirs)
        if not differ.size:
            continue
        at = int(differ[0])
        one, two = int(ours[at]), int(theirs[at])
        at_s = float(min(first.begin_s[one], other.begin_s[two]))
        if earliest is not None and earliest[0] <= at_s:
            continue
        said = [
            f"begins a request that had waited {_seconds(log.begin_s[each] - log.arrival_s[each])}"
            for log, each in ((first, one), (other, two))
        ]
        earliest = at_s, name, said[0], said[1]
    return earliest


def _begun_order(first: Log, other: Log, number: int, model: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return requests of *model* from region *number* that waited, in each simulation's order of beginning."""
    own = np.flatnonzero((first.region == number) & (first.model == model))
    own = own[np.isfinite(first.begin_s[own]) & np.isfinite(other.begin_s[own])]
    own = own[(first.begin_s[own] > first.arrival_s[own]) | (other.begin_s[own] > other.arrival_s[own])]
    ours, theirs = (own[np.argsort(log.begin_s[own], kind="stable")] for log in (first, other))
    return ours, theirs


def _seconds(lasted_s: float) -> str:
    return f"{lasted_s:.1f} s" if lasted_s >= 1 else f"{1000 * max(0.0, lasted_s):.0f} ms"


def _waiting(log: Log, region: str, at_s: float) -> float:
    """Return the mean number of requests that wait in *region* over the time after *at_s*."""
    t_s = np.array(log.series["t_s"])
    inside = (t_s >= at_s) & (t_s < at_s + AFTER_S)
    if not inside.any():
        return 0.0
    rows = [
        np.array(waiting)[inside]
        for (_, place), waiting in zip(log.series["endpoints"], log.series["waiting"], strict=True)
        if place == region
    ]
    return float(np.sum(rows, axis=0).mean()) if rows else 0.0
