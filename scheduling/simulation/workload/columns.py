"""Requests to come, as columns: what a trace or a generator gives and a simulation takes."""

from array import array
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
    """Tokens that one prefix hash stands for."""
    predicted_tokens: Ints | None = None
    """Predicted output tokens, if known."""
    asked: Coded | None = None
    """The public name that each asked for, "" where it names the model that serves it; None: all do."""
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
        return replace(
            self,
            arrival_s=self.arrival_s[chosen],
            prompt_tokens=self.prompt_tokens[chosen],
            output_tokens=self.output_tokens[chosen],
            model=self.model._replace(codes=self.model.codes[chosen]),
            region=self.region._replace(codes=self.region.codes[chosen]),
            slo_class=self.slo_class._replace(codes=self.slo_class.codes[chosen]),
            tenant=self.tenant._replace(codes=self.tenant.codes[chosen]),
            prefix_first=first,
            prefix_hashes=hashes,
            predicted_tokens=None if self.predicted_tokens is None else self.predicted_tokens[chosen],
            asked=None if self.asked is None else self.asked._replace(codes=self.asked.codes[chosen]),
        )

    def sorted(self) -> "Workload":
        """Return the requests in the order of arrival, the first at 0."""
        if not len(self):
            return self
        ordered = self.select(np.argsort(self.arrival_s, kind="stable"))
        return replace(ordered, arrival_s=ordered.arrival_s - ordered.arrival_s[0])

    def _prefixes(self, chosen: npt.NDArray[np.bool_] | Longs) -> tuple[Longs | None, Longs | None]:
        if self.prefix_first is None or self.prefix_hashes is None:
            return None, None
        first, lengths = self.prefix_first[:-1][chosen], np.diff(self.prefix_first)[chosen]
        ends = np.concatenate(([0], np.cumsum(lengths)))
        # Position of each hash: where its request's run starts, plus its place in the run.
        positions = np.repeat(first - ends[:-1], lengths) + np.arange(ends[-1])
        return ends.astype(np.int64), self.prefix_hashes[positions]


_NO_TOKENS, _NO_NAMES = np.zeros(0, np.int32), Coded(np.zeros(0, np.int32), [])
NO_REQUESTS = Workload(
    np.zeros(0), _NO_TOKENS, _NO_TOKENS, _NO_NAMES, _NO_NAMES, _NO_NAMES, _NO_NAMES, predicted_tokens=_NO_TOKENS
)


def _refuse(name: str, values: npt.NDArray[np.generic], wrong: npt.NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        position = int(np.argmax(wrong))
        raise WorkloadError(f"{name} of request {position} {what}: {values[position]}")
