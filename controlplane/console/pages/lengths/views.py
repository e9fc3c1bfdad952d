"""Lengths: predicted against actual output lengths, predictors, and versions of the length model."""

from dataclasses import dataclass
from datetime import datetime

from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_safe

from controlplane.accounts.models import Role
from controlplane.accounts.selectors import visible_tenants
from controlplane.console.access.roles import may, signed_in
from controlplane.console.actions import ActionForm, action
from controlplane.console.charts.cache import once
from controlplane.console.charts.spec import Chart
from controlplane.console.live import length_service, tiles
from controlplane.console.live.feed import feed
from controlplane.console.live.views import live_context, redrawn
from controlplane.console.pages.lengths import tables
from controlplane.console.pages.lengths.charts import (
    calibration,
    error_over_time,
    predicted_against_actual,
)
from controlplane.lengths import selectors, services, training
from controlplane.lengths.models import LengthVersion, Measures
from controlplane.lengths.selectors import Scope
from controlplane.resources.filters import Filters, Select, every, last_hours, model_select, sort_by
from controlplane.resources.lengths import LENGTH_SERIES, LENGTH_SOURCES, LENGTH_VERSIONS
from forecasting import models_extra

CHARTS_EVERY_S = 15


@dataclass(frozen=True, slots=True)
class Asked:
    """The scope of the query string, limited to what the user may see."""

    filters: Filters
    own_tenants: list[str]
    everything: bool  # the fleet's people see all tenants

    def scope(self, now: datetime) -> Scope:
        tenant = self.filters["tenant"]
        tenants = [tenant] if tenant else None if self.everything else self.own_tenants
        return selectors.scope_of(now, int(self.filters["hours"]), self.filters["model"], tenants)


def asked_of(request: HttpRequest) -> Asked:
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
    return Asked(filters, own, everything)


def charts_of(asked: Asked, now: datetime) -> list[Chart]:
    """Return the charts of the page, built once per scope and period."""
    scope = asked.scope(now)
    key = (
        "lengths",
        asked.filters["model"],
        asked.filters["hours"],
        scope.tenants,
        int(now.timestamp()) // CHARTS_EVERY_S,
    )

    def build() -> list[Chart]:
        pairs, of = selectors.pairs(scope)
        return [
            predicted_against_actual(pairs, of),
            calibration(selectors.by(scope, "predictor", shadows=True)),
            error_over_time(selectors.series(scope, now)),
        ]

    return once(key, build)


@require_safe
@signed_in
def lengths(request: HttpRequest) -> HttpResponseBase:
    now = timezone.now()
    asked = asked_of(request)
    scope = asked.scope(now)
    state = feed.state()
    service = state.lengths() if asked.everything else None
    lines = tables.lines(selectors.by(scope, "model", "tenant"))
    lines = LENGTH_SERIES.arranged(lines, asked.filters)
    by_predictor = selectors.by(scope, "predictor", shadows=True)
    charts = {chart.key: chart for chart in charts_of(asked, now)}
    if request.GET.get("format") == "csv":
        return _csv(request, charts, lines, by_predictor, asked)
    whole = selectors.total(line.measures for line in lines)
    context = {
        **live_context(state, "lengths"),
        "asked": asked,
        "filters": asked.filters,
        "whole": whole,
        "lines": lines,
        "line_columns": LENGTH_SERIES.named(*LENGTH_SERIES.page),
        "source_columns": LENGTH_SOURCES.named(*LENGTH_SOURCES.page),
        "charts": charts,
        "every_s": CHARTS_EVERY_S,
        "sources": tables.sources(by_predictor),
        "service": service,
        "service_tiles": tiles.readings(length_service.TILES, service, "lengths") if service else [],
        "doubts": length_service.doubts(service, whole.coverage_upper),
        "versions": tables.version_rows(by_predictor, scope) if asked.everything else [],
        "version_columns": LENGTH_VERSIONS.named(*LENGTH_VERSIONS.page),
        "version_actions": LENGTH_VERSIONS.actions if may(request, Role.OPERATOR) else "",
        "trainings": tables.training_rows() if asked.everything else [],
        "kinds": tables.kinds() if asked.everything else [],
        "models_extra": models_extra.missing_for("An encoder"),
        "can_roll_back": asked.everything and selectors.active_version() is not None,
    }
    return render(request, "console/lengths/lengths.html", context)


def _csv(
    request: HttpRequest,
    charts: dict[str, Chart],
    lines: list[tables.Line],
    by_predictor: dict[str, Measures],
    asked: Asked,
) -> HttpResponseBase:
    name = request.GET.get("table", "")
    if name in charts:
        return charts[name].csv(f"lengths-{name}")
    if name == "sources":
        return LENGTH_SOURCES.csv(tables.sources(by_predictor))
    if name == "versions" and asked.everything:
        return LENGTH_VERSIONS.csv(tables.version_rows(by_predictor))
    return LENGTH_SERIES.csv(lines)


@require_GET
@signed_in
def charts(request: HttpRequest) -> HttpResponse:
    """`GET /console/api/length-charts?charts=pairs,trend&model=…`: the charts of the page."""
    drawn = charts_of(asked_of(request), timezone.now())
    return redrawn(request, drawn)


# Acting on versions


UNCHANGED = "Nothing was changed"
DECISIONS = {
    "promote": (services.promote, "predicts from now on; gateways take it up within seconds"),
}
"""By name in the address: the service, and what becomes of the version."""


@action(Role.OPERATOR, LengthVersion, key="number", among=DECISIONS, page="console:lengths", unchanged=UNCHANGED)
def decide(form: ActionForm, version: LengthVersion, decision: str) -> str:
    """Promote a shadow."""
    service, outcome = DECISIONS[decision]
    service(version, form.user, form.reason)
    return f"{version} {outcome}."


@action(Role.OPERATOR, page="console:lengths", unchanged=UNCHANGED)
def roll_back(form: ActionForm) -> str:
    """Return to the version that was active before."""
    version = services.rollback(None, form.user, form.reason)
    return f"{version or 'The bundled version'} predicts again; gateways take it up within seconds."


@action(Role.OPERATOR, page="console:lengths", unchanged=UNCHANGED)
def train(form: ActionForm) -> str:
    """Train a new version of a kind from the samples there are, now."""
    kind = form.fields.get("kind", training.USUAL)
    training.ask(form.user, form.reason, kind)
    return f"A worker is training a new version of {kind}; its progress is below. It predicts in shadow first."
