"""How the runs of an application ended lately: completion times, deadlines met, and how well they were predicted."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol, Self

DAY_H: Final = 24
TARGET: Final = 0.95
"""Share of runs that should end by their deadline."""
AXIS_S: Final = (0.5, 3600.0)
"""Ends of the logarithmic axis of completion times."""


class EndedRun(Protocol):
    """What counts of a run that ended (`models.ApplicationRun`)."""

    outcome: str
    deadline_s: float | None
    prompt_tokens: int
    output_tokens: int
    needed_s: float
    error_s: float

    @property
    def duration_s(self) -> float: ...

    @property
    def in_time(self) -> bool | None: ...


def quantile(values: list[float], share: float) -> float | None:
    """The value of nearest rank; None for none."""
    return values[min(len(values) - 1, int(share * len(values)))] if values else None


def on_axis(seconds: float | None) -> float:
    """Return the place of a completion time on the axis, from 0 to 100."""
    low_s, high_s = AXIS_S
    place = math.log(max(seconds or low_s, low_s) / low_s) / math.log(high_s / low_s)
    return round(100 * min(1.0, place), 1)


AXIS_TICKS: Final = tuple(
    (on_axis(seconds), label) for seconds, label in ((1.0, "1 s"), (10.0, "10 s"), (60.0, "1 min"), (600.0, "10 min"))
)
"""Places and labels of the marks on it."""


@dataclass(frozen=True)
class Completions:
    """The runs of an application that ended lately, in a day or as it was asked."""

    ended: int
    durations_s: list[float]
    """Ascending, without those that were abandoned or stopped."""
    judged: int
    """Runs with a deadline."""
    met: int
    abandoned: int
    deadline_s: float | None
    """Of the latest run with one."""
    tokens: float | None
    """Mean of prompt and output."""
    tokens_low: float | None
    """With the next: of the middle 80% of runs."""
    tokens_high: float | None
    needed_s: float
    """Service that came after predictions at calls placed by rank, their sum; next, the sum of errors."""
    error_s: float

    @property
    def error(self) -> float | None:
        """Return the mean error of predicted remaining demand, as a share of what came; None without a prediction."""
        return self.error_s / self.needed_s if self.needed_s else None

    @property
    def p50_s(self) -> float | None:
        return quantile(self.durations_s, 0.5)

    @property
    def p95_s(self) -> float | None:
        return quantile(self.durations_s, 0.95)

    @property
    def in_time(self) -> float | None:
        """Return the share of runs with a deadline that ended by it; None without any."""
        return self.met / self.judged if self.judged else None

    @property
    def below_target(self) -> bool:
        return self.in_time is not None and self.in_time < TARGET

    @property
    def places(self) -> dict[str, float]:
        """Return the places of p50, p95 and the deadline on the axis."""
        return {name: on_axis(getattr(self, f"{name}_s")) for name in ("p50", "p95", "deadline")}

    @classmethod
    def of(cls, ended: Iterable[EndedRun]) -> Self:
        """Return those of *ended*, in the order of their ends."""
        runs = list(ended)
        finished = [run for run in runs if run.outcome not in ("abandoned", "stopped")]
        judged = [run for run in runs if run.in_time is not None]
        tokens = sorted(float(run.prompt_tokens + run.output_tokens) for run in finished)
        return cls(
            ended=len(runs),
            durations_s=sorted(run.duration_s for run in finished),
            judged=len(judged),
            met=sum(bool(run.in_time) for run in judged),
            abandoned=sum(run.outcome == "abandoned" for run in runs),
            deadline_s=judged[-1].deadline_s if judged else None,
            tokens=sum(tokens) / len(tokens) if tokens else None,
            tokens_low=quantile(tokens, 0.1),
            tokens_high=quantile(tokens, 0.9),
            needed_s=sum(run.needed_s for run in runs),
            error_s=sum(run.error_s for run in runs),
        )
