"""Application runs to come: each is a record of steps, whose requests come once the steps before them have ended."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.demand_graph import Backend, RunRecord
from scheduling.applications.standings import USUAL_READING, KnownGraph, Reading
from scheduling.fleet.profile import Profile


class ApplicationToCome(NamedTuple):
    name: str
    units: dict[str, Backend]
    graph: KnownGraph | None
    """What a dispatcher knows of it; None for nothing."""


class RunToCome(NamedTuple):
    application: int
    """Index in `RunsToCome.applications`."""
    began_s: float
    due_in_s: float
    """After it began, infinity for never."""
    record: RunRecord
    prompts: int = 0
    """Version of its units' system prompts."""
    after: Sequence[Sequence[int]] | None = None
    """Of recorded calls, by step: the steps that must have ended before; None: the one that led to it."""
    gap_s: Sequence[float] = ()
    """By step: seconds from their ends to its begin (thinking, tools), for a first one from that of the run; empty: none."""
    failed: frozenset[int] = frozenset()
    """Recorded calls that failed: where they fail again, those that came after them come too."""

    @property
    def follows(self) -> Sequence[Sequence[int]]:
        """Return by step the steps that must have ended before it begins."""
        if self.after is not None:
            return self.after
        return [[step.parent] if step.parent >= 0 else [] for step in self.record.steps]


@dataclass(frozen=True, slots=True)
class RunsToCome:
    """All runs of a simulation; run r has the requests with `Requests.run == r`, in the order of steps."""

    applications: Sequence[ApplicationToCome]
    runs: Sequence[RunToCome]
    exact: bool = False
    """Whether orders know the whole service of every run (an oracle)."""
    reading: Reading = USUAL_READING
    """Of what runs need, by the orders."""


@dataclass(frozen=True, slots=True)
class RunOutcomes:
    """How the runs of a simulation ended; one element each, in the order of `RunsToCome.runs`."""

    names: Sequence[str]
    """Of applications."""
    application: NDArray[np.int64]
    began_s: NDArray[np.float64]
    due_s: NDArray[np.float64]
    """Absolute, infinity for never."""
    ended_s: NDArray[np.float64]
    """NaN for one that was abandoned or still runs."""
    abandoned: NDArray[np.bool_]
    """One of its requests was refused or failed."""

    @property
    def completion_s(self) -> NDArray[np.float64]:
        """Return the duration of each; NaN for one that did not end."""
        return self.ended_s - self.began_s


NOT_ENDED: Final = np.nan


def alone_s(
    record: RunRecord, units: Mapping[str, Backend], instance_of: Callable[[str], tuple[Profile, int]]
) -> float:
    """Return the seconds that a run takes alone on idle instances, along its longest chain of steps.

    *instance_of* gives the profile and the KV tokens of an instance of a model. The requests of a step run in one batch, or
    in several where these hold no more.
    """
    ends_s: list[float] = []
    for step in record.steps:
        lasts_s = step.duration_s
        if units[step.unit].kind == "llm":
            profile, kv_tokens = instance_of(units[step.unit].name)
            batches = min(
                step.parallelism,
                math.ceil(step.parallelism * (step.input_tokens + step.output_tokens) / max(1, kv_tokens)),
            )
            batch = step.parallelism / batches
            context = batch * (step.input_tokens + step.output_tokens / 2)
            step_s = (
                profile.decode_a_s + profile.decode_b_s_per_sequence * batch + profile.decode_c_s_per_token * context
            )
            prefill_s = profile.step_time_s(math.ceil(batch * step.input_tokens), 0, 0)
            lasts_s = batches * (prefill_s + step_s * max(0.0, step.output_tokens - 1))
        ends_s.append((ends_s[step.parent] if step.parent >= 0 else 0.0) + lasts_s)
    return max(ends_s)
