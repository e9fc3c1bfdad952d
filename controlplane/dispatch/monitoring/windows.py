"""Counts and latency histograms over sliding windows of the last minutes; attainment by SLO class.

One `Windows` holds them for a growing set of groups (the fleet, each model, each endpoint, each instance). Values are first
collected in small dictionaries, by the groups they count for together: a request records a dozen times. Counts are then
written to a ring of one-second slices; latencies are added to one histogram of the last minute, and taken from it again a
minute later. A group takes 6 kB once it is counted for, and 4 kB while it has latencies.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from controlplane.fleet.attainment import Attainment

SLICES = 300  # one-second slices: the longest window
LATENCY_WINDOW_S = 60
_GROWTH = 1.08  # width of a histogram bucket: percentiles are within 4 %
_FLOOR_MS = 0.1
_BUCKETS = 256  # up to 0.1 ms x 1.08^255 = 9 hours
_PER_LOG = 1.0 / math.log(_GROWTH)
_EDGES_MS = _FLOOR_MS * _GROWTH ** np.arange(_BUCKETS)


class Count(IntEnum):
    REQUESTS = 0
    FAILED = 1
    FINISHED = 2
    SLO_MET = 3
    SLO_JUDGED = 4


class Latency(IntEnum):
    TTFT = 0
    ITL = 1
    E2E = 2
    QUEUE = 3


_PLACES = len(Latency) * _BUCKETS  # buckets of all histograms of a group


class Windows:
    """Sliding windows for any number of groups; `group(name)` creates one on first use."""

    def __init__(self) -> None:
        self._groups: dict[str, int] = {}
        self._second = -1
        self._started_second = -1
        self._counts: dict[int, NDArray[np.int32]] = {}  # slices by group
        self._counts_now: dict[tuple[int, ...], list[int]] = {}  # of the current second, by groups
        self._histograms: dict[int, array[int]] = {}  # of the last minute, by group
        self._together: dict[tuple[int, ...], int] = {}  # groups that latencies were recorded for together
        self._latency_now: Counter[int] = Counter()  # by number of the groups and place in their histograms
        self._written = [(array("q"), array("i")) for _ in range(LATENCY_WINDOW_S)]  # the same by second, and amounts

    def group(self, name: str) -> int:
        return self._groups.setdefault(name, len(self._groups))

    def known(self, name: str) -> int | None:
        """Return the group called *name*; None before its first use."""
        return self._groups.get(name)

    def advance(self, now_s: float) -> None:
        """Move the ring to *now_s*, clearing the slices that are reused. Call before recording and reading."""
        second = int(now_s)
        if second == self._second:
            return
        if self._second < 0:
            self._started_second = self._second = second
            return
        self._write()
        for passed in range(max(self._second + 1, second - SLICES + 1), second + 1):
            for counts in self._counts.values():
                counts[:, passed % SLICES] = 0
        for passed in range(max(self._second + 1, second - LATENCY_WINDOW_S + 1), second + 1):
            self._forget(passed % LATENCY_WINDOW_S)
        self._second = second

    def count(self, groups: tuple[int, ...], what: Count, amount: int = 1) -> None:
        counts = self._counts_now.get(groups)
        if counts is None:
            counts = self._counts_now[groups] = [0] * len(Count)
        counts[what] += amount

    def latency(self, groups: tuple[int, ...], what: Latency, value_ms: float) -> None:
        bucket = int(math.log(value_ms / _FLOOR_MS) * _PER_LOG) + 1 if value_ms > _FLOOR_MS else 0
        number = self._together.setdefault(groups, len(self._together))
        self._latency_now[number * _PLACES + what * _BUCKETS + min(bucket, _BUCKETS - 1)] += 1

    def _write(self) -> None:
        """Write the values of the current second."""
        for groups, counts in self._counts_now.items():
            for group in groups:
                if group not in self._counts:
                    self._counts[group] = np.zeros((len(Count), SLICES), np.int32)
                self._counts[group][:, self._second % SLICES] += counts
        self._counts_now.clear()
        if self._latency_now:
            places, amounts = array("q", self._latency_now.keys()), array("i", self._latency_now.values())
            self._add(places, amounts)
            for written, new in zip(self._written[self._second % LATENCY_WINDOW_S], (places, amounts), strict=True):
                written.extend(new)
            self._latency_now.clear()

    def _forget(self, at: int) -> None:
        """Take what was written in slice *at* from the histograms, and free those that are empty then."""
        places, amounts = self._written[at]
        if places:
            self._written[at] = array("q"), array("i")
            for group in self._add(places, array("i", [-amount for amount in amounts])):
                if not any(self._histograms[group]):
                    del self._histograms[group]

    def _add(self, places: "array[int]", amounts: "array[int]") -> set[int]:
        """Add *amounts* to the histograms at *places*; return their groups."""
        together, changed = list(self._together), set()
        for place, amount in zip(places, amounts, strict=True):
            number, at = divmod(place, _PLACES)
            for group in together[number]:
                histogram = self._histograms.get(group)
                if histogram is None:
                    histogram = self._histograms[group] = array("i", bytes(4 * _PLACES))
                histogram[at] += amount
                changed.add(group)
        return changed

    def total(self, group: int, what: Count, window_s: int) -> int:
        """Return the sum over the last *window_s* whole seconds (without the current second)."""
        if group not in self._counts:
            return 0
        seconds = np.arange(self._second - self._span(window_s), self._second) % SLICES
        return int(self._counts[group][what, seconds].sum())

    def rate(self, group: int, what: Count, window_s: int) -> float:
        """Return the rate per second over the last *window_s* whole seconds, or since the start if that is less."""
        return self.total(group, what, window_s) / max(self._span(window_s), 1)

    def percentiles(self, group: int, what: Latency, percents: tuple[float, ...]) -> list[float | None]:
        """Return percentiles in milliseconds over the last minute; None where nothing was recorded."""
        self._write()
        counts = np.array(self._histograms.get(group, ())[what * _BUCKETS : (what + 1) * _BUCKETS])
        total = int(counts.sum())
        if not total:
            return [None] * len(percents)
        buckets = np.searchsorted(np.cumsum(counts), np.ceil(np.asarray(percents) / 100.0 * total))
        # logarithmic middle of a bucket: half a bucket's width below its upper edge
        return [float(edge) for edge in _EDGES_MS[np.minimum(buckets, _BUCKETS - 1)] / math.sqrt(_GROWTH)]

    def _span(self, window_s: int) -> int:
        return min(window_s, self._second - self._started_second)


SLO_WINDOW_S = 300


class ServiceLevels:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._windows = Windows()
        self.objectives: dict[str, float] = {}  # by class with a verdict, the latest promise
        self._groups: dict[tuple[tuple[str, ...], str], tuple[int, ...]] = {}  # by scopes and class

    def judge(self, scopes: tuple[str, ...], slo_class: str, objective: float, met: bool) -> None:
        """Count a verdict on a request of *slo_class* for each of *scopes*."""
        self.objectives[slo_class] = objective
        self._windows.advance(self._clock())
        groups = self._groups.get((scopes, slo_class))
        if groups is None:
            groups = tuple(self._windows.group(_name(scope, slo_class)) for scope in scopes)
            self._groups[scopes, slo_class] = groups
        self._windows.count(groups, Count.SLO_JUDGED)
        self._windows.count(groups, Count.SLO_MET, int(met))

    def of(self, scope: str) -> list[Attainment]:
        """Return the attainment of every class with a recent verdict in *scope*, by name."""
        windows = self._windows
        windows.advance(self._clock())
        rows = []
        for slo_class, objective in sorted(self.objectives.items()):
            if (group := windows.known(_name(scope, slo_class))) is not None:
                met, judged = (windows.total(group, what, SLO_WINDOW_S) for what in (Count.SLO_MET, Count.SLO_JUDGED))
                rows.append(Attainment(slo_class, met, judged, objective))
        return [row for row in rows if row.judged]


def _name(scope: str, slo_class: str) -> str:
    return f"{slo_class} in {scope}"
