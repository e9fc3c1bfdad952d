"""What meets the condition of a rule now."""

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from typing import Final
from urllib.parse import urlencode

from django.db.models import Q, Sum

from controlplane.accounts.models import Budget
from controlplane.alerts.models import AlertRule, Condition
from controlplane.alerts.problems import Problem, span
from controlplane.fleet.attainment import CRITICAL_BURN, Attainment
from controlplane.fleet.models import SloClass
from controlplane.gateway.models import LedgerRow, MinuteRow
from controlplane.gateway.selectors import MISSED_BY, missed_by
from controlplane.usage.budgets import used_share

SHORT_WINDOWS: Final = 12
"""Short windows in a long one (SRE workbook, chapter 5)."""
MIN_JUDGED: Final = 10
"""Requests in the short window below which a burn says nothing: one miss of three is no incident."""
KINDS: Final = {
    Condition.ERRORS: ("errors",),
    Condition.ENDPOINT: ("endpoint", "queue"),
    Condition.INSTANCE: ("instance", "gpu", "region"),
    Condition.ROLLOUT: ("rollout",),
    Condition.PLAN: ("plan",),
    Condition.FLAPPING: ("flapping",),
    Condition.BATCH: ("batch",),
    Condition.JOB: ("job", "part"),
}
"""Kinds of problems that meet a condition without a threshold."""


def problems_of(rule: AlertRule, now: datetime, found: Iterable[Problem]) -> list[Problem]:
    """Return what meets the condition of *rule*, within its model; *found* is what is wrong anyhow."""
    condition = Condition(rule.condition)
    if condition == Condition.SLO_BURN:
        found = _slo_burn(rule, now)
    elif condition == Condition.BUDGET:
        found = _budget(rule, now)
    else:
        found = (each for each in found if each.kind in KINDS[condition])
    return [each for each in found if rule.model in ("", each.model)]


def burns(long: Attainment, short: Attainment, threshold: float) -> bool:
    """Whether the error budget burns faster than *threshold* over both windows: the long one shows that it matters, the
    short one that it still does (SRE workbook, chapter 5, "Multiwindow, multi-burn-rate alerts")."""
    return short.judged >= MIN_JUDGED and min(long.burn or 0.0, short.burn or 0.0) >= threshold


def _slo_burn(rule: AlertRule, now: datetime) -> Iterator[Problem]:
    short_s = rule.window_s / SHORT_WINDOWS
    begin, late = (now - timedelta(seconds=seconds) for seconds in (rule.window_s, short_s))
    # A minute counts in whole, so that the short window has requests early in a minute.
    late = late.replace(second=0, microsecond=0)
    rows = MinuteRow.objects.filter(minute__gte=begin, slo_judged__gt=0)
    rows = rows.filter(**{name: given for name in ("model", "slo_class") if (given := getattr(rule, name))})
    percentiles = dict(SloClass.objects.values_list("name", "percentile"))
    recent = Q(minute__gte=late)
    sums = (
        rows.order_by()
        .values_list("model", "slo_class")
        .annotate(
            met=Sum("slo_met"),
            judged=Sum("slo_judged"),
            met_lately=Sum("slo_met", filter=recent, default=0),
            judged_lately=Sum("slo_judged", filter=recent, default=0),
        )
    )
    for model, slo_class, met, judged, met_lately, judged_lately in sums:
        if slo_class not in percentiles:
            continue
        objective = percentiles[slo_class] / 100
        long = Attainment(slo_class, met, judged, objective)
        short = Attainment(slo_class, met_lately, judged_lately, objective)
        if burns(long, short, rule.limit or 0.0):
            words = f"{100 * met / judged:.1f}% of the {100 * objective:g}% promised over {span(rule.window_s)}, "
            words += f"{long.burn or 0:.1f} times the allowed misses; {short.burn or 0:.1f} in the last {span(short_s)}"
            missed = {"model": model, "class": slo_class, "slo": "missed", "hours": "1"}
            shares = missed_by(LedgerRow.objects.filter(model=model, slo_class=slo_class, arrived_at__gte=late))
            causes = [
                (MISSED_BY[cause], share, f"/requests/?{urlencode(missed | {'cause': cause})}")
                for cause, share in shares
            ]
            yield Problem(
                "slo",
                f"{model}, {slo_class}",
                "critical" if (long.burn or 0.0) >= CRITICAL_BURN else "warning",
                f"{model} misses its SLO for {slo_class}",
                words,
                f"/requests/?{urlencode(missed)}",
                model,
                rank=1 + (long.ratio or 0.0),
                value=round(long.burn or 0.0, 2),
                causes=tuple(causes),
            )


def _budget(rule: AlertRule, now: datetime) -> Iterator[Problem]:
    for row in Budget.objects.select_related("tenant", "api_key"):
        share = used_share(row, now)
        if share is not None and share >= (rule.limit or 0.0):
            title, words = f"{row.scope} nears its budget", f"{share:.0%} of {row.amount} is used"
            severity, value = "critical" if share >= 1 else "warning", round(share, 4)
            yield Problem(
                "budget", row.scope, severity, title, words, "/usage/budgets/", row.model, rank=3, value=value
            )
