"""Timeline: service, demand and capacity over any time whose minute rows are kept, with marks of what happened, and what
changed in that time against the time of equal length before."""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from django.db.models import F, Sum
from django.http import HttpRequest, HttpResponseBase, QueryDict
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.console.access.roles import fleet_role
from controlplane.console.charts.spec import AMOUNT, DAYS, SHARE, STYLES, Axis, Chart, Levels, Series, local
from controlplane.console.formats import MINUS, NONE, percent, quantity, signed
from controlplane.console.live.views import of_charts
from controlplane.console.selectors.events import ROUTINE, event_row
from controlplane.events.models import Event, Severity
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import SloClass
from controlplane.gateway.models import MinuteRow
from controlplane.gateway.selectors import OWN_REGION
from controlplane.planning.capacity import capacity_over_time, endpoint_loads
from controlplane.planning.forecasts import selectors as forecasts
from controlplane.planning.forecasts.demand import EVERY_CLASS, TOKENS
from controlplane.planning.models import ScalingMove
from controlplane.resources.filters import Filters, Moment, Select, every, model_select
from controlplane.resources.names import model_names, region_names
from controlplane.resources.tables import Table
from controlplane.rows import narrowed

RANGES: Final = (("1", "Last hour"), ("6", "Last 6 hours"), ("24", "Last 24 hours"), ("168", "Last 7 days"),
                 ("720", "Last 30 days"), ("times", "From … until …"))  # fmt: skip
LONGEST: Final = timedelta(days=92)
STEPS_S: Final = (60, 120, 300, 600, 900, 1800, 3600, 10_800, 21_600, 86_400)
POINTS: Final = 200
EVENTS_SHOWN: Final = 12
CHANGES_SHOWN: Final = 12
KINDS: Final = {
    "alert.opened": "Alert",
    "deployment.": "Deploy",
    "rollout.": "Deploy",
    "model.": "Policy",
    "policy.": "Policy",
    "setting.changed": "Policy",
    "region.": "Failure",
    "gpu.": "Failure",
}
"""What events are marked as, by the beginning of their kind; those of instances that fail are failures, too."""
MARKS: Final = {"Move": ("s2", "square"), "Deploy": ("s4", "square"), "Policy": ("s5", "circle"),
                "Failure": ("crit", "circle"), "Alert": ("warn", "circle")}  # fmt: skip


class Mark(NamedTuple):
    at: datetime
    what: str
    text: str


class Change(NamedTuple):
    """A figure of the time asked for and of the time before; *share* is its difference, of all of its kind before."""

    what: str
    of: str
    before: str
    now: str
    share: float

    @property
    def said(self) -> str:
        return f"{signed(round(100 * self.share))}%"


@dataclass(frozen=True)
class Span:
    """The time asked for, in whole steps, and what it is narrowed to."""

    since: datetime
    until: datetime
    model: str
    region: str

    @property
    def step_s(self) -> int:
        """Length of a point in seconds, of `STEPS_S`."""
        length_s = (self.until - self.since).total_seconds()
        return next((step for step in STEPS_S if length_s / step <= POINTS), STEPS_S[-1])

    @property
    def starts(self) -> list[datetime]:
        return [timezone.localtime(start) for start in forecasts.grid(self.since, self.until, self.step_s)]

    @property
    def before(self) -> "Span":
        return Span(self.since - (self.until - self.since), self.since, self.model, self.region)

    def minutes(self) -> Any:
        """Return the minute rows."""
        rows = MinuteRow.objects.filter(minute__gte=self.since, minute__lt=self.until).order_by()
        return narrowed(rows, model=self.model, region=self.region)

    def moves(self) -> Any:
        rows = ScalingMove.objects.filter(at__gte=self.since, at__lt=self.until)
        return narrowed(rows, model=self.model, region=self.region)

    def events(self) -> Iterator[tuple[str, Event]]:
        """Yield what is marked, with what it is marked as, oldest first: all of the fleet, as events have no model."""
        rows = Event.objects.filter(at__gte=self.since, at__lt=self.until).order_by("at")
        for event in rows.exclude(kind__in=ROUTINE, severity=Severity.INFO):
            failed = event.kind in ROUTINE and event.after.get("state") == InstanceState.FAILED
            what = (
                "Failure" if failed else next((as_ for kind, as_ in KINDS.items() if event.kind.startswith(kind)), "")
            )
            if what:
                yield what, event


def filters_of(query: QueryDict) -> Filters:
    given = {name: str(value) for name, value in query.items()}
    if "from" in given:
        given.setdefault("range", "times")
    times = given.get("range") == "times"
    return Filters(
        given,
        Select("range", "Range", RANGES, "6"),
        *([Moment("from", "From"), Moment("until", "Until")] if times else []),
        model_select(model_names()),
        Select("region", "Region", every("regions", region_names())),
    )


def span_of(filters: Filters, now: datetime) -> Span:
    """Return the time that *filters* ask for, `LONGEST` at most and none of the future."""
    until = now
    if filters["range"] == "times":
        zone = timezone.get_current_timezone()
        read = [datetime.fromisoformat(filters[name]).replace(tzinfo=zone) if filters[name] else None
                for name in ("from", "until")]  # fmt: skip
        until = min(read[1] or now, now)
        since = min(read[0] or until - timedelta(hours=6), until - timedelta(minutes=1))
    else:
        since = now - timedelta(hours=int(filters["range"]))
    return Span(max(since, until - LONGEST), until, filters["model"], filters["region"])


def marks_of(span: Span) -> list[Mark]:
    """Return the marks of *span*, the moves of a step as one."""
    starts = span.starts
    moved: dict[datetime, Counter[str]] = defaultdict(Counter)
    for at, delta in span.moves().order_by("at").values_list("at", "delta"):
        moved[starts[max(0, bisect_right(starts, at) - 1)]]["+" if delta > 0 else MINUS] += 1
    moves = [
        Mark(at, "Move", ", ".join(f"{sign}{count}" for sign, count in both.items())) for at, both in moved.items()
    ]
    events = [Mark(event.at, what, event_row(event)["title"]) for what, event in span.events()]
    return sorted([*moves, *events])


def marked(marks: Iterable[Mark], at: float) -> list[Series]:
    """Return a series of points at the height *at* for each kind of mark."""
    by_kind: dict[str, list[Mark]] = defaultdict(list)
    for mark in marks:
        by_kind[mark.what].append(mark)
    return [
        Series(
            what,
            [at] * len(of_kind),
            (color, "solid"),
            [timezone.localtime(mark.at) for mark in of_kind],
            shape=shape,
            size=8,
            layer=3,
            more={"text": [mark.text for mark in of_kind], "hovertemplate": "%{text}"},
        )
        for what, (color, shape) in MARKS.items()
        if (of_kind := by_kind.get(what))
    ]


def charts_of(span: Span, now: datetime) -> list[Chart]:
    starts, marks = span.starts, marks_of(span)
    return [_service(span, starts, marks), _demand(span, starts, marks, now), _requests(span, starts)]


def across(span: Span) -> Axis:
    """Return the axis that the charts share."""
    return DAYS.but(range=[local(timezone.localtime(at)) for at in (span.since, span.until)])


def _sums(span: Span, starts: list[datetime], *fields: str) -> dict[str, list[list[int]]]:
    """Return sums of *fields* of the minute rows in each step, by SLO class."""
    sums: dict[str, list[list[int]]] = defaultdict(lambda: [[0] * len(starts) for _ in fields])
    first_s = starts[0].timestamp()
    totals = {f"of_{name}": Sum(name) for name in fields}
    for minute, slo_class, *values in span.minutes().values_list("minute", "slo_class").annotate(**totals):
        at = int((minute.timestamp() - first_s) // span.step_s)
        for series, value in zip(sums[slo_class], values, strict=True):
            series[at] += value
    return sums


def _service(span: Span, starts: list[datetime], marks: list[Mark]) -> Chart:
    classes = {row.name: row.percentile / 100 for row in SloClass.objects.all() if row.promises}
    sums = _sums(span, starts, "slo_met", "slo_judged")
    series = [
        Series(name, [one / of if of else None for one, of in zip(*sums[name], strict=True)], STYLES[at % len(STYLES)])
        for at, name in enumerate(classes)
        if name in sums and any(sums[name][1])
    ]
    worst = {one.label: min(value for value in one.y if value is not None) for one in series}
    said = ", ".join(f"{name} at worst {percent(value)}" for name, value in worst.items())
    promised = sorted({classes[one.label] for one in series})
    columns = [starts, *(one.y for one in series)]
    return Chart(
        key="service",
        title="SLO met by class",
        caption="Share of judged requests, by the minute of arrival",
        sentence=f"SLO met: {said or 'nothing was judged'}.",
        x=starts,
        across=across(span),
        up=SHARE.but(rangemode="normal", range=[min([*promised, *worst.values(), 0.9]) - 0.02, 1.02]),
        series=[*series, *marked(marks, 1.0)],
        levels=Levels("promised", promised) if series else None,
        table=Table(
            ("From", *(f"{one.label} (ratio)" for one in series)), [list(row) for row in zip(*columns, strict=True)]
        ),
        empty="" if series else "No request with a promise ended in this time.",
        size="medium",
    )


def _demand(span: Span, starts: list[datetime], marks: list[Mark], now: datetime) -> Chart:
    asked = forecasts.demand(span.model, span.region, TOKENS, starts, span.step_s, EVERY_CLASS)
    capacity = capacity_over_time(span.model, span.region, starts, endpoint_loads(now))
    known = [value for value in asked if value is not None]
    series = [Series("demand", asked, ("text", "solid"), width=2)] if known else []
    if known and any(value is not None for value in capacity):
        series.append(Series("capacity", capacity, ("s2", "solid"), more={"line": {"shape": "hv"}}))
    said = f"demand from {quantity(min(known))} to {quantity(max(known))} tok/s" if known else "nothing was counted"
    return Chart(
        key="demand",
        title="Demand and capacity",
        caption="Prompt and output tokens a second of all classes but opportunistic ones, and what ready instances serve",
        sentence=f"Demand: {said}.",
        x=starts,
        across=across(span),
        up=AMOUNT.but(unit="tok/s"),
        series=[*series, *marked(marks, 0.0)],
        table=Table(
            ("From", "Demand (tok/s)", "Capacity (tok/s)"),
            [list(row) for row in zip(starts, asked, capacity, strict=True)],
        ),
        empty="" if series else "No request was counted in this time.",
        size="medium",
    )


def _requests(span: Span, starts: list[datetime]) -> Chart:
    sums = _sums(span, starts, "requests", "failed", "refused")
    totals = [[sum(column) for column in zip(*(of[at] for of in sums.values()), strict=True)] for at in range(3)]
    per_s = [[total / span.step_s for total in of] for of in totals]
    names = (("requests", ("s1", "solid")), ("failed", ("crit", "solid")), ("refused", ("warn", "dash")))
    series = [Series(name, values, look) for (name, look), values in zip(names, per_s, strict=True)] if sums else []
    return Chart(
        key="requests",
        title="Requests",
        caption="A second, by the minute of arrival; refused are those that limits, full queues and deadlines turned away",
        sentence=f"Requests: {quantity(sum(totals[0]))} in all, {quantity(sum(totals[1]))} failed.",
        x=starts,
        across=across(span),
        up=AMOUNT.but(unit="requests/s"),
        series=series,
        empty="" if series else "No request was counted in this time.",
        size="medium",
    )


def changes_of(span: Span) -> list[Change]:
    """Return what differs between *span* and the time of equal length before, the largest share first."""
    return sorted([*_demand_changes(span), *_service_changes(span), *_moved(span)], key=lambda one: -abs(one.share))[
        :CHANGES_SHOWN
    ]


def _demand_changes(span: Span) -> Iterator[Change]:
    length_s = (span.until - span.since).total_seconds()
    tokens = F("prompt_tokens") + F("output_tokens") + F("unserved_prompt_tokens") + F("unserved_output_tokens")

    def rates(of: Span) -> dict[tuple[str, str, str], float]:
        rows = of.minutes().annotate(own=OWN_REGION).values_list("model", "own", "slo_class").annotate(of=Sum(tokens))
        return {(model, region, name): total / length_s for model, region, name, total in rows}

    now, before = rates(span), rates(span.before)
    whole = sum(before.values()) or sum(now.values()) or 1.0
    for key in now.keys() | before.keys():
        here, there = now.get(key, 0.0), before.get(key, 0.0)
        what = f"Demand for {key[0]}, {key[2]}"
        yield Change(what, key[1], f"{quantity(there)} tok/s", f"{quantity(here)} tok/s", (here - there) / whole)


def _service_changes(span: Span) -> Iterator[Change]:
    def sums(of: Span) -> dict[tuple[str, str], list[int]]:
        names = ("slo_met", "slo_judged", "requests", "failed", "refused")
        totals = of.minutes().values_list("model", "slo_class").annotate(*map(Sum, names))
        return {(model, name): of_them for model, name, *of_them in totals}

    now, before = sums(span), sums(span.before)
    for key, (met, judged, count, *ends) in now.items():
        was = before.get(key, [0] * 5)
        of = f"of {key[0]}, {key[1]}"
        if judged:
            share, met_now = was[0] / was[1] if was[1] else None, met / judged
            change = met_now - (1.0 if share is None else share)
            yield Change(f"SLO met {of}", "", percent(share), percent(met_now), change)
        for what, there, here in zip(("Failed", "Refused"), was[3:], ends, strict=True):
            if there or here:
                yield Change(f"{what} {of}", "", quantity(there), quantity(here), (here - there) / max(1, count))


def _moved(span: Span) -> Iterator[Change]:
    moved = {(model, region): delta for model, region, delta in
             span.moves().order_by().values_list("model", "region").annotate(of=Sum("delta"))}  # fmt: skip
    loads = endpoint_loads(span.until)
    ready = sum(load.ready for load in loads.values()) or 1
    for (model, region), delta in moved.items():
        if delta:
            yield Change(f"Instances of {model}", region, NONE, signed(delta), delta / ready)


@require_safe
@fleet_role(Role.VIEWER)
def timeline(request: HttpRequest) -> HttpResponseBase:
    now = timezone.now()
    filters = filters_of(request.GET)
    span = span_of(filters, now)
    charts = charts_of(span, now)
    if (answer := of_charts(request, charts, "timeline-{}")) is not None:
        return answer
    events = [(what, event_row(event)) for what, event in span.events()]
    context = {
        "filters": filters,
        "span": span,
        "charts": charts,
        "changes": changes_of(span),
        "happened": events[-EVENTS_SHOWN:][::-1],
        "more": len(events) - EVENTS_SHOWN,
        "every_s": max(30, span.step_s),
    }
    return render(request, "console/overview/timeline.html", context)
