"""Usage: who used what of the fleet, what it cost and what is charged for it; a tenant's people see their own."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from django.db.models import Min
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_http_methods, require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.selectors import visible_tenants
from controlplane.console.access.roles import fleet_role, may, signed_in
from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import Chart
from controlplane.console.editing import edit
from controlplane.console.lists import list_page
from controlplane.console.live.views import of_charts
from controlplane.console.pages.usage import tables
from controlplane.console.pages.usage.charts import SHOWN, usage_over_time
from controlplane.fleet.models import SloClass
from controlplane.fleet.spot import selectors as spot
from controlplane.resources import focus
from controlplane.resources.filters import Day, Filters, Hidden, Select, every, model_select, number, sort_by
from controlplane.resources.forms import PriceForm
from controlplane.resources.inventory import PRICES
from controlplane.resources.tables import table
from controlplane.usage.selectors import UsageScope, counted_until, usage, used_models, zone_of

DAY = timedelta(days=1)
LONGEST = 366 * DAY
BY_HOUR = 2 * DAY  # the longest time that is drawn by the hour
CHARTS_EVERY_S = 30
GROUPED_BY = [(by, f"By {group.title}") for by, group in tables.GROUPS.items()]
PERIODS = (("1", "Today"), ("7", "Last 7 days"), ("30", "Last 30 days"), ("dates", "From … to …"))


@dataclass(frozen=True, slots=True)
class Query:
    """What the query string asks for, within what the user may see."""

    filters: Filters
    asked: UsageScope
    sees_fleet: bool
    several_tenants: bool

    @property
    def sees_idle(self) -> bool:
        """Whether what was idle is among the rows: it is no tenant's, of no key and no class."""
        return self.sees_fleet and not any(self.filters[name] for name in ("tenant", "key", "class"))


def query_of(request: HttpRequest, now: datetime) -> Query:
    sees_fleet = may(request, Role.VIEWER)
    tenants = visible_tenants(request.user)
    names = sorted(tenants.values_list("name", flat=True))
    of = None if sees_fleet else tenants
    several = len(names) > 1
    dates = request.GET.get("period") == "dates"
    of_all = sees_fleet and not (request.GET.get("tenant") or request.GET.get("key"))  # instances serve all tenants
    groups = [(by, name) for by, name in GROUPED_BY if by != "instance" or of_all]
    filters = Filters(
        request.GET,
        Select("period", "Period", PERIODS, "7"),
        *([Day("from", "From"), Day("to", "To")] if dates else []),
        Select("by", "Grouped by", groups, "tenant" if several else "model"),
        Select("show", "Chart", [(name, shown.title) for name, shown in SHOWN.items()], "cost"),
        Select("tenant", "Tenant", every("tenants", names)) if several else Hidden("tenant", names),
        model_select(used_models(of), free=160),
        Select("class", "SLO class", every("classes", SloClass.objects.values_list("name", flat=True)), free=40),
        Hidden("key"),
        sort_by(tables.SORTED_BY, "-name" if request.GET.get("by") == "day" else "-cost_usd"),
    )
    zone = zone_of(of, filters["tenant"])
    since, until = period(filters, now, zone)
    narrowed = {
        "tenant__name": filters["tenant"],
        "model": filters["model"],
        "slo_class": filters["class"],
        "api_key": str(number(filters["key"]) or ""),
    }
    return Query(filters, UsageScope(since, until, of, narrowed, zone), sees_fleet, several)


def period(filters: Filters, now: datetime, zone: ZoneInfo) -> tuple[datetime, datetime]:
    """The days of *zone* that are asked for: from the beginning of the first to the end of the last, a year at most."""
    today = now.astimezone(zone).replace(hour=0, minute=0, second=0, microsecond=0)
    if filters["period"] != "dates":
        return today - (int(filters["period"]) - 1) * DAY, today + DAY
    first, last = (
        datetime.fromisoformat(filters[name]).replace(tzinfo=zone) if filters[name] else default
        for name, default in (("from", today - 6 * DAY), ("to", today))
    )
    first, last = min(first, last), max(first, last)
    return max(first, last - LONGEST), last + DAY


def chart_of(query: Query, now: datetime) -> Chart:
    """The figure of the page, made once for everybody who asks for the same within a while."""
    asked, filters = query.asked, query.filters
    first = asked.rows().aggregate(at=Min("hour"))["at"] or asked.since
    first, next_hour = (at.astimezone(asked.zone).replace(minute=0, second=0, microsecond=0) for at in (first, now))
    next_hour += timedelta(hours=1)
    by_hour = min(next_hour, asked.until) - first <= BY_HOUR
    if by_hour:
        until = min(next_hour, asked.until)
        asked = replace(asked, since=max(asked.since, min(first, until - DAY)), until=until)
    whose = None if asked.tenants is None else tuple(asked.tenants.order_by("pk").values_list("pk", flat=True))
    choices = tuple((field.name, value) for field, value in filters)
    key = ("usage", whose, choices, asked.since, int(now.timestamp()) // CHARTS_EVERY_S)
    chart = once(key, lambda: [usage_over_time(asked, filters["by"], SHOWN[filters["show"]], by_hour)])[0]
    later = asked.since > query.asked.since
    return (
        replace(chart, caption=f"{chart.caption}; nothing was counted before {first:%-d %b %H:%M}") if later else chart
    )


@require_safe
@signed_in
def usage_page(request: HttpRequest) -> HttpResponseBase:
    now = timezone.now()
    query = query_of(request, now)
    filters, asked, group = query.filters, query.asked, query.filters["by"]
    chart = chart_of(query, now)
    if (answer := of_charts(request, [chart], "usage-chart")) is not None:
        return answer
    lines = tables.lines(asked, group, filters.order)
    donated = spot.donated_time(asked.since, min(asked.until, now), filters["model"]) if query.sees_idle else []
    if request.GET.get("format") == "csv":
        return table(tables.columns(group, query.sees_idle, asked.zone), lines).csv(f"usage-by-{group}")
    if request.GET.get("format") == "focus":
        return table(focus.COLUMNS, focus.rows(asked)).csv("focus")

    def href(**changes: str) -> str:
        changed = request.GET.copy()
        for name in ("sort", "table"):
            changed.pop(name, None)
        for name, value in changes.items():
            changed[name] = value
        return f"?{changed.urlencode()}"

    whole = tables.total(usage(asked))
    context = {
        "query": query,
        "filters": filters,
        "whole": whole,
        "idle_ratio": whole["idle_usd"] / whole["cost_usd"] if whole["cost_usd"] else None,
        "group": tables.GROUPS[group].title,
        "detail": tables.GROUPS[group].detail,
        "chart": chart,
        "every_s": CHARTS_EVERY_S,
        "lines": tables.linked(lines, href, group, query.several_tenants),
        "donated": donated,
        "with_tenant": query.several_tenants and group in ("key", "application", "batch"),
        "own_idle": query.sees_idle and tables.GROUPS[group].own_idle,
        "counted_until": counted_until(),
        "days": [f"{day.day} {day:%b %Y}" for day in (asked.since, asked.until - DAY)],
        "zone": asked.zone,
    }
    return render(request, "console/usage/usage.html", context)


@require_http_methods(["GET", "HEAD", "POST"])
@fleet_role(Role.VIEWER)
def prices(request: HttpRequest) -> HttpResponseBase:
    editing = edit(request, PRICES, PriceForm)
    return editing if isinstance(editing, HttpResponse) else list_page(request, PRICES, editing=editing, edits=True)
