"""Decisions of two simulations side by side, around the first that differs: what each does, in order of time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scheduling.simulation.measures.differences import INSTANCES, ORDER, SWAP, Difference, Log

ROWS: Final = 50
BEFORE: Final = 20
"""Of the rows, those before the first difference."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One decision as each of the two makes it; empty where one of them makes none."""

    at_s: float
    about: str
    """Of which model, or of whose request."""
    first: str
    other: str
    differs: bool


def around(first: Log, other: Log, difference: Difference) -> tuple[list[Pair], int]:
    """(at most ROWS decisions of the difference's kind in its region, place of the first one that differs among them).

    *difference* is one of `differences(first, other)`. Moves and swaps of instances are decisions of one kind here, as are
    the region and the instance of a request.
    """
    number = first.regions.index(difference.region)
    if difference.kind in (INSTANCES, SWAP):
        rows = _scaling(first, other, difference.region)
        at = next((at for at, row in enumerate(rows) if row.differs and row.at_s >= difference.at_s), 0)
        begin = max(0, at - BEFORE)
        return rows[begin : begin + ROWS], at - begin
    if difference.kind == ORDER:
        return _order(first, other, number, first.models.index(difference.model))
    return _requests(first, other, number, difference.at_s)


def _scaling(first: Log, other: Log, region: str) -> list[Pair]:
    """Changes of instances in *region*: the same change at the same time is one row."""
    rows = []
    ours, theirs = _changes(first, region), _changes(other, region)
    for key in sorted({*ours, *theirs}):
        for at in range(max(len(ours.get(key, ())), len(theirs.get(key, ())))):
            one, two = (own[key][at] if at < len(own.get(key, ())) else "" for own in (ours, theirs))
            rows.append(Pair(key[0], key[1], one, two, not (one and two)))
    return rows


def _changes(log: Log, region: str) -> dict[tuple[float, str, str], list[str]]:
    """By (time, model, what is done) the sentences, with reasons, which do not make a difference."""
    changes: dict[tuple[float, str, str], list[str]] = {}
    for at_s, model, place, done, reason in log.moves:
        if place == region:
            does = f"{'adds' if done > 0 else 'takes away'} {abs(done)}"
            changes.setdefault((at_s, model, does), []).append(f"{does}{f': {reason}' if reason else ''}")
    for at_s, instance, model, place in log.swaps:
        if place == region:
            changes.setdefault((at_s, model, f"swaps {instance}"), []).append(f"swaps {instance} to {model}")
    return changes


def _requests(first: Log, other: Log, number: int, at_s: float) -> tuple[list[Pair], int]:
    """Requests of the region in order of arrival: who serves each."""
    own = np.flatnonzero(first.region == number)
    at = int(np.searchsorted(first.arrival_s[own], at_s))
    rows: list[Pair] = []
    begin = max(0, at - BEFORE)
    for request in own[begin : begin + ROWS].tolist():
        said = [_served(log, request, number) for log in (first, other)]
        names = [log.instances[log.instance[request]] if log.instance[request] >= 0 else None for log in (first, other)]
        model = first.models[first.model[request]]
        rows.append(Pair(float(first.arrival_s[request]), model, said[0], said[1], names[0] != names[1]))
    return rows, next((place for place, row in enumerate(rows) if row.differs and row.at_s >= at_s), at - begin)


def _served(log: Log, request: int, number: int) -> str:
    if log.instance[request] < 0:
        return "is never begun"
    name, _, region = log.instances[log.instance[request]]
    away = "" if region == log.regions[number] else f", in {region}"
    waited_s = float(log.begin_s[request] - log.arrival_s[request])
    return f"{name}{away}{f', after {_seconds(waited_s)}' if waited_s > 0 else ''}"


def _order(first: Log, other: Log, number: int, model: int) -> tuple[list[Pair], int]:
    """Requests that waited, by the order in which each begins them."""
    own = np.flatnonzero((first.region == number) & (first.model == model))
    own = own[np.isfinite(first.begin_s[own]) & np.isfinite(other.begin_s[own])]
    own = own[(first.begin_s[own] > first.arrival_s[own]) | (other.begin_s[own] > other.arrival_s[own])]
    ours, theirs = (own[np.argsort(log.begin_s[own], kind="stable")] for log in (first, other))
    differ = np.flatnonzero(ours != theirs)
    at = int(differ[0]) if differ.size else 0
    begin = max(0, at - BEFORE)
    places = {int(request): place for place, request in enumerate(np.sort(own).tolist(), 1)}
    rows = [
        Pair(
            float(min(first.begin_s[one], other.begin_s[two])),
            first.models[model],
            _begun(first, one, places),
            _begun(other, two, places),
            one != two,
        )
        for one, two in _both(ours, theirs, begin)
    ]
    return rows, at - begin


def _both(ours: NDArray[np.int64], theirs: NDArray[np.int64], begin: int) -> Sequence[tuple[int, int]]:
    window = slice(begin, begin + ROWS)
    return list(zip(ours[window].tolist(), theirs[window].tolist(), strict=True))


def _begun(log: Log, request: int, places: dict[int, int]) -> str:
    waited_s = float(log.begin_s[request] - log.arrival_s[request])
    return f"begins request {places[request]}, which had waited {_seconds(waited_s)}"


def _seconds(lasted_s: float) -> str:
    return f"{lasted_s:.1f} s" if lasted_s >= 1 else f"{1000 * max(0.0, lasted_s):.0f} ms"
