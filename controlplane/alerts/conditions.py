"""What stands wrong now, by the condition of a rule."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final
from urllib.parse import urlencode

from django.db.models import Q, Sum
from msgspec import Struct

from controlplane.accounts.models import Budget
from controlplane.alerts.models import AlertRule, Condition
from controlplane.fleet.attainment import Attainment
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import Instance, SloClass
from controlplane.gateway.models import MinuteRow
from controlplane.planning.models import PlanStatus, ScalingPlan
from controlplane.planning.selectors import FLAPPING_OVER, flapping
from controlplane.usage.budgets import used_share

SHORT_WINDOWS: Final = 12
"""Short windows in a long one (SRE workbook, chapter 5)."""
LEAST_JUDGED: Final = 10
"""Requests in the short window below which a burn says nothing: one miss of three is no incident."""


class Problem(Struct, frozen=True):
    """A subject that meets a condition. *since* is None where only the alert itself knows it.

    *page* is an address in the console, written out: the URL configuration takes seconds to load, and this process may serve
    no page.
    """

    subject: str
    detail: str
    value: float | None = None
    since: datetime | None = None
    model: str = ""
    page: str = ""


class Signals(Struct, frozen=True):
    """What only the memory of the process that owns the regions has: the report of its monitor, and the instances that are
    ready and yet get no requests, with the reason."""

    report: Mapping[str, Any]
    troubles: Mapping[str, str]


def problems_of(rule: AlertRule, now: datetime, signals: Signals) -> list[Problem]:
    """Return what meets the condition of *rule*, within its model."""
    problems = CONDITIONS[Condition(rule.condition)](rule, now, signals)
    return [each for each in problems if rule.model in ("", each.model)]


def burns(long: Attainment, short: Attainment, threshold: float) -> bool:
    """Whether the error budget burns faster than *threshold* over both windows: the long one shows that it matters, the
    short one that it still does (SRE workbook, chapter 5, "Multiwindow, multi-burn-rate alerts")."""
    return short.judged >= LEAST_JUDGED and min(long.burn or 0.0, short.burn or 0.0) >= threshold


def _slo_burn(rule: AlertRule, now: datetime, _: Signals) -> Iterator[Problem]:
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
            detail = (
                f"{judged - met:,} of {judged:,} requests missed in {_words(rule.window_s)}: {long.burn or 0:.1f} times "
                f"what {100 * objective:g}% allows; {short.burn or 0:.1f} times in the last {_words(short_s)}"
            )
            page = f"/?{urlencode({'model': model})}"
            yield Problem(f"{model}, {slo_class}", detail, round(long.burn or 0.0, 2), None, model, page)


def _budget(rule: AlertRule, now: datetime, _: Signals) -> Iterator[Problem]:
    for row in Budget.objects.select_related("tenant", "api_key"):
        share = used_share(row, now)
        if share is not None and share >= (rule.limit or 0.0):
            detail = f"{share:.0%} of {row.amount} is used"
            yield Problem(row.scope, detail, round(share, 4), None, row.model, "/usage/budgets/")


def _instance(rule: AlertRule, now: datetime, signals: Signals) -> Iterator[Problem]:
    wanted = Q(state=InstanceState.FAILED) | Q(state=InstanceState.READY, name__in=list(signals.troubles))
    rows = Instance.objects.filter(wanted, deployment__active=True).select_related("deployment__model")
    for row in rows.order_by("name"):
        failed = row.state == InstanceState.FAILED
        detail = f"failed: {row.state_reason}" if failed else signals.troubles[row.name]
        since = row.state_changed_at if failed else None
        page = f"/instances/{row.name}/"
        yield Problem(row.name, detail.rstrip(": "), None, since, row.deployment.model.name, page)


def _plan(rule: AlertRule, now: datetime, _: Signals) -> Iterator[Problem]:
    rows = ScalingPlan.objects.filter(status=PlanStatus.ADVICE, valid_until__gt=now).select_related("model")
    for row in rows.order_by("pk"):
        detail = f"The plan of {row.strategy} can be approved until {row.valid_until:%H:%M} UTC"
        yield Problem(row.model.name, detail, None, row.made_at, row.model.name, f"/scaling/plans/{row.pk}/")


def _job(rule: AlertRule, now: datetime, signals: Signals) -> Iterator[Problem]:
    page = "/system/"
    for part in signals.report["parts"]:
        if part["state"] == "down":
            yield Problem(f"part {part['name']}", f"down: {part['detail']}".rstrip(": "), page=page)
    for job in signals.report["jobs"]:
        if job["state"] in ("late", "failing") and not job["quiet"]:
            why = job["last_error"] if job["failures_in_a_row"] else f"due every {job['period_s']:g} s"
            yield Problem(f"job {job['name']}", f"{job['state']}: {why}", page=page)


def _flapping(rule: AlertRule, now: datetime, _: Signals) -> Iterator[Problem]:
    for each in flapping(now):
        by = ", ".join(f"{who.lower()} +{out} -{back}" for who, (out, back) in sorted(each.by.items()))
        detail = f"{each.reversals} reversals in {_words(FLAPPING_OVER.total_seconds())}: {by}"
        page = f"/scaling/moves/?{urlencode({'model': each.model, 'region': each.region})}"
        yield Problem(f"{each.model} in {each.region}", detail, float(each.reversals), None, each.model, page)


def _words(seconds: float) -> str:
    """Return a time in its largest even unit, such as `5 min`."""
    for unit_s, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit_s and seconds % unit_s == 0:
            return f"{seconds / unit_s:g} {unit}"
    return f"{seconds:g} s"


CONDITIONS: Final[dict[Condition, Callable[[AlertRule, datetime, Signals], Iterator[Problem]]]] = {
    Condition.SLO_BURN: _slo_burn,
    Condition.BUDGET: _budget,
    Condition.INSTANCE: _instance,
    Condition.PLAN: _plan,
    Condition.JOB: _job,
    Condition.FLAPPING: _flapping,
}
