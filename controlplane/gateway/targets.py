"""How each weighted target served its share of the requests for a public name over the last day."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from django.db.models import Case, CharField, Count, F, Q, QuerySet, When
from django.db.models.fields.json import KT

from controlplane.fleet.models import WeightedTarget
from controlplane.gateway.models import LedgerRow, Outcome
from scheduling.routing.models import ModelRule

OVER: Final = timedelta(days=1)
MEASURES: Final = ("ttft_ms", "itl_ms", "e2e_ms", "output_tokens")
DONE: Final = Q(outcome=Outcome.DONE, model_rule=ModelRule.WEIGHTS)
TARGET: Final = Case(
    When(~Q(model_rule=ModelRule.WEIGHTS), then=KT("trace__0__model")),
    When(adapter="", then=F("model")),
    default=F("adapter"),
    output_field=CharField(),
)
"""Target that was chosen by weight, also of a request that its fallback served."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One target of a public name."""

    name: str
    target: str
    weight: float
    share: float
    """By weight."""
    heaviest: bool
    """Of its name."""
    requests: int
    error_ratio: float | None
    """Share that was not answered, or by a fallback; mistakes of callers are not counted."""
    medians: dict[str, float | None]
    """Of answered requests, by measure."""


def comparisons(until: datetime) -> list[Compared]:
    """Return the active targets of every public name over the day before *until*, the heaviest of each name first."""
    weights: dict[str, dict[str, float]] = {}
    for row in WeightedTarget.objects.filter(active=True).order_by("name", "-weight", "target"):
        weights.setdefault(row.name, {})[row.target] = row.weight
    return [one for name, its in weights.items() for one in _compared(name, its, until)]


def _compared(name: str, weights: dict[str, float], until: datetime) -> list[Compared]:
    rows = LedgerRow.objects.filter(asked_model=name, arrived_at__gte=until - OVER, arrived_at__lt=until)
    rows = rows.exclude(outcome=Outcome.CANCELLED).exclude(status_code__gte=400, status_code__lt=429)
    rows = rows.annotate(chosen=TARGET).order_by()
    counts = {
        each["chosen"]: each for each in rows.values("chosen").annotate(n=Count("pk"), done=Count("pk", filter=DONE))
    }
    total = sum(weights.values()) or 1.0
    made: list[Compared] = []
    for target, weight in weights.items():
        n, done = (counts[target][key] if target in counts else 0 for key in ("n", "done"))
        answered = rows.filter(DONE, chosen=target)
        medians = {name: _median(answered, name) if done else None for name in MEASURES}
        errors = 1 - done / n if n else None
        made.append(Compared(name, target, weight, weight / total, not made, n, errors, medians))
    return made


def _median(rows: QuerySet[LedgerRow], measure: str) -> float | None:
    """Return the lower median of *measure*; None without values."""
    known = rows.exclude(**{measure: None})
    count = known.count()
    return float(known.order_by(measure).values_list(measure, flat=True)[(count - 1) // 2]) if count else None
