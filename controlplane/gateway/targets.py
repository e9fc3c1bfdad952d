"""Weighted targets compared: how each served its share of the requests for a public name, and where they differ.

A conversation stays with its target, so conversations are compared, not requests: all requests of a run are one, and a
request of none is one by itself. Times and lengths are compared by their geometric means (Welch's interval on logarithms),
errors by the share of conversations that had one (Newcombe 1998, method 10). A difference is only stated where the interval
excludes none.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import exp, log, sqrt
from statistics import fmean, median, variance
from typing import Any, Final, NamedTuple

from controlplane.fleet.models import WeightedTarget
from controlplane.gateway.models import LedgerRow, Outcome
from scheduling.routing.models import ModelRule

OVER: Final = timedelta(days=1)
LEAST_CONVERSATIONS: Final = 30
"""Of each target, before an interval is given: below it the normal distribution is a poor guess."""
MOST_REQUESTS: Final = 50_000
"""Of one name, the newest."""
Z: Final = 1.959964
"""For intervals of 95%."""
MEASURES: Final = {"ttft_ms": "TTFT", "itl_ms": "ITL", "e2e_ms": "E2E", "output_tokens": "output"}


class Interval(NamedTuple):
    """Of a ratio, or of a difference of shares, to the baseline."""

    low: float
    high: float


class Served(NamedTuple):
    """One request, as far as targets are compared by it."""

    conversation: str
    failed: bool
    """It was not answered, or by a fallback; not for a mistake of its caller."""
    values: Mapping[str, float | None]
    """By measure, of an answered request."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One target of a public name, against the heaviest one."""

    name: str
    target: str
    weight: float
    share: float
    """By weight."""
    requests: int
    conversations: int
    error_ratio: float | None
    """Of conversations."""
    medians: dict[str, float | None]
    baseline: str = ""
    """Target that it is compared with; empty for that one itself."""
    ratios: dict[str, Interval] = field(default_factory=dict)
    """By measure, 95% interval of its geometric mean over the baseline's."""
    errors: Interval | None = None
    """95% interval of the difference of `error_ratio`."""

    @property
    def verdict(self) -> str:
        """Return the differences that the intervals show, in words."""
        if not self.baseline:
            return "Baseline"
        if self.errors is None:
            return f"Too few to compare: {LEAST_CONVERSATIONS} conversations of each are needed"
        words = [
            f"{MEASURES[name]} {_word(name, more=of.low > 1.0)} by {_percents(of)}"
            for name, of in self.ratios.items()
            if of.low > 1.0 or of.high < 1.0
        ]
        if self.errors.low > 0 or self.errors.high < 0:
            words.append("more errors" if self.errors.low > 0 else "fewer errors")
        return "; ".join(words) or "No difference shown"


def _percents(of: Interval) -> str:
    """Return the ends of a ratio's interval on one side of 1: "4 to 12%"."""
    least, most = sorted(abs(100.0 * (end - 1.0)) for end in of)
    return f"{least:.0f} to {most:.0f}%"


def _word(measure: str, *, more: bool) -> str:
    if measure == "output_tokens":
        return "longer" if more else "shorter"
    return "slower" if more else "faster"


def compare(name: str, weights: Mapping[str, float], served: Mapping[str, Sequence[Served]]) -> list[Compared]:
    """Compare the targets of *name* by what they *served*, the heaviest first, which is the baseline."""
    order = sorted(weights, key=lambda target: (-weights[target], target))
    total = sum(weights.values()) or 1.0
    failures = {target: _failures(served.get(target, ())) for target in order}
    logs = {target: {what: _logs(served.get(target, ()), what) for what in MEASURES} for target in order}
    rows = []
    for target in order:
        own, failed = served.get(target, ()), failures[target]
        baseline = "" if target == order[0] else order[0]
        enough = baseline and min(len(failed), len(failures[baseline])) >= LEAST_CONVERSATIONS
        ratios = {
            what: interval
            for what in (MEASURES if enough else ())
            if (interval := ratio(logs[target][what], logs[baseline][what])) is not None
        }
        rows.append(
            Compared(
                name,
                target,
                weights[target],
                weights[target] / total,
                len(own),
                len(failed),
                fmean(failed) if failed else None,
                {what: _median(own, what) for what in MEASURES},
                baseline,
                ratios,
                difference(sum(failed), len(failed), sum(failures[baseline]), len(failures[baseline]))
                if enough
                else None,
            )
        )
    return rows


def _failures(served: Iterable[Served]) -> list[bool]:
    """Whether each conversation had an error."""
    by: dict[str, bool] = {}
    for one in served:
        by[one.conversation] = by.get(one.conversation, False) or one.failed
    return list(by.values())


def _logs(served: Iterable[Served], measure: str) -> list[float]:
    """Return the mean logarithm of *measure* of each conversation that has it."""
    by: dict[str, list[float]] = {}
    for one in served:
        if value := one.values.get(measure):
            by.setdefault(one.conversation, []).append(log(value))
    return [fmean(values) for values in by.values()]


def _median(served: Iterable[Served], measure: str) -> float | None:
    values = [value for one in served if (value := one.values.get(measure)) is not None]
    return median(values) if values else None


def ratio(logs: Sequence[float], base: Sequence[float]) -> Interval | None:
    """Return the 95% interval of the ratio of two geometric means, from logarithms; None for too few."""
    if min(len(logs), len(base)) < LEAST_CONVERSATIONS:
        return None
    middle = fmean(logs) - fmean(base)
    error = Z * sqrt(variance(logs) / len(logs) + variance(base) / len(base))
    return Interval(exp(middle - error), exp(middle + error))


def difference(failed: int, of: int, base_failed: int, base_of: int) -> Interval:
    """Return the 95% interval of the difference of two shares (Newcombe 1998, method 10, from Wilson's intervals)."""
    low, high = _wilson(failed, of)
    base_low, base_high = _wilson(base_failed, base_of)
    share, base = failed / of, base_failed / base_of
    return Interval(
        share - base - sqrt((share - low) ** 2 + (base_high - base) ** 2),
        share - base + sqrt((high - share) ** 2 + (base - base_low) ** 2),
    )


def _wilson(failed: int, of: int) -> Interval:
    share, z2 = failed / of, Z * Z
    middle, spread = share + z2 / (2 * of), Z * sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return Interval((middle - spread) / (1 + z2 / of), (middle + spread) / (1 + z2 / of))


def comparisons(until: datetime) -> list[Compared]:
    """Return the active targets of every public name, compared over the day before *until*."""
    weights: dict[str, dict[str, float]] = {}
    for row in WeightedTarget.objects.filter(active=True):
        weights.setdefault(row.name, {})[row.target] = row.weight
    return [one for name, its in weights.items() for one in compare(name, its, _served(name, until))]


def _served(name: str, until: datetime) -> dict[str, list[Served]]:
    """Return the requests for *name* by target, also of those that its fallback served."""
    rows = LedgerRow.objects.filter(asked_model=name, arrived_at__gte=until - OVER, arrived_at__lt=until)
    columns = ("request_id", "run", "model", "adapter", "model_rule", "outcome", "status_code", *MEASURES)
    newest = rows.order_by("-arrived_at").values(*columns)[:MOST_REQUESTS]
    fallen = {row["request_id"] for row in newest if row["model_rule"] != ModelRule.WEIGHTS}
    traces = dict(rows.filter(request_id__in=fallen).values_list("request_id", "trace")) if fallen else {}
    served: dict[str, list[Served]] = {}
    for row in newest:
        fell = row["request_id"] in fallen
        target = _first_target(traces.get(row["request_id"], [])) if fell else row["adapter"] or row["model"]
        own_mistake = 400 <= row["status_code"] < 429
        if target and not own_mistake and row["outcome"] != Outcome.CANCELLED:
            done = row["outcome"] == Outcome.DONE and not fell
            values = {what: row[what] for what in MEASURES} if done else {}
            served.setdefault(target, []).append(Served(row["run"] or row["request_id"], not done, values))
    return served


def _first_target(trace: list[dict[str, Any]]) -> str:
    return next((str(step["model"]) for step in trace if step.get("model_rule") == ModelRule.WEIGHTS), "")
