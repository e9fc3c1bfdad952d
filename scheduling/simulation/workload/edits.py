"""Edits of demand: more or less of it, earlier or later, longer or shorter, and what another tenant adds.

They act on the requests themselves, wherever these come from, and draw from a separate seed: futures that share their
edits get the very same requests. More, fewer, earlier and later are whole runs, by their first calls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.simulation.workload.columns import Calls, Coded, Floats, Ints, Workload

JITTER_S = 60.0
"""Width of the window around a request in which its copies arrive."""
SEED = 21


@dataclass(frozen=True, slots=True)
class Scope:
    """Requests that an edit applies to; empty sets mean all."""

    models: frozenset[str] = frozenset()
    regions: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()

    def of(self, workload: Workload) -> NDArray[np.bool_]:
        """Return a mask of the requests in the scope."""
        inside = np.ones(len(workload), bool)
        for names, column in (
            (self.models, workload.model),
            (self.regions, workload.region),
            (self.classes, workload.slo_class),
        ):
            if names:
                inside &= np.array([name in names for name in column.names], bool)[column.codes]
        return inside


@dataclass(frozen=True, slots=True)
class Factor:
    """*by* times as many requests from *from_s* until *until_s*, with a ramp of *ramp_s* at both ends."""

    scope: Scope
    by: float
    from_s: float = 0.0
    until_s: float = np.inf
    ramp_s: float = 0.0

    def of(self, arrival_s: Floats) -> Floats:
        """Return the factor at each of *arrival_s*."""
        inside = (arrival_s >= self.from_s) & (arrival_s < self.until_s)
        height = np.ones(arrival_s.size)
        if self.ramp_s > 0:
            height = np.clip(np.minimum(arrival_s - self.from_s, self.until_s - arrival_s) / self.ramp_s, 0.0, 1.0)
        return np.where(inside, 1.0 + (self.by - 1.0) * height, 1.0)

    def of_each(self, workload: Workload) -> Floats:
        """Return how often each request of *workload* comes, on average."""
        return np.where(self.scope.of(workload), self.of(workload.arrival_s), 1.0)

    def applied(self, workload: Workload, horizon_s: float, draw: np.random.Generator) -> Workload:
        first, _ = workload.wholes()
        factor = self.of_each(workload)[first]
        whole = np.floor(factor)
        counts = (whole + (draw.random(factor.size) < factor - whole)).astype(np.int64)
        chosen = np.repeat(np.arange(counts.size), counts)
        made, copy = workload.copied(chosen)
        again = np.diff(chosen, prepend=-1) == 0
        moved_s = np.where(again, draw.uniform(-JITTER_S / 2, JITTER_S / 2, chosen.size), 0.0)[copy]
        last_s = np.nextafter(horizon_s, 0.0) if np.isfinite(horizon_s) else np.inf
        return replace(made, arrival_s=np.clip(made.arrival_s + moved_s, 0.0, np.maximum(last_s, made.arrival_s)))


@dataclass(frozen=True, slots=True)
class Shift:
    """Everything *by_s* later (below 0: earlier); requests that leave the horizon at one end enter it at the other."""

    scope: Scope
    by_s: float

    def applied(self, workload: Workload, horizon_s: float, draw: np.random.Generator) -> Workload:
        arrival_s = workload.arrival_s
        span_s = horizon_s if np.isfinite(horizon_s) else float(arrival_s[-1]) + 1.0 if arrival_s.size else 1.0
        first, of = workload.wholes()
        inside, began_s = (self.scope.of(workload) & (arrival_s < span_s))[first], arrival_s[first]
        moved_s = np.where(inside, (began_s + self.by_s) % span_s, began_s)
        return replace(workload, arrival_s=arrival_s - began_s[of] + moved_s[of])


@dataclass(frozen=True, slots=True)
class LengthFactor:
    """Prompts and outputs *prompt* and *output* times as long."""

    scope: Scope
    prompt: float = 1.0
    output: float = 1.0

    def applied(self, workload: Workload, horizon_s: float, draw: np.random.Generator) -> Workload:
        inside = self.scope.of(workload)

        def scaled(tokens: NDArray[np.int32], by: float) -> NDArray[np.int32]:
            longer: NDArray[np.int32] = np.maximum(1, np.rint(tokens * by)).astype(np.int32)
            return np.where(inside, longer, tokens)

        return replace(
            workload,
            prompt_tokens=scaled(workload.prompt_tokens, self.prompt),
            output_tokens=scaled(workload.output_tokens, self.output),
        )


@dataclass(frozen=True, slots=True)
class More:
    """Further requests, such as those of a new tenant."""

    requests: Workload

    def applied(self, workload: Workload, horizon_s: float, draw: np.random.Generator) -> Workload:
        return merged(workload, self.requests.select(self.requests.arrival_s < horizon_s))


@dataclass(frozen=True, slots=True)
class Retarget:
    """Requests for the public *name* are shared by *weights*, of which one is above 0.

    As few as possible move: only from models whose share becomes smaller to those whose share grows.
    """

    name: str
    weights: Mapping[str, float]

    def applied(self, workload: Workload, horizon_s: float, draw: np.random.Generator) -> Workload:
        if workload.asked is None or self.name not in workload.asked.names:
            return workload
        names = [*workload.model.names, *(name for name in self.weights if name not in workload.model.names)]
        rows = np.flatnonzero(workload.asked.codes == workload.asked.names.index(self.name))
        served = workload.model.codes[rows]
        was = np.bincount(served, minlength=len(names)) / max(rows.size, 1)
        will = np.array([self.weights.get(name, 0.0) for name in names])
        will = will / will.sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            stays = draw.random(rows.size) < np.where(was > will, will / was, 1.0)[served]
        grows, moving = np.maximum(will - was, 0.0), np.flatnonzero(~stays)
        codes = workload.model.codes.copy()
        if moving.size:
            codes[rows[moving]] = draw.choice(len(names), moving.size, p=grows / grows.sum())
        return replace(workload, model=Coded(codes, names))


Edit = Factor | Shift | LengthFactor | More | Retarget


def edited(workload: Workload, edits: Sequence[Edit], *, seed: int, horizon_s: float = np.inf) -> Workload:
    """Return *workload* after *edits*, one after the other, in order of arrival. The same values give the same requests."""
    for number, edit in enumerate(edits):
        made = edit.applied(workload, horizon_s, np.random.default_rng([seed, SEED, number]))
        workload = made.select(np.argsort(made.arrival_s, kind="stable"))
    return workload


def merged(one: Workload, other: Workload) -> Workload:
    """Return the requests of *one*, then of the other. Raise ValueError if prefixes are in blocks of two sizes."""
    if not len(other):
        return one
    both = one.prefix_first is not None and other.prefix_first is not None
    if both and one.prefix_block_tokens != other.prefix_block_tokens:
        raise ValueError("The prefixes of the two are in blocks of different sizes.")
    first = hashes = None
    if one.prefix_first is not None or other.prefix_first is not None:
        starts, ends = _prefixes(one), _prefixes(other)
        first = np.concatenate([starts[0], ends[0][1:] + starts[0][-1]])
        hashes = np.concatenate([starts[1], ends[1]])
    return Workload(
        np.concatenate([one.arrival_s, other.arrival_s]),
        np.concatenate([one.prompt_tokens, other.prompt_tokens]),
        np.concatenate([one.output_tokens, other.output_tokens]),
        _joined(one.model, other.model),
        _joined(one.region, other.region),
        _joined(one.slo_class, other.slo_class),
        _joined(one.tenant, other.tenant),
        prefix_first=first,
        prefix_hashes=hashes,
        prefix_block_tokens=one.prefix_block_tokens or other.prefix_block_tokens,
        predicted_tokens=_predicted(one, other),
        asked=_asked(one, other),
        calls=_calls(one, other),
        left_out=one.left_out + other.left_out,
    )


def _calls(one: Workload, other: Workload) -> Calls | None:
    if one.calls is None and other.calls is None:
        return None
    (run, *first), (later, *second) = (
        Calls.none(len(each)) if each.calls is None else each.calls for each in (one, other)
    )
    later = np.where(later >= 0, later + run.max(initial=-1) + 1, later)
    pairs: list[Any] = list(zip(first, second, strict=True))
    columns: list[Any] = [_joined(*each) if isinstance(each[0], Coded) else np.concatenate(each) for each in pairs]
    return Calls(np.concatenate([run, later]), *columns)


def _asked(one: Workload, other: Workload) -> Coded | None:
    if one.asked is None and other.asked is None:
        return None
    first, second = (
        Coded(np.zeros(len(each), np.int32), [""]) if each.asked is None else each.asked for each in (one, other)
    )
    return _joined(first, second)


def _predicted(one: Workload, other: Workload) -> Ints | None:
    """Return the predictions of both; where only one has them, those of the other are exact."""
    if one.predicted_tokens is None and other.predicted_tokens is None:
        return None
    return np.concatenate(
        [each.output_tokens if each.predicted_tokens is None else each.predicted_tokens for each in (one, other)]
    )


def _prefixes(workload: Workload) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if workload.prefix_first is None or workload.prefix_hashes is None:
        return np.zeros(len(workload) + 1, np.int64), np.empty(0, np.int64)
    return workload.prefix_first, workload.prefix_hashes


def _joined(one: Coded, other: Coded) -> Coded:
    names = [*one.names, *(name for name in other.names if name not in one.names)]
    codes = np.array([names.index(name) for name in other.names], one.codes.dtype)[other.codes]
    return Coded(np.concatenate([one.codes, codes]), names)
