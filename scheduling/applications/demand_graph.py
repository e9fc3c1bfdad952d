"""Probabilistic demand graph of an application (Hermes section 3.2): its units, and records of the runs seen.

A run is a tree of steps. A step is one execution of a unit: how many requests it made at once, how long they were, and
which units it led to. The graph keeps the latest `MOST_RECORDS` runs; distributions, branch probabilities and correlations
are read from them and never stored, so a graph in JSON is its units and its records.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from scheduling.fleet.profile import Profile

MOST_RECORDS: Final = 1_000
"""Runs kept; the oldest goes first."""
VERSION: Final = 1
"""Of the JSON form."""
START: Final = ""
"""Stands for the unit before the first one."""
MOST_STEPS: Final = 4_096
"""Steps of one record, so that a loop that does not end is bounded."""

BackendKind = Literal["llm", "container", "dnn", "tool"]


class Backend(Struct, frozen=True, omit_defaults=True):
    """Where a unit runs."""

    kind: BackendKind
    name: str
    """Model, container image, DNN model or tool."""
    adapter: str = ""
    """LoRA adapter."""
    prompt: str = ""
    """Digest of the system prompt."""


class Step(Struct, frozen=True, omit_defaults=True):
    """One execution of a unit."""

    unit: str
    parent: int = -1
    """Index of the step that led to it; -1 for a first one."""
    input_tokens: float = 0.0
    """Mean over its parallel requests, as `output_tokens`; 0 unless the backend is an LLM."""
    output_tokens: float = 0.0
    duration_s: float = 0.0
    """0 if the backend is an LLM: the instance's profile gives its time."""
    parallelism: int = 1
    """Requests at once."""
    longest: float = 0.0
    """Output tokens, or seconds, of the one that took longest, with which the step ended; 0: the mean."""
    predicted_tokens: float = 0.0
    """Output tokens that were predicted as its requests came, their mean; 0: not known."""


class RunRecord(Struct, frozen=True):
    """A run that ended: its steps in the order in which they began."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.steps) <= MOST_STEPS:
            raise ValueError(f"a record has 1 to {MOST_STEPS} steps, not {len(self.steps)}")
        for at, step in enumerate(self.steps):
            numbers = (step.input_tokens, step.output_tokens, step.duration_s, step.longest, step.predicted_tokens)
            if not -1 <= step.parent < at:
                raise ValueError(f"steps[{at}].parent must be from -1 to {at - 1}, not {step.parent}")
            if not all(0 <= number < np.inf for number in numbers) or step.parallelism < 1:
                raise ValueError(f"steps[{at}] has a negative demand, or parallelism below 1")

    def children(self) -> list[list[int]]:
        """Return the steps that each step led to, by index."""
        led_to: list[list[int]] = [[] for _ in self.steps]
        for at, step in enumerate(self.steps):
            if step.parent >= 0:
                led_to[step.parent].append(at)
        return led_to


class ServiceRate(Struct, frozen=True):
    """Seconds of service of a request: a constant, by input token and by output token (or second of duration)."""

    base_s: float = 0.0
    input_s: float = 0.0
    output_s: float = 1.0

    def service_s(self, input_tokens: float, output: float) -> float:
        """Return the seconds of one request."""
        return self.base_s + self.input_s * input_tokens + self.output_s * output

    @classmethod
    def of(cls, profile: Profile) -> "ServiceRate":
        """Return the rate of requests on an instance of *profile*: prefill by prompt token, decoding by output token.

        The quadratic terms are left out: a rank compares applications, and prompts of one unit vary little.
        """
        step_s = profile.decode_a_s + profile.decode_b_s_per_sequence
        return cls(max(0.0, profile.prefill_a_s), profile.prefill_b_s_per_token, step_s)


class UnitOutlook(NamedTuple):
    """Recorded steps of a unit, one row each, and what followed them."""

    output: NDArray[np.float64]
    """(S,): output tokens of the step's longest request; seconds of a unit that is no LLM."""
    next_units: tuple[str, ...]
    """Units that followed, the most frequent first: at once, or after units between that are no LLM."""
    gap_s: NDArray[np.float64]
    """(S, N): from the step's end until the first call of each of them; infinity if it did not follow."""
    parallelism: int
    """Median of the step's requests at once."""


class DemandGraph(Struct):
    """What is known of an application. Raises ValueError for a record that names an unknown unit."""

    application: str
    units: dict[str, Backend]
    records: list[RunRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        records, self.records = self.records, []
        for record in records:
            self.add(record)

    def add(self, record: RunRecord) -> None:
        """Learn a run that ended. Raises ValueError if a step's unit is unknown."""
        for at, step in enumerate(record.steps):
            if step.unit not in self.units:
                raise ValueError(f"steps[{at}].unit: {step.unit!r} is no unit of {self.application}")
        self.records.append(record)
        del self.records[:-MOST_RECORDS]

    def next_units(self, unit: str = START) -> dict[tuple[str, ...], float]:
        """Return the probability of each set of units that *unit* leads to at once; () is the end of a branch."""
        counts: Counter[tuple[str, ...]] = Counter()
        for record in self.records:
            if unit == START:
                counts[tuple(sorted(step.unit for step in record.steps if step.parent < 0))] += 1
                continue
            for step, led_to in zip(record.steps, record.children(), strict=True):
                if step.unit == unit:
                    counts[tuple(sorted(record.steps[at].unit for at in led_to))] += 1
        total = sum(counts.values())
        return {units: count / total for units, count in counts.most_common()}

    def branch_probabilities(self) -> dict[tuple[str, str], float]:
        """Return for each edge the probability that an execution of its first unit leads to its second one."""
        return {
            (unit, after): sum(share for units, share in branches.items() if after in units)
            for unit, branches in ((unit, self.next_units(unit)) for unit in (START, *self.units))
            for after in sorted({each for units in branches for each in units})
        }

    def service_s(self, record: RunRecord, rates: Mapping[str, ServiceRate]) -> float:
        """Return the service of a run in seconds, summed over its parallel requests."""
        return sum(step_service_s(step, self.units[step.unit], rates[step.unit]) for step in record.steps)

    def path_s(self, record: RunRecord, rates: Mapping[str, ServiceRate]) -> float:
        """Return the seconds of its longest chain of steps, on which a step ends with its longest request."""
        ends_s: list[float] = []
        for step in record.steps:
            takes_s = rates[step.unit].service_s(step.input_tokens, longest(step, self.units[step.unit]))
            ends_s.append((ends_s[step.parent] if step.parent >= 0 else 0.0) + takes_s)
        return max(ends_s)

    def outlooks(self) -> dict[str, UnitOutlook]:
        """Return the outlook of each unit that is recorded."""
        steps_of: dict[str, list[tuple[float, dict[str, float], int]]] = {}
        for record in self.records:
            gaps: list[dict[str, float]] = [{} for _ in record.steps]
            for at in range(len(record.steps) - 1, -1, -1):  # a step comes after the one that led to it
                step, after_s = record.steps[at], gaps[at]
                output = longest(step, self.units[step.unit])
                steps_of.setdefault(step.unit, []).append((output, after_s, step.parallelism))
                if step.parent < 0:
                    continue
                comes_s = {step.unit: 0.0}
                if self.units[step.unit].kind != "llm":
                    comes_s = {unit: output + gap_s for unit, gap_s in after_s.items()} | comes_s
                before = gaps[step.parent]
                before |= {unit: min(gap_s, before.get(unit, math.inf)) for unit, gap_s in comes_s.items()}
        return {unit: _outlook(rows) for unit, rows in steps_of.items()}

    def to_json(self) -> bytes:
        """Return the versioned JSON form."""
        return msgspec.json.encode({"version": VERSION, **msgspec.to_builtins(self)})

    @classmethod
    def from_json(cls, text: bytes) -> "DemandGraph":
        """Return the graph of `to_json`. Raises ValueError that says what is wrong and where."""
        try:
            value: Any = msgspec.json.decode(text)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(value, dict) or value.pop("version", None) != VERSION:
            raise ValueError(f"version: must be {VERSION}")
        return msgspec.convert(value, cls)


def _outlook(rows: list[tuple[float, dict[str, float], int]]) -> UnitOutlook:
    outputs, gaps_of, parallel = zip(*rows, strict=True)
    followed = Counter(unit for gaps in gaps_of for unit in gaps)
    next_units = tuple(unit for unit, _ in followed.most_common())
    gap_s = np.array([[gaps.get(unit, math.inf) for unit in next_units] for gaps in gaps_of], np.float64)
    return UnitOutlook(np.array(outputs), next_units, gap_s.reshape(len(rows), -1), int(np.median(parallel)))


def demand(step: Step, backend: Backend) -> tuple[float, float, float]:
    """Return (input, output, parallelism) of *step*; the output of what is not an LLM is its duration in seconds."""
    return step.input_tokens, step.output_tokens if backend.kind == "llm" else step.duration_s, float(step.parallelism)


def longest(step: Step, backend: Backend) -> float:
    """Return the output of the request of *step* with which it ended, at least their mean."""
    return max(step.longest, demand(step, backend)[1])


def step_service_s(step: Step, backend: Backend, rate: ServiceRate) -> float:
    """Return the service of a step in seconds, summed over its parallel requests."""
    taken, given, parallelism = demand(step, backend)
    return parallelism * rate.service_s(taken, given)


def executions(graph: DemandGraph) -> Iterator[tuple[Step, Step | None, tuple[str, ...], int]]:
    """Yield each step of the records of *graph* with its nearest ancestor that is an LLM's, the units it led to, and how
    often its unit ran before in the run.
    """
    for record in graph.records:
        visits: Counter[str] = Counter()
        for step, led_to in zip(record.steps, record.children(), strict=True):
            above = step.parent
            while above >= 0 and graph.units[record.steps[above].unit].kind != "llm":
                above = record.steps[above].parent
            yield (
                step,
                record.steps[above] if above >= 0 else None,
                tuple(record.steps[at].unit for at in led_to),
                visits[step.unit],
            )
            visits[step.unit] += 1
