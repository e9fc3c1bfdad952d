"""Lengths: the error of predicted output lengths by model and tenant, and versions of the length model."""

from dataclasses import dataclass
from datetime import datetime

from django.http import HttpRequest, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.selectors import visible_tenants
from controlplane.console.access.roles import may, signed_in
from controlplane.console.actions import ActionForm, action
from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import Chart
from controlplane.console.live import length_service, tiles
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, of_charts
from controlplane.console.pages.lengths import tables
from controlplane.console.pages.lengths.charts import error_over_time
from controlplane.lengths import selectors, training
from controlplane.lengths.selectors import Scope
from controlplane.resources.filters import Filters, Select, every, last_hours, model_select, sort_by
from controlplane.resources.lengths import LENGTH_SERIES, LENGTH_VERSIONS
from forecasting import models_extra

CHARTS_EVERY_S = 15


@dataclass(frozen=True, slots=True)
class PageScope:
    """The scope of the query string, limited to what the user may see."""

    filters: Filters
    own_tenants: list[str]
    everything: bool  # the fleet's people see all tenants

    def scope(self, now: datetime) -> Scope:
        tenant = self.filters["tenant"]
        tenants = [tenant] if tenant else None if self.everything else self.own_tenants
        return selectors.scope_of(now, int(self.filters["hours"]), self.filters["model"], tenants)


def asked_of(request: HttpRequest) -> PageScope:
    everything = may(request, Role.VIEWER)
    own = [tenant.name for tenant in visible_tenants(request.user)]
    models, known_tenants = selectors.known_series(None if everything else own)
    tenants = every("tenants", sorted({*own, *known_tenants})) if everything else every("your tenants", own)
    filters = Filters(
        request.GET,
        model_select(models),
        Select("tenant", "Tenant", tenants),
        Select("hours", "Time range", last_hours(1, 6, 24, 168), "6"),
        sort_by(LENGTH_SERIES.sorting, "-requests"),
    )
    return PageScope(filters, own, everything)


def chart_of(asked: PageScope, now: datetime) -> Chart:
    """Return the chart of the page, built once per scope and period."""
    scope, filters = asked.scope(now), asked.filters
    key = ("lengths", filters["model"], filters["hours"], scope.tenants, int(now.timestamp()) // CHARTS_EVERY_S)
    return once(key, lambda: error_over_time(selectors.series(scope, now)))


@require_safe
@signed_in
def lengths(request: HttpRequest) -> HttpResponseBase:
    now = timezone.now()
    asked = asked_of(request)
    chart = chart_of(asked, now)
    if (answer := of_charts(request, [chart], "lengths-{}")) is not None:
        return answer
    scope = asked.scope(now)
    state = feed.state()
    service = state.lengths() if asked.everything else None
    lines = LENGTH_SERIES.arranged(tables.lines(selectors.by(scope, "model", "tenant")), asked.filters)
    versions = tables.version_rows(selectors.by(scope, "predictor", shadows=True), scope) if asked.everything else []
    if request.GET.get("format") == "csv":
        if request.GET.get("table") == "versions" and asked.everything:
            return LENGTH_VERSIONS.csv(versions)
        return LENGTH_SERIES.csv(lines)
    whole = selectors.total(line.measures for line in lines)
    context = {
        **live_context(state, "lengths"),
        "asked": asked,
        "filters": asked.filters,
        "whole": whole,
        "lines": lines,
        "line_columns": LENGTH_SERIES.named(*LENGTH_SERIES.page),
        "chart": chart,
        "every_s": CHARTS_EVERY_S,
        "service": service,
        "service_tiles": tiles.readings(length_service.TILES, service, "lengths") if service else [],
        "doubts": length_service.doubts(service, whole.coverage_upper),
        "versions": versions,
        "version_columns": LENGTH_VERSIONS.named(*LENGTH_VERSIONS.page),
        "version_actions": LENGTH_VERSIONS.actions if may(request, Role.OPERATOR) else "",
        "kinds": tables.kinds() if asked.everything else [],
        "models_extra": models_extra.missing_for("An encoder"),
    }
    return render(request, "console/lengths/lengths.html", context)


@action(Role.OPERATOR, page="console:lengths", unchanged="Nothing was changed")
def train(form: ActionForm) -> str:
    """Train a new version of a kind from the samples there are, now."""
    kind = form.fields.get("kind", training.USUAL)
    training.ask(form.user, form.reason, kind)
    return f"A worker trains a new version of {kind}. It predicts in shadow first; an event says why if it fails."
