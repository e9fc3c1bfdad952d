"""Requests to come, as columns: what a trace or a generator gives and a simulation takes."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Scalar = TypeVar("Scalar", np.float64, np.int16, np.int32, np.int64)
Codes = npt.NDArray[np.int16] | npt.NDArray[np.int32]


class Coded(NamedTuple):
    """A column of names: `names[codes[i]]` for request i."""

    codes: Codes
    names: list[str]

    @classmethod
    def of(cls, names: Sequence[str]) -> "Coded":
        known = {name: at for at, name in enumerate(dict.fromkeys(names))}
        return cls(np.fromiter((known[name] for name in names), np.int32, len(names)), list(known))


def buffered(values: "array[Any]", dtype: type[Scalar]) -> npt.NDArray[Scalar]:
    """Return the numbers in *values*, over its buffer and without a copy."""
    return np.frombuffer(values, dtype) if values else np.empty(0, dtype)


class Calls(NamedTuple):
    """Which requests are calls of application runs, and how these went when they were recorded; one element a request."""

    run: Ints
    """Number of its run, -1 for none."""
    step: Ints
    """Number of the call in its run, from 1; 0 for none."""
    application: Coded
    unit: Coded
    due_in_s: Floats
    """Deadline of its run, after this began; infinity for none."""
    took_s: Floats
    """From its arrival to its end; NaN where that is not known."""
    failed: npt.NDArray[np.bool_]

    @classmethod
    def none(cls, count: int) -> "Calls":
        """Return *count* requests that are of no run."""
        no_name, zeros = Coded(np.zeros(count, np.int32), [""]), np.zeros(count, np.int32)
        unknown = np.full(count, np.nan)
        return cls(zeros - 1, zeros, no_name, no_name, np.full(count, np.inf), unknown, np.zeros(count, np.bool_))


COLUMNS = (
    "arrival_s", "prompt_tokens", "output_tokens", "model", "region", "slo_class", "tenant", "predicted_tokens", "asked",
    "calls",
)  # fmt: skip
"""Those of `Workload` with an element a request."""
FAILED = ("failed", "cancelled", "rejected")
"""Outcomes of calls that ended without an answer, as the ledger has them."""
SALT = np.int64(0x1E3779B97F4A7C15)


class WorkloadError(ValueError):
    """A column has an invalid value; names the column, the request (from 0) and the value."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of arrival, one element each."""

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    model: Coded
    region: Coded
    """Where the caller is."""
    slo_class: Coded
    tenant: Coded
    prefix_first: Longs | None = None
    """With `prefix_hashes`: request i shares the blocks prefix_hashes[prefix_first[i] : prefix_first[i + 1]]."""
    prefix_hashes: Longs | None = None
    prefix_block_tokens: int = 0
    """Tokens that one prefix hash stands for; 0: it is not known which prompts share prefixes."""
    predicted_tokens: Ints | None = None
    """Predicted output tokens, if known."""
    asked: Coded | None = None
    """The public name that each asked for, "" where it names the model that serves it; None: all do."""
    calls: Calls | None = None
    """None: no request is a call of a run."""
    left_out: int = field(default=0, compare=False)
    """Requests of the trace that are not here because they have no prompt or no output."""

    def __len__(self) -> int:
        return self.arrival_s.size

    def check(self) -> None:
        """Raise WorkloadError unless times are finite, from 0 up and in order, and no prompt or output is empty."""
        _refuse("arrival_s", self.arrival_s, ~np.isfinite(self.arrival_s), "is not a finite number")
        _refuse("arrival_s", self.arrival_s, self.arrival_s < 0, "is before 0")
        earlier = np.concatenate(([False], np.diff(self.arrival_s) < 0)) if len(self) else np.empty(0, bool)
        _refuse("arrival_s", self.arrival_s, earlier, "is earlier than the one before it")
        for name in ("prompt_tokens", "output_tokens"):
            tokens = getattr(self, name)
            _refuse(name, tokens, tokens < 1, "is less than 1")

    def select(self, chosen: npt.NDArray[np.bool_] | Longs) -> "Workload":
        """Return the *chosen* requests (a mask or positions)."""
        first, hashes = self._prefixes(chosen)
        columns: dict[str, Any] = {name: _chosen(getattr(self, name), chosen) for name in COLUMNS}
        return replace(self, prefix_first=first, prefix_hashes=hashes, **columns)

    def wholes(self) -> tuple[Longs, Longs]:
        """Return the first request of each run, and each that is of none; and by request which of these it belongs to."""
        run = np.full(len(self), -1) if self.calls is None else self.calls.run
        own = np.where(run >= 0, run, run.max(initial=-1) + 1 + np.arange(run.size))
        _, first, of = np.unique(own, return_index=True, return_inverse=True)
        return first, of

    def copied(self, chosen: Longs, *, new: bool = False) -> tuple["Workload", Longs]:
        """Return the *chosen* of `wholes`, each as a separate run, and by request which of them it belongs to.

        What is chosen again shares prefixes as different runs do: those that only requests of one run share, it does not
        share with the others. *new*: nor with what is chosen for the first time.
        """
        first, of = self.wholes()
        rows, counts = np.argsort(of, kind="stable"), np.bincount(of, minlength=first.size)
        ends = np.concatenate(([0], np.cumsum(counts[chosen])))
        begins = np.cumsum(counts)[chosen] - counts[chosen]
        made = self.select(rows[np.repeat(begins - ends[:-1], counts[chosen]) + np.arange(ends[-1])])
        copy = np.repeat(np.arange(chosen.size), counts[chosen])
        if made.calls is not None:
            run = np.where(made.calls.run >= 0, copy, -1).astype(np.int32)
            made = replace(made, calls=made.calls._replace(run=run))
        if self.prefix_hashes is None or made.prefix_hashes is None or made.prefix_first is None:
            return made, copy
        order = np.argsort(chosen, kind="stable")
        again = np.empty(chosen.size, np.int64)
        again[order] = np.arange(chosen.size) - np.searchsorted(chosen[order], chosen[order]) + new
        assert self.prefix_first is not None
        hashes, number = np.unique(self.prefix_hashes, return_inverse=True)
        pairs = np.unique(number * first.size + np.repeat(of, np.diff(self.prefix_first)))
        own = hashes[np.bincount(pairs // first.size, minlength=hashes.size) == 1]
        salt = np.repeat(again[copy], np.diff(made.prefix_first)) * SALT
        salted = np.where(np.isin(made.prefix_hashes, own), made.prefix_hashes ^ salt, made.prefix_hashes)
        return replace(made, prefix_hashes=salted), copy

    def _prefixes(self, chosen: npt.NDArray[np.bool_] | Longs) -> tuple[Longs | None, Longs | None]:
        if self.prefix_first is None or self.prefix_hashes is None:
            return None, None
        first, lengths = self.prefix_first[:-1][chosen], np.diff(self.prefix_first)[chosen]
        ends = np.concatenate(([0], np.cumsum(lengths)))
        # Position of each hash: where its request's run starts, plus its place in the run.
        positions = np.repeat(first - ends[:-1], lengths) + np.arange(ends[-1])
        return ends.astype(np.int64), self.prefix_hashes[positions]


def _chosen(column: Any, chosen: npt.NDArray[np.bool_] | Longs) -> Any:
    match column:
        case None:
            return None
        case Coded():
            return column._replace(codes=column.codes[chosen])
        case Calls():
            return Calls(*(_chosen(each, chosen) for each in column))
    return column[chosen]


def calls_of(
    tenant: Sequence[str],
    application: Sequence[str],
    run: Sequence[str],
    unit: Sequence[str],
    due_s: Sequence[float | None],
    e2e_ms: Sequence[float | None],
    outcome: Sequence[str],
) -> Calls | None:
    """Return the calls among requests in order of arrival, by columns of the ledger; None for none.

    A run is known by its tenant, application and name.
    """
    numbers: dict[tuple[str, str, str], int] = {}
    steps = Counter[int]()
    runs, step = np.full(len(run), -1, np.int32), np.zeros(len(run), np.int32)
    for at, key in enumerate(zip(tenant, application, run, strict=True)):
        if key[1] and key[2]:
            runs[at] = number = numbers.setdefault(key, len(numbers))
            steps[number] += 1
            step[at] = steps[number]
    if not numbers:
        return None
    due_in_s, took_ms = np.array(due_s, np.float64), np.array(e2e_ms, np.float64)
    return Calls(
        runs,
        step,
        Coded.of(application),
        Coded.of(unit),
        np.where(np.isnan(due_in_s), np.inf, due_in_s),
        took_ms / 1000,
        np.isin(outcome, FAILED),
    )


_NO_TOKENS, _NO_NAMES = np.zeros(0, np.int32), Coded(np.zeros(0, np.int32), [])
NO_REQUESTS = Workload(
    np.zeros(0), _NO_TOKENS, _NO_TOKENS, _NO_NAMES, _NO_NAMES, _NO_NAMES, _NO_NAMES, predicted_tokens=_NO_TOKENS
)


def _refuse(name: str, values: npt.NDArray[np.generic], wrong: npt.NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        position = int(np.argmax(wrong))
        raise WorkloadError(f"{name} of request {position} {what}: {values[position]}")
