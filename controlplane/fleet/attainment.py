"""Attainment of an SLO class against the share that its percentile promises.

Classes are never mixed: batch work with a day to go is always in time and would hide interactive requests that are not.
Where one number stands for several classes it is that of the worst, by burn rate.
"""

from collections.abc import Iterable
from typing import NamedTuple

CRITICAL_BURN = 2.0
MIN_BUDGET = 0.001  # of a class that promises 100 %: any miss burns it fast, and the rate stays finite


class Attainment(NamedTuple):
    """Attainment of one SLO class: requests judged, requests that met their targets, and the promised share."""

    slo_class: str
    met: int
    judged: int
    objective: float

    @property
    def ratio(self) -> float | None:
        return self.met / self.judged if self.judged else None

    @property
    def burn(self) -> float | None:
        """Return misses over those that the objective allows; above 1 the error budget does not last."""
        if not self.judged:
            return None
        return (self.judged - self.met) / self.judged / max(1.0 - self.objective, MIN_BUDGET)

    @property
    def budget_left(self) -> float | None:
        """Return the unused share of the allowed misses; 0 when they are used up."""
        return None if self.burn is None else max(0.0, 1.0 - self.burn)

    def as_dict(self) -> dict[str, str | int | float | None]:
        return {
            "slo_class": self.slo_class,
            "met": self.met,
            "judged": self.judged,
            "met_ratio": self.ratio,
            "objective_ratio": self.objective,
            "burn": self.burn,
        }

    @property
    def below(self) -> bool:
        return self.judged > 0 and self.met < self.objective * self.judged - 1e-9

    @property
    def level(self) -> str:
        return level_of(self.ratio, self.objective, self.burn)


def together(rows: Iterable[Attainment]) -> dict[str, Attainment]:
    """Sum *rows* of several endpoints by class."""
    sums: dict[str, Attainment] = {}
    for row in rows:
        before = sums.get(row.slo_class, row._replace(met=0, judged=0))
        sums[row.slo_class] = row._replace(met=before.met + row.met, judged=before.judged + row.judged)
    return sums


def level_of(ratio: float | None, objective: float | None, burn: float | None) -> str:
    """Return `"warning"` below the objective, `"critical"` at twice the allowed misses, else `""`."""
    if ratio is None or objective is None or burn is None or ratio >= objective:
        return ""
    return "critical" if burn >= CRITICAL_BURN - 1e-9 else "warning"


def worst(classes: Iterable[Attainment]) -> Attainment | None:
    """Return the class whose error budget burns fastest, among equals the busiest; None if nothing was judged."""
    return max((one for one in classes if one.judged), key=lambda one: (one.burn, one.judged), default=None)
